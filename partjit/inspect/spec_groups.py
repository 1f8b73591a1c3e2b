"""Arguments whose specs change together: equal layers, states of an optimizer, and the results that are these anew."""

from collections.abc import Sequence
from typing import TypeAlias

from partjit.inspect.annotated import AnnotatedValue
from partjit.inspect.leaves import Leaf
from partjit.inspect.why.key_paths import common_end, keys_of
from partjit.paths import pattern_of

__all__ = ["Group", "groups_of", "leaf_of", "shape_of"]


def leaf_of(name: str, value: AnnotatedValue) -> Leaf | None:
    """The argument or result of a program that has this name; None if it is no array."""
    return Leaf(name, value.aval.shape, value.aval.dtype, value.nbytes) if value.is_array else None


Group: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""The positions of arguments, and those of the results that are these anew."""


def groups_of(inputs: Sequence[Leaf | None], outputs: Sequence[Leaf | None]) -> list[Group]:
    """Arguments that are changed together, and the results that are these anew; those of most bytes first."""
    found: dict[object, list[int]] = {}
    for k, leaf in enumerate(inputs):
        if leaf is not None and leaf.shape:
            keys = keys_of(leaf.name) or (leaf.name,)
            found.setdefault((leaf.shape, pattern_of(" ".join(keys))), []).append(k)
    members: list[list[int]] = []
    for group in found.values():
        first = _keys(inputs[group[0]])
        # The state of a parameter has its keys at the end of its own, and its shape.
        like = [
            of
            for of in members
            if _is_state(_keys(inputs[of[0]]), first) and shape_of(inputs, of) == shape_of(inputs, group)
        ]
        if like:
            like[0].extend(group)
        else:
            members.append([*group])
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for j, leaf in enumerate(outputs):
        if leaf is not None:
            by_shape.setdefault(leaf.shape, []).append(j)
    of_outputs = [*map(_keys, outputs)]
    made = []
    for group in members:
        ends = {_keys(inputs[k])[1:] for k in group} - {()}
        anew = [
            j
            for j in by_shape.get(shape_of(inputs, group), ())
            if any(common_end(end, of_outputs[j]) == len(end) for end in ends)
        ]
        made.append((tuple(group), tuple(anew)))
    return sorted(made, key=lambda group: -sum(leaf.nbytes for k in group[0] if (leaf := inputs[k])))


def _keys(leaf: Leaf | None) -> tuple[str, ...]:
    return () if leaf is None else keys_of(leaf.name) or (leaf.name,)


def shape_of(leaves: Sequence[Leaf | None], group: Sequence[int]) -> tuple[int, ...]:
    """The shape that the members of a group have."""
    leaf = leaves[group[0]]
    assert leaf is not None
    return leaf.shape


def _is_state(parameter: tuple[str, ...], state: tuple[str, ...]) -> bool:
    end = parameter[1:]
    return bool(end) and parameter[0] != state[0] and state[-len(end) :] == end
