"""Runs colocated calls under every transformation of jax, and writes what happened as the table in transformations.md.

    python docs/transformations.py            # writes the table
    python docs/transformations.py --check    # fails if the document says something else

A row is a way to transform a function with a call in it. It is run with each kind of call, and with device code in the
place of the call, which says what has to come out. No cell is written by hand.
"""

import argparse
import contextlib
import dataclasses
import difflib
import os
import pathlib
import re
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

# XLA's CPU client reads it when it is created: with fewer threads, collectives of virtual devices may wait for ever.
os.environ.setdefault("NPROC", "32")

import jax
import jax.export
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import checkify

import partjit
from partjit import P, colocated, pjit

DOCUMENT = pathlib.Path(__file__).with_suffix(".md")
BEGIN, END = "<!-- written by transformations.py -->\n", "<!-- end -->\n"
FAULT = "FAULT"  # in a cell that tells of what must not happen
X = np.linspace(0.5, 2, 4, dtype=np.float32)
T = np.float32([1, -1, 2, 0.5])
XS = np.stack([X, X + 1, X + 2])

# What a colocated function captures is copied, a module is not: here both sides see which calls were made.
made = types.ModuleType("transformations_made")
made.calls = []
sys.modules[made.__name__] = made


# The kinds of calls


def _like(x: Any) -> Any:
    return x


def _nothing(_: Any) -> None:
    return None


def _square(**options: Any) -> Any:
    """A colocated function x -> x * x."""

    def square(x: Any) -> Any:
        made.calls.append(x.shape)
        return x * x

    return colocated.colocated_python(square, out_specs_fn=_like, **options)


def pure(_: str, **options: Any) -> Any:
    """The function x -> x * x, which does nothing else."""
    return _square(pure=True, **options)


def effectful(_: str, **options: Any) -> Any:
    """The function x -> x * x, which may do something else."""
    return _square(**options)


def logger(_: str, **options: Any) -> Any:
    """The function x -> x * x on the devices, after a call that only looks at x."""

    def log(x: Any) -> None:
        made.calls.append(x.shape)

    call = colocated.colocated_python(log, out_specs_fn=_nothing, **options)

    def logged(x: Any) -> Any:
        call(x)
        return x * x

    return logged


def with_rules(rule: str, **options: Any) -> Any:
    """The function x -> x * x, which knows its derivative."""
    square = _square(**options)
    if rule == "defjvp":
        square.defjvp(lambda primals, tangents: (square(*primals), 2 * primals[0] * tangents[0]))
    else:
        square.defvjp(lambda x: (square(x), x), lambda x, ct: (2 * x * ct,))
    return square


KINDS: dict[str, Callable[..., Any]] = {
    "pure call": pure,
    "call with an effect": effectful,
    "call without results": logger,
    "call with a rule": with_rules,
}


# The ways to transform


@dataclasses.dataclass(frozen=True)
class Row:
    """A way to transform a function with a call.

    Attributes:
        name: what the table says.
        ways: by name, functions of `call` and `jit` that give a tree of arrays; most rows have one, without a name.
        expected: how often the call is to be made.
        per: what it is made once for, where it is made more than once.
        rule: the rule of the calls that have one.
        options: what is said of the calls.
    """

    name: str
    ways: Mapping[str, Callable[[Any, Any], Any]]
    expected: int = 1
    per: str = ""
    rule: str = "defvjp"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


SECTIONS: dict[str, list[Row]] = {}


def section(title: str) -> None:
    """Begins a part of the table."""
    SECTIONS[title] = []


def row(name: str, **more: Any) -> Callable[[Any], None]:
    """Adds a row of one way."""
    return lambda run: [*SECTIONS.values()][-1].append(Row(name, {"": run}, **more))


def around_and_inside(name: str, apply: Callable[[Any], Any], make: Callable[[Any], Any], **more: Any) -> None:
    """Adds a row of a transformation that is applied to a program, and to a function inside of one.

    Args:
        name: what the table says.
        apply: takes a function to a transformed one without arguments.
        make: takes a call to the function.
        more: fields of the row.
    """
    ways = {
        "around": lambda call, jit: apply(jit(make(call)))(),
        "inside": lambda call, jit: jit(apply(make(call)))(),
    }
    [*SECTIONS.values()][-1].append(Row(name, ways, **more))


def between(call: Any) -> Any:
    """A function with a call between device work."""

    def step(x: Any) -> Any:
        return 3 * call(x + 1)

    return step


def loss(call: Any) -> Any:
    """The same with a scalar result."""
    return lambda x: between(call)(x).sum()


section("Programs")
row("`pjit`")(lambda call, jit: jit(between(call))(X))
row("`pjit` or `jax.jit` in a `pjit`")(lambda call, jit: jit(lambda x: jax.jit(jit(between(call)))(x))(X))
row("`jax.jit(inline=True)` in a `pjit`")(lambda call, jit: jit(jax.jit(between(call), inline=True))(X))
row("`jax.jit` outermost")(lambda call, jit: jax.jit(jit(between(call)))(X))
row("`jax.named_call`, `jax.named_scope`")(lambda call, jit: jit(jax.named_call(between(call), name="named"))(X))
row("a donated argument")(lambda call, jit: jit(between(call), donate_argnums=0)(jnp.asarray(X)))
row("`.lower(...).compile()`")(lambda call, jit: jit(between(call)).lower(X).compile()(X))


@row("`.eval_shape`, `jax.eval_shape`", expected=0)
def _(call: Any, jit: Any) -> Any:
    shapes = jit(between(call)).eval_shape(X), jax.eval_shape(jit(between(call)), X)
    return [np.zeros(shape.shape, shape.dtype) for shape in shapes]


@row("`jax.make_jaxpr`", expected=0)
def _(call: Any, jit: Any) -> Any:
    return len(jax.make_jaxpr(jit(between(call)))(X).out_avals)


row("a jaxpr, evaluated in a `pjit`")(
    lambda call, jit: jit(jax.extend.core.jaxpr_as_fun(jax.make_jaxpr(jit(between(call)))(X)))(X)
)


@row("`jax.disable_jit`")
def _(call: Any, jit: Any) -> Any:
    with jax.disable_jit():
        return jit(between(call))(X)


@row("`jax.export`")
def _(call: Any, jit: Any) -> Any:
    return jax.export.export(jit(between(call)))(X).call(X)


@row("`checkify`, no check fails")
def _(call: Any, jit: Any) -> Any:
    error, result = checkify.checkify(jit(checked(call)))(X)
    error.throw()
    return result


@row("`checkify`, a check after the call fails")
def _(call: Any, jit: Any) -> Any:
    error, _ = checkify.checkify(jit(checked(call)))(-X)
    return [ord(letter) for letter in str(error.get())]


def checked(call: Any) -> Any:
    """A function that checks something before and after the call."""

    def fun(x: Any) -> Any:
        checkify.check(jnp.all(x < 5), "too large")
        y = call(x)
        checkify.check(jnp.all(y < x + 2.5), "grew")
        return y

    return fun


section("Derivatives")
around_and_inside("`jvp`", lambda f: lambda: jax.jvp(f, (X,), (T,)), between, rule="defjvp")
around_and_inside("`linearize`", lambda f: lambda: jax.linearize(f, X)[1](T), between, rule="defjvp")
row("`jacfwd`", rule="defjvp")(lambda call, jit: jax.jacfwd(jit(between(call)))(X))
around_and_inside("`vjp`", lambda f: lambda: jax.vjp(f, X)[1](T), between)
around_and_inside("`grad`", lambda f: lambda: jax.grad(f)(X), loss)
around_and_inside("`grad` with `defjvp`", lambda f: lambda: jax.grad(f)(X), loss, rule="defjvp")
row("`value_and_grad`")(lambda call, jit: jax.value_and_grad(jit(loss(call)))(X))
row("`jacrev`")(lambda call, jit: jax.jacrev(jit(between(call)))(X))
around_and_inside("`hessian`", lambda f: lambda: jax.hessian(f)(X), loss, rule="defjvp")
row("`grad` of `grad`")(lambda call, jit: jax.grad(lambda x: jax.grad(jit(loss(call)))(x).sum())(X))
around_and_inside(
    "`grad`, the call gets `stop_gradient(x)`",
    lambda f: lambda: jax.grad(f)(X),
    lambda call: lambda x: (x * between(call)(lax.stop_gradient(x))).sum(),
)
around_and_inside(
    "`linear_transpose`, the call gets a constant",
    lambda f: lambda: jax.linear_transpose(f, X)(T),
    lambda call: lambda x: x * between(call)(jnp.asarray(X)),
)
around_and_inside("`jax.checkpoint`", lambda f: lambda: jax.checkpoint(f)(X), between)
[*SECTIONS.values()][-1].append(
    Row(
        "`grad` of `jax.checkpoint`, whatever the policy",
        {
            name: lambda call, jit, policy=policy: jit(jax.grad(jax.checkpoint(sines(call), policy=policy)))(X)
            for name, policy in {
                "by default": None,
                "everything_saveable": jax.checkpoint_policies.everything_saveable,
                "nothing_saveable": jax.checkpoint_policies.nothing_saveable,
                "dots_saveable": jax.checkpoint_policies.dots_saveable,
                "save_only_these_names": jax.checkpoint_policies.save_only_these_names("saved"),
            }.items()
        },
    )
)
row("`grad` of `jax.checkpoint` of a program")(lambda call, jit: jax.grad(jax.checkpoint(jit(sines(call))))(X))


def sines(call: Any) -> Any:
    """A function with something to compute again before and after the call."""
    return lambda x: jnp.sin(loss(call)(jnp.sin(x)))


@row("`grad` of a `custom_vjp` with the call in its `fwd`")
def _(call: Any, jit: Any) -> Any:
    fun = jax.custom_vjp(between(call))
    fun.defvjp(lambda x: (between(call)(x), x), lambda x, ct: (ct * jnp.cos(x),))
    return jax.value_and_grad(jit(lambda x: fun(x).sum()))(X)


@row("`grad` of a `custom_jvp` with the call in its rule")
def _(call: Any, jit: Any) -> Any:
    fun = jax.custom_jvp(between(call))
    fun.defjvp(lambda primals, tangents: (between(call)(*primals), tangents[0] * jnp.cos(primals[0])))
    return jax.value_and_grad(jit(lambda x: fun(x).sum()))(X)


section("Batches")
around_and_inside("`vmap`", lambda f: lambda: jax.vmap(f)(XS), between, expected=3, per="element")
for method, expected in (("sequential", 3), ("expand_dims", 1), ("broadcast_all", 1)):
    around_and_inside(
        f'`vmap`, `vmap_method="{method}"`',
        lambda f: lambda: jax.vmap(f)(XS),
        between,
        options={"vmap_method": method},
        expected=expected,
        per="element",
    )
BROADCAST = {"vmap_method": "broadcast_all"}
around_and_inside(
    "`vmap` with `spmd_axis_name`",
    lambda f: lambda: jax.vmap(f, spmd_axis_name="x")(XS[:2]),
    between,
    options=BROADCAST,
)
around_and_inside(
    "`vmap`, the call gets no batch",
    lambda f: lambda: jax.vmap(f)(XS),
    lambda call: lambda x: x * between(call)(jnp.asarray(X)),
)
row('`grad` of `vmap`, `vmap_method="broadcast_all"`', options=BROADCAST)(
    lambda call, jit: jax.grad(lambda x: jax.vmap(jit(loss(call)))(x).sum())(XS)
)
around_and_inside(
    "`vmap` of a `cond` with a batched predicate",
    lambda f: lambda: jax.vmap(f)(XS),
    lambda call: lambda x: lax.cond(x.sum() > 6, between(call), jnp.sin, x),
    options={"vmap_method": "sequential"},
    expected=3,
    per="element",
)

section("Control flow")


def scanned(call: Any, **options: Any) -> Any:
    """A loop of three turns with a call in each."""
    return lambda x: lax.scan(lambda c, y: (c + call(y), c.sum()), x, jnp.stack([x, x + 1, x + 2]), **options)


def counted(call: Any, test: Any) -> Any:
    """A loop of three turns, with something to do in each and in each test."""
    return lambda x: lax.while_loop(
        lambda c: (c[0] < 3) & (test(c[1])[0] > -1), lambda c: (c[0] + 1, 2 * call(c[1]) / 9), (0, x)
    )[1]


def same(x: Any) -> Any:
    """No call."""
    return x


row("`scan`", expected=3, per="turn")(lambda call, jit: jit(scanned(call))(X))
row("`scan(reverse=True)`", expected=3, per="turn")(lambda call, jit: jit(scanned(call, reverse=True))(X))
row("`scan(unroll=2)`", expected=3, per="turn")(lambda call, jit: jit(scanned(call, unroll=2))(X))
row("`scan` around a program", expected=3, per="turn")(
    lambda call, jit: lax.scan(lambda c, y: (jit(between(call))(c + y), None), X, XS)[0]
)
row("`fori_loop`", expected=3, per="turn")(
    lambda call, jit: jit(lambda x: lax.fori_loop(0, 3, lambda i, c: call(c) / 9 + i, x))(X)
)
row("`while_loop`, in the body", expected=3, per="turn")(lambda call, jit: jit(counted(call, same))(X))
row("`while_loop`, in the predicate", expected=4, per="test")(lambda call, jit: jit(counted(same, call))(X))
row("`lax.map`", expected=3, per="turn")(lambda call, jit: jit(lambda x: lax.map(between(call), x))(XS))
row("`cond`, the branch is taken")(lambda call, jit: jit(lambda x: lax.cond(x[0] > 0, between(call), same, x))(X))
row("`cond`, the branch is not taken", expected=0)(
    lambda call, jit: jit(lambda x: lax.cond(x[0] < 0, between(call), same, x))(X)
)
row("`switch`")(lambda call, jit: jit(lambda i, x: lax.switch(i, [same, between(call), jnp.sin], x))(np.int32(1), X))
row("`cond` in a `scan`, taken in two turns of three", expected=2)(
    lambda call, jit: jit(
        lambda x: lax.scan(lambda c, i: (lax.cond(i > 0, between(call), same, c), None), x, jnp.arange(3))[0]
    )(X)
)
around_and_inside(
    "`grad` of `scan`", lambda f: lambda: jax.grad(lambda x: f(x)[0].sum())(X), scanned, expected=3, per="turn"
)
row("`jvp` of `scan`", expected=3, per="turn", rule="defjvp")(
    lambda call, jit: jit(lambda x: jax.jvp(scanned(call), (x,), (T,)))(X)
)
row("`grad` of `jax.checkpoint` of `scan`", expected=3, per="turn")(
    lambda call, jit: jit(jax.grad(lambda x: jax.checkpoint(scanned(call))(x)[0].sum()))(X)
)
around_and_inside(
    "`grad` of `cond`",
    lambda f: lambda: jax.grad(f)(X),
    lambda call: lambda x: lax.cond(x[0] > 0, between(call), same, x).sum(),
)
row('`vmap` of `scan`, `vmap_method="broadcast_all"`', expected=3, per="turn", options=BROADCAST)(
    lambda call, jit: jit(jax.vmap(scanned(call)))(XS)
)


@row("`checkify` of `scan`", expected=3, per="turn")
def _(call: Any, jit: Any) -> Any:
    error, result = checkify.checkify(jit(scanned(lambda x: jnp.minimum(checked(call)(x / 9), 1))))(X)
    error.throw()
    return result


row("`jax.disable_jit` of `scan`", expected=3, per="turn")(
    lambda call, jit: under_disable_jit(lambda: jit(scanned(call))(X))
)


def under_disable_jit(run: Callable[[], Any]) -> Any:
    """The result of `run`."""
    with jax.disable_jit():
        return run()


section("`shard_map`")


def mapped(fun: Any) -> Any:
    """A function of the shards of its argument."""
    return lambda x: jax.shard_map(fun, in_specs=P("x"), out_specs=P("x"))(x)


row("in a `shard_map`", expected=2, per="shard")(lambda call, jit: jit(mapped(between(call)))(X))
row("`grad` of `shard_map`", expected=2, per="shard")(
    lambda call, jit: jit(jax.grad(lambda x: mapped(between(call))(x).sum()))(X)
)
row("`scan` in a `shard_map`", expected=6, per="turn and shard")(
    lambda call, jit: jit(lambda x: mapped(lambda x: scanned(call)(x)[0])(x))(X)
)


# What happens


def outcome(row: Row, way: str, kind: str, expected: Any) -> str:
    """What happens to a call of a kind, transformed in one of the ways of a row.

    Args:
        row, way, kind: which.
        expected: the result without calls.
    """
    made.calls.clear()
    try:
        call = KINDS[kind](row.rule, **row.options)
        result = row.ways[way](call, pjit)
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(result)]
        colocated.wait(timeout=60)
    except Exception as error:
        with contextlib.suppress(Exception):  # one is told already
            colocated.wait(timeout=60)
        text = str(error).split("\n")[0]
        if "square" not in text and " log" not in text:
            return f"{FAULT}: {type(error).__name__}: {text[:80]}"
        return f"{FAULT}: refused after {_calls()}" if made.calls else f"refused: {_first_words(text)}"
    wanted = jax.tree.leaves(expected)
    if [leaf.shape for leaf in leaves] != [leaf.shape for leaf in wanted] or not all(
        np.allclose(leaf, other, rtol=1e-4, atol=1e-5) for leaf, other in zip(leaves, wanted, strict=True)
    ):
        return f"{FAULT}: wrong values"
    if len(made.calls) != row.expected:
        return f"{FAULT}: {_calls()} instead of {row.expected}"
    return f"1 call per {row.per}" if row.per and row.expected > 1 else _calls()


def _calls() -> str:
    """How many calls were made."""
    count = len(made.calls)
    return "1 call" if count == 1 else f"{count or 'no'} calls"


def _first_words(message: str) -> str:
    """What is refused, up to where the reasons begin."""
    without_site = re.sub(r" at \S+:\d+ in [^\s:]+", "", message.replace("the colocated function ", ""))
    return re.split(r"[:,.] |; ", without_site)[0]


def cell(row: Row, kind: str) -> str:
    """What happens to a call of a kind under the transformation of a row."""
    texts = {}
    for way, run in row.ways.items():
        without_calls = jax.tree.map(np.asarray, run(lambda x: x * x, jax.jit))
        texts[way] = outcome(row, way, kind, without_calls)
    is_same = len({*texts.values()}) == 1
    return next(iter(texts.values())) if is_same else "; ".join(f"{way}: {text}" for way, text in texts.items())


def mesh() -> contextlib.AbstractContextManager[Any]:
    """Makes the mesh of the table ambient."""
    return partjit.set_mesh(partjit.Mesh(jax.devices()[:2], "x"))


def part(title: str) -> str:
    """A part of the table, computed."""
    lines = [f"| {title} | {' | '.join(KINDS)} |", "|---" * (len(KINDS) + 1) + "|"]
    with mesh():
        for row in SECTIONS[title]:
            lines.append(f"| {row.name} | {' | '.join(cell(row, kind) for kind in KINDS)} |")
    return "\n".join(lines) + "\n"


def document(text: str) -> str:
    """The document with the table in it that was computed here."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + "\n".join(map(part, SECTIONS)) + "\n" + END + after


def main() -> None:
    """Writes the document, or checks it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if the document says something else")
    check = parser.parse_args().check
    jax.config.update("jax_num_cpu_devices", 2)
    written = DOCUMENT.read_text(encoding="utf-8")
    computed = document(written)
    if check and computed != written:
        lines = difflib.unified_diff(
            written.splitlines(), computed.splitlines(), "written", "computed", n=0, lineterm=""
        )
        sys.exit(f"{DOCUMENT.name} does not say what happens: run python docs/{DOCUMENT.stem}.py\n" + "\n".join(lines))
    DOCUMENT.write_text(computed, encoding="utf-8")


if __name__ == "__main__":
    main()
