"""A call's specs say how its arguments come to it and what its shards make, wherever they come from and go to.

The law draws no examples: it goes through every pair of specs in every position, with all pairs in one program.
"""

import dataclasses
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.mlir import ir
from jax.sharding import NamedSharding

import partjit
from partjit import P, pjit, shardy
from partjit.colocated import colocated_python
from partjit.errors import ShardingError
from partjit.plan.ir.legality import PlanError
from partjit.plan.ir.nodes import ColocatedCall
from partjit.plan.ir.verify import verify
from partjit.plan.passes.choose_emitted import Executables
from partjit.plan.pipeline import structured
from partjit.xla_rewrites import rewrite
from tests.colocated import rendezvous
from tests.effort import EVERYTHING, sample

SPECS = (P(), P("data"), P("model"), P(("data", "model")), P(("model", "data")))
PAIRS = [*itertools.product(SPECS, SPECS)]
SHARDED = [*itertools.product(SPECS[1:], SPECS[1:])]
X = np.arange(8, dtype=np.float32) ** 2
DOUBLED = 2 * X + 1


MESHES = {
    shape: partjit.Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), ("data", "model"))
    for shape in ((2, 2), (4, 2))
}


@pytest.fixture
def mesh():
    return MESHES[2, 2]


def struct(mesh, spec):
    return jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, spec))


def doubled(array):
    """Computed by NumPy, for XLA would compile each operation anew for each device and sharding."""
    return jax.device_put(2 * np.asarray(array) + 1, array.sharding)


def per_shard(mesh, spec, **options):
    stated = struct(mesh, spec)
    return colocated_python(
        lambda shard: doubled(shard.data), layout="per_shard", in_specs=((stated,), {}), out_specs=stated, **options
    )


def on_arrays(mesh, spec, **options):
    stated = struct(mesh, spec)

    def fun(x):
        assert x.sharding.is_equivalent_to(stated.sharding, 1), f"it asked for {spec} and got {x.sharding}"
        return doubled(x)

    return colocated_python(fun, in_specs=((stated,), {}), out_specs=stated, **options)


def partitions(mesh, spec):
    return dict(NamedSharding(mesh, spec).devices_indices_map(X.shape))


def differing(mesh, pairs):
    """The pairs of specs that both partition, and differently."""
    is_sharded = {spec: not NamedSharding(mesh, spec).is_fully_replicated for spec in SPECS}
    return [(a, b) for a, b in pairs if is_sharded[a] and is_sharded[b] and partitions(mesh, a) != partitions(mesh, b)]


# The positions: functions of the calls `f` of the first spec of each pair and `g` of the second one, and of an argument
# for each pair, which comes in with the second spec; what they return leaves with it.


def each(fun):
    return lambda f, g, x, mesh: [*map(fun, f, g, x)]


def shard_maps(f, g, x, mesh):
    def mapped(value):
        return jax.shard_map(lambda shard: shard * 2 + 1, mesh=mesh, in_specs=P("model"), out_specs=P("model"))(value)

    return [mapped(call(own)) for call, own in zip(f, x, strict=True)]


def called(calls, values):
    return [call(value) for call, value in zip(calls, values, strict=True)]


def branch(flag):
    def position(f, g, x, mesh):
        wanted = jnp.sum(x[0]) > 0 if flag else jnp.sum(x[0]) < 0
        return jax.lax.cond(wanted, lambda v: called(g, v), lambda v: [*v], called(f, x))

    return position


def batches(f, g, x, mesh):
    return [jax.vmap(call)(own[None])[0] for call, own in zip(f, x, strict=True)]


def loops(calls, values, count):
    return jax.lax.fori_loop(0, count, lambda _, v: called(calls, v), values)


def whiles(f, g, x, mesh):
    return jax.lax.while_loop(lambda v: v[0] < 3, lambda v: (v[0] + 1, called(f, v[1])), (0, x))[1]


def stacks(f, g, x, mesh):
    return [own[1] for own in jax.lax.scan(lambda v, _: (v, called(f, v)), x, None, length=2)[1]]


def slices(f, g, x, mesh):
    made = [own[None] for own in called(f, x)]
    return jax.lax.scan(lambda v, own: (called(g, own), None), x, made)[0]


def constants(f, g, x, mesh):
    return called(f, [jnp.asarray(X)] * len(f))


def times(count, x=X):
    return x if not count else times(count - 1, 2 * x + 1)


POSITIONS = {
    "result": (each(lambda f, g, x: f(x)), times(1)),
    "result of what is computed": (each(lambda f, g, x: f(x + 1)), times(1, X + 1)),
    "another call": (each(lambda f, g, x: g(f(x))), times(2)),
    "result and another call": (each(lambda f, g, x: (y := f(x), g(y))), (times(1), times(2))),
    "two calls of one argument": (each(lambda f, g, x: f(x) - 3 * g(x)), -2 * times(1)),
    "two calls of one value": (each(lambda f, g, x: (y := x + 1, f(y) - 3 * g(y))[1]), -2 * times(1, X + 1)),
    "checkpoint": (each(lambda f, g, x: jax.checkpoint(f)(x)), times(1)),
    "shard_map": (shard_maps, times(2)),
    "constant": (constants, times(1)),
    "vmap": (batches, times(1)),
    "branch that is taken": (branch(True), times(2)),
    "branch that passes on": (branch(False), times(1)),
    "call in a branch": (
        lambda f, g, x, mesh: jax.lax.cond(jnp.sum(x[0]) > 0, lambda v: called(f, v), lambda v: [*v], x),
        times(1),
    ),
    "carried": (lambda f, g, x, mesh: loops(f, x, 3), times(3)),
    "carried from a call": (lambda f, g, x, mesh: loops(g, called(f, x), 2), times(3)),
    "call of what was carried": (lambda f, g, x, mesh: called(g, loops(f, x, 1)), times(2)),
    "carried while": (whiles, times(3)),
    "stack": (stacks, times(1)),
    "slices": (slices, times(2)),
}


OF_ARRAYS = [
    "another call",
    "result and another call",
    "two calls of one argument",
    "two calls of one value",
    "constant",
    "branch that passes on",
    "carried",
    "call of what was carried",
    "slices",
]


def check(pairs, mesh, make, position, mode):
    fun, expected = POSITIONS[position]
    made = {spec: make(mesh, spec, mode=mode, vmap_method="expand_dims") for spec in SPECS}
    f, g = ([made[spec] for spec in specs] for specs in zip(*pairs, strict=True))
    second = tuple(b for _, b in pairs)
    program = pjit(
        lambda x: tuple(fun(f, g, [*x], mesh)),
        in_axis_resources=(second,),
        out_axis_resources=second,
        donate_argnums=0,
    )
    with mesh:
        results = program(tuple(jax.device_put(X, NamedSharding(mesh, b)) for b in second))
    for pair, result in zip(pairs, results, strict=True):
        jax.tree.map(partial(np.testing.assert_array_equal, err_msg=str(pair)), result, expected)
        for leaf in jax.tree.leaves(result):
            assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, pair[1]), 1), pair
    assert len(differing(mesh, pairs)) == 4 * 3  # of four specs that partition, no two do it alike


@pytest.mark.soak
@pytest.mark.parametrize("position", POSITIONS)
def test_shards_are_assembled_by_the_specs_of_their_call(mesh, position):
    replicated_as_well = EVERYTHING or position in ("result", "another call", "constant", "carried")
    check(PAIRS if replicated_as_well else SHARDED, mesh, per_shard, position, "inline")


@pytest.mark.soak
@pytest.mark.parametrize("position", sample([*POSITIONS], 5))
def test_shards_over_a_mesh_that_is_not_square(position):
    check(SHARDED, MESHES[4, 2], per_shard, position, "stream")


@pytest.mark.soak
@pytest.mark.parametrize("position", sample(OF_ARRAYS, 2))
def test_arrays_come_as_the_specs_of_their_call_say(mesh, position):
    check(SHARDED, mesh, on_arrays, position, "inline")


@pytest.mark.parametrize("options", [{}, {"in_axis_resources": P("data")}], ids=["left open", "in another spec"])
def test_a_result_that_is_not_moved_costs_no_fragment_and_one_that_is_costs_one(mesh, options):
    for a, b in PAIRS:
        call = per_shard(mesh, a)
        with mesh:
            plan = pjit(lambda x, call=call: call(x), out_axis_resources=b, **options).plan(X)
        before = bool(options) and partitions(mesh, a) != partitions(mesh, P("data"))
        assert len(plan.fragments) == before + (partitions(mesh, a) != partitions(mesh, b)), (a, b)


@pytest.mark.parametrize("is_open", [False, True], ids=["stated", "left open"])
@pytest.mark.parametrize("place", ["program", "disable_jit", "eager"])
def test_shards_of_arguments_whose_specs_are_left_open(mesh, place, is_open):
    """A result that does not say its sharding either has that of the argument of its shape."""
    first, second = (tuple(specs) for specs in zip(*PAIRS, strict=True))

    def made(spec):
        said = (
            {"out_specs_fn": lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)}
            if is_open
            else {"out_specs": struct(mesh, spec)}
        )
        return colocated_python(lambda shard: doubled(shard.data), layout="per_shard", **said)

    calls = [*map(made, first)]
    if place == "eager":
        second = first
        results = [call(jax.device_put(X, NamedSharding(mesh, spec))) for call, spec in zip(calls, first, strict=True)]
    else:
        program = pjit(lambda x: tuple(called(calls, x)), in_axis_resources=(first,), out_axis_resources=second)
        with mesh, jax.disable_jit(place == "disable_jit"):
            results = program((X,) * len(PAIRS))
    for pair, result in zip(zip(first, second, strict=True), results, strict=True):
        np.testing.assert_array_equal(result, DOUBLED, err_msg=str(pair))
        assert result.sharding.is_equivalent_to(NamedSharding(mesh, pair[1]), 1)


@pytest.mark.parametrize(("make", "fragments"), [(on_arrays, 0), (per_shard, 1)])
def test_the_thread_of_a_call_reshards_what_only_leaves_unless_it_is_shards(mesh, make, fragments):
    f = pjit(make(mesh, P("data")), in_axis_resources=P("data"), out_axis_resources=P("model"))
    with mesh:
        assert len(f.plan(X).fragments) == fragments
        y = f(X)
    assert y.sharding.spec == P("model")
    np.testing.assert_array_equal(y, DOUBLED)


def test_a_result_of_another_shape_that_says_no_sharding_is_replicated(mesh):
    def total(shard):
        rendezvous.logs["shapes"].append(shard.data.shape)
        return jnp.ones(3)

    call = colocated_python(total, layout="per_shard", out_specs=jax.ShapeDtypeStruct((3,), np.float32))
    with mesh:
        result = pjit(lambda x: call(x) + 1, in_axis_resources=P("data"))(X)
    assert result.sharding.is_fully_replicated
    assert np.asarray(result).tolist() == [2, 2, 2]


@pytest.mark.parametrize("place", ["program", "scan", "disable_jit", "eager"])
@pytest.mark.parametrize("make", [np.full, jnp.full], ids=["numpy", "jax"])
def test_shards_of_one_part_are_equal_unless_they_are_too_large_to_be_compared(mesh, make, place):
    def called(call, x):
        if place == "eager":
            return call(x)
        if place == "scan":
            call, own = lambda x: jax.lax.scan(lambda x, _: (own(x), None), x, length=2)[0], call
        with mesh, jax.disable_jit(place == "disable_jit"):
            return pjit(call)(x)

    for spec, size in itertools.product(SPECS, [8, 8192]):
        sharding = NamedSharding(mesh, spec)
        x = jax.device_put(np.zeros(size, np.float32), sharding)
        stated = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        call = colocated_python(
            lambda shard: make(shard.data.shape, -0.0 if shard.replica_id else 0.0, np.float32),
            layout="per_shard",
            in_specs=((stated,), {}),
            out_specs=stated,
        )
        if len({*map(str, sharding.devices_indices_map(x.shape).values())}) == mesh.size or size == 8192:
            np.testing.assert_array_equal(called(call, x), 0)
            continue
        part = ":" if spec == P() else "0:4"
        message = (
            rf"different shards as result 0 on .*:0 and .*, which have the same part \[{part}\] of it: \[0.0, .*-0.0"
        )
        with pytest.raises(ValueError, match=message):
            np.asarray(called(call, x))


def test_shards_that_could_be_of_several_arrays_are_refused(mesh):
    call = colocated_python(lambda x, y: y.data, layout="per_shard", out_specs_fn=lambda x, y: y)
    program = pjit(lambda x, y: call(x, y), in_axis_resources=(P("data"), P("model")))
    message = (
        r"do not say which sharding result 0 has: the arguments of its shape .*Say it with a sharding in out_specs"
    )
    with mesh, pytest.raises(ValueError, match=message):
        np.asarray(program(X, X))


@pytest.mark.parametrize("mode", ["inline", "stream"])
def test_shards_are_on_the_devices_of_the_arguments(mesh, mode):
    devices = [*mesh.devices.flat]
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    half = partjit.Mesh(np.array(devices[:2]), "data")
    call = colocated_python(lambda shard: shard.data, layout="per_shard", out_specs=struct(half, P()), mode=mode)
    message = (
        r"on the devices \[0, 1, 2, 3.*\], but the specs of result 0 are on \[0, 1\]: a result per shard has to be"
    )
    with pytest.raises(ValueError, match=message):
        np.asarray(call(x))


def test_arguments_of_which_not_all_have_shards_on_a_device_are_refused(mesh):
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    stated = struct(mesh, P("data"))
    both = colocated_python(lambda x, y: x.data, layout="per_shard", out_specs=stated, devices=mesh, mode="inline")
    with pytest.raises(ValueError, match=r"must be on the same devices, but they are on \[\[0, 1, .*\], \[1\]\]"):
        both(x, jax.device_put(X, jax.devices()[1]))


@pytest.mark.parametrize("make", [per_shard, on_arrays], ids=["shards", "arrays"])
def test_specs_of_the_devices_in_another_order_are_refused(mesh, make):
    turned = partjit.Mesh(mesh.devices[::-1], mesh.axis_names)
    with mesh, pytest.raises(ShardingError, match=r"name the devices \[.*\], but the program runs .*, in this order"):
        pjit(lambda x: make(turned, P("data"))(x) + 0)(X)


@pytest.mark.parametrize("explicit", ["program", "call", "both"])
def test_meshes_with_explicit_axes(mesh, explicit):
    types = (jax.sharding.AxisType.Explicit,) * 2
    twin = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=types)
    of_program, of_call = (twin if explicit in (name, "both") else mesh for name in ("program", "call"))
    pairs = [(P("data"), P("model")), (P("data"), P("data"))]
    calls = [per_shard(of_call, a) for a, _ in pairs]
    program = pjit(lambda x: tuple(call(x) for call in calls), out_axis_resources=tuple(b for _, b in pairs))
    with partjit.set_mesh(of_program):
        results = program(X)
    for (_, b), result in zip(pairs, results, strict=True):
        np.testing.assert_array_equal(result, DOUBLED)
        assert result.sharding.is_equivalent_to(NamedSharding(of_program, b), 1)


@pytest.mark.parametrize("given", [X, 2.0, "uncommitted"], ids=["NumPy", "number", "uncommitted"])
@pytest.mark.parametrize("specs", [{}, {"in_shardings": P(), "out_shardings": P()}], ids=["open", "stated"])
def test_arguments_without_a_sharding_have_the_axes_that_calls_compute_on(mesh, given, specs):
    """Under jax.set_mesh, jax refuses to compute with arrays over another mesh than that."""
    explicit = jax.make_mesh((2, 2), ("data", "model"), devices=mesh.devices.flat)
    given = jnp.asarray(X) if isinstance(given, str) else given
    call = colocated_python(lambda x: 2 * x, out_specs_fn=lambda x: x)
    program = pjit(lambda x: call(x) + 1, **specs)
    with jax.set_mesh(explicit):
        np.testing.assert_array_equal(program(given), 2 * np.float32(given) + 1)
        if given is X:  # an array has a sharding when it is lowered
            np.testing.assert_array_equal(program.lower(X).compile()(X), DOUBLED)


@pytest.mark.parametrize("types", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
@pytest.mark.parametrize("mode", ["inline", "stream"])
def test_functions_compute_on_the_mesh_of_the_program_whatever_jax_has_set(mesh, mode, types):
    """Its specs bring one along, or it was compiled for one."""
    other = jax.make_mesh((8,), ("x",), axis_types=(types,))
    call = colocated_python(lambda x: 2 * x, out_specs_fn=lambda x: x, mode=mode)
    spec = NamedSharding(mesh, P("data"))
    program = pjit(lambda x: call(x) + 1, in_shardings=spec)
    compiled = program.lower(X).compile()
    for run in (program, compiled, compiled, program):
        with jax.set_mesh(other):
            np.testing.assert_array_equal(run(X), DOUBLED)
        np.testing.assert_array_equal(run(X), DOUBLED)


@pytest.mark.parametrize("is_open", [False, True], ids=["stated", "left open"])
def test_shards_of_accelerators_are_shards_of_an_eager_call(accelerators, is_open):
    mesh = partjit.Mesh(np.array(accelerators).reshape(2, 2), ("data", "model"))
    stated = struct(mesh, P("data"))
    said = {"out_specs_fn": lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)} if is_open else {"out_specs": stated}
    call = colocated_python(lambda shard: doubled(shard.data), layout="per_shard", **said)
    result = call(jax.device_put(X, stated.sharding))
    np.testing.assert_array_equal(result, DOUBLED)
    assert result.sharding == stated.sharding


def test_shards_of_accelerators_are_assembled_on_the_hosts(accelerators):
    mesh = partjit.Mesh(np.array(accelerators).reshape(2, 2), ("data", "model"))
    calls = [per_shard(mesh, a) for a, _ in PAIRS]
    second = tuple(b for _, b in PAIRS)
    with mesh:
        results = pjit(lambda x: tuple(call(x) for call in calls), out_axis_resources=second)(X)
    for b, result in zip(second, results, strict=True):
        np.testing.assert_array_equal(result, DOUBLED)
        assert result.sharding.is_equivalent_to(NamedSharding(mesh, b), 1)


def test_a_plan_in_which_a_call_has_other_shardings_than_its_specs_is_broken(mesh):
    call = per_shard(mesh, P("data"))
    program = pjit(lambda x: call(x + 1) + 1)
    with mesh:
        plan = program.plan(X)
        flat = structured(program.trace(X).jaxpr, plan.mesh, executables=Executables.of(plan.mesh, None))
    verify(plan, flat)
    (k,) = [k for k, node in enumerate(plan.nodes) if isinstance(node, ColocatedCall)]
    for what in ("inputs", "outputs"):
        (value,) = getattr(plan.nodes[k], what)
        wrong = dataclasses.replace(value, sharding=NamedSharding(mesh, P("model")))
        nodes = [*plan.nodes]
        nodes[k] = dataclasses.replace(nodes[k], **{what: (wrong,)})
        message = rf"{value.name} is float32\[8\] P\('model',?\) and the specs of x_lambda say P.*'data'"
        with pytest.raises(PlanError, match=message):
            verify(dataclasses.replace(plan, nodes=tuple(nodes)), flat)


def test_the_planner_runs_as_much_of_the_propagation_as_decides_arguments_and_results():
    mesh, constrain = MESHES[4, 2], jax.lax.with_sharding_constraint

    def mlp(x, w):
        return jnp.tanh(x @ w) @ w.T, x

    def constrained(x, w):
        y = constrain(x * 2, NamedSharding(mesh, P("model")))
        return jnp.sum(y, 0), y @ w, jax.lax.top_k(y, 2)[0]

    def uneven(x, w):  # neither of the sizes can be divided by that of the axis
        return jnp.pad(x, ((0, 1), (0, 3))) @ jnp.pad(w, ((0, 3), (0, 0)))

    def looping(x, w):
        return jax.lax.scan(lambda x, _: (x @ w, jnp.sum(x)), x, length=3)

    w = jnp.ones((4, 4))
    for fun, specs in itertools.product((mlp, constrained, uneven, looping), itertools.product(SPECS, SPECS[:3])):
        shardings = [NamedSharding(mesh, spec) for spec in specs]
        lowered = jax.jit(fun, in_shardings=shardings).lower(jnp.ones((8, 4)), w)
        found = []
        for propagate in (shardy.propagate, shardy.propagate_interface):
            module = ir.Module.parse(str(lowered.compiler_ir()), context=lowered.compiler_ir().context)
            rewrite(module)
            propagate(module)
            interface = shardy.Shardings(module)
            found.append((interface.of_arguments(), interface.of_results()))
        assert found[0] == found[1]
