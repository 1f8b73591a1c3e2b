"""Programs with colocated calls where they meet the unusual: ahead of time on a named stream or with arrays that lie
elsewhere, names that are none, keys, uneven shards, calls in loops."""

import contextlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, SingleDeviceSharding

from partjit import Mesh, P, colocated, pjit
from partjit.colocated import colocated_python
from partjit.plan.ir.names import Names, spelled
from tests.colocated import rendezvous

like = {"out_specs_fn": lambda *xs: xs[0]}
nothing = {"out_specs_fn": lambda *xs: None}

x = np.ones(8, np.float32)


# Ahead of time, on a stream


def two_notes():
    """A program that notes "first" on the caller's stream and "second" on a named one; they tell in which order."""
    first = colocated_python(lambda x: rendezvous.logs["notes"].append("first"), **nothing)

    def note(x):
        rendezvous.logs["notes"].append("second")
        return x + 0

    second = colocated_python(note, stream="named", **like)

    def fun(x, w):
        first(((w @ w) @ w)[0])  # takes longer than what the other call waits for
        return second(x * 2) + 1

    return pjit(fun)


def test_a_compiled_program_is_in_the_order_of_the_stream_it_is_called_from(mesh, meeting):
    program, w = two_notes(), np.ones((512, 512), np.float32)
    with mesh:
        compiled = program.lower(x, w).compile()
        for _ in range(3):
            rendezvous.logs["notes"].clear()
            with colocated.stream("named"):
                np.testing.assert_allclose(compiled(x, w), 3)
            assert rendezvous.logs["notes"] == ["first", "second"]


def test_what_is_lowered_on_a_stream_is_for_every_stream(mesh):
    program, w = two_notes(), np.ones((512, 512), np.float32)
    with mesh:
        with colocated.stream("named"):
            traced = program.trace(x, w)
            assert {call.stream.name for call in traced.plan.calls} == {"named"}
            lowered = traced.lower()
        assert lowered.plan is program.lower(x, w).plan
    assert {call.stream and call.stream.name for call in lowered.plan.calls} == {None, "named"}
    assert lowered.compile().plan is lowered.plan


def test_a_compiled_program_that_was_called_from_its_stream_once_compiles_nothing_more(mesh, meeting, compilations):
    program, w = two_notes(), np.ones((512, 512), np.float32)
    with mesh:
        compiled = program.lower(x, w).compile()
        for _ in range(2):
            with colocated.stream("named"):
                compiled(x, w)
        before = len(compilations)
        for _ in range(2):
            with colocated.stream("named"):
                compiled(x, w)
        assert len(compilations) == before


# Ahead of time, with arrays that lie elsewhere


def test_a_compiled_program_refuses_committed_arrays_that_lie_otherwise_by_path(mesh, meeting):
    double = colocated_python(lambda x: 2 * x, **like)
    program = pjit(lambda d, y: double(d["x"]) + y, in_axis_resources=(P("x"), None), out_axis_resources=P("x"))
    placed, elsewhere = (jax.device_put(x, NamedSharding(mesh, spec)) for spec in (P("x"), P("y")))
    with mesh:
        compiled = program.lower({"x": x}, 1.0).compile()
        plain = pjit(lambda d, y: d["x"] + y, in_axis_resources=(P("x"), None)).lower({"x": x}, 1.0).compile()
    for right in (placed, x, jnp.ones(8), [1.0] * 8):
        np.testing.assert_allclose(compiled({"x": jnp.asarray(right)}, 1.0), 3)
    for wrong in (elsewhere, jax.device_put(x, jax.devices()[3])):
        for function in (compiled, plain):
            with pytest.raises(ValueError, match="compiled for input shardings that disagree with the shardings of"):
                function({"x": wrong}, 1.0)
        with pytest.raises(ValueError, match=r"Argument d\['x'\] with shape float32\[8\]") as caught:
            compiled({"x": wrong}, 1.0)
        assert f"Passed sharding: {wrong.sharding}" in str(caught.value)
        assert f"Required sharding: {compiled.input_shardings[0][0]['x']}" in str(caught.value)


def test_a_program_compiled_without_a_mesh_refuses_committed_arrays_of_other_devices(mesh, meeting):
    double = colocated_python(lambda x: 2 * x, **like)
    on = [jax.device_put(x, device) for device in jax.devices()[:4]]
    anywhere = pjit(lambda x: double(x) + 1).lower(x).compile()
    bound = pjit(lambda x: double(x) + 1).lower(on[3]).compile()
    for compiled, device in ((anywhere, 0), (bound, 3)):
        for right in (x, jnp.ones(8), on[device]):
            np.testing.assert_allclose(compiled(right), 3)
        spread = jax.device_put(x, NamedSharding(mesh, P("x")))
        for wrong in (spread, *(array for array in on if array is not on[device])):
            with pytest.raises(ValueError, match="Argument x with shape") as caught:
                compiled(wrong)
            assert f"Required sharding: {SingleDeviceSharding(jax.devices()[device])}" in str(caught.value)


# Names


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("m²", "m2"),
        ("½", "x_1_2"),
        ("x['ﬁ']", "x_fi"),
        ("\u09f4", "x"),  # a digit to \w, but not to Python
        ("1st", "x_1st"),
        ("\u0663x", "x_\u0663x"),  # a digit in Arabic
        ("\uff49\uff46", "x_if"),
        ("größe", "größe"),
        ("a__b", "a__b"),
    ],
)
def test_names_are_what_python_takes_for_one(wanted, expected):
    name = Names().take(wanted)
    assert name == expected
    namespace = {}
    exec(f"{name} = 1", namespace)
    assert name in namespace


def test_names_that_python_takes_for_the_same_are_told_apart():
    names = Names("wait")
    assert [names.take(name) for name in ("ﬁ", "fi", "\uff57ait")] == ["fi", "fi_2", "wait_2"]


def test_every_character_gives_a_name():
    for start in range(0, 0x110000, 0x100):
        text = "".join(map(chr, range(start, start + 0x100)))
        assert f"x{spelled(text)}".isidentifier(), hex(start)


def test_a_program_runs_whatever_its_arguments_and_itself_are_called(meeting):
    double = colocated_python(lambda x: 2 * x, **like)

    def fun(tree):
        return double(tree["m²"] + tree["ﬁ"]) + tree["fi"]

    for name in ("m²", "__debug__", "ﬁ", "½"):
        fun.__name__ = name
        np.testing.assert_allclose(pjit(fun)({"m²": x, "ﬁ": x, "fi": x}), 5)


# Keys


@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_pending_key_that_is_there_shows_itself_and_is_ready(meeting, shape):
    key = jax.random.key(5) if not shape else jax.random.split(jax.random.key(5), shape)
    same = colocated_python(lambda key: key, **like)
    pending, _ = pjit(lambda key, x: (same(key), x + 1))(key, x)
    pending.block_until_ready()
    assert pending.is_ready()
    assert repr(pending) == repr(key)
    jax.jit(lambda x: (pending.is_ready(), repr(pending), x)[2])(x)
    pending.delete()
    assert repr(pending).endswith("deleted)")


# Shards


@pytest.mark.parametrize(
    ("first", "others"),
    [
        (lambda x: x, lambda x: None),
        (lambda x: None, lambda x: x),
        (lambda x: (x,), lambda x: x),
        (lambda x: x, lambda x: (x, x)),
        (lambda x: x, lambda x: {}),
    ],
    ids=["some nothing", "first nothing", "first a tuple", "some more", "some empty"],
)
def test_per_shard_calls_that_return_other_results_on_some_device_name_it(mesh, meeting, first, others):
    sharding = NamedSharding(mesh, P(("x", "y")))
    stated = jax.ShapeDtypeStruct((8,), np.float32, sharding=sharding)

    def uneven(shard):
        return (others if shard.index[0].start else first)(shard.data)

    call = colocated_python(uneven, layout="per_shard", out_specs=stated)
    devices = [shard.device for shard in jax.device_put(x, sharding).addressable_shards]
    (right, *_) = [device for device in devices if bool(devices.index(device)) == (first(x) is not x)]
    (wrong, *_) = [device for device in devices if bool(devices.index(device)) == (first(x) is x)]
    message = (
        rf"uneven returned what its output specs do not say on {wrong}: result is .*, but its spec says an array\. It"
    )
    with mesh, pytest.raises(ValueError, match=message) as caught:
        pjit(lambda x: call(x) + 1, in_axis_resources=P(("x", "y")))(x)
    assert f"on {right}:" not in str(caught.value)
    with pytest.raises(ValueError, match=message):  # outside of programs as well
        np.asarray(call(jax.device_put(x, sharding)))


def test_per_shard_calls_that_return_nothing_anywhere_return_nothing(mesh, meeting):
    call = colocated_python(lambda shard: None, layout="per_shard", **nothing)
    with mesh:
        assert pjit(lambda x: call(x), in_axis_resources=P("x"))(x) is None
    assert call(jax.device_put(x, NamedSharding(mesh, P("x")))) is None


# Rules of the user's for batches


@pytest.mark.parametrize("nested", [lambda fun: fun, jax.jit, jax.checkpoint])
@pytest.mark.parametrize("is_sequential", [False, True])
@pytest.mark.parametrize("is_batched", [False, True])
def test_functions_with_batching_rules_of_their_own_make_the_calls_of_what_is_evaluated(
    is_batched, is_sequential, nested, meeting
):
    def note(x, rule):
        rendezvous.logs["notes"].append((rule, np.asarray(x).tolist()))
        return 2 * x

    noted = colocated_python(note, **like)
    if is_sequential:
        own = jax.custom_batching.sequential_vmap(lambda x: noted(x, "own") + 1)
    else:
        own = jax.custom_batching.custom_vmap(lambda x: noted(x, "own") + 1)
        own.def_vmap(lambda size, are_batched, x: (noted(x, "batch") + 1, True))
    fun = nested(jax.vmap(own) if is_batched else own)
    x = np.arange(3, dtype=np.float32)
    np.testing.assert_array_equal(pjit(lambda x: fun(x + 1))(x), 2 * (x + 1) + 1)
    calls = {True: [("own", value) for value in (1, 2, 3)], False: [("batch", [1, 2, 3])]}
    assert rendezvous.logs["notes"] == (calls[is_sequential] if is_batched else [("own", [1, 2, 3])])


# Out of reach


@pytest.mark.parametrize("nested", [lambda fun: fun, jax.jit, pjit])
def test_a_call_that_the_host_cannot_make_is_refused_with_its_line(mesh, nested):
    double = colocated_python(lambda x: 2 * x, **like)

    @nested
    def fun(x):
        return jax.custom_derivatives.linear_call(lambda _, x: double(x), lambda _, ct: 2 * ct, (), x)  # this line

    line = getattr(fun, "__wrapped__", fun).__code__.co_firstlineno + 2
    where = f"called inside of a linear_call at {__file__}:{line} in fun: a program can"
    with mesh, pytest.raises(ValueError, match=where):
        pjit(lambda x: fun(x))(x)


def test_a_compiled_plan_compiles_nothing_when_it_is_called_elsewhere(mesh, compilations):
    same = colocated_python(lambda v: v, **like)
    f = pjit(lambda v: same(v + 1) * 2, in_axis_resources=P("x"), out_axis_resources=P("x"))
    v = np.ones(8, np.float32)
    with mesh:
        compiled = f.lower(v).compile()
        np.testing.assert_allclose(compiled(v), 4 * v)
    count = len(compilations)
    np.testing.assert_allclose(compiled(v), 4 * v)
    assert len(compilations) == count


def double(noted, pair):
    noted(pair[0])
    return pair[0] + pair[0], pair[1] * pair[0]


KEEPING = {
    "row": lambda noted, pair: double(noted, double(noted, pair)),
    "fori": lambda noted, pair: lax.fori_loop(0, 2, lambda _, pair: double(noted, pair), pair),
    "while": lambda noted, pair: lax.while_loop(lambda p: (p[1] < p[0]).all(), lambda p: double(noted, p), pair),
    "cond": lambda noted, pair: lax.cond((pair[1] < pair[0]).all(), lambda: double(noted, pair), lambda: pair),
    "scan": lambda noted, pair: lax.scan(lambda s, x: (s + double(noted, (s, x))[1], s), *pair),
}


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")  # of jax, as it traces the function
@pytest.mark.parametrize("options", [{}, {"uses_jax": False}], ids=["as it is", "no jax"])
@pytest.mark.parametrize("way", KEEPING)
@pytest.mark.parametrize("dtype", [np.int64, np.float64, np.uint64])
def test_types_of_64_bits_stay_where_they_are_not_enabled(way, dtype, options):
    rendezvous.clear()
    with jax.enable_x64(True):
        pair = jnp.asarray(2**40, dtype), jnp.asarray([1, 2**35], dtype)

    def note(x):
        rendezvous.logs["64 bits"].append((x.dtype.name, x.item()))
        return np.float32(np.asarray(x) / 2**40)

    spec = jax.ShapeDtypeStruct((), np.float32)
    noted = colocated_python(note, out_specs=spec, **options)

    def program(call):
        def run(*pair):
            seen = []
            made = KEEPING[way](lambda x: seen.append(call(x)), pair)
            return made, seen[-1] if way == "row" else None

        return run

    made, seen = pjit(program(noted))(*pair)
    expected, _ = jax.jit(program(lambda x: x))(*pair)
    for result, value in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        assert (result.dtype, result.tolist()) == (value.dtype, value.tolist())
    colocated.wait()
    names = {name for name, _ in rendezvous.logs["64 bits"]}
    assert names == {np.dtype(dtype).name}
    assert rendezvous.logs["64 bits"][0][1] == 2**40
    assert seen is None or float(seen) == 2


def in_branch(noted, pair):
    return lax.cond(pair[0][0] > 1, lambda a, b: (noted(a), (a * b, a + b))[1], lambda a, b: (a - b, b + a), *pair)


def in_iterations(noted, pair):
    return lax.fori_loop(0, 2, lambda _, s: (noted(s[0]), (s[0] * pair[1], s[1] + pair[0]))[1], pair)


@pytest.mark.parametrize("inner", [in_branch, in_iterations])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_what_a_branch_is_given_twice_is_donated_once(depth, inner):
    noted = colocated_python(lambda x: None, out_specs_fn=lambda x: None, mode="inline")

    def program(call):
        def nested(depth, pair):
            if depth == 0:
                return inner(call, pair)
            return lax.cond(pair[1][0] > 0, lambda *pair: nested(depth - 1, pair), lambda *pair: pair, *pair)

        return lambda x: nested(depth, (y := x * 2, y))

    for x in (np.arange(1, 4, dtype=np.float32), np.zeros(3, np.float32)):
        made, expected = pjit(program(noted))(x), jax.jit(program(lambda x: None))(x)
        for result, value in zip(made, expected, strict=True):
            np.testing.assert_allclose(result, value)


# Memories


def in_other_memories(call, host, device):
    """Programs with arrays in the memory of the hosts, and what they compute, if `call` is `np.sin`."""

    def put(x, where=device):
        return jax.device_put(x, where)

    def called(x):
        return put(call(put(x)), host)

    def stacked(x):
        return lax.scan(lambda c, _: (call(c), put(c, host)), x, length=2)[1]

    names = {"names_which_can_be_saved": [], "names_which_can_be_offloaded": ["x", "y"]}
    offload = jax.checkpoint_policies.save_and_offload_only_these_names(
        **names, offload_src="device", offload_dst="pinned_host"
    )

    @partial(jax.checkpoint, policy=offload)
    def offloaded(x, _=None):
        return jnp.sin(checkpoint_name(call(checkpoint_name(x * 2, "x")), "y")), None

    return {
        "a result": (pjit(lambda x: call(x * 2) + 1, out_shardings=host), lambda x: np.sin(2 * x) + 1),
        "between calls": (pjit(lambda x: put(called(x * 2)) + call(x)), lambda x: np.sin(2 * x) + np.sin(x)),
        "a carried value": (
            pjit(lambda x: lax.fori_loop(0, 2, lambda _, x: called(x), put(x, host))),
            lambda x: np.sin(np.sin(x)),
        ),
        "a stack": (pjit(stacked), lambda x: np.stack([x, np.sin(x)])),
        "of a branch": (
            pjit(lambda x: lax.cond(x[0] > 0, called, lambda x: x, put(x, host)), donate_argnums=0),
            np.sin,
        ),
        "residuals": (
            pjit(jax.grad(lambda x: offloaded(x)[0].sum())),
            jax.grad(lambda x: jnp.sin(jnp.sin(2 * x)).sum()),
        ),
        "residuals of a loop": (
            pjit(jax.grad(lambda x: lax.scan(offloaded, x, length=2)[0].sum())),
            jax.grad(lambda x: jnp.sin(jnp.sin(2 * jnp.sin(jnp.sin(2 * x)))).sum()),
        ),
    }


@pytest.mark.parametrize("kind", ["by the host", "on devices", "answered"])
@pytest.mark.parametrize("name", in_other_memories(None, None, None))
@pytest.mark.parametrize("size", [1, 8])
def test_a_program_with_calls_has_arrays_in_other_memories(size, name, kind):
    mesh = Mesh(np.array(jax.devices()[:size]), "x")
    host, device = (NamedSharding(mesh, P("x"), memory_kind=memory) for memory in ("pinned_host", "device"))
    sine = colocated_python(lambda x: np.sin(x), arrays="numpy", uses_jax=kind != "answered", **like)
    sine.defvjp(lambda x: (sine(x), jnp.cos(x)), lambda cos, ct: (cos * ct,))
    log = colocated_python(lambda x: None, arrays="numpy", **nothing)
    call = (lambda x: (log(x), jnp.sin(x))[1]) if kind == "on devices" else sine
    program, by_hand = in_other_memories(call, host, device)[name]
    with mesh:
        results = [program(jnp.asarray(x)) for _ in range(2)]
        for result in results:
            np.testing.assert_allclose(result, by_hand(x), rtol=1e-5, atol=1e-6)
            is_on_host = name in ("a result", "a carried value", "a stack", "of a branch")
            assert result.sharding.memory_kind == ("pinned_host" if is_on_host else "device")
    colocated.wait()


@pytest.mark.parametrize("where", ["no mesh", "Explicit axes"])
def test_what_a_loop_puts_into_another_memory_is_there_without_a_mesh_and_over_explicit_axes(where):
    call, space = colocated_python(np.sin, arrays="numpy", **like), jax.memory.Space

    @pjit
    def program(x):
        return lax.scan(
            lambda c, _: (jax.device_put(call(jax.device_put(c, space.Device)), space.Host), c), x, length=2
        )

    mesh = jax.make_mesh((8,), ("x",))
    over, place = contextlib.nullcontext(), SingleDeviceSharding(jax.devices()[3], memory_kind="pinned_host")
    if where == "Explicit axes":
        over, place = jax.set_mesh(mesh), NamedSharding(mesh, P("x"), memory_kind="pinned_host")
    with over:
        last, stack = program(jax.device_put(x, place))
    np.testing.assert_allclose(last, np.sin(np.sin(x)), rtol=1e-5)
    np.testing.assert_allclose(stack, np.stack([x, np.sin(x)]), rtol=1e-5)
    assert [last.sharding.memory_kind, stack.sharding.memory_kind] == ["pinned_host"] * 2
    assert last.sharding.device_set == place.device_set
