"""`PendingArray`: an array wherever an array is expected, and waited for only where its value is needed."""

import copy
import functools
import io
import operator
import pickle
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding

import partjit
from partjit import P, colocated, pjit
from partjit.colocated import colocated_python
from partjit.colocated.runtime.pending import PendingArray, when_received
from tests.census import saw, sees
from tests.colocated import rendezvous
from tests.effort import examples

pytestmark = pytest.mark.usefixtures("meeting")

VALUE = np.arange(1.0, 9.0, dtype=np.float32)


@colocated_python(stream="pending", out_specs_fn=lambda x: x)
def when_told(x):
    rendezvous.hear("told")
    return x


@pytest.fixture
def x(mesh):
    return jax.device_put(VALUE, NamedSharding(mesh, P("x")))


def when_told_soon(x):
    """A pending array that gets its value soon after somebody waits for it."""
    array = when_told(x)
    assert not array.is_ready()
    threading.Timer(0.02, rendezvous.say, ["told"]).start()
    return array


@pytest.fixture
def pending(x):
    return when_told_soon(x)


@pytest.fixture
def never(x):
    """A pending array that gets its value after the test."""
    yield when_told(x)
    rendezvous.say("told")
    colocated.wait()


double, double_donated = jax.jit(lambda x: x * 2), jax.jit(lambda x: x * 2, donate_argnums=0)
sum_of_tree = jax.jit(lambda t: t["a"] + t["b"])
times = jax.jit(lambda x, n: x * n, static_argnums=1)
sum_of_squares = jax.jit(lambda x: (x**2).sum())
double_over_x = pjit(lambda x: x * 2, in_axis_resources=P("x"), out_axis_resources=P("x"))

USES = {
    "asarray": lambda x, y: np.asarray(x),
    "array": lambda x, y: np.array(x, dtype=np.float64),
    "device_get": lambda x, y: jax.device_get({"x": x})["x"],
    "device_put": lambda x, y: jax.device_put(x, jax.devices()[3]),
    "device_put, same": lambda x, y: jax.device_put(x, x.sharding),
    "copy": lambda x, y: x.copy(),
    "copy.copy": lambda x, y: copy.copy(x),
    "deepcopy": lambda x, y: copy.deepcopy(x),
    "pickle": lambda x, y: pickle.loads(pickle.dumps(x)),
    "serialize": lambda x, y: colocated.deserialize(colocated.serialize(x)),
    "jit": lambda x, y: double(x),
    "jit of a tree": lambda x, y: sum_of_tree({"a": x, "b": y}),
    "jit that donates": lambda x, y: double_donated(x),
    "jit with a static argument": lambda x, y: times(x, 3),
    "pjit": lambda x, y: double_over_x(x),
    "lower and compile": lambda x, y: jax.jit(lambda x: x * 2).lower(x).compile()(x),
    "closed over": lambda x, y: jax.jit(lambda y: x + y)(y),
    "closed over, nested": lambda x, y: jax.jit(jax.jit(lambda y: jnp.sin(x) + y))(y),
    "closed over in scan": lambda x, y: jax.lax.scan(lambda c, _: (c + x, None), y, None, length=3)[0],
    "closed over in cond": lambda x, y: jax.lax.cond(True, lambda y: x, lambda y: y, y),
    "make_jaxpr": lambda x, y: jax.make_jaxpr(lambda y: x + y)(y).consts[0],
    "grad": lambda x, y: jax.grad(lambda x: (x**2).sum())(x),
    "grad, closed over": lambda x, y: jax.grad(lambda y: (x * y).sum())(y),
    "value_and_grad of jit": lambda x, y: jax.value_and_grad(sum_of_squares)(x)[1],
    "jvp": lambda x, y: jax.jvp(jnp.sin, (x,), (y,))[1],
    "vjp": lambda x, y: jax.vjp(jnp.sin, y)[1](x)[0],
    "linearize": lambda x, y: jax.linearize(jnp.sin, x)[1](y),
    "vmap": lambda x, y: jax.vmap(lambda a, b: a * b)(x, y),
    "checkpoint": lambda x, y: jax.grad(lambda y: jax.checkpoint(lambda y: (x * y).sum())(y))(y),
    "jnp": lambda x, y: jnp.concatenate([x, jnp.cumsum(x)]),
    "numpy": lambda x, y: np.add(x, 1),
    "stack": lambda x, y: jnp.stack([x, y, x]),
    "where": lambda x, y: jnp.where(x > 2, x, y),
    "index": lambda x, y: x[2:4],
    "index with itself": lambda x, y: y[x.astype(int) - 1],
    "at": lambda x, y: x.at[1].set(5.0),
    "T": lambda x, y: x.T,
    "method": lambda x, y: x.reshape(2, 4).sum(axis=0),
    "iterate": lambda x, y: jnp.stack([*x]),
    "float": lambda x, y: float(x[0]),
    "tolist": lambda x, y: x.tolist(),
    "format": lambda x, y: f"{x.sum():.2f}",
    "str": lambda x, y: str(x),
    "bool": lambda x, y: bool(x.sum()),
    "len": lambda x, y: len(x),
    "in": lambda x, y: 3.0 in x,
    "shards": lambda x, y: [np.asarray(shard.data) for shard in x.addressable_shards],
    "addressable_data": lambda x, y: x.addressable_data(1),
    "block_until_ready": lambda x, y: x.block_until_ready(),
    "jax.block_until_ready": lambda x, y: jax.block_until_ready([x, x])[0],
    "tree": lambda x, y: jax.tree.map(lambda a, b: a - b, {"a": x}, {"a": y})["a"],
    "dlpack": lambda x, y: np.from_dlpack(x.addressable_data(0)),
    "with_sharding_constraint": lambda x, y: jax.lax.with_sharding_constraint(x, x.sharding),
    "make_array": lambda x, y: jax.make_array_from_single_device_arrays(
        x.shape, x.sharding, [shard.data for shard in x.addressable_shards]
    ),
    "pure_callback": lambda x, y: jax.pure_callback(lambda x: np.asarray(x) * 2, x, jnp.asarray(np.asarray(x))),
    "eval_shape": lambda x, y: jax.eval_shape(jnp.sin, x).shape,
    "ShapeDtypeStruct": lambda x, y: jax.typeof(x).str_short(),
    "colocated": lambda x, y: colocated_python(lambda x: x + 1)(x),
    "colocated, stream": lambda x, y: colocated_python(lambda x: x + 1, out_specs_fn=lambda x: x, mode="stream")(x),
    "result_type": lambda x, y: jnp.result_type(x, jnp.float32),
    "isinstance": lambda x, y: isinstance(x, jax.Array),
}
UNARY = [operator.neg, operator.pos, abs, round]
BINARY = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    operator.pow,
    operator.eq,
    operator.ne,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
    operator.matmul,
    divmod,
]


def flat(result):
    if isinstance(result, str | bool | int | float):
        return [result]
    return [np.asarray(leaf) for leaf in jax.tree.leaves(result)]


def same(result, expected):
    assert type(result) is type(expected) or isinstance(result, jax.Array)
    for a, b in zip(flat(result), flat(expected), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("use", USES)
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_it_is_an_array_to_whoever_uses_it(x, pending, mesh, use):
    y = jax.device_put(VALUE + 1, x.sharding)
    with mesh:
        result = USES[use](pending, y)
        same(result, USES[use](x.copy(), y))


# Operators are those of the array that comes, however it is sharded: XLA compiles faster for one device.


@pytest.mark.parametrize("op", UNARY, ids=lambda op: op.__name__)
def test_unary_operators(op):
    x = jnp.asarray(VALUE)
    pending = when_told_soon(x)
    same(op(pending), op(x))


@pytest.mark.parametrize("op", BINARY, ids=lambda op: op.__name__)
def test_binary_operators_from_both_sides(op):
    x, y = jnp.asarray(VALUE), jnp.asarray(VALUE[::-1])
    pending = when_told_soon(x)
    for other in (y, VALUE[::-1].copy()):
        same(op(pending, other), op(x, other))
        same(op(other, pending), op(other, x))
    same(op(pending, pending), op(x, x))
    if op is not operator.matmul:
        same(op(pending, 2.0), op(x, 2.0))
        same(op(2.0, pending), op(2.0, x))


def test_integer_operators():
    x = jnp.asarray(np.arange(8))
    rendezvous.say("told")
    for op in (operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift):
        same(op(when_told(x), 3), op(x, 3))
        same(op(3, when_told(x)), op(3, x))
    same(~when_told(x), ~x)
    same(operator.index(when_told(x[0])), 0)


def test_every_public_attribute_of_an_array_is_there(x, pending):
    for name in dir(x):
        if not name.startswith("_"):
            assert hasattr(type(pending), name), name


def test_what_is_known_beforehand_does_not_wait(x, never):
    names = ["shape", "dtype", "ndim", "size", "nbytes", "itemsize", "sharding", "weak_type", "committed"]
    for name in [*names, "is_fully_addressable", "is_fully_replicated"]:
        assert getattr(never, name) == getattr(x, name), name
    assert never.devices() == x.devices()
    assert len(never) == len(x)
    assert jax.typeof(never) == jax.typeof(x)
    assert never.aval.str_short() == x.aval.str_short()
    assert jax.tree.leaves({"a": never})[0] is never
    assert jnp.shape(never) == x.shape
    assert jax.eval_shape(lambda x: x + 1, never).shape == x.shape
    jax.make_jaxpr(lambda x: x + 1)(never)
    assert not never.is_deleted()
    assert not never.is_ready()


def test_what_asks_about_the_state_does_not_wait(never):
    never.copy_to_host_async()
    assert not never.is_ready()
    assert repr(never).startswith("PendingArray(float32[8], NamedSharding(")
    assert repr(never).endswith("pending)")


def test_asking_for_what_no_array_has_does_not_wait(never):
    assert not hasattr(never, "_repr_html_")
    with pytest.raises(AttributeError, match=r"a jax\.Array has no attribute 'absent'"):
        never.absent  # noqa: B018


def test_a_deleted_pending_array_says_so(x):
    array = when_told(x + 0)
    array.delete()
    array.copy_to_host_async()
    assert array.is_deleted()
    assert repr(array).endswith("deleted)")
    with pytest.raises(RuntimeError, match="a colocated function was called with a deleted array"):
        when_told(array)
    rendezvous.say("told")
    colocated.wait()


def test_repr_shows_the_value_when_it_is_there(x, pending):
    pending.block_until_ready()
    assert repr(pending) == repr(x)


def test_it_is_not_hashable_as_no_array_is(never):
    with pytest.raises(TypeError, match="unhashable"):
        hash(never)


def test_a_scalar_has_no_length():
    rendezvous.say("told")
    with pytest.raises(TypeError, match=r"len\(\) of unsized object"):
        len(when_told(jnp.float32(1)))


def test_deleting_a_pending_array_deletes_what_comes(x):
    array = when_told(x + 0)
    array.delete()
    rendezvous.say("told")
    colocated.wait()
    assert array.is_deleted()


bits_of_key = jax.jit(lambda key: jax.random.bits(key, (2,)))


@pytest.mark.parametrize(
    "use",
    [
        jax.random.key_data,
        lambda key: jax.random.normal(key, (3,)),
        lambda key: [jax.random.key_data(k) for k in jax.random.split(key)],
        lambda key: jax.random.key_data(jax.random.fold_in(key, 3)),
        bits_of_key,
        lambda key: jax.vmap(bits_of_key)(jax.random.split(key)),
    ],
)
def test_typed_keys_are_keys_while_they_are_pending(use):
    key = jax.random.key(5)
    array = when_told_soon(key)
    assert array.dtype == key.dtype
    same(use(array), use(key))


def test_an_explicit_mesh_is_in_its_type():
    mesh = jax.make_mesh((8,), ("x",))
    x = jax.device_put(VALUE, NamedSharding(mesh, P("x")))
    array = when_told(x)
    assert jax.typeof(array) == jax.typeof(x)
    rendezvous.say("told")
    same(array + x, x + x)
    assert jax.typeof(array + x) == jax.typeof(x + x)


def without_value(x):
    """An array whose value was not given to it, and that no call will give it."""
    return PendingArray(None, x.aval, x.sharding, True)


def test_an_action_that_the_thread_with_the_value_has_begun_is_run_once(x):
    class Overtaken(list):
        def append(self, action):
            super().append(action)
            array.receive(x)

    array, seen = without_value(x), []
    array._then = Overtaken()
    when_received(array, seen.append)
    assert [*map(id, seen)] == [id(x)]


def test_an_action_that_the_thread_that_added_it_takes_back_is_not_run_by_the_one_with_the_value(x):
    class TakenBack(list):
        def pop(self, _):
            self.clear()
            raise IndexError

    array, seen = without_value(x), []
    array._then = TakenBack([seen.append])
    array.receive(x)
    assert array.value() is x
    assert not seen


def test_a_failed_array_raises_at_every_use(x):
    @colocated_python(stream="failing", out_specs_fn=lambda x: (x, x))
    def fail(x):
        raise LookupError("nothing there")

    for use in (
        np.asarray,
        lambda a: a + 1,
        jax.jit(lambda a: a),
        lambda a: a.block_until_ready(),
        float,
        str,
        pickle.dumps,
    ):
        first, second = fail(x)
        with pytest.raises(LookupError, match="nothing there"):
            use(first)
        with pytest.raises(LookupError, match="nothing there"):
            use(second)
        assert first.is_ready()
        assert "failed: the colocated call of 'fail'" in repr(first)
        assert "LookupError: nothing there" in repr(first)


def is_pending(x):
    return isinstance(x, partjit.colocated.PendingArray)


def larger(a, b):
    return jnp.where(a > b, a, b)


@sees("a pending argument", "a pending result", "a program on a pending array")
@examples(30)
@given(st.data())
def test_programs_do_not_know_which_of_their_arrays_are_pending(data):
    rendezvous.clear()
    rendezvous.say("told")
    values = [VALUE, VALUE[::-1].copy(), VALUE * 2]
    arrays = [jax.device_put(v) for v in values]
    mixed = [when_told(a) if data.draw(st.booleans()) else a for a in arrays]
    ops = [jnp.add, jnp.multiply, jnp.minimum, jnp.subtract, larger]
    for _ in range(data.draw(st.integers(1, 5))):
        i, j = data.draw(st.integers(0, len(arrays) - 1)), data.draw(st.integers(0, len(arrays) - 1))
        op = data.draw(st.sampled_from(ops))
        run = data.draw(st.sampled_from([lambda f: f, jax.jit, jax.vmap]))(op)
        arrays.append(run(arrays[i], arrays[j]))
        result = run(mixed[i], mixed[j])
        mixed.append(when_told(result) if data.draw(st.booleans()) else result)
        saw("a program on a pending array", when=is_pending(mixed[i]) or is_pending(mixed[j]))
    saw("a pending argument", when=any(map(is_pending, mixed[:3])))
    saw("a pending result", when=any(map(is_pending, mixed[3:])))
    for a, b in zip(arrays, mixed, strict=True):
        same(b, a)
        assert b.sharding == a.sharding
        assert b.committed == a.committed


def test_a_checkpoint_of_pending_arrays_is_that_of_arrays(x, tmp_path):
    rendezvous.say("told")
    tree = {"w": x, "b": [x * 2]}
    pending = jax.tree.map(when_told, tree)
    np.savez(tmp_path / "a", **{jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(pending)})
    with np.load(tmp_path / "a.npz") as saved:
        np.testing.assert_array_equal(saved["['w']"], VALUE)
        np.testing.assert_array_equal(saved["['b'][0]"], VALUE * 2)
    same(pickle.loads(pickle.dumps(pending)), tree)


def test_partial_and_reduce_see_an_array(pending, x):
    same(functools.reduce(operator.add, [pending, x, pending]), x * 3)
    assert isinstance(pending, jax.Array)
    assert isinstance(pending, partjit.colocated.PendingArray)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="only types written in C have a buffer")
def test_its_memory_is_read_as_that_of_any_array():
    array = jnp.asarray(VALUE)
    for use in (memoryview, lambda y: np.frombuffer(y, np.float32), lambda y: io.BytesIO(y).getbuffer()):
        assert bytes(use(when_told_soon(array))) == bytes(use(array))


def test_its_memory_is_that_of_its_numpy_array_on_every_python():
    array = jnp.asarray(VALUE)
    assert memoryview(np.asarray(when_told_soon(array))) == memoryview(array)
    if sys.version_info < (3, 12):
        with pytest.raises(TypeError, match="a bytes-like object is required, not 'PendingArray'"):
            memoryview(when_told_soon(array))
        rendezvous.say("told")
