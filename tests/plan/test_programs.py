"""Programs with colocated calls: what they compute, when calls run, what they get and what becomes of failures."""

import gc
import re
import threading
import traceback
import weakref
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding

import partjit
from partjit import P, colocated, pjit
from partjit.colocated import PendingArray, colocated_python, colocated_python_class
from partjit.plan.ir.nodes import Loop, Transfer
from tests.colocated import rendezvous

like = {"out_specs_fn": lambda *xs: xs[0]}
nothing = {"out_specs_fn": lambda *xs: None}
scalar = jax.ShapeDtypeStruct((), np.float32)


def same(array, expected):
    np.testing.assert_allclose(np.asarray(array), np.asarray(expected), rtol=1e-6)


def placed(mesh, spec, shape=(8, 4)):
    return jax.device_put(np.arange(np.prod(shape), dtype=np.float32).reshape(shape), NamedSharding(mesh, spec))


@pytest.fixture
def double():
    return colocated_python(lambda x: 2 * x, **like)


# Values


def test_a_call_between_device_work(mesh, double):
    f = pjit(lambda x: double(x + 1) - 3, in_axis_resources=P("x"), out_axis_resources=P("y"))
    with mesh:
        for _ in range(3):
            y = f(np.arange(8.0, dtype=np.float32))
            same(y, 2 * np.arange(8.0) - 1)
            assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("y")), 1)


def test_the_function_gets_concrete_arrays_on_the_mesh_each_time(mesh, meeting):
    def look(x):
        assert isinstance(x, jax.Array)
        assert not isinstance(x, jax.core.Tracer)
        rendezvous.logs["seen"].append((float(x.sum()), len(x.sharding.device_set)))
        return x

    f = pjit(lambda x: colocated_python(look, **like)(x) + 1, in_axis_resources=P("x"), out_axis_resources=None)
    with mesh:
        for i in range(3):
            f(np.full(8, i, np.float32))
    assert rendezvous.logs["seen"] == [(8.0 * i, 8) for i in range(3)]


@pytest.mark.parametrize("spec", [P(), P("x"), P("y", "x"), P(None, ("x", "y"))])
def test_in_specs_and_out_specs_are_kept(mesh, meeting, spec):
    wanted = NamedSharding(mesh, spec)
    shape = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=wanted)

    def look(x):
        rendezvous.logs["seen"].append(x.sharding)
        return x * 1

    call = colocated_python(look, in_specs=((shape,), {}), out_specs=shape)
    program = {
        "of the devices": lambda x: (call(x + 1), x),
        "of an argument": lambda x: (call(x), x),
        "of a call": lambda x: (call(call(x)), x),
        "for the devices": lambda x: (call(x) * 2, x),
    }
    for fun in program.values():
        with mesh:
            f = pjit(fun, in_axis_resources=P("y"), out_axis_resources=(P("x"), None))
            y, _ = f(np.ones((8, 8), np.float32))
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 2)
    assert all(sharding.is_equivalent_to(wanted, 2) for sharding in rendezvous.logs["seen"])


def test_specs_on_other_devices_are_refused(mesh):
    other = NamedSharding(partjit.Mesh(jax.devices()[:2], "z"), P("z"))
    call = colocated_python(lambda x: x, out_specs=jax.ShapeDtypeStruct((8,), np.float32, sharding=other))
    with mesh, pytest.raises(partjit.ShardingError, match=r"out_specs of the colocated function <lambda> name the dev"):
        pjit(lambda x: call(x) + 1, in_axis_resources=P("x"))(np.ones(8, np.float32))


def test_in_specs_of_other_types_are_refused(mesh):
    call = colocated_python(lambda x: x, in_specs=((jax.ShapeDtypeStruct((4,), np.float32),), {}), **like)
    with mesh, pytest.raises(ValueError, match=r"in_specs do not fit the arguments: x is float32\[8\]"):
        pjit(lambda x: call(x), in_axis_resources=P("x"))(np.ones(8, np.float32))


@pytest.mark.parametrize(
    ("args", "kwargs", "said", "message"),
    [
        ((1, 1), {}, ((1,), {}), "args is a tuple of 2, but its spec says a tuple of 1"),
        (
            ({"w": 1},),
            {},
            (({"W": 1},), {}),
            "args[0]['W'] is missing; args[0]['w'] is not among them: did you mean 'W'?",
        ),
        (([1, 1],), {}, ((1,), {}), "args[0] is a list of 2, but its spec says an array"),
        ((1,), {"scale": 1}, ((1,), {}), "kwargs['scale'] is not among them"),
        ((1,), {}, ((1,), {"scale": 1}), "kwargs['scale'] is missing"),
    ],
)
@pytest.mark.parametrize("way", [lambda call: call, pjit])
def test_in_specs_of_another_structure_are_named(way, args, kwargs, said, message):
    ones = lambda tree, of: jax.tree.map(lambda _: of, tree)  # noqa: E731
    in_specs = ones(said, jax.ShapeDtypeStruct((8,), np.float32))
    call = colocated_python(lambda *args, **kwargs: None, in_specs=in_specs)
    with pytest.raises(ValueError, match=re.escape(f"in_specs do not fit the arguments: {message}")):
        way(call)(*ones(args, np.ones(8, np.float32)), **ones(kwargs, np.ones(8, np.float32)))


def test_trees_keywords_constants_and_no_results(mesh, meeting):
    constant = np.float32(7)

    def note(a, *, b):
        rendezvous.logs["seen"].append((float(a["x"]), float(a["y"][0]), float(b)))
        return {"sum": a["x"] + b}

    call = colocated_python(note, out_specs={"sum": scalar})

    @partial(pjit, in_axis_resources=None, out_axis_resources=None)
    def f(x):
        return call({"x": jnp.asarray(constant), "y": [jnp.float32(2)]}, b=x)["sum"], 3.0, x

    with mesh:
        same(f(np.float32(1))[0], 8)
    assert rendezvous.logs["seen"] == [(7.0, 2.0, 1.0)]


def test_keys_flags_and_small_types_cross_the_cut(mesh):
    call = colocated_python(lambda *xs: xs, out_specs_fn=lambda *xs: xs)

    @partial(pjit, in_axis_resources=P("x"), out_axis_resources=None)
    def f(x):
        key, flags, small = call(jax.random.key(3), x > 2, x.astype(jnp.bfloat16))
        return jax.random.uniform(key) + jnp.sum(flags.astype(jnp.float32)) + jnp.sum(small.astype(jnp.float32))

    x = np.arange(8, dtype=np.float32)
    with mesh:
        same(f(x), jax.random.uniform(jax.random.key(3)) + 5 + 28)


def test_without_a_mesh_it_runs_where_the_arguments_are(double):
    f = pjit(lambda x: double(x + 1) - 3)
    y = f(np.ones(3, np.float32))
    same(y, np.ones(3))
    assert not y.committed
    on_three = f(jax.device_put(np.ones(3, np.float32), jax.devices()[3]))
    assert on_three.sharding == SingleDeviceSharding(jax.devices()[3])
    assert on_three.committed


def test_explicit_axes_come_back_explicit(double):
    explicit = jax.make_mesh((8,), ("x",))
    with jax.set_mesh(explicit):
        f = pjit(lambda x: (double(x + 1) - 3, double(x)), in_axis_resources=P("x"), out_axis_resources=P("x"))
        for y in f(np.ones(8, np.float32)):
            assert y.sharding.mesh == explicit
            assert y.sharding.spec == P("x")


def test_static_and_keyword_arguments(mesh, double):
    f = pjit(lambda n, x, *, y: double(x * n) + y, static_argnums=0)
    with mesh:
        for n in (2, 3, 2):
            same(f(n, np.ones(8, np.float32), y=1), 2 * n + 1)


def test_the_mesh_of_each_call_is_meant(double):
    f = pjit(lambda x: double(x + 1), in_axis_resources=P("x"), out_axis_resources=P("x"))
    for count in (8, 2, 4, 8):
        with partjit.Mesh(jax.devices()[:count], "x"):
            y = f(np.ones(8, np.float32))
        assert len(y.sharding.device_set) == count
        same(y, 4)


def test_gradients_around_calls_and_through_nested_programs(mesh, double):
    inner = pjit(lambda x: jnp.sum(x * double(jax.lax.stop_gradient(x))), in_axis_resources=P("x"))
    with mesh:
        x = np.arange(8, dtype=np.float32)
        same(jax.grad(inner)(x), 2 * x)
        same(pjit(jax.grad(inner), in_axis_resources=P("x"), out_axis_resources=P("x"))(x), 2 * x)
        same(pjit(jax.grad(jax.checkpoint(inner)), in_axis_resources=P("x"), out_axis_resources=None)(x), 2 * x)


def test_a_call_is_made_once_under_checkpoint_and_its_gradient(mesh, meeting):
    @partial(colocated_python, pure=True, **like)
    def count(x):
        rendezvous.logs["calls"].append(1)
        return x

    def loss(x):
        return jnp.sum(jnp.sin(x * count(jax.lax.stop_gradient(x))))

    f = pjit(jax.value_and_grad(jax.checkpoint(loss)), in_axis_resources=P("x"), out_axis_resources=None)
    with mesh:
        f(np.ones(8, np.float32))
    assert len(rendezvous.logs["calls"]) == 1


# Effects


def test_pure_calls_are_left_out_or_made_once_and_others_never(mesh, meeting):
    def note(x):
        rendezvous.logs["calls"].append(1)
        return x

    pure, effectful = colocated_python(note, pure=True, **like), colocated_python(note, **like)

    def counted(fun):
        rendezvous.logs["calls"].clear()
        with mesh:
            pjit(fun, in_axis_resources=P("x"), out_axis_resources=None)(np.ones(8, np.float32))
        colocated.wait()
        return len(rendezvous.logs["calls"])

    assert counted(lambda x: (pure(x), x)[1]) == 0
    assert counted(lambda x: pure(x) + pure(x)) == 1
    assert counted(lambda x: pure(x) + pure(x + 1)) == 2
    assert counted(lambda x: (effectful(x), x)[1]) == 1
    assert counted(lambda x: effectful(x) + effectful(x)) == 2


def test_calls_of_an_object_keep_their_order_across_streams(mesh, meeting):
    @colocated_python_class
    class Log:
        def __init__(self):
            self.seen = []

        def note(self, x):
            self.seen.append(float(x))
            return jnp.asarray(np.float32(len(self.seen)))

    log = Log()
    left = log.note.specialize(out_specs=scalar, stream="left")
    right = log.note.specialize(out_specs=scalar, stream="right")

    @partial(pjit, in_axis_resources=None, out_axis_resources=None)
    def f(x):
        return [call(x + i) for i, call in enumerate([left, right, left, right])]

    with mesh:
        for start in (0, 4):
            same(jnp.stack(f(np.float32(1))), start + np.arange(4.0) + 1)


def test_a_stream_entered_in_the_function_is_that_of_the_program(mesh, meeting):
    def where(x):
        rendezvous.logs["threads"].append(threading.get_ident())

    note = colocated_python(where, mode="stream", **nothing)

    @partial(pjit, in_axis_resources=None, out_axis_resources=None)
    def f(x):
        with colocated.stream("named"):
            note(x)
        return x

    with mesh:
        assert [call.stream.name for call in f.plan(np.float32(1)).calls] == ["named"]
        f(np.float32(1))
    colocated.wait("named")
    assert len(rendezvous.logs["threads"]) == 1


# Asynchrony


def test_results_that_only_leave_are_pending_and_the_caller_goes_on(mesh, meeting):
    def slow(x):
        rendezvous.hear("go")
        return x + 1

    call = colocated_python(slow, **like)
    f = pjit(lambda x: (call(x), x * 2), in_axis_resources=P("x"), out_axis_resources=(P("y"), None))
    with mesh:
        y, z = f(np.ones(8, np.float32))
    same(z, 2)
    assert type(y) is PendingArray
    assert not y.is_ready()
    rendezvous.say("go")
    same(y, 2)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("y")), 1)


@pytest.mark.parametrize("argument", ["donated", "not donated", "computed", "result"])
def test_an_asynchronous_call_keeps_its_argument(mesh, meeting, argument):
    def look(x):
        rendezvous.hear("go")
        rendezvous.logs["seen"].append(float(x.sum()))

    save = colocated_python(look, stream="save", **nothing)

    def fun(x):
        y = x * 2
        save({"donated": x, "not donated": x, "computed": x + 1, "result": y}[argument])
        return y

    donated = () if argument == "not donated" else 0
    f = pjit(fun, in_axis_resources=P("x"), out_axis_resources=P("x"), donate_argnums=donated)
    step = pjit(lambda x: x * 0, in_axis_resources=P("x"), out_axis_resources=P("x"), donate_argnums=0)
    x = placed(mesh, P("x"))
    total = float(np.arange(32).sum())
    with mesh:
        y = step(f(x))  # gives away what the call may still read
        if argument == "not donated":
            x.delete()
        del x
    assert not rendezvous.logs["seen"]
    rendezvous.say("go")
    colocated.wait("save")
    expected = {"donated": total, "not donated": total, "computed": total + 32, "result": 2 * total}[argument]
    assert rendezvous.logs["seen"] == [expected]
    same(y, 0)


def test_two_calls_on_two_streams_meet(mesh, meeting):
    def meet(x):
        rendezvous.meet("both", 2)
        return x

    left, right = (colocated_python(meet, stream=name, **like) for name in ("left", "right"))
    f = pjit(lambda x: left(x) + right(x), in_axis_resources=P("x"), out_axis_resources=P("x"))
    with mesh:
        same(f(np.ones(8, np.float32)), 2)


def test_independent_device_work_is_dispatched_while_a_call_runs(mesh, meeting):
    def wait_for_the_rest(x):
        rendezvous.hear("rest")
        return x

    call = colocated_python(wait_for_the_rest, **like)
    told = colocated_python(lambda x: rendezvous.say("rest"), stream="rest", **nothing)

    def fun(x):
        y = call(x)
        big = jnp.sum(jnp.ones((200, 200)) @ (jnp.ones((200, 200)) * x[0]))
        told(big)
        return y + 1, big

    with mesh:
        f = pjit(fun, in_axis_resources=P("x"), out_axis_resources=None)
        assert len(f.plan(np.ones(8, np.float32)).fragments) == 2
        same(f(np.ones(8, np.float32))[0], 2)


def test_threads_call_one_program_at_once(mesh, double):
    f = pjit(lambda x: double(x + 1) - 3, in_axis_resources=P("x"), out_axis_resources=P("x"))
    results = {}

    def work(i):
        with mesh:
            results[i] = [float(f(np.full(8, i + k, np.float32))[0]) for k in range(10)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {i: [2.0 * (i + k) - 1 for k in range(10)] for i in range(4)}


@pytest.mark.parametrize("mode", ["inline", "stream"])
def test_programs_call_functions_that_call_programs(mesh, double, mode):
    inner = pjit(lambda x: double(x) + 1, in_axis_resources=P("x"), out_axis_resources=P("x"))

    def run(x):
        with mesh:
            return inner(x)

    call = colocated_python(run, mode=mode, **like)
    f = pjit(lambda x: call(x + 1) - 3, in_axis_resources=P("x"), out_axis_resources=P("x"))
    with mesh:
        for _ in range(5):
            same(f(np.ones(8, np.float32)), 2)


# Running ahead


class Numbers:
    def __init__(self):
        self.count = 0

    def next(self):
        self.count += 1
        rendezvous.logs["made"].append(self.count)
        if self.count == 4:
            raise StopIteration("no more")
        return jnp.asarray(np.float32(self.count))


def test_calls_made_ahead_are_taken_in_order_and_none_is_lost(mesh, meeting):
    numbers = colocated_python_class(Numbers)()
    following = numbers.next.specialize(out_specs=scalar, run_ahead=2, devices=mesh)

    @partial(pjit, in_axis_resources=None, out_axis_resources=None)
    def f(x):
        return following() + x

    @partial(colocated_python, **like)
    def fail(x):
        raise KeyError("first")

    @partial(pjit, in_axis_resources=None, out_axis_resources=None)
    def g(x):
        return fail(x) + following()

    with mesh:
        same(f(np.float32(0)), 1)
        with pytest.raises(KeyError, match="first"):
            g(np.float32(0))
        colocated.wait()
        assert rendezvous.logs["made"] == [1, 2, 3]
        same(following(), 2)  # outside of programs as well
        same(f(np.float32(0)), 3)
        with pytest.raises(RuntimeError, match="next raised StopIteration") as caught:
            f(np.float32(0))
        assert isinstance(caught.value.__cause__, StopIteration)


def test_only_calls_without_arguments_are_made_ahead(mesh):
    call = colocated_python(lambda x: x, run_ahead=2, **like)
    with mesh, pytest.raises(ValueError, match=r"run_ahead=2 .* no arguments; this one has x"):
        pjit(lambda x: call(x))(np.float32(1))


# Layouts


def test_per_shard_calls_come_once_for_each_device_with_its_index(mesh, meeting):
    def note(shard):
        rendezvous.logs["seen"].append((str(shard.index), shard.replica_id, shard.data.shape))
        return np.asarray(shard.data) * 2

    sharding = NamedSharding(mesh, P("x", "y"))
    stated = jax.ShapeDtypeStruct((8, 4), np.float32, sharding=sharding)
    call = colocated_python(note, layout="per_shard", in_specs=((stated,), {}), out_specs=stated)
    x = placed(mesh, P("x", "y"))
    with mesh:
        f = pjit(lambda x: call(x) + 1, in_axis_resources=P("x", "y"), out_axis_resources=P("x", "y"))
        same(f(x), 2 * np.asarray(x) + 1)
    expected = {(str(shard.index), shard.replica_id, (2, 2)) for shard in x.addressable_shards}
    assert {*rendezvous.logs["seen"]} == expected
    assert len(rendezvous.logs["seen"]) == 8
    same(call(x), 2 * np.asarray(x))  # outside of programs as well


def test_per_shard_calls_that_return_wrong_shards_say_so(mesh):
    stated = jax.ShapeDtypeStruct((8,), np.float32, sharding=NamedSharding(mesh, P("x")))
    call = colocated_python(lambda shard: jnp.ones(5), layout="per_shard", out_specs=stated)
    with mesh, pytest.raises(ValueError, match=r"<lambda> returned float32\[5\] as result 0 on"):
        pjit(lambda x: call(x) + 1, in_axis_resources=P("x"))(np.ones(8, np.float32))


# Failures


@pytest.mark.parametrize("mode", ["inline", "stream"])
def test_a_failure_names_the_users_line_and_the_program_goes_on(mesh, mode):
    @partial(colocated_python, mode=mode, **like)
    def check(x):
        if float(x[0]) == 7:
            raise LookupError("seven")
        return x

    @partial(pjit, in_axis_resources=P("x"), out_axis_resources=P("x"))
    def f(x):
        return check(x) + 1  # this line

    line = f.__wrapped__.__code__.co_firstlineno + 2
    with mesh:
        for i in range(10):
            if i == 7:
                with pytest.raises(LookupError, match="seven") as caught:
                    f(np.full(8, i, np.float32))
                (note,) = caught.value.__notes__
                assert note == f"This happened in the colocated call of 'check' made at {__file__}:{line} in f"
                functions = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
                assert functions[-1] == "check"
            else:
                same(f(np.full(8, i, np.float32)), i + 1)


AROUND = [
    lambda call, x: jax.lax.map(call, x),
    lambda call, x: jax.lax.cond(x[0] < 9, call, lambda x: x, x),
    lambda call, x: jax.lax.cond(x[0] < 9, lambda x: jax.lax.map(call, x), lambda x: x, x),
    lambda call, x: jax.lax.while_loop(lambda x: x[0] < 9, call, x),
    lambda call, x: jax.jit(call)(x),
    lambda call, x: pjit(call)(x),
]


def test_the_failure_of_a_function_that_jax_itself_calls_names_the_users_line():
    def fail(x):
        raise LookupError("no")

    call = colocated_python(fail, **like)  # one function for all: jax traces it once, whatever the line
    call.defvjp(lambda x: (call(x), None), lambda _, ct: (ct,))
    for around in AROUND:
        with pytest.raises(LookupError) as caught:
            jax.block_until_ready(pjit(lambda x, around=around: around(call, x) + 1)(jnp.ones(4)))
        (note,) = caught.value.__notes__
        assert f"made at {__file__}:{around.__code__.co_firstlineno} in <lambda>" in note


def test_the_failure_of_a_function_that_is_the_program_names_the_line_where_it_is_defined():
    def fail(x):
        raise LookupError("no")

    silent = colocated_python(fail, out_specs_fn=lambda x: None)
    for program in (pjit(colocated_python(fail, **like)), pjit(silent)):
        result = program(jnp.ones(4))
        with pytest.raises(LookupError) as caught:
            colocated.wait() if result is None else result.block_until_ready()
        (note,) = caught.value.__notes__
        assert f"made at {__file__}:{fail.__code__.co_firstlineno} in fail" in note


@pytest.mark.parametrize("mode", ["inline", "stream"])
def test_the_failure_of_a_call_outside_of_programs_is_not_one_of_the_program_that_gets_its_result(mode):
    def fail(x):
        raise LookupError("no")

    failing = colocated_python(fail, **like)
    double = pjit(lambda x: 2 * colocated_python(lambda x: x, mode=mode, **like)(x))
    result = failing(jnp.ones(4))
    with pytest.raises(LookupError) as caught:
        double(result).block_until_ready()
    (note,) = caught.value.__notes__
    assert note.startswith(f"This happened in the colocated call of 'fail' made at {__file__}:")


def test_only_what_depends_on_a_failure_is_poisoned(mesh):
    def fail(x):
        raise LookupError("no")

    bad = colocated_python(fail, stream="bad", **like)
    f = pjit(lambda x: (bad(x), x + 1), in_axis_resources=P("x"), out_axis_resources=None)
    with mesh:
        y, z = f(np.ones(8, np.float32))
    same(z, 2)
    with pytest.raises(LookupError, match="no"):
        np.asarray(y)
    colocated.wait()


def test_a_failure_that_nobody_looks_at_is_raised_by_wait(mesh):
    def fail(x):
        raise LookupError("no")

    note = colocated_python(fail, **nothing)
    with mesh:
        same(pjit(lambda x: (note(x), x)[1], in_axis_resources=P("x"))(np.ones(8, np.float32)), 1)
    with pytest.raises(LookupError, match="no"):
        colocated.wait()


def test_a_result_of_another_type_than_specified_says_so(mesh):
    call = colocated_python(lambda x: x[:4], **like)
    with mesh, pytest.raises(ValueError, match=r"returned what its output specs do not say: result is float32\[4\]"):
        pjit(lambda x: call(x) + 1, in_axis_resources=P("x"))(np.ones(8, np.float32))


def test_donated_arguments_are_gone_and_given_twice_are_refused(mesh, double):
    f = pjit(lambda x: double(x) + x, in_axis_resources=P("x"), out_axis_resources=P("x"), donate_argnums=0)
    x = placed(mesh, P("x"))
    with mesh:
        same(f(x), 3 * np.arange(32).reshape(8, 4))
        assert x.is_deleted()
        for _ in range(2):
            with pytest.raises((RuntimeError, ValueError), match="deleted"):
                f(x)


# Nothing hidden


def test_no_collective_is_added_and_nothing_is_moved(mesh):
    double = colocated_python(lambda x: x + x, **like)

    def body(x, w, middle):
        return jnp.sum(middle(x @ w) @ w.T, axis=0)

    def collectives(fun):
        f = pjit(fun, in_axis_resources=(P("x"), P(None, "y")), out_axis_resources=None)
        text = f.lower(*args).compile().as_text()
        return {
            name: text.count(f" {name}(") for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute")
        }

    args = placed(mesh, P("x"), (8, 8)), placed(mesh, P(None, "y"), (8, 8))
    with mesh:
        with_call = collectives(lambda x, w: body(x, w, double))
        assert with_call == collectives(lambda x, w: body(x, w, lambda x: 2 * x))
        f = pjit(lambda x, w: body(x, w, double), in_axis_resources=(P("x"), P(None, "y")), out_axis_resources=None)
        f(*args)
        with jax.transfer_guard("disallow"):
            f(*args)


def test_specs_at_the_cut_come_from_the_whole_program(mesh):
    keep = colocated_python(lambda x: x, **like)

    def fun(middle):
        def f(x, w):
            y = middle(x @ w)
            return partjit.with_sharding_constraint(y @ w, P(("x", "y"), None))

        return pjit(f, in_axis_resources=None, out_axis_resources=P(("x", "y")))

    x = np.ones((64, 64), np.float32)
    with mesh:
        flops = [fun(middle).lower(x, x).compile().cost_analysis()["flops"] for middle in (keep, lambda x: x)]
    assert flops[0] <= 1.1 * flops[1]


def test_a_value_that_no_spec_can_describe_goes_to_a_call_replicated(mesh):
    double = colocated_python(lambda x: x * 2, out_specs_fn=lambda x: x)

    # Reshaped, it is sharded over a part of the axis of 4 devices in its first dimension, over the other in its second.
    fun = pjit(lambda x: jnp.sin(double(jnp.cos(x.reshape(2, 4, 4)))).sum(), in_axis_resources=P("x"))
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    with mesh:
        (call,) = fun.plan(x).calls
        assert call.inputs[0].sharding == NamedSharding(mesh, P())
        out = fun(x)
    np.testing.assert_allclose(out, np.sin(2 * np.cos(x)).sum(), rtol=1e-4)


# Stages


def test_it_is_lowered_and_compiled_as_any_program(mesh, double):
    f = pjit(
        lambda x, y: {"z": double(x + 1) - y},
        in_axis_resources=(P("x"), None),
        out_axis_resources=P("x"),
        donate_argnums=0,
    )
    x = placed(mesh, P("x"))
    with mesh:
        traced = f.trace(x, 1.0)
        lowered = traced.lower()
        compiled = lowered.compile()
        assert len(lowered.plan.fragments) == 2
        assert repr(lowered) == f"<lowered {repr(lowered.plan)[1:]}"
        assert repr(compiled) == f"<compiled {repr(lowered.plan)[1:]}"
        for stage in (traced, lowered, compiled):
            assert "<svg" in stage._repr_html_()
        assert lowered.as_text().count("module @") == 2
        assert compiled.as_text().count("HloModule") == 2
        assert compiled.cost_analysis()["flops"] > 0
        assert sorted(compiled.memory_analysis()) == ["fragment_0", "fragment_1"]
    for stage in (lowered, compiled):
        assert (stage.donate_argnums, stage.in_tree, stage.in_avals) == ((0,), traced.in_tree, traced.in_avals)
    assert lowered.out_info["z"].shape == (8, 4)
    assert compiled.input_shardings[0][0].spec == P("x")
    assert compiled.output_shardings["z"].spec == P("x")
    expected = 2 * np.asarray(x) + 1
    same(compiled(x, 1.0)["z"], expected)
    with pytest.raises(TypeError, match=r"Argument types differ .* x was float32\[8,4\] and is float32\[4,4\]"):
        compiled(np.ones((4, 4), np.float32), 1.0)
    with pytest.raises(TypeError, match=r"another structure: args was a tuple of 2 and is a tuple of 1$"):
        compiled(x)
    with pytest.raises(TypeError, match=r"another structure: args\[1\] was an array and is a dict with the key 'y'$"):
        compiled(x, {"y": 1.0})
    with pytest.raises(TypeError, match="Cannot apply JAX transformations"):
        jax.jit(compiled)(np.ones((8, 4), np.float32), 1.0)
    with pytest.raises(ValueError, match="takes no compiler_options"):
        lowered.compile({"xla_flag": 1})


def test_a_second_call_compiles_and_traces_nothing(mesh, double, compilations):
    traced = []

    def fun(x):
        traced.append(1)
        return double(x + 1) - 3

    f = pjit(fun, in_axis_resources=P("x"), out_axis_resources=P("x"))
    x = placed(mesh, P("x"))
    with mesh:
        f(x)
        first = len(compilations)
        for _ in range(3):
            f(x)
        f(np.asarray(x))
        assert len(compilations) == first
        assert len(traced) == 1
        f.clear_cache()
        f(x)
        assert len(traced) == 2


def test_events_tell_what_a_program_does(mesh, double):
    from partjit import events

    f = pjit(lambda x: double(x + 1) - 3, in_axis_resources=P("x"), out_axis_resources=P("x"), name="shown")
    with mesh:
        f(np.ones(8, np.float32))
        with partjit.record() as timeline:
            for _ in range(2):
                f(np.ones(8, np.float32)).block_until_ready()
            deadline = threading.Event()
            while sum(isinstance(e, events.FragmentReady) for e in timeline.events) < 4 and not deadline.wait(0.01):
                pass
    kinds = [type(e).__name__ for e in timeline.events if not isinstance(e, events.FragmentReady)]
    one = ["ProgramStarted", "FragmentDispatched", "CallQueued", "CallStarted", "CallFinished", "FragmentDispatched"]
    assert kinds == [*one, "ProgramFinished"] * 2
    queued = [e for e in timeline.events if isinstance(e, events.CallQueued)]
    assert [(e.program, e.node) for e in queued] == [("shown", "x_lambda")] * 2
    assert timeline.host_seconds > 0
    assert 0 <= timeline.hidden_fraction <= 1


def test_events_of_a_program_inside_of_a_call_have_an_execution_of_their_own(mesh):
    from partjit import events

    def again(x):
        return f(x - 1) if float(x[0]) > 0 else x

    call = colocated_python(again, mode="inline", out_specs_fn=lambda x: x)
    f = pjit(lambda x: call(x) * 2, in_axis_resources=P("x"), out_axis_resources=P("x"), name="nested")
    x = jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, P("x")))
    with mesh, partjit.record() as timeline:
        np.testing.assert_array_equal(f(x), np.zeros(8))
    ends = [(type(e).__name__, e.execution) for e in timeline.events if type(e).__name__.startswith("Program")]
    numbers = [number for name, number in ends if name == "ProgramStarted"]
    assert len({*numbers}) == 2
    assert [number for name, number in ends if name == "ProgramFinished"] == numbers[::-1]
    queued = [(e.execution, e.node) for e in timeline.events if isinstance(e, events.CallQueued)]
    assert queued == [(number, "again") for number in numbers]


def test_the_callers_stream_is_one_with_the_named_stream_it_is(mesh, meeting):
    def note(x):
        rendezvous.logs["order"].append(float(x))
        return x

    of_caller = colocated_python(note, mode="stream", out_specs_fn=lambda x: x)
    named = of_caller.specialize(stream="one order")

    @partial(pjit, in_axis_resources=None, out_axis_resources=None)
    def f(x):
        y = named(x)  # awaited
        a = of_caller(y + 1)
        named(x + 2)
        return a

    with mesh:
        for _ in range(3):
            rendezvous.logs["order"].clear()
            with colocated.stream("one order"):
                f(np.float32(0))
            assert rendezvous.logs["order"] == [0, 1, 2]


def test_a_call_like_the_last_one_on_another_mesh_of_the_same_shape(double):
    f = pjit(lambda x: double(x + 1), in_axis_resources=P("x"), out_axis_resources=P("x"))
    x = np.ones(8, np.float32)
    for setter in (lambda mesh: mesh, jax.set_mesh):
        for devices in (jax.devices()[:4], jax.devices()[4:], jax.devices()[:4]):
            with setter(jax.sharding.Mesh(devices, "x") if setter is jax.set_mesh else partjit.Mesh(devices, "x")):
                assert f(x).sharding.device_set == {*devices}


# Accelerators


def test_on_accelerators_values_travel_to_the_hosts_and_back_by_explicit_transfers(accelerators, meeting):
    def look(x):
        rendezvous.logs["devices"].append(sorted(d.id for d in x.devices()))
        return x + 1

    call = colocated_python(look, **like)
    note = colocated_python(lambda x: rendezvous.logs["noted"].append(float(x)), stream="note", **nothing)

    def fun(x):
        y = call(x * 2)
        z = call(call(y))
        note(jnp.sum(y))
        return z * 3, call(y - 1), x

    mesh = partjit.Mesh(accelerators, "x")
    with mesh:
        f = pjit(fun, in_axis_resources=P("x"), out_axis_resources=P("x"))
        plan = f.plan(np.ones(8, np.float32))
        for _ in range(2):
            z, leaving, x = f(np.ones(8, np.float32))
            same(z, 15)
            same(leaving, 3)
            same(x, 1)
            for result in (z, leaving, x):
                assert result.sharding == NamedSharding(mesh, P("x"))
                assert {d.id for d in result.devices()} == {4, 5, 6, 7}
    colocated.wait()
    assert {tuple(ids) for ids in rendezvous.logs["devices"]} == {(0, 1, 2, 3)}
    assert rendezvous.logs["noted"] == [24.0] * 2
    moved = [(value.name, after.name) for t in plan.transfers for value, after in zip(t.inputs, t.outputs, strict=True)]
    assert len(moved) == len({*moved})
    assert sum(name.startswith("to_devices") for name in (t.name for t in plan.transfers)) == 1


@pytest.mark.parametrize("order", ["abc", "acb", "bac", "cab"])
def test_on_accelerators_each_call_gets_all_of_its_arguments_on_the_hosts(accelerators, order):
    def add(*values):
        assert {d.id for value in values for d in value.devices()} <= {0, 1, 2, 3}
        return sum(values)

    call = colocated_python(add, **like)

    def fun(x):
        values = {"a": x + 1, "b": x + 2, "c": x + 3}
        first = call(values[order[0]])  # it has been moved when the next call reads it among others
        return first + call(*(values[name] for name in "abc"))

    x = np.arange(8, dtype=np.float32)
    with partjit.Mesh(accelerators, "x"):
        result = pjit(fun, in_axis_resources=P("x"), out_axis_resources=P("x"))(x)
    same(result, 4 * x + 6 + 1 + "abc".index(order[0]))


def test_on_accelerators_what_a_loop_reads_from_outside_travels_once_before_it(accelerators, meeting):
    def add(x, y):
        rendezvous.logs["devices"].append(sorted(d.id for array in (x, y) for d in array.devices()))
        return x + y

    call = colocated_python(add, **like)

    def fun(x):
        doubled, called = x * 2, call(x, x + 1)
        return jax.lax.scan(lambda v, _: (call(v, doubled) * 2 + called, None), x, None, length=3)[0]

    mesh = partjit.Mesh(accelerators, "x")
    x = np.arange(8, dtype=np.float32)
    with mesh:
        f = pjit(fun, in_axis_resources=P("x"), out_axis_resources=P("x"))
        plan = f.plan(x)
        result = f(x)
    expected = x
    for _ in range(3):
        expected = (expected + 2 * x) * 2 + (2 * x + 1)
    same(result, expected)
    assert {d.id for d in result.devices()} == {4, 5, 6, 7}
    colocated.wait()
    assert rendezvous.logs["devices"] == [[0, 0, 1, 1, 2, 2, 3, 3]] * 4
    (loop,) = (node for node in plan.nodes if isinstance(node, Loop))
    before = plan.nodes[: plan.nodes.index(loop)]
    made = {value: node for node in before for value in node.outputs}
    # `doubled` is on the hosts in the loop, and `called` on the devices: both were moved there.
    assert {made[value].name.split("_")[1] for value in loop.captured} == {"hosts", "devices"}
    assert all(isinstance(made[value], Transfer) for value in loop.captured)
    inside = [value for node in loop.block.nodes if isinstance(node, Transfer) for value in node.inputs]
    assert not {*inside} & {*loop.captured}


def nested_loops(call, x, on_host):
    def outer(v, _):
        return jax.lax.scan(lambda w, _: (call(w, on_host) - on_host / 2, None), v, None, length=2)[0] + on_host, None

    return jax.lax.scan(outer, x, None, length=2)[0]


def nested_by_hand(x, on_host):
    for _ in range(2):
        for _ in range(2):
            x = x + on_host / 2
        x = x + on_host
    return x


ON_HOSTS = {
    "carried": (
        lambda call, x, on_host: jax.lax.scan(lambda v, _: (call(v, v) + x, None), on_host, None, length=2)[0],
        lambda x, on_host: 4 * on_host + 3 * x,
    ),
    "returned": (
        lambda call, x, on_host: jax.lax.scan(lambda v, _: (call(v + 1, on_host), None), x, None, length=2)[0],
        lambda x, on_host: x + 2 + 2 * on_host,
    ),
    "branch": (
        lambda call, x, on_host: jax.lax.cond(
            x[0] < 5, lambda v, h: call(v, h) + h, lambda v, h: call(h, h) - v, x, on_host
        ),
        lambda x, on_host: x + 2 * on_host,
    ),
    "nested": (nested_loops, nested_by_hand),
}


@pytest.mark.parametrize("case", ON_HOSTS)
def test_on_accelerators_values_on_the_hosts_go_into_loops_and_branches(accelerators, case):
    fun, by_hand = ON_HOSTS[case]
    call = colocated_python(lambda x, y: x + y, **like)
    x = np.arange(8, dtype=np.float32)
    with partjit.Mesh(accelerators, "x"):
        f = pjit(lambda x: fun(call, x, call(x, x + 1)), in_axis_resources=P("x"), out_axis_resources=P("x"))
        result = f(x)
    same(result, by_hand(x, 2 * x + 1))
    assert {d.id for d in result.devices()} == {4, 5, 6, 7}


def test_without_a_mesh_on_an_accelerator(accelerators):
    call = colocated_python(lambda x: x + 1, **like)
    f = pjit(lambda x: (call(x * 2) * 3, call(x)))
    x = jax.device_put(np.ones(4, np.float32), accelerators[1])
    assert len(f.plan(x).transfers) >= 2
    y, leaving = f(x)
    same(y, 9)
    same(leaving, 2)
    assert y.devices() == leaving.devices() == {accelerators[1]}


def test_functions_that_are_dropped_leave_no_plans_behind(double, new_garbage):
    plans, functions = [], []
    for wrap in (lambda x: double(x + 1) - 3, lambda x: x + 1):

        def fun(x, wrap=wrap):
            return wrap(x)

        f = pjit(fun)
        for _ in range(2):
            f(np.ones(3, np.float32))
        plans.append(weakref.ref(f.plan(np.ones(3, np.float32))))
        functions.append(weakref.ref(fun))
        del f, fun
    for _ in range(3):  # what a cache drops is collected in the next round
        gc.collect()
    assert [reference() for reference in (*plans, *functions)] == [None] * 4
