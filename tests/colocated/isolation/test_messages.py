"""Messages between a worker and its parent: values arrive as they were, and memory in use is not overwritten."""

import pickle
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partjit.colocated.isolation import messages, process
from tests.census import saw, sees
from tests.effort import examples

SIZES = [0, 3, 5_000, 50_000]
DTYPES = [np.float32, np.int8, np.complex128, bool, ml_dtypes.bfloat16, ml_dtypes.int4, "S3", "M8[s]", object]


def sent(value):
    """A value as the other side reads it."""
    body, pieces = messages.pack(*messages.dumps(value))
    if not pieces:
        return messages.unpack((body, []), None)
    segment = messages.Segment(messages.size_of(pieces))
    places = segment.write(pieces)
    assert all(offset % 64 == 0 for offset, _ in places)
    return messages.unpack((body, places), segment)


@sees("several elements", "an array in a segment", "a view", "a read-only array")
@examples(40)
@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.sampled_from(SIZES), st.booleans(), st.sampled_from("CFN")), max_size=4
    )
)
def test_arrays_arrive_as_they_were(kinds):
    values = []
    for dtype, size, is_writable, order in kinds:
        array = (np.arange(2 * size) % 7).astype(dtype).reshape(2, size)
        array = {"C": array, "F": np.asfortranarray(array), "N": array[:, ::-1]}[order]
        array.flags.writeable = is_writable
        values.append(array)
        saw("a read-only array", when=not is_writable)
        saw("a view", when=order == "N" and size)
    saw("an array in a segment", when=messages.pack(*messages.dumps(values))[1])
    for array, value in zip(sent(values), values, strict=True):
        assert (array.dtype, array.shape) == (value.dtype, value.shape)
        assert array.tolist() == value.tolist()
        if value.flags.contiguous and value.dtype.kind not in "OM" and value.nbytes:
            assert array.flags.writeable == value.flags.writeable


def test_arrays_of_jax_and_shards_arrive_without_jax():
    x = jnp.arange(4, dtype=jnp.bfloat16)
    shard = x.addressable_shards[0]
    array, part = sent((x, shard))
    assert type(array) is np.ndarray
    assert (array.dtype, array.tolist()) == (x.dtype, [0, 1, 2, 3])
    assert type(part) is types.SimpleNamespace
    assert type(part.data) is np.ndarray
    assert (part.index, part.replica_id, part.device.id) == (shard.index, 0, shard.device.id)
    with pytest.raises(TypeError):
        messages.dumps(jax.random.key(0))


def test_a_definition_owns_its_arrays():
    large = np.zeros(100_000)
    (found,) = pickle.loads(messages.definition_of([large]))
    found += 1
    assert large.sum() == 0


def test_a_segment_is_used_as_long_as_an_array_refers_to_it():
    x = np.arange(50_000)
    x.flags.writeable = False
    for value in (x, x.astype(ml_dtypes.bfloat16), x.copy()):
        body, pieces = messages.pack(*messages.dumps(value))
        segment = messages.Segment(1 << 20)
        assert segment.is_unused()
        content = body, segment.write(pieces)
        for part in (lambda a: a, lambda a: a[3:5], lambda a: a.reshape(2, -1).T, lambda a: a[:1].view()):
            kept = part(messages.unpack(content, segment))
            assert not segment.is_unused()
            del kept
            assert segment.is_unused()


def test_the_modules_of_a_worker_import_neither_jax_nor_partjit():
    *loading, run = process._program(0).splitlines()
    assert run.startswith("module.main(")
    code = "\n".join([*loading, "assert not {'jax', 'jaxlib', 'partjit', 'partjit.colocated'} & {*sys.modules}"])
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
