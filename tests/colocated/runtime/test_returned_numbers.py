"""Numbers that functions return are put on devices when more than the number is used, and never if nobody does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partjit import colocated, pjit
from partjit.colocated import cheapness, colocated_python
from partjit.colocated.runtime.out_spec import OutSpec
from tests.colocated import rendezvous

pytestmark = pytest.mark.usefixtures("meeting")

large = np.full(2_000_000, 3, np.float32)

RETURNED = {
    "a NumPy number": (jnp.float32, lambda x: np.float32(x) + 1),
    "an array without dimensions": (jnp.float32, lambda x: np.asarray(np.float32(x) + 1)),
    "a Python number": (jnp.float32, lambda x: float(x) + 1),
    "an integer": (jnp.int32, lambda x: int(x) + 1),
    "a bool": (jnp.bool_, lambda x: bool(x > 0)),
    "NaN": (jnp.float32, lambda x: np.float32(x) * np.float32("nan")),
}


@pytest.fixture
def puts(monkeypatch):
    """A list that gets each NumPy array of a result that is put on devices."""
    seen = []
    put = OutSpec.put_numpy
    monkeypatch.setattr(OutSpec, "put_numpy", lambda self, value: (seen.append(value), put(self, value))[1])
    return seen


@pytest.fixture
def all_are_brief(monkeypatch):
    """Every call outside of named streams is brief: who waits for it runs it, after ten others."""
    monkeypatch.setattr(cheapness, "_CHEAP_SECONDS", 60.0)


def after_ten(step, x):
    for _ in range(10):
        jax.block_until_ready(step(x))
    return step(x)


@pytest.mark.parametrize("kind", RETURNED)
def test_a_number_that_is_only_read_is_not_put_on_a_device(kind, all_are_brief, puts):
    dtype, function = RETURNED[kind]
    call = colocated_python(function, out_specs_fn=lambda x: jax.ShapeDtypeStruct((), dtype))
    step = pjit(lambda x: (x * 2, call(x[0])))  # takes long enough for its caller to have something else to do
    result = after_ten(step, large)[1]
    puts.clear()
    wanted = np.asarray(function(np.float32(3)), dtype)
    assert (result.dtype, result.shape) == (dtype, ())
    for read in (np.asarray(result), result.item(), bool(result)):
        np.testing.assert_array_equal(read, np.asarray(wanted, np.asarray(read).dtype))
    assert not puts
    added = jax.jit(lambda x: x | x if x.dtype == bool else x + x)(result)
    np.testing.assert_array_equal(added, wanted | wanted if dtype == jnp.bool_ else wanted + wanted)
    assert len(puts) == 1
    assert added.sharding == result.sharding


@pytest.mark.parametrize("kind", RETURNED)
def test_a_number_of_a_thread_is_put_by_whoever_uses_it_and_then_by_the_thread(kind, puts):
    dtype, function = RETURNED[kind]
    call = colocated_python(function, mode="stream", out_specs_fn=lambda x: jax.ShapeDtypeStruct((), dtype))
    x = jnp.float32(3)
    wanted = np.asarray(function(np.float32(3)), dtype)
    float(call(x))
    puts.clear()  # that of the first call
    for _ in range(2):
        result = call(x)
        for read in (np.asarray(result), result.item(), bool(result)):
            np.testing.assert_array_equal(read, np.asarray(wanted, np.asarray(read).dtype))
    call(x)
    colocated.wait(timeout=60)
    assert not puts
    np.testing.assert_array_equal(jnp.stack([result]), [wanted])
    assert len(puts) == 1
    following = call(x)
    colocated.wait(timeout=60)
    assert len(puts) == 2
    np.testing.assert_array_equal(jnp.stack([following]), [wanted])


def test_a_number_is_what_was_returned_though_the_function_changes_its_own(all_are_brief):
    class Counter:
        def __init__(self):
            self.count = np.zeros((), np.int32)

        def next(self, x):
            self.count += 1
            return self.count

    counter = colocated.colocated_python_class(Counter)()
    following = counter.next.specialize(out_specs_fn=lambda x: jax.ShapeDtypeStruct((), jnp.int32))
    step = pjit(lambda x: (x * 2, following(x)))
    numbers = [after_ten(step, large)[1], *(step(large)[1] for _ in range(4))]
    colocated.wait(timeout=60)
    assert [*map(int, numbers)] == [11, 12, 13, 14, 15]
    np.testing.assert_array_equal([x + 0 for x in numbers], [11, 12, 13, 14, 15])


def test_a_number_of_another_dtype_than_specified_is_an_error(all_are_brief):
    def late(x):
        rendezvous.logs["calls"].append(None)
        return np.float32(1) if len(rendezvous.logs["calls"]) < 11 else np.int32(1)

    wrong = colocated_python(late, out_specs_fn=lambda x: jax.ShapeDtypeStruct((), jnp.float32))
    with pytest.raises(ValueError, match="returned what its output specs do not say: result is int32"):
        float(after_ten(pjit(lambda x: (x * 2, wrong(x))), large)[1])


def test_a_number_is_donated_and_deleted_as_any_array(all_are_brief):
    call = colocated_python(lambda x: np.float32(3), out_specs_fn=lambda x: jax.ShapeDtypeStruct((), x.dtype))
    step = pjit(lambda x: (x * 2, call(x)))
    first, second = after_ten(step, large)[1], step(large)[1]
    assert float(first) == 3
    assert float(jax.jit(lambda x: x + 1, donate_argnums=0)(first)) == 4
    assert first.is_deleted()
    assert float(second) == 3
    second.delete()
    assert second.is_deleted()
    with pytest.raises(RuntimeError, match="deleted"):
        second + 1
