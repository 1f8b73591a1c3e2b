"""The arguments and results of a program as rows of a widget, and which of them follow which."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from partjit.inspect.leaves import Leaf
from partjit.inspect.live.spec_field import text_of
from partjit.inspect.why.key_paths import keys_of
from partjit.paths import pattern_of
from partjit.render.numbers import shown_bytes

__all__ = ["axes_of", "expanded", "followers", "program_data"]


def program_data(
    name: str, mesh: Mesh, arguments: Iterable[Leaf], results: Iterable[Leaf], specs: Mapping[str, P]
) -> dict[str, Any]:
    """A program as plain data: its name, the axes of its mesh with their sizes, and a row for each array.

    A row has `name`, `pattern` (the name without numbers), `kind`, `array` (dtype and shape), `bytes`, `spec` (the text
    of the present one), `axes` (the same as a list of axes for each dimension) and `is_chosen`: whether the partitioner
    chose it.

    Args:
        name: of the program.
        mesh: its mesh.
        arguments, results: of the program.
        specs: the specs that these have after the propagation, by name.
    """

    def row(kind: str, leaf: Leaf) -> dict[str, Any]:
        spec = specs[leaf.name]
        return {
            "name": leaf.name,
            "pattern": pattern_of(leaf.name),
            "kind": kind,
            "array": f"{leaf.dtype.name}[{','.join(map(str, leaf.shape))}]",
            "size": shown_bytes(leaf.nbytes),
            "spec": text_of(spec),
            "axes": axes_of(spec),
            "is_chosen": leaf.spec is None,
        }

    rows = [*(row("argument", leaf) for leaf in arguments), *(row("result", leaf) for leaf in results)]
    return {"name": name, "mesh": [[str(axis), size] for axis, size in mesh.shape.items()], "rows": rows}


def axes_of(spec: P) -> list[list[str]]:
    """The axes that shard each dimension.

    Example:
        >>> axes_of(P("data", None, ("x", "y")))
        [['data'], [], ['x', 'y']]
    """
    return [[] if dim is None else [dim] if isinstance(dim, str) else [*dim] for dim in spec]


def expanded(given: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Texts by names, in which `*` stands for the characters of one key, as texts by full names.

    Later ones outweigh earlier ones. A name that is none of these stays as it is.

    Example:
        >>> expanded({"params[*]['w']": "P('x')", "y": "P()"}, ["params[0]['w']", "params[0]['b']", "params[1]['w']"])
        {"params[0]['w']": "P('x')", "params[1]['w']": "P('x')", 'y': 'P()'}
    """
    found = {}
    for key, text in given.items():
        pattern = re.compile(re.escape(key).replace(r"\*", r"[^\[\].]*"))
        matched = [key] if key in names or "*" not in key else [name for name in names if pattern.fullmatch(name)]
        found.update(dict.fromkeys(matched or [key], text))
    return found


def followers(arguments: Sequence[Leaf], results: Sequence[Leaf]) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """For each argument the arguments, itself among them, and the results that are sharded like it if they follow it.

    These are the arrays of its shape whose path ends in its own path, the name of the argument aside: the state that an
    optimizer has for a parameter, and what a step returns for both.

    Example:
        >>> import numpy as np
        >>> def leaf(name):
        ...     return Leaf(name, (4,), np.dtype("float32"), 16)
        >>> arguments = [leaf("params['w']"), leaf("state[0].mu['w']"), leaf("x")]
        >>> results = [leaf("result[0]['w']"), leaf("result[1][0].mu['w']")]
        >>> followers(arguments, results)["params['w']"]
        (("params['w']", "state[0].mu['w']"), ("result[0]['w']", "result[1][0].mu['w']"))
        >>> followers(arguments, results)["x"]
        (('x',), ())
    """

    def ends_of(leaves: Sequence[Leaf], wanted: set[int]) -> dict[tuple[object, ...], list[str]]:
        found: dict[tuple[object, ...], list[str]] = {}
        for leaf in leaves:
            keys = keys_of(leaf.name) or (leaf.name,)
            for length in wanted:
                if length < len(keys):
                    found.setdefault((leaf.shape, keys[len(keys) - length :]), []).append(leaf.name)
        return found

    paths = {leaf.name: (keys_of(leaf.name) or (leaf.name,))[1:] for leaf in arguments}
    lengths = {len(path) for path in paths.values() if path}
    of_arguments, of_results = ends_of(arguments, lengths), ends_of(results, lengths)
    found = {}
    for leaf in arguments:
        key = leaf.shape, paths[leaf.name]
        found[leaf.name] = (tuple(of_arguments.get(key, (leaf.name,))), tuple(of_results.get(key, ())))
    return found
