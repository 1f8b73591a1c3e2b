"""pjit over processes: what it does with global arrays, and with the pieces of each process."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from started import (
    IS_SOAK,
    columns,
    count,
    distributed,
    grid,
    held,
    interleaved,
    mesh,
    number,
    numbers,
    own_piece,
    refused,
    require_equal,
)

from partjit import (
    FROM_ARRAY,
    Mesh,
    P,
    ReshardWarning,
    colocated,
    pjit,
    reshard_policy,
    to_process_local,
)

EVERY = 1 if IS_SOAK else 5

X = np.arange(32, dtype=np.float32).reshape(16, 2) / 10
W = np.arange(4, dtype=np.float32).reshape(2, 2)


def layer(x, w):
    return {"y": jnp.tanh(x @ w), "sum": jnp.sum(x)}


WANTED = {"y": np.tanh(X @ W), "sum": X.sum()}
SPECS = {"in_shardings": (P("x"), P(None, "y")), "out_shardings": {"y": P("x", "y"), "sum": None}}
of_arrays = pjit(layer, **SPECS)
of_pieces = pjit(layer, **SPECS, positional_semantics="local")


def piece(value, *spec, of=mesh):
    """What this process has of a value, as a NumPy array."""
    return own_piece(value, NamedSharding(of, P(*spec)))


def own(value, *spec, of=mesh):
    """The same as an array over the local mesh."""
    return to_process_local(distributed(value, *spec, mesh=of))


def require_piece(array, value, *spec, of=mesh):
    assert array.is_fully_addressable
    np.testing.assert_allclose(array, piece(np.asarray(value), *spec, of=of), rtol=1e-5, atol=1e-6)


def require_layer(result):
    require_piece(result["y"], WANTED["y"], "x", "y")
    require_piece(result["sum"], WANTED["sum"])


# Global arrays


def check_placing():
    add = pjit(lambda x: x + jnp.sum(x), in_shardings=P("x"), out_shardings=P("y"))
    placed = distributed(numbers, "x")
    for given in (placed, numbers, jnp.asarray(numbers)):  # the last two are the same in all processes
        require_equal(add(given), numbers + 120)
    elsewhere = distributed(numbers, "y")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        require_equal(add(elsewhere), numbers + 120)
    assert [warning.category for warning in caught] == [ReshardWarning]
    with reshard_policy("allow"):
        require_equal(add(elsewhere), numbers + 120)
    with reshard_policy("error"):
        assert "does not match the sharding" in refused(add, elsewhere)
    require_equal(pjit(jnp.sum, in_shardings=FROM_ARRAY)(elsewhere), 120)
    assert "which has no sharding of its own" in refused(pjit(jnp.sum, in_shardings=FROM_ARRAY), numbers)


def check_stages():
    compiled = of_arrays.lower(jax.ShapeDtypeStruct(X.shape, X.dtype), W).compile()
    for run in (compiled, of_arrays):
        result = run(distributed(X, "x"), distributed(W, None, "y"))
        jax.tree.map(require_equal, result, WANTED)
    donate = pjit(lambda x: x + 1, in_shardings=P("x"), out_shardings=P("x"), donate_argnums=0)
    for _ in range(2):
        given = distributed(numbers, "x")
        require_equal(donate(given), numbers + 1)
        assert given.is_deleted()
        assert "deleted" in refused(donate, given) or "donated" in refused(donate, given)


def check_transformations():
    def loss(x, w):
        return jnp.sum(inner(x, w)["y"] ** 2)

    inner = layer
    wanted = jax.grad(loss, argnums=(0, 1))(X, W)
    inner = of_arrays
    x, w = distributed(X, "x"), distributed(W, None, "y")
    outer = pjit(jax.grad(loss, argnums=(0, 1)), in_shardings=SPECS["in_shardings"])
    for gradients in (jax.grad(loss, argnums=(0, 1))(x, w), outer(x, w), jax.jit(outer)(x, w)):
        jax.tree.map(require_equal, gradients, wanted)
    both = jax.vmap(of_arrays, in_axes=(0, None))(distributed(np.stack([X, -X]), None, "x"), w)
    require_equal(both["y"], np.stack([WANTED["y"], -WANTED["y"]]))


def check_that_devices_are_named():
    everywhere, here = held([*mesh.devices.flat]), held(jax.local_devices())
    text = refused(of_arrays, own(X, "x"), W)
    assert f"is committed to the incompatible devices {here}, but the program runs on the devices {everywhere}" in text
    assert "partjit.from_process_local(spec, x), or call with positional_semantics='local'" in text
    first = Mesh([device for device in grid if device.process_index == 0], "x")
    text = refused(pjit(lambda x: x, in_shardings=P("x"), out_shardings=NamedSharding(first, P("x"))), numbers)
    assert f"over the incompatible devices {held([*first.devices.flat])}, but the program runs on {everywhere}" in (
        text.replace("runs on the devices", "runs on")
    )
    with first:
        result = pjit(lambda x: x + 1, in_shardings=P("x"))(numbers)  # elsewhere an array without shards, as of jax.jit
        require_equal(result, numbers + 1)
        assert len(result.addressable_shards) == (8 // count if number == 0 else 0)


# Pieces


def check_that_pieces_make_the_same_program():
    intos, outs = [(), ("x",), ("y",), (("x", "y"),), (None, "y"), ("x", "y")], [("y",), (None, "x")]
    value = np.arange(64, dtype=np.float32).reshape(8, 8)
    wanted = value.T + value.sum()
    cases = [*itertools.product((mesh, columns), intos, outs)]
    for of, into, out in cases[::EVERY]:
        with of:
            specs = {"in_shardings": P(*into), "out_shardings": P(*out)}
            add = pjit(lambda x: x.T + jnp.sum(x), **specs, positional_semantics="local")
            for given in (piece(value, *into, of=of), own(value, *into, of=of), distributed(value, *into, mesh=of)):
                require_piece(add(given), wanted, *out, of=of)


def check_kinds_of_calls():
    x = piece(X, "x")
    for given in (x, jnp.asarray(x), own(X, "x"), distributed(X, "x")):
        require_layer(of_pieces(given, W))
    classic = pjit(layer, *SPECS.values(), positional_semantics="local")
    require_layer(classic(x, W))
    require_layer(pjit(layer, positional_semantics="local")(own(X, "x"), W))
    require_layer(pjit(layer, positional_semantics="local")(own(X, "x"), w=W))
    from_array = pjit(layer, in_shardings=FROM_ARRAY, positional_semantics="local")
    require_layer(from_array(own(X, "x"), distributed(W)))
    scaled = pjit(
        lambda n, x: n * x, in_shardings=P("x"), out_shardings=P("x"), static_argnums=0, positional_semantics="local"
    )
    require_piece(scaled(3, x), 3 * X, "x")
    with jax.disable_jit():
        require_layer(of_pieces(x, W))
    keys = jax.random.split(jax.random.key(0), 16)
    draw = pjit(jax.vmap(jax.random.normal), in_shardings=P("x"), out_shardings=P("x"), positional_semantics="local")
    own_keys = jax.random.wrap_key_data(piece(np.asarray(jax.random.key_data(keys)), "x"))
    require_piece(draw(own_keys), np.asarray(jax.vmap(jax.random.normal)(keys)), "x")
    with Mesh(mesh.devices, mesh.axis_names, (AxisType.Explicit,) * 2):
        require_layer(of_pieces(x, W))
        text = refused(jax.grad(lambda x: of_pieces(x, W)["sum"]), x)
        assert "with Explicit axes, where the types of pieces name another mesh" in text


def check_donated_pieces():
    add = pjit(
        lambda x: x + 1, in_shardings=P("x"), out_shardings=P("x"), donate_argnums=0, positional_semantics="local"
    )
    for _ in range(2):
        given = own(numbers, "x")
        require_piece(add(given), numbers + 1, "x")
        assert given.is_deleted()
        assert "deleted" in refused(add, given)
    require_piece(add(add(own(numbers, "x"))), numbers + 2, "x")


def check_stages_of_pieces():
    types = jax.ShapeDtypeStruct(piece(X, "x").shape, X.dtype), jax.ShapeDtypeStruct(W.shape, W.dtype)
    assert jax.tree.map(np.shape, of_pieces.eval_shape(*types)) == {"y": piece(X, "x", "y").shape, "sum": ()}
    traced = of_pieces.trace(*types)
    assert traced.jaxpr.in_avals[0].shape == X.shape  # the program is that of the arrays
    lowered = traced.lower()
    compiled = lowered.compile()
    assert "all-" in compiled.as_text()
    assert lowered.out_tree == traced.out_tree == compiled.out_tree
    for x in (piece(X, "x"), own(X, "x")):
        require_layer(compiled(x, W))
    unspecified = pjit(layer, in_shardings=(P("x"), None), positional_semantics="local")
    assert "give it one" in refused(unspecified.eval_shape, *types)
    require_piece(unspecified.lower(*types).compile()(piece(X, "x"), W)["sum"], WANTED["sum"])


def check_transformed_pieces():
    def loss(x, w):
        return jnp.sum(layer(x, w)["y"] ** 2)

    of = pjit(loss, in_shardings=SPECS["in_shardings"], out_shardings=None, positional_semantics="local")
    wanted = jax.value_and_grad(loss, argnums=(0, 1))(X, W)
    for x in (piece(X, "x"), own(X, "x")):
        value, gradients = jax.value_and_grad(of, argnums=(0, 1))(x, W)
        require_piece(value, wanted[0])
        require_piece(gradients[0], wanted[1][0], "x")
        np.testing.assert_allclose(gradients[1], wanted[1][1], rtol=1e-5)
    _, tangent = jax.jvp(of, (piece(X, "x"), W), (piece(X, "x"), W))
    np.testing.assert_allclose(tangent, jax.jvp(loss, (X, W), (X, W))[1], rtol=1e-5)
    stacked = np.stack([piece(X, "x"), -piece(X, "x")], axis=1)
    both = jax.vmap(of_pieces, in_axes=(1, None), out_axes={"y": 2, "sum": 0})(stacked, W)
    require_piece(both["y"], np.stack([WANTED["y"], -WANTED["y"]], axis=2), "x", "y")
    without = pjit(loss, in_shardings=SPECS["in_shardings"], positional_semantics="local")
    assert "has a result without a spec" in refused(jax.grad(without), piece(X, "x"), W)
    assert "and has no spec" in refused(jax.grad(pjit(loss, positional_semantics="local")), piece(X, "x"), W)


def check_pieces_inside_of_programs():
    inner = pjit(lambda x: 2 * x, in_shardings=P("x"), out_shardings=P("x"), positional_semantics="local")

    def outer(x):
        return inner(x) + jnp.sum(x)

    wanted = 2 * numbers + 120
    for wrap in (jax.jit, pjit):
        require_equal(wrap(outer)(distributed(numbers, "x")), wanted)
    local = pjit(outer, in_shardings=P("x"), out_shardings=P("x"), positional_semantics="local")
    require_piece(local(piece(numbers, "x")), wanted, "x")


def check_pieces_of_programs_with_calls():
    double = colocated.colocated_python(lambda v: v.data * 2, out_specs_fn=lambda v: v, layout="per_shard")
    said = []
    note = colocated.colocated_python(lambda text: said.append(text), out_specs_fn=lambda text: None)
    program = pjit(
        lambda text, x: (note(text), double(x + jnp.sum(x)))[1],
        in_shardings=P("x"),
        out_shardings=P("x"),
        host_argnums=0,
        positional_semantics="local",
    )
    x = piece(numbers, "x")
    for _ in range(2):
        require_piece(program("called", x), 2 * (numbers + 120), "x")
    compiled = program.lower("lowered", x).compile()
    require_piece(compiled("compiled", x), 2 * (numbers + 120), "x")
    assert "double" in str(program.plan("planned", x)) or "lambda" in str(program.plan("planned", x))
    colocated.wait()


def check_that_all_know_of_a_piece_that_does_not_fit():
    if count > 2:
        return
    double = colocated.colocated_python(lambda v: v.data * 2, out_specs_fn=lambda v: v, layout="per_shard")
    specs = {"in_shardings": P("x"), "out_shardings": P("x")}
    program = pjit(lambda x: double(x + jnp.sum(x)), **specs, positional_semantics="local")
    require_piece(program(piece(numbers, "x")), 2 * (numbers + 120), "x")
    larger = np.ones(4 + 4 * number, np.float32)
    assert "every process has to call the same programs" in refused(program, larger)
    wrong = refused(program, np.ones((4, 4)[: 1 - number], np.float32))
    assert "for the pieces of process 1, does not fit on the mesh (x=2, y=2)" in wrong, wrong
    require_piece(program(piece(numbers, "x")), 2 * (numbers + 120), "x")


def check_errors():
    assert "A spec of layer, for the pieces of process" in refused(of_pieces, piece(X, "x"), W[:, :1])
    with interleaved:
        text = refused(pjit(jnp.sum, in_shardings=P("x"), positional_semantics="local"), numbers)
    assert "a process can pass and receive its own piece of an array only where its devices are a box" in text
    assert all(f"of process {k}" in text for k in range(count))
    one = jax.device_put(X, jax.local_devices()[0])
    text = refused(pjit(layer, positional_semantics="local"), one, W)
    assert "Argument x of layer has no spec in in_axis_resources, and its own sharding" in text, text
    other = Mesh(jax.local_devices()[:1], "z")
    text = refused(of_pieces, jax.device_put(X, NamedSharding(other, P())), W)
    assert f"is committed to the incompatible devices {held([*other.devices.flat])}" in text, text
