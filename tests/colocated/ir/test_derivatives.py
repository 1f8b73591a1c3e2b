"""Colocated calls under differentiation: with rules and without, under `jax.checkpoint` and in loops."""

import contextlib
import functools
import gc
import pickle
import weakref

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partjit import colocated, events, pjit
from partjit.colocated import PendingArray, colocated_python, colocated_python_class, deserialize, serialize
from tests.census import saw, sees
from tests.colocated import rendezvous
from tests.effort import examples

X = np.linspace(0.1, 0.8, 8, dtype=np.float32)


def like(x, *_, **__):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def nothing(*_, **__):
    return None


def host(name, function, **said):
    """A function of NumPy on the host, which notes its calls."""

    def fun(x):
        rendezvous.logs["calls"].append(name)
        rendezvous.logs[name].append(np.asarray(x).copy())
        return jnp.asarray(function(np.asarray(x)))

    fun.__name__ = name
    return colocated_python(fun, **{"out_specs_fn": like, **said})


@colocated_python(out_specs_fn=nothing)
def log(x):
    rendezvous.logs["calls"].append("log")
    rendezvous.logs["log"].append(np.asarray(x).copy())


@pytest.fixture
def hosts(meeting):
    """`sin` and `cos` on the host, each with the other one in its rule: one for reverse mode only, one for both."""
    sin, cos = host("sin", np.sin), host("cos", np.cos)
    sin.defvjp(lambda x: (sin(x), x), lambda x, ct: (cos(x) * ct,))
    cos.defjvp(lambda primals, tangents: (cos(*primals), -sin(*primals) * tangents[0]))
    return sin, cos


def programs(f, mesh):
    """A function as it is, and as a program over a mesh."""

    def program(*args):
        with mesh:
            return pjit(f)(*args)

    return f, program


def counted():
    """How often each function was called since the last time, once all calls have ended."""
    colocated.wait(timeout=30)
    counts = {name: len(seen) for name, seen in rendezvous.logs.items() if name != "calls"}
    rendezvous.clear()
    return counts


def same(left, right):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), left, right)


# With rules


# Those of `sum(sin(x) * x)`, and of `cos(x) * x`.
SLOPE = np.cos(X) * X + np.sin(X)
CURVATURE = 2 * np.cos(X) - np.sin(X) * X
SLOPE_OF_COS = np.cos(X) - np.sin(X) * X

REVERSE = [
    (jax.grad, SLOPE, {"sin": 1, "cos": 1}),
    (jax.value_and_grad, (np.sum(np.sin(X) * X), SLOPE), {"sin": 1, "cos": 1}),
    (lambda f: lambda x: jax.vjp(f, x)[1](np.float32(3)), (3 * SLOPE,), {"sin": 1, "cos": 1}),
    (lambda f: jax.grad(jax.checkpoint(f)), SLOPE, {"sin": 1, "cos": 1}),
    # The second time the value and the derivative are differentiated, and both have rules with one call of each.
    (
        lambda f: jax.grad(lambda x: jnp.sum(jnp.sin(jax.grad(f)(x)))),
        np.cos(SLOPE) * CURVATURE,
        {"sin": 2, "cos": 2},
    ),
]


@pytest.mark.parametrize(("transform", "expected", "calls"), REVERSE)
def test_defvjp_gives_the_derivatives_of_reverse_mode(hosts, mesh, transform, expected, calls):
    sin, _ = hosts
    for run in programs(transform(lambda x: jnp.sum(sin(x) * x)), mesh):
        same(run(jnp.asarray(X)), expected)
        assert counted() == calls


FORWARD = [
    (lambda f: lambda x: jax.jvp(f, (x,), (x,)), (np.cos(X) * X, SLOPE_OF_COS * X)),
    (lambda f: lambda x: jax.linearize(f, x)[1](x), SLOPE_OF_COS * X),
    (jax.jacfwd, np.diag(SLOPE_OF_COS)),
    (jax.jacrev, np.diag(SLOPE_OF_COS)),
    (lambda f: jax.grad(lambda x: jnp.sum(f(x))), SLOPE_OF_COS),
    (lambda f: jax.grad(lambda x: jnp.sum(jax.checkpoint(f)(x))), SLOPE_OF_COS),
]


@pytest.mark.parametrize(("transform", "expected"), FORWARD)
def test_defjvp_gives_the_derivatives_of_both_modes(hosts, mesh, transform, expected):
    _, cos = hosts
    for run in programs(transform(lambda x: cos(x) * x), mesh):
        same(run(jnp.asarray(X)), expected)
        assert counted() == {"cos": 1, "sin": 1}


def test_hessians_are_forward_over_reverse(meeting, mesh):
    sin, cos = host("sin", np.sin), host("cos", np.cos)
    sin.defjvp(lambda primals, tangents: (sin(*primals), cos(*primals) * tangents[0]))
    cos.defjvp(lambda primals, tangents: (cos(*primals), -sin(*primals) * tangents[0]))
    for run in programs(jax.hessian(lambda x: jnp.sum(sin(x) * x)), mesh):
        same(run(jnp.asarray(X)), np.diag(CURVATURE))
        assert counted() == {"sin": 2, "cos": 2}


def test_rules_may_be_device_code(meeting, mesh):
    sin = host("sin", np.sin)
    sin.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (jnp.cos(x) * ct,))
    for run in programs(jax.grad(lambda x: jnp.sum(sin(x))), mesh):
        same(run(jnp.asarray(X)), np.cos(X))
        assert counted() == {}


def test_the_rules_of_a_call_on_constants_are_not_used(hosts, mesh):
    sin, _ = hosts
    for run in programs(jax.grad(lambda x: jnp.sum(sin(np.ones(8, np.float32)) * x)), mesh):
        same(run(jnp.asarray(X)), np.sin(np.ones(8, np.float32)))
        assert counted() == {"sin": 1}


def test_eager_calls_do_not_know_of_rules(meeting):
    sin = host("sin", np.sin)

    def rule(*_):
        raise AssertionError("called")

    sin.defvjp(rule, rule)
    result = sin(jnp.asarray(X))
    assert type(result) is PendingArray
    same(result, np.sin(X))


@pytest.mark.parametrize("rules", ["defvjp", "defjvp"])
def test_a_call_with_rules_leaks_no_tracers(hosts, mesh, rules):
    fun = hosts[0 if rules == "defvjp" else 1]
    with mesh, jax.checking_leaks():
        jax.grad(lambda x: jnp.sum(fun(x)))(jnp.asarray(X))
        pjit(fun)(X)
        pjit(jax.grad(lambda x: jnp.sum(fun(x))))(X)


def test_effects_in_rules_are_made_once(hosts, mesh):
    sin, _ = hosts
    noted = host("noted", np.sin)

    def fwd(x):
        log(jnp.float32(1))
        return noted(x), x

    def bwd(x, ct):
        log(jnp.float32(2))
        return (sin(x) * ct,)

    noted.defvjp(fwd, bwd)
    for run in programs(jax.grad(lambda x: jnp.sum(noted(x))), mesh):
        same(run(jnp.asarray(X)), np.sin(X))
        colocated.wait()
        assert rendezvous.logs["calls"] == ["log", "noted", "log", "sin"]
        assert [float(x) for x in rendezvous.logs["log"]] == [1, 2]
        rendezvous.clear()


def test_trees_keywords_integers_and_nones_go_through_rules(meeting, mesh):
    @colocated_python(out_specs_fn=lambda state, k, scale=None: {"y": like(state["x"]), "none": None})
    def f(state, k, scale=None):
        x = np.asarray(state["x"]) * (1 if scale is None else float(scale))
        return {"y": jnp.asarray(x ** int(k)), "none": None}

    def fwd(state, k, scale):
        return f(state, k, scale=scale), (state, k, scale)

    def bwd(kept, ct):
        state, k, scale = kept
        by = 1 if scale is None else scale
        k = k.astype(np.float32)
        dx = ct["y"] * k * (by * state["x"]) ** (k - 1)
        return {"x": dx * by}, None, None if scale is None else jnp.sum(dx * state["x"])

    f.defvjp(fwd, bwd)

    def loss(of_f):
        def both(x, scale):
            first = of_f({"x": x}, jnp.int32(3))
            second = of_f(scale=scale, state={"x": x}, k=jnp.int32(2))
            return jnp.sum(first["y"]) + jnp.sum(second["y"])

        return jax.value_and_grad(both, argnums=(0, 1))

    expected = np.sum(X**3) + np.sum((2 * X) ** 2), (3 * X**2 + 8 * X, np.sum(4 * X**2))
    for run in programs(loss(f), mesh):
        same(run(jnp.asarray(X), jnp.float32(2)), expected)


@pytest.mark.parametrize("number", [3, 3.0, 3 + 0j])
@pytest.mark.parametrize("options", [{}, {"uses_jax": False}], ids=repr)
def test_numbers_that_jax_passes_to_rules_are_numbers(meeting, number, options):
    def product(x, k=number):
        return np.asarray(x) * np.real(k).astype(np.float32)

    def with_rule(make, called):
        made = make(lambda x, k=number: called(x, k))
        made.defvjp(lambda x, k: (called(x, k), None), lambda _, ct: (3 * ct, None))
        return made

    host = colocated_python(product, out_specs_fn=like, **options)
    around = [with_rule(jax.custom_vjp, called) for called in (host, pjit(lambda x, k: host(x, k) + 0))]
    of_the_call = with_rule(lambda _: colocated_python(product, out_specs_fn=like, **options), host)
    for f in (of_the_call, *around):
        for given in ((), (number,)):
            gradient = jax.value_and_grad(lambda x, f=f, given=given: jnp.sum(f(x, *given)))
            for transformed in (gradient, pjit(gradient)):
                for _ in range(2):
                    value, slope = transformed(X)
                    np.testing.assert_allclose(value, 3 * X.sum(), rtol=1e-6)
                    np.testing.assert_array_equal(slope, 3 * np.ones_like(X))


def test_results_of_none_may_have_rules(meeting, mesh):
    @colocated_python(out_specs_fn=nothing)
    def note(x):
        rendezvous.logs["note"].append(float(x))

    note.defvjp(lambda x: (note(x), None), lambda _, ct: (jnp.float32(5),))

    def loss(x):
        note(x)
        return x**2

    for run in programs(jax.grad(loss), mesh):
        assert float(run(jnp.float32(2))) == 4  # there is no cotangent that could ask for it
        assert counted() == {"note": 1}


def test_positions_and_zeros_are_those_of_jax(meeting):
    @colocated_python(out_specs_fn=like)
    def scaled(x, *, by):
        return x * by

    scaled.defvjp(lambda x, by: (x * by, by), lambda by, ct: (ct * by, None))
    with pytest.raises(TypeError, match="keyword arguments could not be resolved to positions: by"):
        jax.grad(lambda x: scaled(x, by=jnp.float32(2)))(jnp.float32(1))

    labelled = colocated_python(lambda x, label="a": x, out_specs_fn=like)
    labelled.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
    with pytest.raises(
        TypeError,
        match=r"the rules of defjvp take all arguments of <lambda> by position, and label, which was not given, is 'a' "
        r"then, which is not an array: bind it, as with functools\.partial",
    ):
        jax.grad(labelled)(jnp.float32(1))

    seen = []
    product = colocated_python(lambda x, y: x * y, out_specs_fn=like)

    def jvp(primals, tangents):
        seen.append([type(t).__name__ for t in tangents])
        return primals[0] * primals[1], tangents[0] * primals[1]

    product.defjvp(jvp, symbolic_zeros=True)
    assert float(jax.jvp(lambda x: product(x, jnp.float32(3)), (2.0,), (1.0,))[1]) == 3
    assert seen[0][1] == "SymbolicZero"


def test_the_later_rule_wins(meeting):
    sin = host("sin", np.sin)

    @sin.defjvp
    def twice(primals, tangents):
        return sin(*primals), 2 * tangents[0]

    assert callable(twice)
    assert float(jax.grad(sin)(jnp.float32(0))) == 2
    assert sin.defvjp(lambda x: (sin(x), None), lambda _, ct: (3 * ct,)) is None
    assert float(jax.grad(sin)(jnp.float32(0))) == 3
    sin.defjvp(twice)
    assert float(jax.grad(sin)(jnp.float32(0))) == 2


def test_rules_are_functions(meeting):
    sin = host("sin", np.sin)
    with pytest.raises(TypeError, match="bwd must be a function, but is None"):
        sin.defvjp(lambda x: x, None)
    with pytest.raises(TypeError, match="jvp must be a function, but is 1"):
        sin.defjvp(1)


def test_copies_have_the_rules_that_were_there(hosts):
    sin, _ = hosts
    before = sin.specialize(stream="io")
    sin.defvjp(lambda x: (sin(x), None), lambda _, ct: (7 * ct,))
    after = sin.specialize(stream="io")
    assert float(jax.grad(before)(jnp.float32(0))) == 1
    assert float(jax.grad(after)(jnp.float32(0))) == 7


def test_rules_are_written_with_their_function(hosts):
    sin, _ = hosts
    copy = deserialize(serialize(sin))
    assert float(jax.grad(copy)(jnp.float32(0))) == 1

    @colocated_python(out_specs_fn=like)
    def outer(x):
        return jax.grad(sin)(x)

    assert float(outer(jnp.float32(0))) == 1


@colocated_python_class
class Scaled:
    def __init__(self, by):
        self.by = by

    def times(self, x):
        rendezvous.logs["times"].append(float(x))
        return x * self.by

    def factor(self, x):
        return x * 0 + self.by


for name in ("times", "factor"):
    setattr(Scaled, name, getattr(Scaled, name).specialize(out_specs_fn=like))


def test_methods_have_rules_per_object(meeting, mesh):
    two, three = Scaled(2.0), Scaled(3.0)
    two.times.defvjp(lambda x: (two.times(x), x), lambda x, ct: (two.factor(x) * ct,))
    for run in programs(jax.grad(two.times), mesh):
        assert float(run(jnp.float32(5))) == 2
        assert counted() == {"times": 1}
    with pytest.raises(ValueError, match=r"Scaled\.times has no derivative"):
        jax.grad(three.times)(jnp.float32(5))
    assert float(jax.grad(two.times.specialize(stream="io"))(jnp.float32(5))) == 2
    copy = deserialize(serialize(two.times))
    assert float(jax.grad(copy)(jnp.float32(5))) == 2


def test_methods_have_rules_per_class(meeting):
    class Plain:
        def times(self, x):
            return 2 * x

    cls = colocated_python_class(Plain)
    cls.times = cls.times.specialize(out_specs_fn=like)
    obj = cls()
    assert float(obj.times(jnp.float32(1))) == 2
    cls.times.defjvp(lambda primals, tangents: (2 * primals[0], 2 * tangents[0]))
    assert float(jax.grad(obj.times)(jnp.float32(1))) == 2
    assert float(jax.grad(cls.times.specialize(stream="io").__get__(obj))(jnp.float32(1))) == 2


def test_rules_that_name_their_object_do_not_keep_it(meeting):
    def made():
        obj = Scaled(2.0)
        obj.times.defvjp(lambda x: (obj.times(x), x), lambda x, ct: (obj.factor(x) * ct,))
        assert float(jax.grad(obj.times)(jnp.float32(5))) == 2
        return weakref.ref(obj)

    reference = made()
    gc.collect()
    assert reference() is None


# Without


def test_eager_gradients_put_each_call_on_the_stream_that_the_function_has_entered(meeting):
    log = colocated_python(lambda x: None, out_specs_fn=lambda x: None, mode="stream")

    def squared(w, name):
        with colocated.stream(name):
            log(w)
        return w**2

    seen = []
    with events.subscribe(seen.append):
        for name in ("left", "right"):
            jax.grad(squared)(jnp.float32(1), name)
        colocated.wait()
    assert [event.stream for event in seen if isinstance(event, events.CallQueued)] == ["left", "right"]


def test_a_call_without_a_rule_is_refused_by_name_and_line(meeting, mesh):
    double = host("double", lambda x: 2 * x)

    def loss(x, y):
        return jnp.sum(double(x) * y)  # here

    expected = (
        r"the colocated function double has no derivative, and is differentiated with respect to x at "
        r".*test_derivatives\.py:\d+ in loss: say what it is with double\.defvjp\(fwd, bwd\) or "
        r"double\.defjvp\(jvp\) before the program is traced, or pass what it only looks at as "
        r"jax\.lax\.stop_gradient\(x\)"
    )
    for transformed in (jax.grad(loss), lambda x, y: jax.jvp(loss, (x, y), (x, y)), jax.grad(jax.checkpoint(loss))):
        for run in programs(transformed, mesh):
            with pytest.raises(ValueError, match=expected):
                run(jnp.asarray(X), jnp.asarray(X))
    assert counted() == {}
    same(jax.grad(loss, argnums=1)(jnp.asarray(X), jnp.asarray(X)), 2 * X)


@pytest.mark.parametrize(
    ("transform", "expected"),  # of sum(x**4)
    [
        (jax.value_and_grad, (np.sum(X**4), 4 * X**3)),
        (lambda f: lambda x: jax.vjp(f, x)[1](jnp.float32(1)), (4 * X**3,)),
        (lambda f: lambda x: jax.jvp(f, (x,), (x,)), (np.sum(X**4), np.sum(4 * X**4))),
        (lambda f: lambda x: jax.linearize(f, x)[1](x), np.sum(4 * X**4)),
        (lambda f: jax.grad(lambda x: jnp.sum(jax.grad(f)(x))), 12 * X**2),
        (lambda f: jax.grad(jax.checkpoint(f)), 4 * X**3),
        (lambda f: jax.grad(jax.checkpoint(f, policy=jax.checkpoint_policies.everything_saveable)), 4 * X**3),
        (lambda f: jax.grad(lambda x: jnp.sum(jax.grad(jax.checkpoint(f))(x))), 12 * X**2),
        (
            lambda f: jax.grad(jax.checkpoint(jax.checkpoint(f), policy=jax.checkpoint_policies.dots_saveable)),
            4 * X**3,
        ),
    ],
)
def test_what_has_no_differentiable_result_is_made_once(meeting, mesh, transform, expected):
    rank = colocated_python(
        lambda x: rendezvous.logs["rank"].append(1) or np.argsort(x).astype("int32"),
        out_specs=jax.ShapeDtypeStruct((8,), "int32"),
        arrays="numpy",
    )

    def loss(x):
        log(x)
        y = x[rank(-x)] ** 2
        log(y)
        return jnp.sum(y**2)

    for run in programs(transform(loss), mesh):
        same(run(jnp.asarray(X)), expected)
        colocated.wait()
        seen = np.stack(rendezvous.logs["log"])
        np.testing.assert_array_equal(seen, [X, X[::-1] ** 2])
        assert counted() == {"log": 2, "rank": 1}


def test_what_is_not_differentiated_needs_no_rule(meeting, mesh):
    pick = host("pick", lambda k: k * 2)

    def loss(x, k):
        return jnp.sum(x * pick(k).astype(np.float32) * pick(jax.lax.stop_gradient(x)))

    for run in programs(jax.grad(loss), mesh):
        same(run(jnp.asarray(X), jnp.int32(3)), 12 * X)
        assert counted() == {"pick": 2}


def test_a_call_cannot_be_transposed(meeting, mesh):
    double = host("double", lambda x: 2 * x)
    expected = (
        "the colocated function double cannot be transposed, and is called with x, which depends on what is transposed"
    )
    for run in programs(lambda x: jax.linear_transpose(double, x)(x), mesh):
        with pytest.raises(ValueError, match=expected):
            run(jnp.asarray(X))
    for run in programs(lambda x: jax.linear_transpose(lambda y: y * double(jnp.float32(3)), x)(x), mesh):
        same(run(jnp.asarray(X)), (6 * X,))
        assert counted() == {"double": 1}

    sin = host("sin", np.sin)
    sin.defjvp(lambda primals, tangents: (sin(*primals), double(tangents[0])))
    for run in programs(lambda x: jax.jvp(sin, (x,), (x,))[1], mesh):
        same(run(jnp.asarray(X)), 2 * X)
    for run in programs(jax.grad(lambda x: jnp.sum(sin(x))), mesh):
        with pytest.raises(ValueError, match=expected):
            run(jnp.asarray(X))


# In functions of the user's with rules


def test_calls_in_the_user_s_own_rules(hosts, mesh):
    sin, cos = hosts

    @jax.custom_vjp
    def f(x):
        log(x)
        return sin(x)

    def fwd(x):
        log(x)
        return sin(x), cos(x)

    f.defvjp(fwd, lambda kept, ct: (log(ct), (kept * ct,))[1])

    @jax.custom_jvp
    def g(x):
        return cos(x)

    g.defjvp(lambda primals, tangents: (g(*primals), -sin(*primals) * tangents[0]))
    for run in programs(jax.grad(lambda x: jnp.sum(f(x))), mesh):
        same(run(jnp.asarray(X)), np.cos(X))
        assert counted() == {"log": 2, "sin": 1, "cos": 1}
    for run in programs(lambda x: jax.jvp(g, (x,), (x,)), mesh):
        same(run(jnp.asarray(X)), (np.cos(X), -np.sin(X) * X))
        assert counted() == {"sin": 1, "cos": 1}
    for run in programs(f, mesh):
        same(run(jnp.asarray(X)), np.sin(X))
        assert counted() == {"log": 1, "sin": 1}


# Under `jax.checkpoint`


offload = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
POLICIES = {
    "none": None,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "offload": offload,
    "names": jax.checkpoint_policies.save_only_these_names("a"),
}


def with_calls_by(sin, cos, pure, exp):
    def f(x):
        fixed = jax.lax.stop_gradient(x)
        y = jnp.sin(sin(x) * cos(fixed))
        return jnp.sum(jnp.cos(y * pure(fixed)) * jnp.sin(x * exp(fixed)))

    return f


@pytest.fixture(scope="module")
def slope_by_device():
    return np.asarray(jax.jit(jax.grad(with_calls_by(jnp.sin, jnp.cos, jnp.tanh, jnp.exp)))(X))


@pytest.mark.parametrize(("policy", "depth"), [*((policy, 1) for policy in POLICIES), ("nothing", 3), ("offload", 2)])
def test_results_of_calls_are_saved_whatever_the_policy(hosts, mesh, slope_by_device, policy, depth):
    sin, cos = hosts
    pure = host("pure", np.tanh, pure=True)
    pure.defjvp(lambda primals, tangents: (pure(*primals), (1 - pure(*primals) ** 2) * tangents[0]))
    without_rule = host("without_rule", np.exp, pure=True)

    f = with_calls_by(sin, cos, pure, without_rule)
    for _ in range(depth):
        f = jax.checkpoint(f, policy=POLICIES[policy])
    for run in programs(jax.grad(f), mesh):
        same(run(jnp.asarray(X)), slope_by_device)
        assert counted() == {"sin": 1, "cos": 2, "pure": 1, "without_rule": 1}


def test_what_calls_returned_is_not_recomputed_from_its_arguments(meeting, mesh):
    """The forward and the backward half must see the same numbers, whatever the call says the next time."""

    def fun(x):
        rendezvous.logs["turn"].append(1)
        return x * 0 + len(rendezvous.logs["turn"])

    turn = colocated_python(fun, out_specs_fn=like)

    @jax.checkpoint
    def loss(x):
        return jnp.sum(jnp.sin(x * turn(jax.lax.stop_gradient(x))))

    for run in programs(jax.grad(loss), mesh):
        same(run(jnp.asarray(X)), np.cos(X))
        assert counted() == {"turn": 1}


# In loops and branches


def calls_of(jaxpr, path=()):
    """The calls in a jaxpr in their order, with the loops and branches around each."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "colocated_call":
            yield eqn.params["callee"].name, path
        inside = path + ((eqn.primitive.name,) if eqn.primitive.name in ("scan", "while", "cond") else ())
        for inner in jax.tree.leaves(
            [*eqn.params.values()], is_leaf=lambda leaf: hasattr(leaf, "eqns") or hasattr(leaf, "jaxpr")
        ):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from calls_of(getattr(inner, "jaxpr", inner), inside)


def training(log_of, sin):
    """A loop with calls that depend on nothing, on what does not change, and on what does, at any depth."""

    def body(c, x):
        log_of(jnp.float32(0))
        log_of(scale)
        jax.jit(lambda: log_of(scale + 1))()
        jax.lax.cond(True, lambda: log_of(scale + 2), lambda: None)
        jax.lax.scan(lambda _, __: (log_of(scale + 3), None), None, None, 2)
        jax.lax.while_loop(lambda i: i < 1, lambda i: (log_of(scale + 4), i + 1)[1], 0)
        jax.checkpoint(lambda: log_of(scale + 5))()
        log_of(c)
        return c * sin(x), jnp.exp(scale) * c

    scale = jnp.float32(10)

    def loss(xs):
        c, ys = jax.lax.scan(body, jnp.float32(1), xs)
        return c + jnp.sum(ys)

    return loss


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint, jax.jit, lambda f: jax.checkpoint(jax.checkpoint(f))])
def test_calls_stay_in_a_loop_that_is_differentiated(hosts, wrap):
    sin, _ = hosts
    forward = list(calls_of(jax.make_jaxpr(training(log, sin))(X).jaxpr))
    jaxpr = jax.make_jaxpr(jax.grad(wrap(training(log, sin))))(X).jaxpr
    found = [call for call in calls_of(jaxpr) if call[0] != "cos"]
    assert found == forward
    assert {path[0] for _, path in found} == {"scan"}


@pytest.fixture(scope="module")
def slope():
    """The gradient of a loop without calls."""
    return np.asarray(jax.jit(jax.grad(training(nothing, jnp.sin)))(X))


@pytest.mark.parametrize(("is_gradient", "wrap"), [(True, lambda f: f), (True, jax.checkpoint), (False, lambda f: f)])
def test_loops_that_are_differentiated_make_the_calls_of_each_turn(hosts, mesh, slope, is_gradient, wrap):
    sin, cos = hosts
    sin.defjvp(lambda primals, tangents: (sin(*primals), cos(*primals) * tangents[0]))
    f = wrap(training(log, sin))
    carried = np.cumprod([1, *np.sin(X[:-1])])
    with mesh:
        result = pjit(jax.grad(f) if is_gradient else lambda x: jax.linearize(f, x)[1](x))(X)
        same(result, slope if is_gradient else np.dot(slope, X))
        colocated.wait()
        expected = np.concatenate([[0, 10, 11, 12, 13, 13, 14, 15, c] for c in carried])
        same(np.stack(rendezvous.logs["log"]), expected)
        assert counted() == {"log": 9 * len(X), "sin": len(X), "cos": len(X)}


def test_a_while_loop_is_not_run_twice(meeting, mesh):
    def steps(x):
        def body(carry):
            i, x = carry
            log(i)
            return i + 1, jnp.sin(x)

        return jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, x))[1]

    for transform in (
        lambda f: lambda x: jax.linearize(f, x)[1](x),
        lambda f: jax.grad(f),
        lambda f: jax.grad(jax.checkpoint(f)),
    ):
        with pytest.raises(
            ValueError,
            match=r"the colocated function log is called at .*:\d+ in .*body.* in a while_loop that is linearized, or "
            r"differentiated in reverse mode.* use jax\.lax\.scan",
        ):
            jax.make_jaxpr(transform(steps))(jnp.float32(1))
    with mesh:
        primal, tangent = pjit(lambda x: jax.jvp(steps, (x,), (x,)))(jnp.float32(1))
    same((primal, tangent), jax.jvp(lambda x: jnp.sin(jnp.sin(jnp.sin(x))), (1.0,), (1.0,)))
    assert counted() == {"log": 3}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint])
def test_a_while_loop_beside_what_is_differentiated_runs_once(meeting, mesh, wrap):
    @wrap
    def loss(x):
        _, total = jax.lax.while_loop(
            lambda carry: carry[0] < 3,
            lambda carry: (log(carry[1]), (carry[0] + 1, carry[1] * 2))[1],
            (0, jax.lax.stop_gradient(x)),
        )
        return x**2 * jnp.sin(total)

    with mesh:
        same(pjit(jax.grad(loss))(jnp.float32(3)), 6 * np.sin(24.0))
    assert counted() == {"log": 3}


# Any of it


steps = st.lists(st.sampled_from(["sin", "cos", "device", "log", "rank"]), min_size=1, max_size=5)
nests = st.lists(st.sampled_from(["jit", "nothing", "everything", "none", "pjit"]), max_size=3)


@sees("a call with a derivative", "an effect", "a nested function", "in a program", "not in a program")
@examples(7, in_soak=100)
@hypothesis.given(
    steps=steps,
    nests=nests,
    transform=st.sampled_from(["grad", "value_and_grad", "vjp", "jacrev"]),
    in_program=st.booleans(),
)
def test_derivatives_are_those_without_hosts_and_calls_are_made_once(mesh, steps, nests, transform, in_program):
    in_program = in_program or "jit" in nests  # of which XLA runs the whole, where no program takes it apart
    saw("a call with a derivative", when={"sin", "cos"} & {*steps})
    saw("an effect", when="log" in steps)
    saw("a nested function", when=nests)
    saw("in a program" if in_program else "not in a program")
    rendezvous.clear()
    on_host = host("sin", np.sin)
    other = host("cos", np.cos)
    on_host.defvjp(lambda x: (on_host(x), x), lambda x, ct: (jnp.cos(x) * ct,))
    other.defjvp(lambda primals, tangents: (other(*primals), -jnp.sin(*primals) * tangents[0]))
    rank = colocated_python(
        lambda x: rendezvous.logs["calls"].append("rank") or np.argsort(x).astype("int32"),
        out_specs=jax.ShapeDtypeStruct((8,), "int32"),
        arrays="numpy",
    )

    def loss(sin, cos, log, rank):
        def f(x):
            for step in steps:
                if step == "log":
                    log(x)
                elif step == "rank":
                    x = x[rank(x)]
                else:
                    x = {"sin": sin, "cos": cos, "device": lambda x: jnp.sin(x) * 2}[step](x)
            return jnp.sum(x * x)

        for nest in nests:
            checkpoint = functools.partial(jax.checkpoint, policy=POLICIES.get(nest))
            f = {"jit": jax.jit, "pjit": pjit}.get(nest, checkpoint)(f)
        if transform == "vjp":
            return lambda x: jax.vjp(f, x)[1](jnp.float32(1))
        return getattr(jax, transform)(f)

    expected = jax.jit(loss(jnp.sin, jnp.cos, nothing, jnp.argsort))(X)
    with mesh if in_program or "pjit" in nests else contextlib.nullcontext():
        f = loss(on_host, other, log, rank)
        same((pjit(f) if in_program else f)(jnp.asarray(X)), expected)
        colocated.wait(timeout=30)
    assert rendezvous.logs["calls"] == [step for step in steps if step != "device"]


def test_rules_are_in_pickles_of_specialized_copies(hosts):
    sin, _ = hosts
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(sin)  # only `serialize` knows how to write functions
    assert float(jax.grad(deserialize(serialize({"f": [sin.specialize(pure=False)]}))["f"][0])(jnp.float32(0))) == 1
