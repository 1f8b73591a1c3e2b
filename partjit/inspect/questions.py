"""Questions about other specs of a program, and the answers to them."""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.core import ShapedArray
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from partjit._jax.shardings import UnspecifiedValue
from partjit.checks import require, wrong_type
from partjit.inspect.changes import Axes, Change, axes_on
from partjit.inspect.contents import Collectives
from partjit.inspect.leaves import Leaf
from partjit.inspect.user_lines import Site, shown_line
from partjit.inspect.why.lookup import ValueNotFoundError
from partjit.spec import ParsedPartitionSpec, Spec, parse_spec_tree
from partjit.validate import check_specs, raise_mismatches

__all__ = ["Activation", "Answer", "Question", "change_of"]


@dataclasses.dataclass(frozen=True)
class Activation:
    """A value inside of a program that may be constrained.

    Attributes:
        number: of the value; a question names it by that.
        shape, dtype: of the whole array.
        nbytes: bytes of the whole array.
        primitive: the name of the primitive that computes it.
        site: the user's line (file, line, function) that it comes from, or None.
        module: the path of the module that it belongs to, "Block_3/Dense_0"; empty if there is none.
        scope: its name stack, with `jvp(..)` and `transpose(..)` of forward and backward pass.
        times: how often a step computes it; None if a loop of unknown trip count is around it.
    """

    number: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    nbytes: int
    primitive: str
    site: Site | None
    module: str
    scope: str
    times: int | None

    def __str__(self) -> str:
        where = "" if self.site is None else f" at {shown_line(self.site)}"
        shown = f"{self.dtype.name}[{','.join(map(str, self.shape))}]"
        return f"{self.number}: {shown} of {self.primitive}{where}{f' in {self.module}' if self.module else ''}"


@dataclasses.dataclass(frozen=True)
class Question:
    """Other specs for a program; what is not named keeps the spec that the function requests.

    Attributes:
        arguments: specs by the names of arguments, each as `pjit` takes one: a `PartitionSpec`, a `NamedSharding`, None
            for replicated, `partjit.UNSPECIFIED` for what the partitioner chooses.
        results: the same by the names of results.
        constraints: specs by the numbers of activations, each as `with_sharding_constraint` takes one.
    """

    arguments: Mapping[str, object] = dataclasses.field(default_factory=dict)
    results: Mapping[str, object] = dataclasses.field(default_factory=dict)
    constraints: Mapping[int, object] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a program sends, needs and computes in a step, per device.

    Attributes:
        collectives: the predicted collectives, as a report has them.
        bytes_by_axes: bytes that a device sends, in all branches, by the axes that the collectives communicate over.
        peak_memory: the most that is live at once, arguments and results included; estimated.
        argument_bytes: of the arguments.
        flops: floating point operations of the busiest device.
        memory_traffic: bytes that a device reads from its memory and writes to it; see `partjit.inspect.traffic`.
        arguments, results: the specs that arguments and results have after the propagation, by name.
        unknown: what the figures leave out or depend on, in words; see `is_lower_bound`.
    """

    collectives: Collectives
    bytes_by_axes: Mapping[tuple[str, ...], float]
    peak_memory: int
    argument_bytes: int
    flops: float
    memory_traffic: float
    arguments: Mapping[str, P]
    results: Mapping[str, P]
    unknown: tuple[str, ...] = ()

    @property
    def bytes_sent(self) -> float:
        """Bytes that a device sends in a step; a loop of unknown trip count counts as one iteration."""
        return self.collectives.bytes_per_step

    @property
    def bytes_sent_at_most(self) -> float:
        """The same with the upper bounds of what is not predicted exactly."""
        return self.collectives.bytes_per_step_at_most

    @property
    def is_lower_bound(self) -> bool:
        """Whether the program may send, need or compute more than is known."""
        return bool(self.unknown)


def change_of(
    question: Question,
    arguments: Sequence[Leaf | None],
    results: Sequence[Leaf | None],
    activations: Mapping[int, Activation],
    mesh: Mesh,
    name: str,
) -> Change:
    """The change that a question is about.

    Args:
        question: the question.
        arguments, results: those of the program, in their order; None for what is no array.
        activations: by their numbers.
        mesh: the mesh of the program.
        name: the name of the program.

    Raises:
        ValueNotFoundError: it names what is not there; the message lists similar names.
        ShardingError: specs do not fit their values or the mesh.
        TypeError, ValueError: a spec is none, names an axis twice, or is over another mesh and like none on this one.
    """
    require("WhatIf.ask", "question", question, Question, "a Question")
    positions = [
        *_positions("argument", question.arguments, arguments),
        *_positions("result", question.results, results),
    ]
    leaves = [leaf for leaf, _ in positions]
    constrained = []
    for number in question.constraints:
        if number not in activations:
            raise ValueNotFoundError(
                f"WhatIf.ask: there is no activation {number!r} in {name}: constraints are by the numbers of "
                "WhatIf.activations"
            )
        constrained.append(activations[number])
    ends = ["arguments"] * len(question.arguments) + ["results"] * len(question.results)
    given = [*question.arguments.values(), *question.results.values()]
    specs = [
        _parsed(f"Question.{end}[{leaf.name!r}]", spec) for end, leaf, spec in zip(ends, leaves, given, strict=True)
    ]
    inner = [
        _parsed(f"Question.constraints[{number}]", spec, may_be_open=True)
        for number, spec in question.constraints.items()
    ]
    mismatches = [
        *(  # in the words of pjit
            mismatch
            for end, leaf, spec in zip(ends, leaves, specs, strict=True)
            for mismatch in check_specs(_NOUNS[end], [leaf.name], [_type(leaf)], [spec], mesh)
        ),
        *check_specs(
            "the activations", [*map(str, constrained)], [*map(_type, constrained)], inner, mesh, allow_uneven=True
        ),
    ]
    raise_mismatches(mismatches, name, mesh)
    axes = [_axes(spec, leaf, mesh) for spec, leaf in zip(specs, leaves, strict=True)]
    count = len(question.arguments)
    return Change(
        {k: own for own, (_, k) in zip(axes[:count], positions[:count], strict=True)},
        {k: own for own, (_, k) in zip(axes[count:], positions[count:], strict=True)},
        {one.number: _axes(spec, one, mesh) or () for one, spec in zip(constrained, inner, strict=True)},
    )


_NOUNS = {"arguments": "pjit arguments", "results": "pjit outputs"}


def _positions(what: str, named: Mapping[str, object], leaves: Sequence[Leaf | None]) -> list[tuple[Leaf, int]]:
    """The leaves of these names, and where they are."""
    require("Question", f"{what}s", named, Mapping, f"a dict from the names of {what}s to specs")
    known = {leaf.name: (leaf, k) for k, leaf in enumerate(leaves) if leaf is not None}
    for name in named:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=3, cutoff=0.3) or [*known][:5]
            there = f": did you mean {', '.join(close)}?" if close else ""
            raise ValueNotFoundError(f"WhatIf.ask: there is no {what} {name!r}{there}")
    return [known[name] for name in named]


def _parsed(where: str, spec: Any, may_be_open: bool = False) -> Spec:
    parsed = parse_spec_tree(spec, where, allow_unconstrained_dims=may_be_open)
    if may_be_open and isinstance(parsed, UnspecifiedValue):
        raise wrong_type("WhatIf.ask", where, spec, "a PartitionSpec: leave out what is not constrained")
    if not isinstance(parsed, ParsedPartitionSpec | UnspecifiedValue):
        raise wrong_type("WhatIf.ask", where, spec, "a PartitionSpec, a NamedSharding, None or partjit.UNSPECIFIED")
    return parsed


def _type(value: Leaf | Activation) -> ShapedArray:
    return ShapedArray(value.shape, value.dtype)


def _axes(spec: Spec, value: Leaf | Activation, mesh: Mesh) -> Axes | None:
    if not isinstance(spec, ParsedPartitionSpec):
        return None
    return axes_on(spec, mesh, len(value.shape), value.name if isinstance(value, Leaf) else str(value))
