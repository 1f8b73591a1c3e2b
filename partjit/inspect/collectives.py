"""A collective of a partitioned program, and what it costs.

The cost is the bytes that a device sends under bandwidth-optimal algorithms: on a ring, in one direction or both,

| kind | bytes |
|---|---|
| all-gather | `(n-1)/n` x result |
| reduce-scatter | `(n-1)/n` x operand |
| all-reduce | `2 (n-1)/n` x operand: a reduce-scatter, then an all-gather |
| all-to-all | `(n-1)/n` x operand: a device keeps its own part |
| collective-broadcast | `(n-1)/n` x operand, on average: the last device of the ring sends nothing |
| collective-permute | operand x the fraction of devices that send to another |

with `n` devices in a group. A collective over several axes of a mesh costs as much as one over as many devices on one
axis; axis by axis the costs add up to the same `(n-1)/n`. A ragged-all-to-all counts as though it were full.

Source: Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH, 2005; How to Scale
Your Model, https://jax-ml.github.io/scaling-book/sharding. Of an all-to-all these are the bytes that originate on a
device, not those it forwards on a ring.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from partjit.inspect.times import Times
from partjit.inspect.user_lines import Site

__all__ = [
    "KINDS",
    "Collective",
    "Member",
    "Total",
    "UnknownMove",
    "bytes_moved",
    "executions",
    "in_branch",
    "repeated",
    "taken",
    "total_bytes",
]

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)


def bytes_moved(kind: str, group_size: int, operand_bytes: float, result_bytes: float, sent: float = 1.0) -> float:
    """Bytes that a device sends in one execution of a collective, on average over the devices.

    Args:
        kind: one of `KINDS`.
        group_size: the number of devices that communicate with each other.
        operand_bytes, result_bytes: sizes of the operand and the result on a device.
        sent: the fraction of devices that send, for a collective-permute.

    Raises:
        ValueError: `kind` is none of these, or the group is empty.

    Example:
        >>> bytes_moved("all-gather", group_size=4, operand_bytes=100, result_bytes=400)
        300.0
        >>> bytes_moved("all-reduce", group_size=4, operand_bytes=400, result_bytes=400)
        600.0
    """
    if kind not in KINDS:
        raise ValueError(f"bytes_moved: {kind!r} is no collective; the kinds are {', '.join(KINDS)}")
    if group_size < 1:
        raise ValueError(f"bytes_moved: a group has at least one device, but group_size is {group_size}")
    others = (group_size - 1) / group_size
    match kind:
        case "all-gather":
            return others * result_bytes
        case "all-reduce":
            return 2 * others * operand_bytes
        case "collective-permute":
            return sent * operand_bytes
        case _:
            return others * operand_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """One of the arrays of a variadic collective, or of one that XLA combined.

    Attributes:
        operand, result: its dtype and shape on a device, before and after: `f32[8,16]`.
        operand_bytes, result_bytes: their sizes on a device.
        site: the user's line that it comes from, or None.
        tags: the numbers of the equations that it comes from, outermost first.
        op_name: its name stack.
        library: the line in an installed package that the user's line calls, or None.
        module: the path of the module that it comes from, "Block_3/Dense_0"; empty if there is none.
    """

    operand: str
    result: str
    operand_bytes: int
    result_bytes: int
    site: Site | None = None
    tags: tuple[int, ...] = ()
    op_name: str = ""
    library: Site | None = None
    module: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective of a program: what it moves, between which devices, how often, and where it comes from.

    Attributes:
        kind: one of `KINDS`.
        axes: the axes of the mesh it communicates over, in the mesh's order; those of size 1 never appear. Those of a
            collective-permute are the axes along which anything moves. Empty if the groups are no product of whole
            axes; see `groups`.
        group_size: the number of devices in the largest group.
        operand, result: dtype and shape on a device, `f32[8,16]`; several are separated by commas.
        operand_bytes, result_bytes: their sizes on a device.
        groups: the device ids of each group, or of each source and target of a collective-permute; None if not known.
        sent: the fraction of devices that send; below 1 for a collective-permute that leaves some out.
        times: how often a step executes it, the product of the trip counts of the loops around it; None if one of them
            is unknown.
        per: the same, per iteration of the loops of unknown trip count; None if there are none.
        is_exact: whether `times` is exact: it is not in a branch, which may not be taken.
        branch: the branches it is in, outermost first: the name of the conditional and the number of the branch.
        site: the user's line that it comes from, or None.
        tags: the numbers of the equations that it comes from, outermost first, as the `eqn:` parts of `op_name` say.
        op_name: its name stack.
        library: the line in an installed package that the user's line calls, or None.
        module: the path of the module that it comes from, "Block_3/Dense_0"; empty if there is none.
        name: of the instruction.
        program: the name of the program, or of the fragment of a plan.
        members: its arrays if there are several, each with its source.

    Example:
        >>> gather = Collective(
        ...     kind="all-gather", axes=("model",), group_size=4, operand="f32[8,16]", result="f32[8,64]",
        ...     operand_bytes=512, result_bytes=2048, times=24)
        >>> gather.bytes_moved, gather.bytes_per_step
        (1536.0, 36864.0)
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    operand: str
    result: str
    operand_bytes: int
    result_bytes: int
    groups: Sequence[tuple[int, ...]] | None = None
    sent: float = 1.0
    times: int | None = 1
    per: Times | None = None
    is_exact: bool = True
    branch: tuple[tuple[str, int], ...] = ()
    site: Site | None = None
    tags: tuple[int, ...] = ()
    op_name: str = ""
    library: Site | None = None
    module: str = ""
    name: str = ""
    program: str = ""
    members: tuple[Member, ...] = ()

    @property
    def executions(self) -> int:
        """`times`, where a loop of unknown trip count counts as one iteration."""
        return executions(self)

    @property
    def shown_times(self) -> str:
        """`times` in words: "10 per iteration at model.py:12"."""
        return str(self.per or ("?" if self.times is None else self.times))

    @property
    def combined(self) -> int:
        """The number of arrays it moves."""
        return max(1, len(self.members))

    @property
    def bytes_moved(self) -> float:
        """Bytes that a device sends in one execution; see the formulas of this module."""
        return bytes_moved(self.kind, self.group_size, self.operand_bytes, self.result_bytes, self.sent)

    @property
    def bytes_per_step(self) -> float | None:
        """Bytes that a device sends in a step if every branch is taken; None if `times` is unknown."""
        return None if self.times is None else self.times * self.bytes_moved

    @property
    def counted_bytes(self) -> float:
        """The same, where a loop of unknown trip count counts as one iteration."""
        return self.executions * self.bytes_moved

    @property
    def sites(self) -> tuple[Site, ...]:
        """The distinct lines that it and its members come from."""
        found = [self.site, *(member.site for member in self.members)]
        return tuple(dict.fromkeys(site for site in found if site is not None))

    @property
    def modules(self) -> tuple[str, ...]:
        """The distinct modules that it and its members come from."""
        return tuple(dict.fromkeys(filter(None, (self.module, *(member.module for member in self.members)))))


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnknownMove:
    """An operation on sharded dimensions for which XLA's partitioner may move data, in a way that is not predicted.

    Attributes:
        operation: its name in the lowered program: `stablehlo.scatter`; or, after `cpu.`, what CPUs send otherwise.
        bytes_at_most: bytes that a device sends at most in one execution.
        needed_at_most: bytes that a device needs for it at most, where these are not as many.
        times, per, is_exact, site, library, module, tags, op_name, program: as those of a `Collective`.
    """

    operation: str
    bytes_at_most: int
    needed_at_most: int | None = None
    times: int | None = 1
    per: Times | None = None
    is_exact: bool = True
    site: Site | None = None
    library: Site | None = None
    module: str = ""
    tags: tuple[int, ...] = ()
    op_name: str = ""
    program: str = ""

    @property
    def bytes_likely(self) -> float:
        """Bytes that a device sends in one execution as a rule: 7 % of the upper bound.

        That is the median of what XLA sent for all that was not predicted in 93 training steps of seven models with
        specs that a search tried, on 4 to 64 devices; in two of three it was between 2.4 and 13 %, and 38 % at most. On
        CPUs it is the upper bound of what is sent in wider types, and that of halos, of which some may not be sent.
        """
        return self.bytes_at_most * (1.0 if self.is_of_cpus or self.needed_at_most is not None else _LIKELY)

    @property
    def is_of_cpus(self) -> bool:
        """Whether it is what CPUs send in wider types, and other devices do not."""
        return self.operation.startswith("cpu.")


_LIKELY = 0.07
_Repeated = TypeVar("_Repeated", Collective, UnknownMove)


def repeated(one: _Repeated, runs: int | None) -> _Repeated:
    """A collective, or a move, of a program that runs so often in a step; None if that is unknown."""
    if runs == 1:
        return one
    times = None if runs is None or one.times is None else one.times * runs
    per = None if one.per is None else one.per * Times(1 if runs is None else runs)
    return dataclasses.replace(one, times=times, per=per, is_exact=one.is_exact and times is not None)


def in_branch(one: Collective | UnknownMove, branch: tuple[tuple[str, int], ...]) -> Collective | UnknownMove:
    """A collective, or a move, in these branches; see `Collective.branch`."""
    if not branch:
        return one
    if isinstance(one, Collective):
        return dataclasses.replace(one, is_exact=False, branch=branch)
    return dataclasses.replace(one, is_exact=False)


def executions(one: Collective | UnknownMove) -> int:
    """How often a step executes a collective or a move; a loop of unknown trip count counts as one iteration."""
    if one.times is not None:
        return one.times
    return 1 if one.per is None else one.per.known


class Total(NamedTuple):
    """The total cost of several collectives.

    Attributes:
        bytes: that a device sends in a step.
        is_exact: if not, loops of unknown trip count count as one iteration, and of the branches of a conditional the
            one that sends the most counts.
    """

    bytes: float
    is_exact: bool


def total_bytes(collectives: Iterable[Collective]) -> Total:
    """Bytes that a device sends in a step of the programs that have these collectives.

    Example:
        >>> def in_branch(number, size):
        ...     return Collective(
        ...         kind="all-gather", axes=("x",), group_size=2, operand="", result="", operand_bytes=size // 2,
        ...         result_bytes=size, is_exact=False, branch=(("conditional.1", number),))
        >>> total_bytes([in_branch(0, 100), in_branch(0, 20), in_branch(1, 80)])
        Total(bytes=60.0, is_exact=False)
    """
    everything = [*collectives]
    is_exact = all(collective.is_exact and collective.times is not None for collective in everything)
    return Total(sum(collective.counted_bytes for collective in taken(everything)), is_exact)


def taken(
    collectives: Iterable[Collective], cost: Callable[[Collective], float] = lambda one: one.counted_bytes
) -> list[Collective]:
    """Those that count in totals: of the branches of each conditional, those of the one that costs the most.

    Example:
        >>> def in_branch(*branch, size):
        ...     return Collective(
        ...         kind="all-gather", axes=("x",), group_size=2, operand="", result="", operand_bytes=size // 2,
        ...         result_bytes=size, branch=branch)
        >>> inner = in_branch(("a", 1), ("b", 0), size=30), in_branch(("a", 1), ("b", 1), size=40)
        >>> [one.result_bytes for one in taken([in_branch(("a", 0), size=60), *inner])]
        [60]
        >>> [one.result_bytes for one in taken([in_branch(("a", 0), size=20), *inner])]
        [40]
    """
    # A tree: the cost of a branch itself, and the conditionals in it with their branches.
    everything = [(collective, _path(collective)) for collective in collectives]
    own: dict[tuple, float] = collections.defaultdict(float)
    inner: dict[tuple, dict[tuple[str, str], dict[int, tuple]]] = {}
    for collective, path in everything:
        own[path] += cost(collective)
        for depth, (program, conditional, number) in enumerate(path):
            branches = inner.setdefault(path[:depth], {}).setdefault((program, conditional), {})
            branches[number] = path[: depth + 1]

    @functools.cache
    def total(path: tuple) -> float:
        return own[path] + sum(total(most) for most in dearest(path))

    @functools.cache
    def dearest(path: tuple) -> list[tuple]:
        return [max(branches.values(), key=total) for branches in inner.get(path, {}).values()]

    def chosen(path: tuple) -> Iterator[tuple]:
        yield path
        for most in dearest(path):
            yield from chosen(most)

    kept = {*chosen(())}
    return [collective for collective, path in everything if path in kept]


def _path(collective: Collective) -> tuple[tuple[str, str, int], ...]:
    """The branches that a collective is in, outermost first: of which program and conditional, and their numbers."""
    return tuple((collective.program, conditional, number) for conditional, number in collective.branch)
