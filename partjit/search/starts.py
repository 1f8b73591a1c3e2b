"""Where a search starts: the ways to partition a training step that have names."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Sequence

from partjit.search.space import Choice, Names, Space

__all__ = ["kind_of", "starts"]


def starts(space: Space) -> Iterator[tuple[str, Choice]]:
    """The choices with names, each with its name.

    * data parallel: the batch over all axes, everything else replicated.
    * ZeRO-3, or FSDP: as well, and parameters and their states stored in shards over all axes; activations are
      constrained to the batch's axes, so that parameters are gathered and not activations moved.
    * gathered first, gradients first: parameters are constrained to be gathered before they are used, and gradients to
      be summed before they are sharded as parameters and states are stored.
    * Megatron: the batch over some axes, the inner dimensions of layers (hidden units, heads, experts) over the others.
    * Megatron with ZeRO-3: parameters are stored in shards over the axes of the batch besides.
    * columns: the last dimension of each parameter that can be sharded over the axes of the inner dimensions.
    * sequence parallel: activations between layers are sharded over the axes of the inner dimensions as well.

    Source: ZeRO, https://arxiv.org/abs/1910.02054; Megatron-LM, https://arxiv.org/abs/1909.08053; sequence parallelism,
    https://arxiv.org/abs/2205.05198.
    """
    axes = tuple(space.sizes)
    nothing = space.nothing
    everything = _with_batch(space, nothing, axes)
    yield "data parallel", everything
    stored = dataclasses.replace(everything, storage=_all_groups(space, axes))
    states = dataclasses.replace(everything, states=_all_groups(space, axes))
    yield "ZeRO-3, gathered first", _gathered(space, stored)
    yield "ZeRO-3", _constrained(space, stored)
    yield "ZeRO-1, gradients first", _gathered(space, states)
    yield "ZeRO-1", states
    found = list[tuple[str, Choice]]()
    for count in range(1, len(axes)):
        for batch in itertools.combinations(axes, count):
            found += _with_inner(space, batch, tuple(axis for axis in axes if axis not in batch))
    found += _with_inner(space, (), axes)
    # Few questions are enough for the plain ones of all axes.
    yield from sorted(found, key=lambda start: start[0].startswith("tensor") + 2 * start[0].count(","))
    yield "replicated", nothing


def kind_of(name: str) -> str:
    """The way to partition that a start is a variant of, by its name: whatever the axes, and with what constraints.

    Example:
        >>> kind_of("ZeRO-3, gathered first"), kind_of("Megatron over data x model with ZeRO-3, sequence parallel")
        ('ZeRO-3', 'Megatron with ZeRO-3, sequence parallel')
    """
    over = re.sub(r" over .*?(?= with |,|$)", "", name)
    kind, _, variant = over.partition(", ")
    return f"{kind}, {variant}" if "sequence" in variant else kind


def _with_inner(space: Space, batch: Names, inner: Names) -> Iterator[tuple[str, Choice]]:
    """The choices with inner dimensions over some axes."""
    over = f"{' x '.join(inner)}"
    sharded = _with_batch(space, space.nothing, batch)
    parts = math.prod(space.sizes[axis] for axis in inner)
    every = {c for c, one in enumerate(space.classes) if _is_inner(space, c) and one.size % parts == 0}
    columns = tuple(inner if c in every else own for c, own in enumerate(sharded.classes))
    yield f"columns over {over}", dataclasses.replace(sharded, classes=columns, is_last_first=True)
    for k, dims in enumerate(_inner_dimensions(space, parts)):
        kind = "Megatron" if k == 0 else "tensor parallel"
        classes = tuple(inner if c in dims else own for c, own in enumerate(sharded.classes))
        choice = dataclasses.replace(sharded, classes=classes)
        yield f"{kind} over {over}", choice
        yield f"{kind} over {over}, constrained", _constrained(space, choice)
        if batch:
            both = dataclasses.replace(choice, storage=_all_groups(space, batch))
            yield f"{kind} over {over} with ZeRO-3", _constrained(space, both)
            yield f"{kind} over {over} with ZeRO-3, gathered first", _gathered(space, both)
            both = dataclasses.replace(choice, states=_all_groups(space, batch))
            yield f"{kind} over {over} with ZeRO-1", both
            yield f"{kind} over {over} with ZeRO-1, gradients first", _gathered(space, both)
        for name, base in (
            ("", choice),
            (" with ZeRO-3", dataclasses.replace(choice, storage=_all_groups(space, batch))),
        ):
            sequence = _constrained(space, base, inner)
            if sequence != _constrained(space, base) and (batch or not name):
                yield f"{kind} over {over}{name}, sequence parallel", sequence


def _with_batch(space: Space, choice: Choice, axes: Names) -> Choice:
    """A choice with the batch over as many of these axes as divide it."""
    classes = [*choice.classes]
    for c in space.batch:
        if not space.is_given(c):
            classes[c] = _dividing(space, axes, space.classes[c].size)
    return dataclasses.replace(choice, classes=tuple(classes))


def _dividing(space: Space, axes: Names, size: int) -> Names:
    found, parts = [], 1
    for axis in axes:
        if size % (parts * space.sizes[axis]) == 0:
            found.append(axis)
            parts *= space.sizes[axis]
    return tuple(found)


def _all_groups(space: Space, axes: Names) -> tuple[Names, ...]:
    return (axes,) * len(space.groups)


def _gathered(space: Space, choice: Choice) -> Choice:
    return dataclasses.replace(choice, gathered=(True,) * len(space.groups))


def _constrained(space: Space, choice: Choice, inner: Names = ()) -> Choice:
    """A choice with constraints of the activations between layers; `inner` shards a further dimension of these."""
    constraints = []
    for family in space.families:
        extra: list[Names] = [()] * len(family.shape)
        free = [
            dim
            for dim, c in enumerate(family.classes)
            if (c is None or not (space.classes[c].groups or space.classes[c].is_batch))
            and family.shape[dim] % math.prod(space.sizes[axis] for axis in inner) == 0
        ]
        if inner and free:
            extra[max(free, key=lambda dim, of=family: (of.shape[dim], -dim))] = inner
        constraints.append(tuple(extra))
    return dataclasses.replace(choice, constraints=tuple(constraints))


def _inner_dimensions(space: Space, parts: int) -> list[set[int]]:
    """Sets of classes of which no parameter has two: the inner dimensions of layers.

    A class that most parameters have, as the residual stream, comes last; the second set starts with it.
    """
    fitting = [c for c, one in enumerate(space.classes) if _is_inner(space, c) and one.size % parts == 0]
    found: list[set[int]] = []
    by_degree = sorted(fitting, key=lambda c: (len(space.classes[c].groups), -space.classes[c].nbytes, c))
    for order in (by_degree, sorted(fitting, key=lambda c: (-space.classes[c].nbytes, c))):
        chosen = _independent(space, order)
        if chosen and chosen not in found:
            found.append(chosen)
    return found


def _is_inner(space: Space, number: int) -> bool:
    one = space.classes[number]
    return bool(one.groups) and not one.is_batch and not space.is_given(number)


def _independent(space: Space, order: Sequence[int]) -> set[int]:
    taken, chosen = set[int](), set[int]()
    for c in order:
        if taken.isdisjoint(space.classes[c].groups):
            chosen.add(c)
            taken.update(space.classes[c].groups)
    return chosen
