"""Looks for the mesh from everywhere in a program, as programs do, and writes what was seen to meshes.md.

    python docs/meshes.py            # writes the tables
    python docs/meshes.py --check    # fails if the document says something else

A table is a place in a program, a row is how the mesh was set, a column is who looks. No cell is written by hand.
"""

import argparse
import contextlib
import pathlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import mesh as mesh_lib
from jax.sharding import AxisType, NamedSharding

import partjit
from partjit import P, pjit

DOCUMENT = pathlib.Path(__file__).with_suffix(".md")
BEGIN, END = "<!-- written by meshes.py -->\n", "<!-- end -->\n"
X = np.ones((64, 8), np.float32)

Function = Callable[[Any], Any]


def grid() -> np.ndarray:
    """The devices as 4 x 2."""
    return np.array(jax.devices()[:8]).reshape(4, 2)


def auto() -> partjit.Mesh:
    """The mesh of the programs."""
    return partjit.Mesh(grid(), ("x", "y"))


def explicit() -> partjit.Mesh:
    """The same with Explicit axes, as `jax.make_mesh` makes them."""
    return partjit.Mesh(grid(), ("x", "y"), (AxisType.Explicit, AxisType.Explicit))


def other() -> partjit.Mesh:
    """Another mesh of the same devices."""
    return partjit.Mesh(grid(), ("a", "b"))


SETTERS: dict[str, Callable[[], Any]] = {
    "nothing": contextlib.nullcontext,
    "`with partjit.Mesh(...):`": auto,
    "`with jax.sharding.Mesh(...):`": lambda: jax.sharding.Mesh(grid(), ("x", "y")),
    "`partjit.set_mesh`": lambda: partjit.set_mesh(auto()),
    "`jax.set_mesh`": lambda: jax.set_mesh(jax.sharding.Mesh(grid(), ("x", "y"))),
    "`jax.set_mesh`, Explicit axes": lambda: jax.set_mesh(jax.make_mesh((4, 2), ("x", "y"))),
    "`with partjit.Mesh(...):`, Explicit axes": explicit,
}


# Who looks, with one axis of the mesh


def _sees(look: Callable[[], object]) -> str:
    try:
        look()
    except Exception as error:
        return f"no ({type(error).__name__})"
    return "yes"


def _shown(mesh: Any) -> str:
    axes = zip(mesh.axis_names, mesh.axis_types, strict=True)
    shown = [name if kind is AxisType.Auto else f"{name} {kind.name}" for name, kind in axes]
    return ", ".join(shown) if shown else "none"


def _mapped(v: Any, axis: str) -> str:
    if axis in jax.sharding.get_abstract_mesh().manual_axes:
        return "is manual"  # jax 0.10 maps it a second time
    return _sees(lambda: jax.shard_map(lambda a: a, in_specs=P(axis), out_specs=P(axis))(v))


LOOKERS: dict[str, Callable[[Any, str], str]] = {
    '`pjit`, spec `P("x")`': lambda v, axis: _sees(lambda: pjit(lambda a: a, in_shardings=P(axis))(v)),
    "`partjit.with_sharding_constraint`": lambda v, axis: _sees(lambda: partjit.with_sharding_constraint(v, P(axis))),
    "`jax.lax.with_sharding_constraint`": lambda v, axis: _sees(lambda: jax.lax.with_sharding_constraint(v, P(axis))),
    '`jax.jit`, spec `P("x")`': lambda v, axis: _sees(lambda: jax.jit(lambda a: a, in_shardings=P(axis))(v)),
    "`jax.shard_map` without mesh": _mapped,
    "`get_abstract_mesh()`": lambda *_: _shown(jax.sharding.get_abstract_mesh()),
    "`thread_resources`": lambda *_: _shown(mesh_lib.thread_resources.env.physical_mesh),
}


def _looked(axis: str, found: list[str]) -> Function:
    def look(v: Any) -> Any:
        found[:] = [looker(v, axis) for looker in LOOKERS.values()]
        return v

    return look


def _cells(place: Callable[[Function], object], axis: str = "x") -> list[str]:
    found: list[str] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # jax's `with mesh:` is deprecated
            place(_looked(axis, found))
    except Exception as error:
        return [f"refused ({type(error).__name__})"] * len(LOOKERS)
    return found


# Where the code is

PLACES: dict[str, Callable[[Function], object]] = {
    "Outside of any program": lambda look: look(X),
    "In the function of a `pjit`": lambda look: pjit(look)(X),
    "In the function of a `jax.jit`": lambda look: jax.jit(look)(X),
}


def _inside(context: Callable[[], Any], look: Function) -> Function:
    def fun(v: Any) -> Any:
        with context():
            return look(v)

    return fun


def _manual(look: Function, axes: set[str], mesh: Any = None) -> Function:
    spec = P(*axes)
    return lambda v: jax.shard_map(look, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=axes)(v)


def _in_mesh(place: Callable[[Function], object]) -> Callable[[Function], object]:
    def within(look: Function) -> None:
        with auto():
            place(look)

    return within


NESTED: dict[str, tuple[Callable[[Function], object], str]] = {
    "a `jax.jit` in the `pjit`": (_in_mesh(lambda look: pjit(jax.jit(look))(X)), "x"),
    "a `pjit` in a `jax.jit`": (_in_mesh(lambda look: jax.jit(pjit(look))(X)), "x"),
    "a `jax.jit` in a `pjit` in a `jax.jit`": (_in_mesh(lambda look: jax.jit(pjit(jax.jit(look)))(X)), "x"),
    "the body of a `scan` in the `pjit`": (
        _in_mesh(lambda look: pjit(lambda v: jax.lax.scan(lambda c, _: (c, look(c)), v, jnp.ones(2)))(X)),
        "x",
    ),
    "the `pjit`, differentiated": (_in_mesh(lambda look: jax.grad(lambda v: pjit(look)(v).sum())(X)), "x"),
    "the `pjit` under `vmap`": (_in_mesh(lambda look: jax.vmap(pjit(look))(np.stack([X, X]))), "x"),
    "a `pjit` of `NamedSharding`s, no mesh set": (
        lambda look: pjit(look, in_shardings=NamedSharding(auto(), P("x")))(X),
        "x",
    ),
    "`with mesh:` in the `pjit`, the same mesh": (_in_mesh(lambda look: pjit(_inside(auto, look))(X)), "x"),
    "`with mesh:` in a `pjit` without mesh": (lambda look: pjit(_inside(auto, look))(X), "x"),
    "`with mesh:` in the `pjit`, axes a and b": (_in_mesh(lambda look: pjit(_inside(other, look))(X)), "a"),
    "`with mesh:` in a `jax.jit`": (lambda look: jax.jit(_inside(auto, look))(X), "x"),
    "`jax.set_mesh` in the `pjit`": (
        _in_mesh(lambda look: pjit(_inside(lambda: jax.set_mesh(auto()), look))(X)),
        "x",
    ),
    "`jax.sharding.use_abstract_mesh` in the `pjit`": (
        _in_mesh(lambda look: pjit(_inside(lambda: jax.sharding.use_abstract_mesh(other().abstract_mesh), look))(X)),
        "a",
    ),
    "a `shard_map` over x and y in the `pjit`": (_in_mesh(lambda look: pjit(_manual(look, {"x", "y"}))(X)), "x"),
    "a `shard_map` over x alone: axis x": (_in_mesh(lambda look: pjit(_manual(look, {"x"}))(X)), "x"),
    "a `shard_map` over x alone: axis y": (_in_mesh(lambda look: pjit(_manual(look, {"x"}))(X)), "y"),
    "a `pjit` in a `shard_map` over x alone: axis y": (
        _in_mesh(lambda look: pjit(_manual(pjit(look), {"x"}))(X)),
        "y",
    ),
    "a `shard_map` over x in a `jax.jit`: axis y": (
        _in_mesh(lambda look: jax.jit(_manual(look, {"x"}, auto()))(X)),
        "y",
    ),
}


def _table(title: str, rows: dict[str, list[str]]) -> str:
    lines = [[title, *LOOKERS], ["---"] * (len(LOOKERS) + 1), *([name, *cells] for name, cells in rows.items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables() -> str:
    """The tables."""
    parts = []
    for place, run in PLACES.items():
        rows = {}
        for setter, context in SETTERS.items():

            def within(look: Function, run: Any = run, context: Any = context) -> None:
                with context():
                    run(look)

            rows[setter] = _cells(within)
        parts.append(f"### {place}\n\n{_table('set by', rows)}\n")
    nested = {name: _cells(place, axis) for name, (place, axis) in NESTED.items()}
    parts.append(
        f"### Elsewhere, under `with partjit.Mesh(...):` unless the row says otherwise\n\n{_table('in', nested)}\n"
    )
    return "\n".join(parts)


def main() -> int:
    """Writes the document, or checks it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    written, end, after = rest.partition(END)
    computed = tables()
    if arguments.check:
        return int(computed != written)
    DOCUMENT.write_text(before + BEGIN + computed + end + after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
