"""Runs features of today's jax under `jax.jit` and under `pjit`, and writes what came out as the table in features.md.

    python docs/features.py            # writes the column of the jax that runs it
    python docs/features.py --check    # fails if the document says something else

A row is a feature, a cell what both gave with that jax: the types of the results, what else was seen, or the refusal.
Where they differ, it has both. No cell is written by hand.
"""

import argparse
import os
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

# XLA's CPU client reads it when it is created: with fewer threads, collectives of virtual devices may wait for ever.
os.environ.setdefault("NPROC", "32")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import hijax
from jax.experimental.compute_on import compute_on
from jax.sharding import AbstractMesh, AxisType, NamedSharding, reshard

import partjit
from partjit import P

DOCUMENT = pathlib.Path(__file__).with_suffix(".md")
BEGIN, END = "<!-- written by features.py -->\n", "<!-- end -->\n"
VERSIONS = ("0.10", "0.12")
X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)

Wrap = Callable[..., Any]
"""`jax.jit` or `pjit`."""

FEATURES: dict[str, Callable[[Wrap], Any]] = {}


def feature(name: str) -> Callable[[Callable[[Wrap], Any]], Callable[[Wrap], Any]]:
    """Adds a row: a function of `jax.jit` or `pjit`, whose result is compared."""

    def add(fun: Callable[[Wrap], Any]) -> Callable[[Wrap], Any]:
        FEATURES[name] = fun
        return fun

    return add


def mesh(*types: AxisType) -> Any:
    """Four by two devices; jax makes their axes Explicit unless they are given types."""
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=types or (AxisType.Explicit,) * 2)


def on_mesh(fun: Callable[..., Any], *specs: P) -> Any:
    """The result of a function for arrays with these specs."""
    with jax.set_mesh(mesh()):
        return fun(*(jax.device_put(X, spec) for spec in specs))


def type_of(x: Any) -> str:
    """The type of a value, as jax prints it."""
    return jax.typeof(x).str_short(short_dtypes=True)


# Types


@feature("types inside a program")
def _(wrap: Wrap) -> Any:
    seen: list[str] = []

    def fun(x: Any, w: Any) -> Any:
        y = jnp.sin(x) @ w
        seen.extend(map(type_of, (x, w, y)))
        return y

    return on_mesh(wrap(fun), P("x"), P(None, "y")), seen


@feature("a product that types do not determine")
def _(wrap: Wrap) -> Any:
    return on_mesh(wrap(lambda x, w: x @ w), P("x", "y"), P("y"))


@feature("`jax.sharding.reshard`, and its gradient")
def _(wrap: Wrap) -> Any:
    fun = wrap(lambda x: reshard(jnp.sin(x), P("y", "x")))
    return on_mesh(fun, P("x")), on_mesh(jax.grad(lambda x: fun(x).sum()), P("x"))


@feature("`out_sharding=`")
def _(wrap: Wrap) -> Any:
    return on_mesh(
        wrap(
            lambda x, w: (
                jnp.dot(x, w, out_sharding=P("x", None)),
                jnp.zeros((8, 8), np.float32, out_sharding=P(None, "y")),
                x.at[jnp.array([1, 2])].get(out_sharding=P(None, "y")),
            )
        ),
        P("x", "y"),
        P("y"),
    )


@feature("`P(unreduced=...)`, inside and as an out spec")
def _(wrap: Wrap) -> Any:
    def product(x: Any, w: Any) -> Any:
        return jnp.dot(x, w, out_sharding=P("x", None, unreduced={"y"}))

    result = on_mesh(wrap(product, out_shardings=P("x", None, unreduced={"y"})), P("x", "y"), P("y"))
    return type_of(result), on_mesh(wrap(lambda x, w: reshard(product(x, w), P("x"))), P("x", "y"), P("y"))


@feature("a mesh with Explicit and Auto axes; `auto_axes`")
def _(wrap: Wrap) -> Any:
    seen: list[str] = []

    def mixed(x: Any) -> Any:
        y = lax.with_sharding_constraint(jnp.sin(x), P(None, "y"))
        seen.extend(map(type_of, (x, y)))
        return y

    def automatic(x: Any) -> Any:
        return jax.sharding.auto_axes(lambda x: x @ x, out_sharding=P("x", None))(x)

    with jax.set_mesh(mesh(AxisType.Explicit, AxisType.Auto)):
        y = wrap(mixed)(jax.device_put(X, P("x", "y")))
    return y, seen, on_mesh(wrap(automatic), P("x", "y"))


@feature("a `shard_map` over one of the axes")
def _(wrap: Wrap) -> Any:
    seen: list[str] = []

    def each(x: Any) -> Any:
        seen.append(type_of(x))
        return lax.psum(x, "x")

    return on_mesh(wrap(jax.shard_map(each, in_specs=P("x"), out_specs=P(), axis_names={"x"})), P("x", "y")), seen


@feature("jaxprs, of a function and of its gradient")
def _(wrap: Wrap) -> Any:
    def fun(x: Any, w: Any) -> Any:
        y = jnp.tanh(x @ w)
        return reshard(lax.scan(lambda c, s: (jnp.sin(c) * s, c.sum()), y, jnp.arange(3.0))[0], P("y"))

    def gradient(x: Any, w: Any) -> Any:
        return jax.grad(lambda w: fun(x, w).sum())(w)

    jaxprs = [on_mesh(lambda *args, f=f: wrap(f).trace(*args).jaxpr, P("x"), P(None, "y")) for f in (fun, gradient)]
    return [(f"{len(jaxpr.eqns)} equations", str(jaxpr)) for jaxpr in jaxprs]


# Ahead of time


@feature("`AbstractMesh`: trace and lower without devices")
def _(wrap: Wrap) -> Any:
    found = []
    for kind in (AxisType.Explicit, AxisType.Auto):
        abstract = AbstractMesh((4, 2), ("x", "y"), axis_types=(kind,) * 2)
        with jax.sharding.use_abstract_mesh(abstract):
            struct = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=NamedSharding(abstract, P("x")))
            traced = wrap(jnp.sin).trace(struct)
            text = traced.lower(lowering_platforms=("tpu",)).as_text()
            # The types of results say how they are sharded; jax.jit leaves that out of what it lowers for such a mesh.
            text = re.sub(r'("result"), sdy.sharding = [^>]*>', r"\1", text)
            found.append((str(traced.jaxpr.in_avals[0]), re.sub(r"@p?jit_\w+", "@", text)))
    return found


@feature("`jax.export`")
def _(wrap: Wrap) -> Any:
    with jax.set_mesh(mesh()) as _:
        struct = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=NamedSharding(jax.sharding.get_mesh(), P("x")))
        exported = jax.export.export(wrap(lambda x: reshard(jnp.sin(x), P("y"))))(struct)
        result = jax.jit(exported.call)(jax.device_put(X, P("x")))
        return result, [f"{exported.nr_devices} devices", *map(str, (*exported.in_avals, *exported.out_avals))]


# Memories, host compute


@feature("`pinned_host`: in specs, in out specs, in types")
def _(wrap: Wrap) -> Any:
    seen: list[str] = []
    with jax.set_mesh(mesh()):
        on_host, on_device = (
            NamedSharding(jax.sharding.get_mesh(), P("x"), memory_kind=kind) for kind in ("pinned_host", "device")
        )
        fun = wrap(lambda x: jnp.sin(jax.device_put(x, on_device)), in_shardings=on_host, out_shardings=on_host)
        first = fun(jax.device_put(X, on_host))

        def moved(x: Any) -> Any:
            y = jax.device_put(x, jax.memory.Space.Device)
            seen.extend(map(type_of, (x, y)))
            return y * 2

        return [first, first.sharding.memory_kind, wrap(moved)(jax.device_put(X, on_host)), seen]


@feature("`compute_on`")
def _(wrap: Wrap) -> Any:
    if jax.__version_info__ < (0, 11):

        def fun(x: Any) -> Any:
            with compute_on("device_host"):
                y = jnp.sin(x)
            return y * 2
    else:
        space = jax.memory.Space.Device

        def fun(x: Any) -> Any:
            return 2 * compute_on(jnp.sin, compute_type="device_host", out_memory_spaces=space)(x)

    text = on_mesh(lambda x: wrap(fun).lower(x).as_text(), P("x"))
    return on_mesh(wrap(fun), P("x")), f"host computation: {'host' in text}"


# Operations and values


@feature("`ragged_dot`, and its gradient")
def _(wrap: Wrap) -> Any:
    groups = np.array([3, 2, 3], np.int32)
    weights = np.ones((3, 8, 4), np.float32)
    with jax.set_mesh(mesh(AxisType.Auto, AxisType.Auto)):
        fun = wrap(lambda x, w: lax.ragged_dot(x, w, groups), in_shardings=(P(), P()), out_shardings=P())
        return fun(X, weights), jax.grad(lambda w: fun(X, w).sum())(weights)


@feature("`ragged_dot` over Explicit axes")
def _(wrap: Wrap) -> Any:
    weights, groups = np.ones((3, 8, 4), np.float32), np.array([3, 2, 3], np.int32)
    return on_mesh(wrap(lambda x: lax.ragged_dot(x, weights, groups)), P("x"))


class Pair:
    """A value of a type of its own: two arrays."""

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second


class PairType(hijax.HiType):
    """The type of a `Pair`."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def __hash__(self) -> int:
        return hash(self.shape)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PairType) and self.shape == other.shape

    def lo_ty(self) -> list[Any]:
        """The types of its arrays."""
        return [jax.core.ShapedArray(self.shape, np.dtype(np.float32))] * 2

    def lower_val(self, pair: Any) -> list[Any]:
        """The arrays of a pair."""
        return [pair.first, pair.second]

    def raise_val(self, *arrays: Any) -> Pair:
        """The pair of arrays."""
        return Pair(*arrays)

    def to_tangent_aval(self) -> "PairType":
        """The type of a tangent."""
        return self


hijax.register_hitype(Pair, lambda pair: PairType(pair.first.shape))
HiPrimitive: Any = getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive  # its name in jax 0.12, and in 0.10


class Sum(HiPrimitive):
    """The sum of a pair."""

    def __init__(self, pair: Any) -> None:
        self.in_avals = (pair,)
        self.out_aval = jax.core.ShapedArray(pair.shape, np.dtype(np.float32))
        self.params: dict[str, Any] = {}
        super().__init__()

    def expand(self, pair: Any) -> Any:
        """The sum, in jax."""
        return pair.first + pair.second


@feature("hijax: an argument of a type of its own")
def _(wrap: Wrap) -> Any:
    return wrap(lambda pair: Sum(PairType((8, 8)))(pair) * 2)(Pair(jnp.asarray(X), jnp.asarray(X)))


# Running them


def outcome(fun: Callable[[Wrap], Any], wrap: Wrap) -> tuple[str, list[Any]]:
    """What a feature gave, as a cell, and everything that is to be equal."""
    try:
        leaves = jax.tree.leaves(fun(wrap))
    except Exception as error:
        return f"refused: {type(error).__name__}", []
    cells, compared = [], []
    for leaf in leaves:
        if isinstance(leaf, jax.Array):
            cells.append(type_of(leaf))
            compared.append((cells[-1], np.asarray(leaf).tolist()))
        else:
            compared.append(leaf)
            cells += [str(leaf)] * (len(str(leaf)) < 40)
    return ", ".join(f"`{cell}`" for cell in dict.fromkeys(cells)), compared


def cell(name: str) -> str:
    """What the document says of a feature with this jax."""
    (theirs, expected), (ours, found) = (outcome(FEATURES[name], wrap) for wrap in (jax.jit, partjit.pjit))
    return theirs if (ours, found) == (theirs, expected) else f"DIFFERS: {theirs} under `jax.jit`, {ours} under `pjit`"


def written() -> dict[str, list[str]]:
    """The cells of the document, by the feature."""
    table = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    rows = [[column.strip() for column in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    return {name: cells for name, *cells in rows}


def column() -> int:
    """Which of the document's columns is that of the jax that runs."""
    return VERSIONS.index(".".join(jax.__version__.split(".")[:2]))


def main() -> int:
    """Writes or checks the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    before, at = written(), column()
    rows = {name: [*before.get(name, ["", ""])] for name in FEATURES}
    for name, cells in rows.items():
        cells[at] = cell(name)
    wrong = [name for name in rows if rows[name] != before.get(name)]
    if check:
        print("\n".join(f"{name}: {rows[name][at]}, but the document has {before.get(name)}" for name in wrong))
        return len(wrong)
    lines = ["| feature | " + " | ".join(f"jax {version}" for version in VERSIONS) + " |", "|---" * 3 + "|"]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    head, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    DOCUMENT.write_text(head + BEGIN + "\n".join(lines) + "\n" + END + rest.partition(END)[2], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
