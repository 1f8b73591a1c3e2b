"""Derivatives of pjit functions: the values are those of the plain function, and everything stays partitioned."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding

from partjit import UNSPECIFIED, P, pjit, with_sharding_constraint
from partjit.primitive import pjit_p, sharding_constraint_p

CHECKPOINT_POLICIES = {
    "default": None,
    "everything": jax.checkpoint_policies.everything_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots without batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "named": jax.checkpoint_policies.save_only_these_names("hidden"),
}

# Of the others the equations are counted: here "nothing" saves what the default does, and no product has a batch.
COMPILED_POLICIES = {name: CHECKPOINT_POLICIES[name] for name in ("default", "everything", "dots", "named")}

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
W = np.linspace(0.5, -0.7, 16, dtype=np.float32).reshape(4, 4)


def mlp(w, x):
    hidden = checkpoint_name(jnp.tanh(x @ w), "hidden")
    return jnp.sin(hidden @ w.T) * x


def loss(w, x):
    return jnp.mean(mlp(w, x) ** 2)


plain_gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))

W_SPEC, X_SPEC = P("y", None), P("x", "y")
pjit_mlp = pjit(mlp, in_axis_resources=(W_SPEC, X_SPEC), out_axis_resources=X_SPEC)
pjit_loss = pjit(loss, in_axis_resources=(W_SPEC, X_SPEC), out_axis_resources=None)


@pytest.fixture(autouse=True)
def under_mesh(mesh):
    with mesh:
        yield


def close(actual, expected, tolerance=1e-5):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert jnp.shape(a) == jnp.shape(e)
        assert jax.dtypes.result_type(a) == jax.dtypes.result_type(e)
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(e, np.float64), rtol=tolerance, atol=tolerance)


def laid_out(array, mesh, spec):
    assert array.sharding.device_set == set(mesh.devices.flat)
    assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim), array.sharding


def equations(jaxpr, primitive):
    """All equations of `primitive` in a jaxpr, nested ones included."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive is primitive:
            found.append(eqn)
        for param in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")):
            inner = getattr(param, "jaxpr", param)
            if hasattr(inner, "eqns"):
                found += equations(inner, primitive)
    return found


# Values


# Some run in one program and most eagerly, where every half of a program is compiled by itself.
TRANSFORMS = {
    "grad": lambda f, w, x: jax.grad(lambda w, x: f(w, x).sum(), argnums=(0, 1))(w, x),
    "value_and_grad": lambda f, w, x: jax.value_and_grad(lambda w, x: f(w, x).sum())(w, x),
    "jvp": lambda f, w, x: jax.jvp(f, (w, x), (2 * W, X)),
    "jvp of one": lambda f, w, x: jax.jvp(lambda w: f(w, x), (w,), (2 * W,)),
    "vjp": lambda f, w, x: jax.vjp(f, w, x)[1](2 * X),
    "linearize": lambda f, w, x: jax.linearize(f, w, x)[1](2 * W, X),
    "linearize, then transpose": lambda f, w, x: jax.linear_transpose(jax.linearize(lambda w: f(w, x), w)[1], w)(2 * X),
    "jacfwd": lambda f, w, x: jax.jit(jax.jacfwd(lambda w: f(w, x[:, :1] * jnp.ones((1, 4), x.dtype))[0]))(w),
    "jacrev": lambda f, w, x: jax.jit(jax.jacrev(lambda w: f(w, x)[0]))(w),
    "hessian": lambda f, w, x: jax.jit(jax.hessian(lambda s: f(w * s, x).sum()))(jnp.float32(0.7)),
    "forward over reverse": lambda f, w, x: jax.jvp(jax.grad(lambda w: f(w, x).sum()), (w,), (2 * W,)),
    "reverse over forward": lambda f, w, x: jax.grad(lambda w: jax.jvp(lambda w: f(w, x), (w,), (w,))[1].sum())(w),
    "reverse over reverse": lambda f, w, x: jax.grad(lambda w: (jax.grad(lambda w: f(w, x).sum())(w) ** 2).sum())(w),
    "third order": lambda f, w, x: jax.jit(jax.grad(jax.grad(jax.grad(lambda s: f(w * s, x).sum()))))(jnp.float32(0.7)),
    "jit of grad": lambda f, w, x: jax.jit(jax.grad(lambda w: f(w, x).sum()))(w),
    "vmap of grad": lambda f, w, x: jax.vmap(jax.grad(lambda w, x: f(w, x).sum()), in_axes=(0, None))(
        np.stack([W, 2 * W]), x
    ),
    "grad of checkpoint": lambda f, w, x: jax.grad(lambda w: jax.checkpoint(f)(w, x).sum())(w),
    "grad of scan": lambda f, w, x: jax.grad(
        lambda w: jax.lax.scan(lambda c, s: (f(w * s, c), c.sum()), x, np.arange(1, 4, dtype=np.float32))[0].sum()
    )(w),
}


@functools.cache
def references(function, *names):
    """What transforms make of a plain function, in one program: it compiles sooner than one for each of them."""
    return jax.jit(lambda w, x: {name: TRANSFORMS[name](function, w, x) for name in names})(W, X)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_derivatives_are_those_of_the_plain_function(name):
    expected = references(mlp, *TRANSFORMS)[name]
    close(TRANSFORMS[name](pjit_mlp, jnp.asarray(W), jnp.asarray(X)), expected)


@functools.partial(pjit, in_axis_resources=(W_SPEC, X_SPEC), out_axis_resources=X_SPEC)
def nested_mlp(w, x):
    inner = pjit(lambda a, b: jnp.tanh(a @ b), in_axis_resources=(X_SPEC, W_SPEC), out_axis_resources=P("x"))
    outer = pjit(lambda a, b: jnp.sin(inner(a, b)), in_axis_resources=(P("x"), None), out_axis_resources=P("x"))
    hidden = inner(x, w)
    return outer(hidden, w.T) * x + inner(x, w)


def plain_nested_mlp(w, x):
    hidden = jnp.tanh(x @ w)
    return jnp.sin(jnp.tanh(hidden @ w.T)) * x + hidden


THROUGH_NESTED = ["grad", "jvp", "hessian", "reverse over reverse", "vmap of grad", "grad of checkpoint"]


@pytest.mark.parametrize("name", THROUGH_NESTED)
def test_derivatives_through_nested_pjits(name):
    expected = references(plain_nested_mlp, *THROUGH_NESTED)[name]
    close(TRANSFORMS[name](nested_mlp, jnp.asarray(W), jnp.asarray(X)), expected)


def test_derivatives_agree_with_finite_differences():
    step = np.float32(0.01)
    above, below = (np.float32(pjit_loss(W * scale, X)) for scale in (1 + step, 1 - step))
    numerically = (above - below) / (2 * step)
    close(np.vdot(jax.grad(pjit_loss)(W, X), W), numerically, 1e-3)


# Zero tangents, integers, results nobody uses


def test_integer_and_boolean_arguments_have_no_tangent(mesh):
    def f(x, i, flag):
        return jnp.where(flag, x[i].sum(), 0.0), i + 1, x * 2

    function = pjit(f, in_axis_resources=(P("x"), None, None), out_axis_resources=(None, None, P("x")))
    i = np.array([1, 3], np.int32)
    grad = jax.grad(lambda x: function(x, i, True)[0])(X)
    expected = np.zeros_like(X)
    expected[i] = 1
    close(grad, expected)
    grads = jax.grad(lambda *args: function(*args)[0], argnums=(0, 1, 2), allow_int=True)(X, i, True)
    assert grads[1].dtype == grads[2].dtype == jax.dtypes.float0
    primals, tangents = jax.jvp(
        function, (X, i, True), (X, np.zeros(2, jax.dtypes.float0), np.zeros((), jax.dtypes.float0))
    )
    assert tangents[1].dtype == jax.dtypes.float0
    close(tangents[2], 2 * X)
    laid_out(tangents[2], mesh, P("x"))
    close(primals[1], i + 1)


def test_an_output_that_does_not_depend_on_what_is_differentiated():
    function = pjit(
        lambda a, b: (a * 2, jnp.sin(b), 3.0),
        in_axis_resources=(P("x"), P("x")),
        out_axis_resources=(P("x"), P("y"), None),
    )
    primals, tangents = jax.jvp(lambda a: function(a, X), (X,), (np.ones_like(X),))
    close(tangents, (2 * np.ones_like(X), np.zeros_like(X), np.float32(0)))
    close(primals[1], np.sin(X))
    close(jax.grad(lambda a: function(a, X)[1].sum())(X), np.zeros_like(X))


@pytest.mark.parametrize("used", [0, 1, 2])
def test_an_unused_output_gets_no_cotangent(used):
    function = pjit(
        lambda a, b: (jnp.sin(a), jnp.cos(b), a * b),
        in_axis_resources=P("x"),
        out_axis_resources=(P("x"), P("y"), P("x", "y")),
    )
    a, b = X, 2 * X
    _, pull = jax.vjp(lambda a, b: function(a, b)[used], a, b)
    zeros = np.zeros_like(X)
    close(pull(np.ones_like(X)), [(np.cos(a), zeros), (zeros, -np.sin(b)), (b, a)][used])


@pytest.mark.parametrize("inside", [False, True], ids=["result of the program", "result of the scan only"])
@pytest.mark.parametrize("derive", [lambda f: jax.grad(f), lambda f: jax.vmap(jax.grad(f), 0, 0)], ids=["grad", "vmap"])
def test_a_stacked_result_of_a_scan_that_nobody_differentiates(derive, inside):
    def decay(x):
        carry, stacked = jax.lax.scan(lambda c, s: (jnp.sin(c) * s, jnp.cos(c)), x, np.array([0.5, 0.9], np.float32))
        return carry.sum(), x if inside else stacked

    function = pjit(decay)
    expected = 0.45 * np.cos(0.5 * np.sin(X)) * np.cos(X)
    np.testing.assert_allclose(derive(lambda x: function(x)[0])(X), expected, rtol=1e-5)


def test_stop_gradient_and_a_program_that_is_constant():
    function = pjit(lambda x: jax.lax.stop_gradient(x) * x, in_axis_resources=P("x"), out_axis_resources=P("x"))
    close(jax.grad(lambda x: function(x).sum())(X), X)
    constant = pjit(lambda x: jnp.ones((8, 4), jnp.float32), in_axis_resources=P("x"), out_axis_resources=P("x"))
    close(jax.grad(lambda x: constant(x).sum())(X), np.zeros_like(X))
    close(jax.jvp(constant, (X,), (X,)), (np.ones_like(X), np.zeros_like(X)))


def test_an_input_that_is_an_output():
    function = pjit(lambda a, b: (a, b, a), in_axis_resources=P("x"), out_axis_resources=(P("y"), P("x"), None))

    outs, pull = jax.vjp(function, X, 2 * X)
    close(outs, (X, 2 * X, X))
    close(pull((X, np.cos(X), np.sin(X))), (X + np.sin(X), np.cos(X)))


def test_the_same_argument_twice_sums_both_cotangents():
    function = pjit(lambda a, b: a * b, in_axis_resources=(P("x"), P("y")), out_axis_resources=P("x"))
    close(jax.grad(lambda x: function(x, x).sum())(X), 2 * X)


def test_pytrees_none_and_static_arguments():
    def f(params, mode, nothing, x):
        return {"y": jnp.tanh(x @ params["w"]) ** mode + params["b"][0], "none": None}

    function = pjit(
        f,
        in_axis_resources=({"w": P("y"), "b": None}, None, P("x")),
        out_axis_resources={"y": P("x"), "none": None},
        static_argnums=1,
    )
    params = {"w": W, "b": [np.ones((8, 4), np.float32)]}

    def run(f):
        return jax.grad(lambda p: f(p, 2, None, X)["y"].sum())(params)

    close(run(function), jax.jit(lambda: run(f))())


def test_complex_values():
    def f(z):
        return jnp.abs(jnp.sin(z) * z).sum()

    function = pjit(f, in_axis_resources=P("x"), out_axis_resources=None)
    z = (X + 1j * X[::-1]).astype(np.complex64)
    close_complex = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    close_complex(jax.grad(function)(z), jax.jit(jax.grad(f))(z))
    holomorphic = pjit(lambda z: (z**2).sum(), in_axis_resources=P("x"), out_axis_resources=None)
    close_complex(jax.grad(holomorphic, holomorphic=True)(z), 2 * z)


# Where derivatives are


def test_the_gradient_is_laid_out_as_the_argument(mesh):
    specs = {"a": P("x", "y"), "b": P(None, ("x", "y")), "c": P("y"), "d": P(), "e": P(("y", "x"))}
    function = pjit(
        lambda params: sum(jnp.sum(jnp.sin(leaf)) for leaf in params.values()),
        in_axis_resources=(specs,),
        out_axis_resources=None,
    )
    params = {name: np.arange(64, dtype=np.float32).reshape(8, 8) for name in specs}
    for grads in (jax.grad(function)(params), jax.jit(jax.grad(function))(params)):
        for name, spec in specs.items():
            laid_out(grads[name], mesh, spec)
            close(grads[name], np.cos(params[name]))


def test_tangents_are_laid_out_as_the_results(mesh):
    primal, tangent = jax.jvp(pjit_mlp, (W, X), (W, X))
    laid_out(primal, mesh, X_SPEC)
    laid_out(tangent, mesh, X_SPEC)
    _, linear = jax.linearize(pjit_mlp, W, X)
    laid_out(linear(W, X), mesh, X_SPEC)


def test_the_gradient_with_respect_to_committed_arguments_needs_no_resharding(mesh):
    w = jax.device_put(W, NamedSharding(mesh, W_SPEC))
    x = jax.device_put(X, NamedSharding(mesh, X_SPEC))
    dw, dx = jax.grad(pjit_loss, argnums=(0, 1))(w, x)
    laid_out(dw, mesh, W_SPEC)
    laid_out(dx, mesh, X_SPEC)
    close((dw, dx), plain_gradients(W, X))


def residuals(vjp):
    return [leaf for leaf in jax.tree.leaves(vjp) if isinstance(leaf, jax.Array) and leaf.ndim == 2]


@pytest.mark.parametrize("derive", [lambda f, x: jax.vjp(f, x)[1], lambda f, x: jax.linearize(f, x)[1]])
def test_residuals_keep_the_sharding_of_the_partitioner(mesh, derive):
    # Nothing the second half needs is an argument or a result of the first: every residual is a value in between.
    function = pjit(
        lambda x: jnp.sum(jnp.sin(jnp.exp(x) * 3) ** 2), in_axis_resources=P("x", "y"), out_axis_resources=None
    )
    x = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)
    kept = [leaf for leaf in jax.live_arrays() if leaf.shape == (8, 8)]
    linear = derive(function, x)
    new = [a for a in jax.live_arrays() if a.shape == (8, 8) and not any(a is k for k in kept)]
    assert new, "there are residuals"
    for residual in new:
        assert not residual.sharding.is_fully_replicated
        laid_out(residual, mesh, P("x", "y"))
    del linear


def test_the_gradient_program_holds_no_replicated_residual():
    jaxpr = jax.make_jaxpr(jax.grad(pjit_loss))(W, X)
    known, unknown = equations(jaxpr.jaxpr, pjit_p)
    result, *residual_specs = known.params["out_specs"]
    assert result.partitions == ()
    assert residual_specs
    assert all(spec is UNSPECIFIED for spec in residual_specs)
    assert UNSPECIFIED in unknown.params["in_specs"]
    assert [spec.partitions for spec in unknown.params["out_specs"]] == [(("y",), ())]


def test_an_argument_that_is_a_residual_is_passed_on_and_not_copied():
    function = pjit(lambda a, b: a * b, in_axis_resources=(P("x"), P("y")), out_axis_resources=P("x"))
    jaxpr = jax.make_jaxpr(lambda a, b: jax.vjp(function, a, b)[1](a))(X, X)
    known, unknown = equations(jaxpr.jaxpr, pjit_p)
    assert len(known.outvars) == 1, "only the result"
    # The arguments come with the specs they have, not as values of unknown layout.
    assert sorted(str(spec) for spec in unknown.params["in_specs"]) == ["P('x',)", "P('x',)", "P('y',)"]


# Closures


def test_closed_over_arrays_and_tracers(mesh):
    table = jnp.asarray(X)

    def f(w):
        inner = pjit(lambda x: (jnp.tanh(x @ w) + table).sum(), in_axis_resources=P("x"), out_axis_resources=None)
        return inner(X)

    def plain(w):
        return (jnp.tanh(X @ w) + table).sum()

    def derived(f, w, batch):
        return {
            "value and gradient": jax.value_and_grad(f)(w),
            "gradient of a gradient": jax.grad(lambda w: jax.grad(f)(w).sum())(w),
            "tangent": jax.jvp(f, (w,), (w,)),
            "batch": jax.vmap(jax.value_and_grad(f))(batch),
        }

    args = W, np.stack([W, 2 * W])
    expected = jax.jit(functools.partial(derived, plain))(*args)
    close(derived(f, *args), expected)
    close(jax.jit(f)(W), expected["value and gradient"][0])


def test_a_closure_over_one_tracer_and_a_call_with_another():
    def f(a, b):
        return pjit(lambda x: a * jnp.sin(x), in_axis_resources=P("x"), out_axis_resources=P("x"))(b).sum()

    close(jax.grad(f, argnums=(0, 1))(X, 2 * X), (np.sin(2 * X), X * np.cos(2 * X)))


# Linear transpose


def test_linear_functions_transpose(mesh):
    function = pjit(lambda x: jnp.asarray(W) @ x.T, in_axis_resources=P("x", "y"), out_axis_resources=P(None, "x"))
    (ct,) = jax.linear_transpose(function, X)(np.ones((4, 8), np.float32))
    close(ct, np.ones((8, 4), np.float32) @ W)
    laid_out(ct, mesh, P("x", "y"))
    abstract = jax.ShapeDtypeStruct(X.shape, X.dtype)
    close(jax.linear_transpose(function, abstract)(np.ones((4, 8), np.float32)), (ct,))


def test_transposing_twice_gives_the_function_back():
    function = pjit(lambda x: 3 * x[:, :2], in_axis_resources=P("x"), out_axis_resources=P("x", "y"))
    twice = jax.linear_transpose(lambda ct: jax.linear_transpose(function, X)(ct)[0], X[:, :2])
    close(twice(X), (function(X),))


def test_transposing_where_one_cotangent_is_missing():
    def pair(x):
        return x * 2, x * 3

    function = pjit(pair, in_axis_resources=P("x"), out_axis_resources=(P("x"), P("y")))
    close(jax.linear_transpose(lambda x: function(x)[1], X)(X), (3 * X,))


# Custom rules


@jax.custom_jvp
def clipped(x):
    return jnp.clip(x, -0.5, 0.5)


@clipped.defjvp
def _(primals, tangents):
    return clipped(*primals), 7 * tangents[0]


@jax.custom_vjp
def reversed_grad(x):
    return jnp.sin(x)


reversed_grad.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda c, ct: (-c * ct,))


@pytest.mark.parametrize("custom", [clipped, reversed_grad], ids=["jvp", "vjp"])
def test_custom_rules_inside(custom):
    def f(x):
        return custom(x * 2).sum()

    function = pjit(f, in_axis_resources=P("x"), out_axis_resources=None)

    def derived(f, x):
        return (
            jax.value_and_grad(f)(x),
            jax.vmap(jax.grad(f))(x),
            jax.grad(jax.checkpoint(f))(x),
            jax.grad(lambda x: jax.grad(f)(x).sum())(x),
        )

    close(derived(function, X), jax.jit(functools.partial(derived, f))(X))


def test_custom_rules_around(mesh):
    program = pjit(lambda x: jnp.sin(x), in_axis_resources=P("x"), out_axis_resources=P("x"))
    backward = pjit(lambda c, ct: 5 * c * ct, in_axis_resources=P("x"), out_axis_resources=P("x"))

    with_vjp = jax.custom_vjp(program)
    with_vjp.defvjp(lambda x: (program(x), jnp.cos(x)), lambda c, ct: (backward(c, ct),))
    close(with_vjp(X), np.sin(X))
    grad = jax.grad(lambda x: with_vjp(x).sum())(X)
    close(grad, 5 * np.cos(X))
    laid_out(grad, mesh, P("x"))

    with_jvp = jax.custom_jvp(program)
    with_jvp.defjvp(lambda primals, tangents: (program(*primals), backward(jnp.cos(*primals), *tangents)))
    close(jax.jvp(with_jvp, (X,), (X,)), (np.sin(X), 5 * np.cos(X) * X))
    close(jax.grad(lambda x: with_jvp(x).sum())(X), 5 * np.cos(X))
    close(jax.jit(jax.grad(lambda x: with_jvp(x).sum()))(X), 5 * np.cos(X))


def test_a_pjit_function_as_nondifferentiable_argument_of_a_custom_vjp():
    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def apply(f, x):
        return f(x)

    apply.defvjp(lambda f, x: (f(x), x), lambda f, x, ct: (ct * f(x),))
    function = pjit(lambda x: x * 3, in_axis_resources=P("x"), out_axis_resources=P("x"))
    close(jax.grad(lambda x: apply(function, x).sum())(X), 3 * X)


# Checkpoints


@pytest.mark.parametrize("policy", COMPILED_POLICIES.values(), ids=COMPILED_POLICIES)
def test_checkpoint_around_with_every_policy(mesh, policy):
    grads = jax.grad(jax.checkpoint(pjit_loss, policy=policy), argnums=(0, 1))(W, X)
    close(grads, plain_gradients(W, X))
    laid_out(grads[0], mesh, W_SPEC)


@pytest.mark.parametrize("policy", COMPILED_POLICIES.values(), ids=COMPILED_POLICIES)
def test_checkpoint_inside_with_every_policy(mesh, policy):
    function = pjit(
        lambda w, x: jnp.mean(jax.checkpoint(mlp, policy=policy)(w, x) ** 2),
        in_axis_resources=(W_SPEC, X_SPEC),
        out_axis_resources=None,
    )
    grads = jax.grad(function, argnums=(0, 1))(W, X)
    close(grads, plain_gradients(W, X))
    laid_out(grads[0], mesh, W_SPEC)


def flops_of_dots(jaxpr):
    return len(equations(jaxpr.jaxpr, jax.lax.dot_general_p))


def test_a_checkpoint_policy_reaches_into_the_program():
    # What is saved is not computed again: the number of matrix products tells.
    def dots(policy):
        f = jax.checkpoint(pjit_loss, policy=policy)
        plain = jax.checkpoint(loss, policy=policy)
        ours = flops_of_dots(jax.make_jaxpr(jax.grad(f, argnums=(0, 1)))(W, X))
        assert ours == flops_of_dots(jax.make_jaxpr(jax.grad(plain, argnums=(0, 1)))(W, X))
        return ours

    found = {name: dots(policy) for name, policy in CHECKPOINT_POLICIES.items()}
    assert found["everything"] == found["dots"] == found["dots without batch"] < found["nothing"] == found["default"]


def test_checkpoint_of_a_scan_of_a_pjit():
    def f(step):
        def loss(w):
            return jax.lax.scan(jax.checkpoint(lambda c, _: (step(w, c), None)), jnp.asarray(X), length=3)[0].sum()

        return jax.grad(loss)(jnp.asarray(W))

    close(f(pjit_mlp), jax.jit(lambda: f(mlp))())


def test_offloading_names_inside_a_checkpoint_recomputes_the_rest():
    policy = jax.checkpoint_policies.save_only_these_names("hidden")
    jaxpr = jax.make_jaxpr(jax.grad(jax.checkpoint(pjit_loss, policy=policy)))(W, X)
    plain = jax.make_jaxpr(jax.grad(jax.checkpoint(loss, policy=policy)))(W, X)
    assert len(equations(jaxpr.jaxpr, jax.lax.tanh_p)) == len(equations(plain.jaxpr, jax.lax.tanh_p))


# Constraints


def test_the_transpose_of_a_constraint_constrains_the_cotangent_alike():
    function = pjit(
        lambda x: (with_sharding_constraint(x * 2, P("x", "y")) ** 2).sum(),
        in_axis_resources=P("x"),
        out_axis_resources=None,
    )
    jaxpr = jax.make_jaxpr(jax.grad(function))(X)
    constraints = equations(jaxpr.jaxpr, sharding_constraint_p)
    assert len(constraints) == 2
    assert {str(eqn.params["spec"]) for eqn in constraints} == {str(P("x", "y"))}
    close(jax.grad(function)(X), 8 * X)


def test_a_constraint_is_linear():
    def f(x):
        return with_sharding_constraint(x, P("y")) ** 2

    function = pjit(f, in_axis_resources=P("x"), out_axis_resources=P("x"))
    close(jax.jvp(function, (X,), (X,)), (X**2, 2 * X**2))
    close(jax.linear_transpose(lambda x: with_sharding_constraint(x, P("y")), X)(X), (X,))
    close(jax.grad(lambda x: with_sharding_constraint(x, P("x")).sum())(X), np.ones_like(X))


def test_a_constraint_outside_a_program_lays_out_its_cotangent(mesh):
    x = jnp.asarray(X)
    _, vjp = jax.vjp(lambda x: with_sharding_constraint(x, P("x", "y")), x)
    (ct,) = vjp(x)
    laid_out(ct, mesh, P("x", "y"))


# Donation


def test_donated_arguments_are_not_donated_by_the_backward_program(mesh):
    function = pjit(
        lambda w, x: (w * 2, jnp.sum(jnp.sin(w) * x)),
        in_axis_resources=(P("x"), P("x")),
        out_axis_resources=(P("x"), None),
        donate_argnums=(0, 1),
    )
    jaxpr = jax.make_jaxpr(jax.grad(lambda w, x: function(w, x)[1], argnums=(0, 1)))(X, X)
    *_, backward = equations(jaxpr.jaxpr, pjit_p)
    assert not any(backward.params["donated_invars"])
    sharding = NamedSharding(mesh, P("x"))
    for _ in range(2):
        w, x = jax.device_put((X, 2 * X), sharding)
        grads = jax.grad(lambda w, x: function(w, x)[1], argnums=(0, 1))(w, x)
        close(grads, (2 * X * np.cos(X), np.sin(X)))


def test_a_donated_argument_that_the_second_half_reads_stays_alive(mesh):
    function = pjit(lambda a, b: a * b, in_axis_resources=P("x"), out_axis_resources=P("x"), donate_argnums=(0, 1))
    sharding = NamedSharding(mesh, P("x"))
    a, b = jax.device_put((X, 2 * X), sharding)
    _, vjp = jax.vjp(function, a, b)
    for _ in range(2):
        close(vjp(X), (2 * X * X, X * X))
    a, b = jax.device_put((X, 2 * X), sharding)
    _, linear = jax.linearize(function, a, b)
    for _ in range(2):
        close(linear(X, X), 3 * X * X)


def test_donation_under_jvp_and_checkpoint(mesh):
    function = pjit(lambda w: jnp.sin(w) * 2, in_axis_resources=P("x"), out_axis_resources=P("x"), donate_argnums=0)
    sharding = NamedSharding(mesh, P("x"))
    w, t = jax.device_put((X, 2 * X), sharding)
    close(jax.jvp(function, (w,), (t,)), (2 * np.sin(X), 4 * np.cos(X) * X))
    w = jax.device_put(X, sharding)
    close(jax.grad(jax.checkpoint(lambda w: function(w).sum()))(w), 2 * np.cos(X))


# Effects of differentiation on the rest


def test_a_linearized_function_can_be_applied_many_times_and_under_other_transforms():
    _, linear = jax.linearize(lambda w: pjit_mlp(w, X), jnp.asarray(W))
    plain = jax.jit(lambda t: jax.jvp(lambda w: mlp(w, X), (jnp.asarray(W),), (t,))[1])
    batch = np.stack([W, np.cos(W)])
    expected = np.stack([plain(t) for t in batch])
    close(linear(W), expected[0])
    close(jax.vmap(linear)(batch), expected)
    close(jax.jit(linear)(W), expected[0])


def test_derivatives_with_unspecified_specs_follow_the_argument(mesh):
    function = pjit(lambda x: jnp.sum(jnp.sin(x)))
    x = jax.device_put(np.arange(64, dtype=np.float32).reshape(8, 8), NamedSharding(mesh, P("x", "y")))
    grad = jax.grad(function)(x)
    close(grad, np.cos(np.asarray(x)))
    laid_out(grad, mesh, P("x", "y"))


def test_gradients_with_a_donated_train_step(mesh):
    # The way a training loop uses it: the gradient is taken inside, and the state is donated.
    @functools.partial(pjit, in_axis_resources=(W_SPEC, X_SPEC), out_axis_resources=(W_SPEC, None), donate_argnums=0)
    def step(w, x):
        value, grad = jax.value_and_grad(pjit_loss)(w, x)
        return w - 0.1 * grad, value

    @jax.jit
    def plain(w, x):
        value, grad = jax.value_and_grad(loss)(w, x)
        return w - 0.1 * grad, value

    w = expected = jnp.asarray(W)
    w = jax.device_put(w, NamedSharding(mesh, W_SPEC))
    losses = []
    for _ in range(4):
        w, value = step(w, X)
        expected, expected_value = plain(expected, X)
        close(value, expected_value)
        losses.append(float(value))
    close(w, expected)
    laid_out(w, mesh, W_SPEC)
    assert losses == sorted(losses, reverse=True)


def test_equal_parameters_at_other_places_are_another_program(mesh):
    """The programs of an eager gradient are found again by all of their parameters."""
    seen = set()
    for in_spec, out_spec in [(P("x"), P("y")), (P("y"), P("x"))]:
        fun = pjit(jnp.sin, in_axis_resources=in_spec, out_axis_resources=out_spec)
        for _ in range(3):
            value, pull = jax.vjp(fun, X)
            laid_out(value, mesh, out_spec)
            (gradient,) = pull(jnp.ones_like(value))
            laid_out(gradient, mesh, in_spec)
            close(gradient, np.cos(X))
            seen.add((value.sharding, gradient.sharding))
    assert len(seen) == 2


def test_a_gradient_made_again_and_again_compiles_once(compilations):
    fun = pjit(lambda w, x: jnp.sum(jnp.tanh(x @ w)), in_axis_resources=(W_SPEC, X_SPEC), out_axis_resources=None)
    first, second, third = (jax.grad(fun, argnums=(0, 1))(W, x) for x in (X, X, X + 1))
    close(second, first)
    assert not np.allclose(third[0], first[0])
    compiled = len(compilations)
    jax.grad(fun, argnums=(0, 1))(W, X + 2)
    assert 0 < compiled == len(compilations)
