"""The small arguments of calls that are made often are copied together; their functions see what pins would give."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding

from partjit import P, colocated, pjit
from partjit._jax import copying
from partjit._jax.arrays import ArrayImpl, memory_of
from partjit.colocated import colocated_python, colocated_python_class, prepared
from partjit.colocated.runtime import pins, small_arguments
from partjit.colocated.runtime.pins import Pin, Pins, borrowed, pin
from tests.census import saw, sees
from tests.colocated import rendezvous
from tests.effort import examples

pytestmark = [
    pytest.mark.usefixtures("meeting", "from_the_first_call"),
    pytest.mark.filterwarnings("ignore:Some donated buffers were not usable"),
]


@pytest.fixture(scope="module")
def from_the_first_call():
    """A program is compiled for the first call, not after hundreds of pins."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_arguments, "_PINS_OF_A_PROGRAM", 0)
        patch.setattr(small_arguments, "_PINS_OF_AN_ARGUMENT", 0)
        patch.setattr(small_arguments, "_FEWEST_NUMBERS", 1)
        yield


DTYPES = [np.float32, np.bool_, jnp.bfloat16, jnp.int4]
SHAPES = {(): P(), (8, 4): P("x"), (4, 8): P(None, ("y", "x")), (0, 8): P(), (128, 256): P("y")}
WHERE = ["anywhere", "on a device", "on a mesh"]

donating = jax.jit(lambda x: ~x if x.dtype == bool else (x + x).astype(x.dtype), donate_argnums=0)
ENDS = {"donated": donating, "deleted": lambda x: x.delete(), "dropped": lambda x: None}
plus_nothing = jax.jit(lambda x: x + 0 if x.dtype != bool else x | x)


def new_array(mesh, where, shape, dtype, is_weak):
    """An array of random values that nothing else refers to."""
    value = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    if is_weak:
        value = jnp.asarray(2.0)
    elif where == "anywhere":
        value = jnp.asarray(value)
    if where != "anywhere":
        where = jax.devices()[3] if where == "on a device" else NamedSharding(mesh, SHAPES[shape])
        value = jax.device_put(value, where)
    return jax.block_until_ready(plus_nothing(value))


def said_of(x):
    return np.asarray(x).tobytes(), x.aval, x.weak_type, x.sharding, x.committed


def note(xs):
    rendezvous.hear("caller is done")
    rendezvous.logs["seen"].append([*map(said_of, xs)])


noting = colocated_python(lambda xs: None, stream="small arguments", out_specs_fn=lambda xs: None)


@sees("small and large", "only small", "a weak type", "numbers and others", "another call", *WHERE, *ENDS)
@examples(25)
@given(st.data())
def test_arguments_are_as_they_were_at_the_call(mesh, data):
    rendezvous.clear()
    assert not rendezvous.has_happened("caller is done")  # which is the first use of this event, before other threads
    where = data.draw(st.sampled_from(WHERE))
    kinds = st.tuples(st.sampled_from([*SHAPES]), st.sampled_from(DTYPES), st.booleans())
    kinds = [
        (shape, dtype, weak and not shape) for shape, dtype, weak in data.draw(st.lists(kinds, min_size=1, max_size=12))
    ]
    large = [shape for shape, dtype, _ in kinds if np.prod(shape) * dtype(0).itemsize > 2**14]
    saw(where)
    saw("small and large" if large else "only small", when=len(large) < len(kinds))
    saw("a weak type", when=any(weak for _, _, weak in kinds))
    saw("numbers and others", when=where == "on a mesh" and 0 < sum(not shape for shape, _, _ in kinds) < len(kinds))
    f = colocated_python(note, stream="small arguments", out_specs_fn=lambda xs: None)
    expected = []
    for kind in {*kinds}:  # so that no compilation keeps the function waiting
        donating(new_array(mesh, where, *kind))
    try:
        for i in range(data.draw(st.integers(1, 3))):
            saw("another call", when=i > 0)
            xs = [new_array(mesh, where, *kind) for kind in kinds]
            expected.append([*map(said_of, xs)])
            f(xs)
            for x in xs:
                end = data.draw(st.sampled_from([*ENDS]))
                saw(end)
                ENDS[end](x)
    finally:
        rendezvous.say("caller is done")
        colocated.wait()
    assert rendezvous.logs["seen"] == expected


def taken(*arrays):
    """What a call takes of arrays, by the program of all; and the pins of its specialization."""
    pins = Pins(len(arrays))
    return pins.pin_all(arrays), pins


def test_small_ones_are_copied_and_large_ones_are_pinned():
    small, large = jnp.ones(8), jnp.ones(10**5)
    copy, pin = taken(small, large)[0]
    assert type(copy) is ArrayImpl
    assert {*memory_of(copy)}.isdisjoint(memory_of(small))
    assert type(pin) is Pin


@pytest.mark.parametrize(("count", "programs"), [(7, 0), (8, 1)])
def test_over_several_devices_a_program_is_worth_as_many_arguments_and_fewer_are_copied_alone(
    mesh, count, programs, monkeypatch
):
    made = []
    monkeypatch.setattr(
        small_arguments, "copier_of", lambda arrays: made.append(len(arrays)) or copying.copier_of(arrays)
    )
    arrays = [jax.device_put(np.arange(8, dtype=np.float32) + i, NamedSharding(mesh, P("x"))) for i in range(count)]
    copies = taken(*arrays)[0]
    assert len(made) == programs
    assert {*map(type, copies)} == {ArrayImpl}
    assert [*map(said_of, copies)] == [*map(said_of, arrays)]
    assert not {where for x in copies for where in memory_of(x)} & {where for x in arrays for where in memory_of(x)}


def test_over_several_devices_large_ones_are_pinned(mesh):
    sharding = NamedSharding(mesh, P("x"))
    arrays = [jax.device_put(np.zeros(n, np.float32), sharding) for n in (8, 10**6)]
    takes, _ = taken(*jax.block_until_ready(arrays))
    assert [*map(type, takes)] == [ArrayImpl, Pin]


@pytest.mark.parametrize("one_is_computed", [False, True])
def test_large_ones_that_are_all_still_computed_are_copied_by_one_program(mesh, one_is_computed, monkeypatch):
    made = []
    monkeypatch.setattr(
        small_arguments, "copier_of", lambda arrays: made.append(len(arrays)) or copying.copier_of(arrays)
    )
    sharding = NamedSharding(mesh, P("x"))
    arrays = [jax.device_put(np.arange(10**5, dtype=np.float32) + i, sharding) for i in range(10)]
    arrays = jax.block_until_ready([jnp.ones(8), *arrays])
    monkeypatch.setattr(small_arguments, "is_computed", lambda array: one_is_computed and array is arrays[1])
    takes = taken(*arrays)[0]
    assert (10 in made) is not one_is_computed
    assert {*map(type, takes[1:])} == {Pin if one_is_computed else ArrayImpl}
    own = borrowed(takes)
    assert [*map(said_of, own)] == [*map(said_of, arrays)]
    shared = {where for x in own for where in memory_of(x)} & {where for x in arrays[1:] for where in memory_of(x)}
    assert bool(shared) is one_is_computed


def test_of_numbers_that_all_devices_have_a_program_copies_those_of_one_device_into_one_array(mesh, monkeypatch):
    copied = []

    def copier_into_one_of(arrays):
        copied.append([*map(said_of, arrays)])
        return copying.copier_into_one_of(arrays)

    monkeypatch.setattr(small_arguments, "copier_into_one_of", copier_into_one_of)
    everywhere = NamedSharding(mesh, P())
    numbers = [jax.device_put(kind(i), everywhere) for kind in (np.bool_, np.float32, np.int32) for i in range(20)]
    large = jnp.ones(10**5)
    *takes, pinned = taken(*numbers, large)[0]
    assert len({id(take.args[0].source) for take in takes}) == 3
    assert [take().item() for take in takes] == [number.item() for number in numbers]
    assert [said_of(take()) for take in takes] == [*map(said_of, numbers)]
    assert type(pinned) is Pin
    replicas = [said_of(number.addressable_data(0)) for number in numbers]
    assert copied == [replicas[start : start + 20] for start in (0, 20, 40)]


def test_one_program_copies_what_is_alike_in_its_devices_and_commitment():
    arrays = [jnp.ones(8), jax.device_put(np.ones(4), jax.devices()[0]), jax.device_put(np.ones(6), jax.devices()[3])]
    for _ in range(2):
        arrays = [x + 1 for x in arrays]
        takes, _ = taken(*arrays)
        assert sorted(type(take).__name__ for take in takes) == ["ArrayImpl", "Pin", "Pin"]
        assert [*map(said_of, borrowed(takes))] == [*map(said_of, arrays)]


def test_no_more_is_copied_than_waiting_calls_can_hold():
    arrays = [jnp.ones(4096 - i % 2) for i in range(200)]
    copied = [x.nbytes for x, take in zip(arrays, taken(*arrays)[0], strict=True) if type(take) is ArrayImpl]
    assert 0 < sum(copied) <= 2**21 < sum(x.nbytes for x in arrays)


def test_the_same_arguments_are_pinned_so_that_calls_share_them():
    arrays = jnp.ones(8), jnp.ones(4)
    first, pins = taken(*arrays)
    second, third = pins.pin_all(arrays), pins.pin_all(arrays)
    assert [*map(type, first)] == [ArrayImpl, ArrayImpl]
    assert [*map(type, second)] == [Pin, Pin]
    assert second == third


def test_a_program_is_compiled_after_as_many_pins_as_that_takes_time(monkeypatch, compilations):
    monkeypatch.setattr(small_arguments, "_PINS_OF_A_PROGRAM", 10)
    monkeypatch.setattr(small_arguments, "_PINS_OF_AN_ARGUMENT", 2)
    pins = Pins(2)
    arrays = [(jnp.ones(7) + i, jnp.ones(5) + i) for i in range(10)]
    compilations.clear()
    kinds = [type(pins.pin_all(pair)[0]) for pair in arrays]
    assert kinds == [Pin] * 6 + [ArrayImpl] * 4
    assert len(compilations) == 1


def test_of_many_arguments_programs_are_compiled_one_after_the_other(monkeypatch):
    monkeypatch.setattr(small_arguments, "_PINS_OF_AN_ARGUMENT", 2)
    monkeypatch.setattr(small_arguments, "_MOST_TOGETHER", 4)
    made = []
    monkeypatch.setattr(
        small_arguments, "copier_of", lambda arrays: made.append(len(arrays)) or copying.copier_of(arrays)
    )
    pins, compiled = Pins(10), []
    for call in range(5):
        arrays = [jnp.full(3, 10 * call + i) for i in range(10)]
        made.clear()
        takes = pins.pin_all(arrays)
        compiled.append(([*made], [type(take) for take in takes].count(ArrayImpl)))
        assert [*map(said_of, borrowed(takes))] == [*map(said_of, arrays)]
    assert compiled == [([4], 4), ([4], 8), ([], 8), ([2], 10), ([], 10)]


def test_calls_with_arguments_of_equal_types_share_a_program_which_ends_with_the_last_of_them(compilations):
    arrays = jnp.ones(11), jnp.ones(9)
    compilations.clear()
    pins = [taken(*arrays)[1] for _ in range(3)]
    assert len(compilations) == 1
    programs = len(copying._copiers)
    del pins
    gc.collect()
    assert len(copying._copiers) < programs


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("shape", [(8, 4), ()], ids=["arrays", "numbers"])
@pytest.mark.parametrize("where", WHERE)
def test_a_deleted_one_is_refused_as_without_the_program(mesh, where, shape, first):
    f = colocated_python(lambda xs: None, mode="stream", out_specs_fn=lambda xs: None)
    if not first:
        f([new_array(mesh, where, shape, np.float32, False) for _ in range(8)])
    for end in donating, lambda x: x.delete():
        xs = [new_array(mesh, where, shape, np.float32, False) for _ in range(8)]
        end(xs[5])
        with pytest.raises(RuntimeError, match=rf"called with a deleted array: float32\[{'8,4' if shape else ''}\]"):
            f(xs)


def test_a_nan_among_them_is_no_error():
    f = colocated_python(lambda x: None, mode="stream", out_specs_fn=lambda x: None)
    f(jnp.float32(1))
    nan = jnp.float32(jnp.nan)
    with jax.debug_nans(True):
        f(nan)
        colocated.wait()


def test_neither_contexts_nor_jax_without_programs_matter(mesh, compilations):
    arrays = [(jnp.ones(8) + i, jnp.int32(i)) for i in range(3)]
    _, pins = taken(*arrays[0])
    compilations.clear()
    with jax.transfer_guard("disallow"), jax.set_mesh(mesh):
        in_mesh = pins.pin_all(arrays[1])
    with jax.disable_jit():
        without = pins.pin_all(arrays[2])
    assert not compilations
    for takes, values in ((in_mesh, arrays[1]), (without, arrays[2])):
        assert {*map(type, takes)} == {ArrayImpl}
        assert [*map(said_of, borrowed(takes))] == [*map(said_of, values)]


def test_beside_numbers_of_the_caller_they_are_copied_too(monkeypatch):
    pinned = []
    monkeypatch.setattr(pins, "_pin_ready", lambda x: pinned.append(x) or Pin(x))
    f = colocated_python(note, mode="stream", out_specs_fn=lambda xs: None)
    expected = []
    try:
        for i in range(3):
            x = jax.block_until_ready(jnp.ones(8) + i)
            expected.append([said_of(jnp.asarray(i)), said_of(x)])
            f((i, x))
            x.delete()
    finally:
        rendezvous.say("caller is done")
        colocated.wait()
    assert rendezvous.logs["seen"] == expected
    assert not pinned


class Log:
    def __init__(self):
        self.lines = []

    def write(self, tree, key):
        self.lines.append((jax.random.key_data(key).tolist(), float(tree["loss"])))

    def read(self):
        return jnp.asarray([loss for _, loss in self.lines])


def test_a_method_and_an_argument_that_is_no_plain_array():
    log = colocated_python_class(Log)()
    spec = jax.ShapeDtypeStruct((3,), np.float32)
    for i in range(3):
        log.write.specialize(out_specs_fn=lambda *args: None)({"loss": jnp.float32(i)}, jax.random.key(i))
    np.testing.assert_array_equal(log.read.specialize(out_specs=spec, devices=jax.devices()[:1])(), [0, 1, 2])


@pytest.mark.parametrize("first", ["argument", "intermediate"])
def test_what_a_program_gives_to_a_call_stays_intact_where_its_caller_may_donate_it(compilations, first):
    f = colocated_python(lambda a, b, c: note([a, b, c]), stream="small arguments", out_specs_fn=lambda *_: None)

    @pjit
    def program(x, y, z):
        between = z * 3
        f(*((x, y, between) if first == "argument" else (between, y, x)))
        return between + 1

    expected = []
    for i in range(4):
        x, y, z = jnp.ones(8) * i, jnp.ones(3) + i, jnp.ones(5) - i
        between = jax.block_until_ready(jax.jit(lambda z: z * 3)(z))
        said = said_of(x), said_of(y), said_of(between)
        expected.append([said[i] for i in ((0, 1, 2) if first == "argument" else (2, 1, 0))])
        if i == 3:
            compilations.clear()
        program(x, y, z)
        donating(x)
        y.delete()
    assert not compilations
    rendezvous.say("caller is done")
    colocated.wait()
    assert rendezvous.logs["seen"] == expected


def test_a_program_copies_what_its_caller_may_donate_at_once(monkeypatch):
    made = []
    for module in (pins, prepared):
        monkeypatch.setattr(module, "pin", lambda array: made.append(array) or pin(array))
    program = pjit(lambda xs: noting(xs) or [x + 1 for x in xs])
    for i in range(3):
        program([jnp.ones(8) * i, jnp.ones(4) * i])
    colocated.wait()
    assert not made


def test_what_is_not_computed_yet_is_copied_without_waiting():
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, y: y @ y, x)[0])
    x = jnp.eye(500)
    _, pins = taken(jax.block_until_ready(slow(x)))
    (take,) = pins.pin_all([slow(x)])
    assert type(take) is ArrayImpl
    assert not take.is_ready()
    np.testing.assert_array_equal(take, np.eye(500)[0])
