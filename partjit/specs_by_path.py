"""Specs by path: regular expressions over the paths of the leaves of a tree choose their specs.

Training codebases keep such rules beside a model. Elsewhere the first rule that matches wins, so that a renamed layer
falls through to a catch-all pattern and is replicated without notice. Here each leaf has exactly one rule, and whatever
has none or several is listed in one error.

A path is spelled as in those codebases: the keys, attributes and indices that lead to a leaf, joined by '/'.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.core import ShapedArray
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import KeyPath

from partjit._jax.shardings import UnspecifiedValue
from partjit._jax.tracing import abstractify
from partjit._jax.types import PyTree, PyTreeDef
from partjit.arguments import name_of, signature_of
from partjit.checks import flattened, items_of, require, require_mesh_type, wrong_type, wrong_value
from partjit.errors import ShardingError
from partjit.paths import folded_texts
from partjit.render import html, text
from partjit.render.numbers import counted, shown_bytes
from partjit.spec import FromArray, ParsedPartitionSpec
from partjit.validate import check_specs

__all__ = ["SpecRow", "SpecTable", "spec_table", "specs_like"]

AnySpec: TypeAlias = P | NamedSharding | UnspecifiedValue | FromArray
Rules: TypeAlias = (
    Mapping[str | re.Pattern, AnySpec]
    | Sequence[tuple[str | re.Pattern, AnySpec]]
    | Callable[[str, Any], AnySpec | None]
)

_SPEC = "a PartitionSpec, a NamedSharding, UNSPECIFIED or FROM_ARRAY"
_REPLICATED = "write P() for replicated"


@dataclasses.dataclass(frozen=True)
class SpecRow:
    """A leaf and its spec.

    Attributes:
        path: the keys that lead to the leaf, joined by '/'; empty for a tree that is one leaf.
        array: its dtype and shape: `float32[16,4]`.
        spec: its spec, or None where there is a `problem`.
        rules: the patterns that match it (of a function, its name); empty where the spec is the default or that of
            scalars.
        problem: why it has no spec, or why the spec does not fit on the mesh; empty if all is well.
        nbytes: its size.
        nbytes_per_device: the size of its shards, or None where there is no mesh or the spec does not determine it.
    """

    path: str
    array: str
    spec: AnySpec | None
    rules: tuple[str, ...]
    problem: str
    nbytes: int
    nbytes_per_device: int | None = None


@dataclasses.dataclass(frozen=True, repr=False)
class SpecTable:
    """The specs of the leaves of a tree, as a table: `print` it, or let a notebook show it.

    Attributes:
        rows: one for each leaf that is an array, in the order of the leaves.
        unused: the patterns that match no leaf.
    """

    rows: tuple[SpecRow, ...]
    unused: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([text.table(self._columns, self._cells), *self._notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html.fragment(html.table("Specs by path", self._columns, self._cells), html.code("\n".join(self._notes)))

    @property
    def _has_shards(self) -> bool:
        return any(row.nbytes_per_device is not None for row in self.rows)

    @property
    def _columns(self) -> tuple[str, ...]:
        return ("path", "array", "spec", "rule", "size", *(["per device"] if self._has_shards else []))

    @property
    def _cells(self) -> list[list[str]]:
        cells = []
        for row in self.rows:
            spec = "?" if row.spec is None else str(row.spec)
            per_device = "?" if row.nbytes_per_device is None else shown_bytes(row.nbytes_per_device)
            cells.append([row.path, row.array, spec, " | ".join(row.rules) or "-", shown_bytes(row.nbytes), per_device])
        return [row[: len(self._columns)] for row in cells]

    @property
    def _notes(self) -> list[str]:
        total = shown_bytes(sum(row.nbytes for row in self.rows))
        known = [row.nbytes_per_device for row in self.rows if row.nbytes_per_device is not None]
        per_device = f", {shown_bytes(sum(known))} per device" if known else ""
        notes = [f"{counted(len(self.rows), 'array')}: {total}{per_device}"]
        if self.unused:
            notes.append(f"rules that match nothing: {', '.join(map(repr, self.unused))}")
        return notes + [row.problem for row in self.rows if row.problem]


def specs_like(tree: PyTree, rules: Rules, *, default: AnySpec | None = None) -> PyTree:
    """The specs of the leaves of a tree, by rules over their paths.

    A path is what leads to a leaf, joined by '/': `layers/0/attention/kernel`, whether through dictionaries, lists or
    attributes. A pattern matches where `re.search` finds it, so that `attention/kernel` also matches in the state of an
    optimizer, below `0/mu`; `^` and `$` anchor it.

    Args:
        tree: a pytree of arrays, or of their types (`jax.ShapeDtypeStruct`, as `jax.eval_shape` gives them).
        rules: `{pattern: spec}`, or a sequence of such pairs, or a function `(path, leaf) -> spec` that returns None
            where it has none. A spec is what a leaf of a spec tree of `pjit` may be, but for None.
        default: the spec of arrays that no rule matches. Without one such an array is an error. Scalars that no rule
            matches are replicated.

    Returns:
        A tree like `tree`, with a spec for each array and None for other leaves (functions and strings in a module of
        Equinox), which `pjit` takes as the specs of `tree` and of its arrays alone.

    Raises:
        ShardingError: a leaf is matched by no rule or by several, or its spec has more entries than the leaf has
            dimensions; the message lists all of them.
        TypeError: `rules` or a spec is of a wrong type.
        ValueError: a pattern is no regular expression, or a spec is wrong by itself.

    Example:
        >>> from jax.numpy import ones
        >>> params = {"up": {"w": ones((4, 8)), "b": ones(8)}, "down": {"w": ones((8, 4))}}
        >>> rules = {"up/w": P(None, "model"), "down/w": P("model"), "b$": P()}
        >>> specs_like(params, rules)
        {'down': {'w': P('model',)}, 'up': {'b': P(), 'w': P(None, 'model')}}

    Source: `match_partition_rules` of EasyLM, in which the first rule that matches wins.
    """
    rows, structure, _ = _matched("specs_like", tree, rules, default, None)
    failures = [(row.path, row.problem) for row in rows if row is not None and row.problem]
    if failures:
        arrays = sum(row is not None for row in rows)
        raise ShardingError(
            f"The rules of specs_like give no spec to {len(failures)} of {counted(arrays, 'array')}:\n\n"
            + "\n".join(folded_texts(failures))
            + "\n\nA leaf needs exactly one rule: add patterns, or narrow them (^ and $ anchor). The spec of a last "
            "pattern for all the rest, such as '.*', belongs in default=. partjit.spec_table shows what matches what."
        )
    return structure.unflatten([None if row is None else row.spec for row in rows])


def spec_table(tree: PyTree, rules: Rules, *, default: AnySpec | None = None, mesh: Mesh | None = None) -> SpecTable:
    """What `specs_like` finds for each array, as a table; leaves without a spec are rows as well, not errors.

    Args:
        tree, rules, default: as those of `specs_like`.
        mesh: the specs are checked against it, and the table has the size of each array on a device.

    Raises:
        TypeError, ValueError: as by `specs_like`, but for leaves without a spec.

    Example:
        >>> from partjit import Mesh, spec_table
        >>> from jax.numpy import ones
        >>> params = {"up": {"w": ones((4, 8)), "b": ones(8)}, "down": {"w": ones((8, 4))}}
        >>> rules = {"/w": P("model"), "down": P("model"), "embed": P()}
        >>> spec_table(params, rules, default=P(), mesh=Mesh(jax.devices()[:4], "model"))
        path    array         spec         rule       size   per device
        down/w  float32[8,4]  ?            /w | down  128 B  ?
        up/b    float32[8]    P()          -          32 B         32 B
        up/w    float32[4,8]  P('model',)  /w         128 B        32 B
        3 arrays: 288 B, 64 B per device
        rules that match nothing: 'embed'
        down/w (float32[8,4]) is matched by 2 rules: '/w' -> P('model',), 'down' -> P('model',)
    """
    if mesh is not None:
        require_mesh_type("spec_table", "mesh", mesh)
    rows, _, patterns = _matched("spec_table", tree, rules, default, mesh)
    of_arrays = tuple(row for row in rows if row is not None)
    used = {pattern for row in of_arrays for pattern in row.rules}
    return SpecTable(of_arrays, tuple(pattern for pattern in patterns if pattern not in used))


_Match: TypeAlias = tuple[str, AnySpec]
"""The pattern of a rule, or the name of a function, and its spec."""


def _matched(
    where: str, tree: PyTree, rules: Rules, default: AnySpec | None, mesh: Mesh | None
) -> tuple[list[SpecRow | None], PyTreeDef, list[str]]:
    """A row for each leaf (None where it is not an array), the structure of the tree, and the patterns of the rules."""
    if default is not None:
        _require_spec(where, "default", default)
    match, patterns = _matcher(where, rules)

    def row(path: KeyPath, leaf: Any) -> SpecRow | None:
        try:
            aval = abstractify(leaf)
        except (TypeError, ValueError, OverflowError):
            return None
        if not isinstance(aval, ShapedArray):
            return None
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return _row(name, aval, match(name, leaf), default, mesh)

    leaves, structure = flattened(tree, f"{where}: tree")
    return [row(path, leaf) for path, leaf in leaves], structure, patterns


def _matcher(where: str, rules: Rules) -> tuple[Callable[[str, Any], list[_Match]], list[str]]:
    """What finds the rules that match a leaf, and the patterns of all rules."""
    expected = "a mapping or a sequence of pairs of a regular expression and a spec, or a function (path, leaf) -> spec"
    if callable(rules) and not isinstance(rules, Mapping):
        function, function_name = rules, name_of(rules)
        if isinstance(rules, type) or not _takes_two(rules):  # a mesh is callable too
            raise wrong_type(where, "rules", rules, expected)

        def call(path: str, leaf: Any) -> list[_Match]:
            spec = function(path, leaf)
            return [] if spec is None else [(function_name, _require_spec(where, f"rules({path!r}, leaf)", spec))]

        return call, []
    pairs = items_of(where, "rules", rules.items() if isinstance(rules, Mapping) else rules, expected)
    compiled = []
    for i, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise wrong_type(where, f"rules[{i}]", pair, "a pair of a regular expression and a spec")
        pattern, spec = pair
        name = f"the pattern of rules[{i}]"
        require(where, name, pattern, str | re.Pattern, "a regular expression")
        try:
            regex = re.compile(pattern)
            regex.search("")  # a pattern for bytes raises TypeError
        except (re.error, TypeError) as error:
            raise wrong_value(where, name, pattern, "a regular expression for str", str(error)) from None
        compiled.append((regex, _require_spec(where, f"rules[{regex.pattern!r}]", spec)))

    def search(path: str, _: Any) -> list[_Match]:
        return [(regex.pattern, spec) for regex, spec in compiled if regex.search(path)]

    return search, [regex.pattern for regex, _ in compiled]


def _takes_two(function: Callable[..., object]) -> bool:
    signature = signature_of(function)
    if signature is not None:
        try:
            signature.bind("path", "leaf")
        except TypeError:
            return False
    return True


def _require_spec(where: str, name: str, spec: object) -> AnySpec:
    if isinstance(spec, P | NamedSharding):
        _parsed(spec, f"{where}: {name}")
    elif not isinstance(spec, UnspecifiedValue | FromArray):
        raise wrong_type(where, name, spec, _SPEC, _REPLICATED if spec is None else "")
    return spec


def _row(path: str, aval: Any, matches: list[_Match], default: AnySpec | None, mesh: Mesh | None) -> SpecRow:
    leaf = f"{path or 'the tree itself'} ({aval.str_short()})"
    spec, problem = _only_spec(leaf, len(aval.shape), matches, default)
    nbytes, per_device = aval.dtype.itemsize * aval.size, None
    if mesh is not None and isinstance(spec, P | NamedSharding):
        parsed = _parsed(spec)
        mismatches = check_specs("the leaves", [path], [aval], [parsed], mesh)
        problem = "\n".join(mismatch.problem for mismatch in mismatches)
        if not problem and not parsed.unconstrained_dims:
            per_device = aval.dtype.itemsize * math.prod(parsed.named_sharding(mesh).shard_shape(aval.shape))
    patterns = tuple(pattern for pattern, _ in matches)
    return SpecRow(path, aval.str_short(), spec, patterns, problem, nbytes, per_device)


def _only_spec(leaf: str, rank: int, matches: list[_Match], default: AnySpec | None) -> tuple[AnySpec | None, str]:
    """The spec of a leaf, or None and why it has none."""
    if len(matches) > 1:
        found = ", ".join(f"{pattern!r} -> {spec}" for pattern, spec in matches)
        return None, f"{leaf} is matched by {len(matches)} rules: {found}"
    if matches:
        ((pattern, spec),) = matches
        of = f"of the rule {pattern!r}"
    else:
        spec, of = default if rank else P(), "of default="
    if spec is None:
        return None, f"{leaf} is matched by no rule"
    if isinstance(spec, P | NamedSharding) and len(_parsed(spec)) > rank:
        least = len(_parsed(spec))
        return None, f"{leaf} has the spec {spec} {of}, which implies a rank of at least {least}, but it is {rank}"
    return spec, ""


def _parsed(spec: P | NamedSharding, name: str = "rules") -> ParsedPartitionSpec:
    return ParsedPartitionSpec.from_user_input(spec, name, allow_unconstrained_dims=True)
