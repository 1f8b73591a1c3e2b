"""Colocated calls under transformations: the table in the documents, what is refused in full, and `jax.disable_jit`,
`checkify`, stages and `jax.export` in detail."""

import gc
import re
import threading

import jax
import jax.export
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import NamedSharding

import partjit
from partjit import P, colocated, pjit, with_sharding_constraint
from partjit.colocated import PendingArray, colocated_python, colocated_python_class
from tests.colocated import rendezvous
from tests.plan.transformations_table import TABLE, part, script

X = np.arange(8.0, dtype=np.float32)
like = {"out_specs_fn": lambda *xs: xs[0]}
nothing = {"out_specs_fn": lambda *xs: None}


@pytest.fixture
def double():
    return colocated_python(lambda x: 2 * x, **like)


def noted(name, **options):
    """A colocated function that notes its calls and returns its argument."""

    def note(x):
        rendezvous.logs[name].append(x)
        return x

    return colocated_python(note, **{**like, **options})


# The table


def test_the_table_in_the_document_has_these_parts():
    assert re.findall(r"\| (.*?) \|.*\n\|---", TABLE) == [*script.SECTIONS]


@pytest.mark.parametrize("title", script.SECTIONS)
def test_the_table_says_what_happens(title):
    """One kind of call for one row in three; `make system` computes all of the table."""
    header, _, *lines = part(title)
    kinds = [column.strip() for column in header.split("|")[2:-1]]
    assert kinds == [*script.KINDS]
    with script.mesh():
        rows = [*enumerate(zip(script.SECTIONS[title], lines, strict=True))]
        for k, (row, line) in rows[::3]:
            name, *written = (column.strip() for column in line.split("|")[1:-1])
            kind = k // 3 % len(kinds)
            assert name == row.name
            assert script.FAULT not in line
            assert script.cell(row, kinds[kind]) == written[kind], (name, kinds[kind])


# Which calls are refused, by the rules that the document states; the script that writes the table does not know them.
IN_A_JIT = ("`jax.jit` outermost", "`scan` around a program")
DIFFERENTIATED = re.compile(
    r"`(grad|value_and_grad|jvp|vjp|linearize|jacfwd|jacrev|hessian)`(?!.*(custom|stop_gradient))"
)


def is_refused(row, kind):
    """Whether a kind of call cannot be made there."""
    if row == "`jax.export`":
        return True  # its bytes have no place for a Python function
    if row in IN_A_JIT:
        return kind != "call without results"  # only a pjit can be decomposed at its calls and wait for their results
    if row == "`vmap`":
        return kind == "pure call"  # nothing says whether one call or several are meant, and no order decides
    if row == "`vmap` of a `cond` with a batched predicate":
        return kind != "pure call"  # both branches run, and an effect would happen in both
    return kind in ("pure call", "call with an effect") and DIFFERENTIATED.match(row) is not None  # they have no rule


@pytest.mark.parametrize("title", script.SECTIONS)
def test_calls_are_refused_exactly_where_the_rules_say(title):
    header, _, *rows = TABLE[TABLE.index(f"| {title} |") :].partition("\n\n")[0].splitlines()
    _, *named = [cell.strip() for cell in header.strip("|").split(" | ")]
    for line in rows:
        row, *cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        for kind, cell in zip(named, cells, strict=True):
            assert cell.startswith("refused") == is_refused(row, kind), (row, kind, cell)


def test_the_script_sees_what_is_wrong(mesh):
    def outcome(run, expected=1):
        row = script.Row("", {"": run}, expected)
        with mesh:
            return script.outcome(row, "", "call with an effect", script.X * script.X)

    assert outcome(lambda call, jit: jit(call)(script.X)) == "1 call"
    assert outcome(lambda call, jit: jit(call)(2 * script.X)) == "FAULT: wrong values"
    assert outcome(lambda call, jit: jit(lambda x: call(x)[:2])(script.X)) == "FAULT: wrong values"
    assert outcome(lambda call, jit: jit(call)(script.X), expected=2) == "FAULT: 1 call instead of 2"
    assert outcome(lambda call, jit: jit(lambda x: call(x) + x.foo)(script.X)).startswith("FAULT: AttributeError")
    assert outcome(lambda call, jit: [jit(call)(script.X), jax.jit(call)(script.X)]) == "FAULT: refused after 1 call"


# jax.disable_jit


def test_under_disable_jit_calls_get_arrays_on_the_mesh_and_give_some(mesh, meeting):
    def body(x):
        made = load()
        assert isinstance(x, jax.Array)
        y = note(x + 1)
        z = note(jnp.ones(8))  # which are nowhere yet
        values.append(not isinstance(x, jax.core.Tracer) and not isinstance(y, PendingArray))
        return y + z + made

    values = []
    note = noted("seen")
    load = colocated_python(lambda: jnp.arange(8.0), out_specs=jax.ShapeDtypeStruct((8,), np.float32))
    f = pjit(body, in_axis_resources=P("x"), out_axis_resources=P("y"))
    with mesh:
        with jax.disable_jit():
            y = f(X)
        np.testing.assert_array_equal(y, f(X))
    assert values == [True, False]
    np.testing.assert_array_equal(y, X + 1 + 1 + X)
    assert y.sharding == NamedSharding(mesh, P("y"))
    seen = rendezvous.logs["seen"]
    assert [s.sharding.is_equivalent_to(NamedSharding(mesh, p), 1) for s, p in zip(seen, [P("x"), P()], strict=False)]
    assert all(len(s.sharding.device_set) == 8 for s in seen)


@pytest.mark.parametrize("axis_types", [None, (jax.sharding.AxisType.Explicit,) * 2])
def test_under_disable_jit_the_mesh_is_that_of_the_program_wherever_it_comes_from(axis_types, meeting):
    mesh = partjit.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"), axis_types)
    spec = NamedSharding(mesh, P("x"))
    load = colocated_python(lambda: jnp.ones(8), out_specs=jax.ShapeDtypeStruct((8,), np.float32, sharding=spec))
    note = noted("seen")

    def body(x):
        return with_sharding_constraint(note(x) + load(), P("y"))

    f = pjit(body, in_shardings=spec, out_shardings=spec)
    g = pjit(body, in_shardings=spec)
    with jax.disable_jit():
        results = f(X), g(X)
    for result, compiled in zip(results, (f(X), g(X)), strict=True):
        np.testing.assert_array_equal(result, X + 1)
        assert result.sharding == compiled.sharding
    assert len(rendezvous.logs["seen"]) == 4


@pytest.mark.parametrize("where", ["compiled ahead of time", "in a jaxpr", "linearized"])
def test_under_disable_jit_a_program_that_is_one_already_runs_as_such(double, where):
    """Its fragment has three results, as many as what tells C++ how to dispatch it."""
    triple = pjit(lambda x: (double(x) + 1, x - 1, double(x) - 2))
    if where == "in a jaxpr":
        run = jax.extend.core.jaxpr_as_fun(jax.make_jaxpr(triple)(X))
    elif where == "linearized":
        double.defjvp(lambda primals, tangents: (double(*primals), double(*tangents)))
        run = jax.linearize(triple, X)[1]
    else:
        run = triple.lower(X).compile()
    shift = (0, 0, 0) if where == "linearized" else (1, -1, -2)
    with jax.disable_jit():
        results = run(X)
    for result, factor, added in zip(results, (2, 1, 2), shift, strict=True):
        np.testing.assert_array_equal(result, factor * X + added)


def test_under_disable_jit_without_a_mesh_calls_are_where_the_arguments_are(double):
    load = colocated_python(lambda: jnp.ones(8), out_specs=jax.ShapeDtypeStruct((8,), np.float32))
    f = pjit(lambda x: double(x) + load())
    over_all = NamedSharding(jax.sharding.Mesh(jax.devices(), "x"), P("x"))
    with jax.disable_jit():
        anywhere, there = f(X), f(jax.device_put(X, jax.devices()[3]))
        everywhere = f(jax.device_put(X, over_all))
    assert not anywhere.committed
    assert there.devices() == {jax.devices()[3]}
    assert everywhere.devices() == over_all.device_set
    for result in (anywhere, there, everywhere):
        np.testing.assert_array_equal(result, 2 * X + 1)


def test_under_disable_jit_calls_keep_the_order_of_their_streams(mesh, meeting):
    def note(x):
        rendezvous.logs["order"].append(int(x))

    first = colocated_python(lambda x: rendezvous.hear("go") or note(x), stream="one", mode="stream", **nothing)
    then = colocated_python(note, stream="one", **nothing)
    f = pjit(lambda x: (then(x), then(x + 1), x)[-1])
    first(jnp.int32(0))
    with jax.disable_jit():
        threading.Timer(0.2, rendezvous.say, ["go"]).start()
        f(np.int32(1))
        assert rendezvous.logs["order"] == [0, 1, 2]  # nobody waits: they ran in their caller
        with colocated.stream("one"):
            f(np.int32(3))
    assert rendezvous.logs["order"] == [0, 1, 2, 3, 4]


def test_under_disable_jit_calls_made_ahead_come_first_and_none_is_lost(mesh, meeting):
    @colocated_python_class
    class Counter:
        def __init__(self):
            self.count = 0

        def next(self):
            self.count += 1
            return jnp.asarray(self.count, jnp.int32)

    counter = Counter()
    spec = jax.ShapeDtypeStruct((), np.int32)
    following = counter.next.specialize(out_specs=spec, run_ahead=2, stream="ahead")
    f = pjit(lambda x: following() + x)
    with mesh:
        assert int(f(np.int32(0))) == 1  # 2 and 3 are made as well
        with jax.disable_jit():
            assert [int(f(np.int32(0))) for _ in range(4)] == [2, 3, 4, 5]
        assert [int(f(np.int32(0))) for _ in range(2)] == [6, 7]


def test_under_disable_jit_calls_in_loops_branches_and_nested_programs_run_inline(mesh, meeting):
    note = noted("seen")

    def body(x):
        c, _ = jax.lax.scan(lambda c, y: (note(c) + y, None), jnp.float32(0), x)
        c = jax.lax.cond(c > 3, note, lambda c: c, c)
        c = jax.lax.while_loop(lambda c: note(c) < 100, lambda c: 2 * note(c), c)
        return pjit(jax.jit(lambda c: jax.checkpoint(note)(c) + 1))(c)

    with mesh, jax.disable_jit():
        assert float(pjit(body)(X)) == 28 * 4 + 1
    assert [float(x) for x in rendezvous.logs["seen"]] == [0, 0, 1, 3, 6, 10, 15, 21, 28, 28, 28, 56, 56, 112, 112]


def test_under_disable_jit_a_function_keeps_what_it_captured_over_calls(mesh):
    seen = []

    @colocated_python(out_specs=jax.ShapeDtypeStruct((), np.int32))
    def count(x):
        seen.append(x)
        return jnp.asarray(len(seen), jnp.int32)

    f = pjit(lambda x: count(x))
    with mesh, jax.disable_jit():
        assert [int(f(X)) for _ in range(3)] == [1, 2, 3]
    assert seen == []


def test_under_disable_jit_what_a_call_calls_is_outside_of_the_program(mesh):
    inner = colocated_python(lambda x: x + 1, **like)

    @colocated_python(**like)
    def outer(x):
        assert len(inner(np.ones(8, np.float32)).devices()) == 1
        return inner(x)

    with mesh, jax.disable_jit():
        np.testing.assert_array_equal(pjit(outer)(X), X + 1)
        assert len(inner(X).devices()) == 1  # as outside of programs ever


def test_under_disable_jit_per_shard_calls_get_their_shards(mesh, meeting):
    def look(shard):
        rendezvous.logs["shards"].append(shard.data.shape)
        return shard.data + 1

    out = jax.ShapeDtypeStruct((8,), np.float32, sharding=NamedSharding(mesh, P("x")))
    per_shard = colocated_python(look, layout="per_shard", in_specs=((out,), {}), out_specs=out)
    with mesh, jax.disable_jit():
        y = pjit(lambda x: per_shard(x * 2))(X)
    np.testing.assert_array_equal(y, 2 * X + 1)
    assert rendezvous.logs["shards"] == [(2,)] * 8


def test_under_disable_jit_on_accelerators_the_function_runs_on_the_hosts(accelerators, meeting):
    def look(x):
        rendezvous.logs["ids"].append(sorted(d.id for d in x.devices()))
        return x + 1

    mesh = partjit.Mesh(accelerators, "x")
    f = pjit(lambda x: colocated_python(look, **like)(2 * x) + x, in_axis_resources=P("x"), out_axis_resources=P("x"))
    with mesh, jax.disable_jit():
        y = f(X)
    assert rendezvous.logs["ids"] == [[0, 1, 2, 3]]
    assert y.sharding == NamedSharding(mesh, P("x"))
    np.testing.assert_array_equal(y, 3 * X + 1)


def test_under_disable_jit_a_failure_names_the_users_line(mesh):
    @colocated_python(**like)
    def fail(x):
        raise FileNotFoundError("data.npy")

    with mesh, jax.disable_jit(), pytest.raises(FileNotFoundError) as caught:
        pjit(lambda x: fail(x))(X)  # here
    assert "test_transformations.py" in caught.value.__notes__[0]
    with mesh, jax.disable_jit():  # and the next one is a program again
        np.testing.assert_array_equal(pjit(lambda x: x + 1)(X), X + 1)


def test_under_disable_jit_specs_are_checked_and_static_and_keyword_arguments_are_what_they_are(mesh, double):
    f = pjit(lambda x, n, *, k: double(x) * n + k, static_argnums=1)
    with mesh, jax.disable_jit():
        np.testing.assert_array_equal(f(X, 3, k=1.0), 6 * X + 1)
        with pytest.raises(partjit.ShardingError, match=r"arguments, x \(.*divisible by 4"):
            pjit(lambda x: x, in_axis_resources=P("x"))(X[:3])
        with pytest.raises(partjit.ShardingError, match="result"):
            pjit(lambda x: x[:3], out_axis_resources=P("x"))(X)
        with pytest.raises(ValueError, match="it is not known what it returns"):
            pjit(lambda x: colocated_python(lambda x: x)(x))(X)
        with pytest.raises(TypeError, match=r"<lambda>\(\) takes 1 positional argument but 2 were given"):
            pjit(lambda x: colocated_python(lambda x: x)(x, x))(X)


@pytest.mark.parametrize("annotation", [None, "None"])
def test_a_function_annotated_to_return_nothing_needs_no_specs_in_a_program(mesh, meeting, annotation):
    def note(x):
        rendezvous.logs["noted"].append(float(x))

    note.__annotations__["return"] = annotation
    note = colocated_python(note)
    f = pjit(lambda x: (note(x.sum()), x + 1)[1])
    with mesh:
        for call in (f, jax.jit(f), jax.grad(lambda x: f(x).sum()), jax.jit(lambda x: (note(x.sum()), x)[1])):
            jax.block_until_ready(call(X))
            jax.effects_barrier()
            colocated.wait(timeout=60)
        with jax.disable_jit():
            f(X)
        colocated.wait(timeout=60)
    assert rendezvous.logs["noted"] == [28] * 5


def test_what_a_function_annotated_to_return_nothing_returns_is_an_error(mesh):
    def note(x) -> None:
        return x

    note = colocated_python(note)
    with mesh:
        pjit(lambda x: (note(x.sum()), x + 1)[1])(X)
    with pytest.raises(ValueError, match=r"note returned what its output specs do not say.*'-> None'"):
        colocated.wait(timeout=60)


def test_under_disable_jit_other_transformations_work_as_ever(mesh, double):
    ruled = colocated_python(lambda x: x * x, **like)
    ruled.defvjp(lambda x: (ruled(x), x), lambda x, ct: (2 * x * ct,))
    f = pjit(lambda x: (ruled(x) * double(jax.lax.stop_gradient(x))).sum(), in_axis_resources=P("x"))
    with mesh, jax.disable_jit():
        np.testing.assert_array_equal(jax.grad(f)(X), 4 * X * X)
        np.testing.assert_array_equal(jax.vmap(pjit(lambda x: double(x) + 1))(X), 2 * X + 1)
        np.testing.assert_array_equal(jax.jit(pjit(double))(X), 2 * X)


def test_functions_that_are_dropped_leave_nothing_for_disable_jit_behind(mesh, new_garbage):
    from partjit import eager

    gc.collect()
    before = len(eager._made)
    for _ in range(3):
        pjit(lambda x: x)
    fun = X.sum
    assert pjit(fun) is not pjit(fun)
    del fun
    gc.collect()
    assert len(eager._made) == before


# checkify


def checked(call):
    def fun(x):
        checkify.check(x[0] < 5, "too large: {x}", x=x[0])
        y = call(x)
        checkify.check(y[0] > 0, "too small: {y}", y=y[0])
        return y

    return fun


@pytest.mark.parametrize("wrap", [lambda f: checkify.checkify(pjit(f)), lambda f: pjit(checkify.checkify(f))])
def test_checks_before_and_after_a_call_raise_when_thrown(mesh, meeting, wrap):
    note = noted("seen")
    f = wrap(checked(note))
    with mesh:
        error, y = f(X + 1)
        error.throw()
        np.testing.assert_array_equal(y, X + 1)
        with pytest.raises(checkify.JaxRuntimeError, match=r"too large: 9\.0"):
            f(X + 9)[0].throw()
        with pytest.raises(checkify.JaxRuntimeError, match=r"too small: -1\.0"):
            f(X - 1)[0].throw()
    assert len(rendezvous.logs["seen"]) == 3  # a check that fails does not stop the program


def test_errors_of_device_code_around_calls_are_found(mesh, double):
    f = checkify.checkify(pjit(lambda x, i: double(jnp.log(x))[i]), errors=checkify.all_checks)
    with mesh:
        assert f(X + 1, 2)[0].get() is None
        assert "nan generated by primitive: log" in f(X - 1, 2)[0].get()
        assert "out-of-bounds indexing" in f(X + 1, 20)[0].get()


# Stages


def test_nothing_runs_before_it_is_called(mesh, meeting):
    f = pjit(lambda x: noted("seen")(x) + 1, in_axis_resources=P("x"), out_axis_resources=P("y"))
    with mesh:
        assert "colocated_call[" in str(jax.make_jaxpr(f)(X))
        assert (jax.eval_shape(f, X).shape, jax.eval_shape(f, X).dtype) == ((8,), np.float32)
        assert f.eval_shape(X).sharding == NamedSharding(mesh, P("y"))
        jaxpr = jax.make_jaxpr(f)(X)
        compiled = f.lower(X).compile()
        f.plan(X)
        assert rendezvous.logs["seen"] == []
        np.testing.assert_array_equal(compiled(X), X + 1)
        assert len(rendezvous.logs["seen"]) == 1
        (y,) = pjit(jax.extend.core.jaxpr_as_fun(jaxpr))(X)
    np.testing.assert_array_equal(y, X + 1)
    assert len(rendezvous.logs["seen"]) == 2


@pytest.mark.parametrize("place", ["first", "last", "alone", "twice", "between"])
def test_a_compiled_program_makes_its_calls_wherever_they_stand(mesh, meeting, place):
    note = noted("seen")
    fun, expected, count = {
        "first": (lambda x: note(x) + 1, X + 1, 1),
        "last": (lambda x: note(x + 1), X + 1, 1),
        "alone": (note, X, 1),
        "twice": (lambda x: note(note(x) + 1), X + 1, 2),
        "between": (lambda x: note(2 * x) + 1, 2 * X + 1, 1),
    }[place]
    with mesh:
        compiled = pjit(fun, in_axis_resources=P("x"), out_axis_resources=P("x")).lower(X).compile()
    for _ in range(2):
        y = compiled(X)
        np.testing.assert_array_equal(y, expected)
        assert y.sharding == NamedSharding(mesh, P("x"))
    assert len(rendezvous.logs["seen"]) == 2 * count


# What is refused


def jitted_twice(f):
    return jax.jit(jax.jit(f))


def refused(text):
    return pytest.raises(ValueError, match=text.replace("$", r"(\n|$)"))  # jax adds notes


INSTEAD = {
    "jax.jit": [jax.jit, lambda f: jax.jit(f).lower, lambda f: jax.grad(lambda x: jax.jit(f)(x).sum()), jitted_twice],
    "jax.pmap": [lambda f: lambda x: jax.pmap(f)(x)],
    "eqx.filter_jit": [
        lambda f: pytest.importorskip("equinox").filter_jit(f),
        lambda f: pytest.importorskip("equinox").filter_jit(f).lower,
    ],
    "nnx.jit": [lambda f: pytest.importorskip("flax.nnx").jit(f)],
}
AROUND = {
    "jax.lax.scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2),
    "jax.lax.map": lambda f: lambda x: jax.lax.map(f, x),
    "jax.lax.fori_loop": lambda f: lambda x: jax.lax.fori_loop(0, 2, lambda _, c: f(c), x),
    "jax.lax.while_loop": lambda f: lambda x: jax.lax.while_loop(lambda c: c.sum() < 9, f, x),
    "jax.lax.cond": lambda f: lambda x: jax.lax.cond(x.sum() < 9, f, lambda x: x, x),
    "jax.scipy.sparse.linalg.cg": lambda f: lambda x: jax.scipy.sparse.linalg.cg(f, x),
}


@pytest.mark.parametrize("wrapper", [*INSTEAD, *AROUND])
@pytest.mark.parametrize("in_program", [False, True])
def test_a_call_under_another_wrapper_is_refused_with_its_name_and_both_lines(mesh, double, wrapper, in_program):
    def f(x):
        return double(jax.lax.stop_gradient(x)) + x

    inner = pjit(f) if in_program else f
    refusal = (
        f"<lambda> is called in a program of {wrapper}, which cannot wait for what a call returns unless the function "
    )
    refusal += "promises uses_jax=False"
    remedy = f"wrap the outermost function with partjit.pjit instead of {wrapper}"
    if wrapper in AROUND:
        remedy = f"call {wrapper} in a function that is wrapped with partjit.pjit"
    for wrap in INSTEAD.get(wrapper) or [AROUND[wrapper]]:
        with mesh, refused(f"{refusal}: {remedy}. The call of <lambda> is at ") as caught:
            wrap(inner)(X)
        message = str(caught.value)
        assert f"{__file__}:{f.__code__.co_firstlineno + 1} in f, the program is called at {__file__}:" in message


def test_a_call_is_refused_under_what_was_wrapped_elsewhere(mesh, double):
    step = jax.jit(double)
    with mesh, refused("in a program of jax.jit, which cannot wait") as caught:
        step(X)
    here = test_a_call_is_refused_under_what_was_wrapped_elsewhere.__code__.co_firstlineno + 3
    where = f"{__file__}:{here} in test_a_call_is_refused_under_what_was_wrapped_elsewhere"
    assert str(caught.value).splitlines()[0].endswith(f"is at {where}, the program is called at {where}")


SAY_RULES = (
    r"say what it is with <lambda>\.defvjp\(fwd, bwd\) or <lambda>\.defjvp\(jvp\) before the program is "
    r"traced, or pass what it only looks at as jax\.lax\.stop_gradient\(x\)$"
)


def test_what_cannot_be_differentiated_or_batched_is_refused_and_says_what_to_do(mesh, double):
    pure = colocated_python(lambda x: 2 * x, pure=True, **like)
    with mesh:
        with refused(
            "^the colocated function <lambda> has no derivative, and is differentiated with respect to x: " + SAY_RULES
        ):
            jax.grad(lambda x: pjit(double)(x).sum())(X)
        with refused(
            r"^the colocated function <lambda> has no derivative, and is differentiated with respect to x at "
            r".*test_transformations\.py:\d+ in .*: " + SAY_RULES
        ):
            pjit(lambda x: jax.jvp(double, (x,), (x,)))(X)
        three = colocated_python(lambda x, y, n: x + y + n, out_specs_fn=lambda x, y, n: x)
        with refused("is differentiated with respect to y at "):  # neither a constant nor an integer
            jax.grad(lambda y, n: pjit(lambda y, n: three(X, y, n))(y, n).sum(), allow_int=True)(X, np.arange(8))
        with refused("is differentiated with respect to y at "):
            jax.grad(lambda y, n: pjit(lambda y, n: three(X, y, n))(y, n).sum(), argnums=(0, 1), allow_int=True)(
                X, np.arange(8)
            )
        with refused(
            "^the colocated function <lambda> cannot be transposed, and is called with x, which depends on what is "
            r"transposed: a call is no linear operation, .*\. Compute with device code what is transposed, or say with "
            "defvjp how to go backward$"
        ):
            jax.linear_transpose(pjit(double), X)(X)
        with refused(
            "^the colocated function <lambda> is pure and called under jax.vmap with a batched x and nothing says how: "
            "give it vmap_method=, one of 'sequential', 'expand_dims', 'broadcast_all', or call it outside of what is "
            "batched$"
        ):
            jax.vmap(pjit(pure))(X)
        with refused(
            "^the colocated function <lambda> is called in a cond whose predicate is batched by jax.vmap. The branches "
            "would be run for all examples, and the call be made where it should not: give the predicate to the "
            "function and let it decide, decide before jax.vmap, or say pure=True if the call does nothing but compute "
            "its results$"
        ):
            jax.vmap(pjit(lambda x: jax.lax.cond(x > 1, double, lambda x: x, x)))(X)


def test_a_program_with_calls_cannot_be_exported(mesh, double):
    @colocated_python(**nothing)
    def log(x):
        pass

    def step(x):
        log(x)
        return double(x)

    with mesh:
        with refused(
            "^step cannot be exported or lowered for another platform: it calls the colocated functions <lambda>, "
            r"log, and there is no place for a Python function in an exported program\. Export the functions "
            "between the calls, each by itself: a pjit without calls can be exported$"
        ):
            jax.export.export(pjit(step))(X)
        with refused(
            "^the colocated function log cannot be part of an exported program, which cannot contain a "
            "Python function: export the functions between the calls, each by itself$"
        ):
            jax.export.export(jax.jit(pjit(step)))(X)
        with refused("cannot be exported"):
            pjit(step).trace(X).lower(lowering_platforms=("tpu",))


def test_programs_without_calls_are_exported_and_run_around_calls(mesh, double):
    half = pjit(lambda x: jnp.sin(x) / 2, in_axis_resources=P("x"), out_axis_resources=P("y"))
    with mesh:
        exported = jax.export.export(half)(X)
        assert exported.nr_devices == 8
        y = pjit(lambda x: exported.call(double(exported.call(x))))(X)
        np.testing.assert_allclose(y, np.sin(np.sin(X)) / 2, rtol=1e-6)
        primal = jax.device_put(X, NamedSharding(mesh, P("x")))
        cotangent = jax.device_put(X, NamedSharding(mesh, P("y")))
        (grad,) = jax.jit(exported.vjp().call)(primal, cotangent)
        np.testing.assert_allclose(grad, X * np.cos(X) / 2, rtol=1e-5)
        assert jax.export.export(half, platforms=("cpu", "tpu"))(X).platforms == ("cpu", "tpu")
        (rows,) = jax.export.symbolic_shape("rows")
        summed = jax.export.export(pjit(lambda x: x.sum(0)))(jax.ShapeDtypeStruct((rows, 4), np.float32))
    assert [*map(str, summed.in_avals)] == ["float32[rows,4]"]
