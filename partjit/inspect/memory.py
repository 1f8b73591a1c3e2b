"""Device memory of a program: estimated from its annotated jaxpr, or as XLA reports it for the compiled program."""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from partjit._jax.compiling import MeshExecutable
from partjit.devices import platform_of
from partjit.inspect.annotated import AnnotatedEquation, AnnotatedValue
from partjit.inspect.buffer_assignment import Peak, aligned, peak_of
from partjit.inspect.buffers import buffers_of
from partjit.inspect.collectives import Collective, UnknownMove
from partjit.inspect.equation_moves import moves_by_equation
from partjit.inspect.inlining import InlinedProgram
from partjit.inspect.memory_range import Range, range_of
from partjit.inspect.propagation import Partitioned
from partjit.inspect.skeleton import Body, Skeleton, Variable, skeleton_of
from partjit.render.numbers import shown_bytes
from partjit.shardy import TensorSharding

__all__ = ["Buffer", "Memory", "Needs", "estimate_memory", "needs_of", "read_memory"]


class Buffer(NamedTuple):
    """What is alive at the peak, besides arguments and results.

    Attributes:
        nbytes: its bytes on a device, of which XLA takes a multiple of 64.
        is_saved: whether the forward pass computes it for the backward pass.
        equation: the equation that computes it.
        value: the value; None for what an equation needs besides its operands and results.
    """

    nbytes: int
    is_saved: bool
    equation: AnnotatedEquation
    value: AnnotatedValue | None = None


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on the device that needs most.

    Attributes:
        program: the name of the program, or of the fragment of a plan.
        arguments, results: of its arguments and results.
        donated: of the donated arguments whose memory it reuses for results.
        peak: the most that is live at once, arguments and results included.
        is_estimate: whether the peak was computed from the order of the equations; see `partjit.inspect.buffers`.
        saved: of what the forward pass computes for the backward pass, at the peak; None if that is not known.
        temporaries: of everything else that is neither argument nor result, at the peak.
        unknown: what the peak depends on that is not known; nothing if it is within some percent.
        at_least, at_most: what it is between, whatever that may be; None if it has no bound. Both are the peak if
            nothing is unknown.
        buffers: the temporaries at the peak, the largest first; none if XLA reports the memory.
    """

    program: str
    arguments: int
    results: int
    donated: int
    peak: int
    is_estimate: bool
    saved: int | None = None
    temporaries: int = 0
    unknown: tuple[str, ...] = ()
    at_least: int = 0
    at_most: int | None = None
    buffers: tuple[Buffer, ...] = dataclasses.field(default=(), repr=False)

    @property
    def shown_bounds(self) -> str:
        """What an estimate that depends on something unknown is between: "0.9 MB to 1.5 MB", or "0.9 MB or more"."""
        if not self.unknown:
            return ""
        least, most = shown_bytes(self.at_least), self.at_most
        if self.at_least == self.peak:
            return "or more" if most is None else f"up to {shown_bytes(most)}"
        return f"{least} or more" if most is None else f"{least} to {shown_bytes(most)}"

    def __str__(self) -> str:
        most = f"about {shown_bytes(self.peak)}" if self.is_estimate else f"{shown_bytes(self.peak)} at most"
        bounds = f" ({self.shown_bounds}, depending on {', '.join(self.unknown)})" if self.unknown else ""
        saved = f", saved for the backward pass {shown_bytes(self.saved)}" if self.saved else ""
        return (
            f"{self.program}: {most}{bounds}; arguments {shown_bytes(self.arguments)} "
            f"({shown_bytes(self.donated)} donated), results {shown_bytes(self.results)}{saved}, temporaries "
            f"{shown_bytes(self.temporaries)}"
        )


class Needs(NamedTuple):
    """What a program needs on a device, as far as it is known without its annotated equations.

    Attributes:
        arguments, results, donated: as those of `Memory`.
        peak: the most that is live at once.
        at_peak: what is alive then besides arguments and results.
        bounds: what the peak may be, and why.
    """

    arguments: int
    results: int
    donated: int
    peak: int
    at_peak: Peak
    bounds: Range


def estimate_memory(
    partitioned: Partitioned,
    donated: Sequence[bool],
    collectives: Iterable[Collective] = (),
    moves: Iterable[UnknownMove] = (),
) -> Memory:
    """The memory of a unit whose arguments are donated as these flags say, without compiling it.

    Args:
        partitioned: the unit.
        donated: for each argument whether it is donated.
        collectives: those that are predicted.
        moves: what XLA may move besides.
    """
    inlined, mesh = partitioned.inlined, partitioned.unit.mesh
    is_cpu = mesh.empty or platform_of(mesh) == "cpu"
    returned = partitioned.result_shardings
    found = needs_of(skeleton_of(inlined), inlined.shardings, returned, donated, collectives, moves, is_cpu)
    return Memory(
        partitioned.unit.name,
        found.arguments,
        found.results,
        found.donated,
        found.peak,
        True,
        found.at_peak.saved,
        max(0, found.peak - found.arguments - found.results + found.donated - found.at_peak.saved),
        found.bounds.reasons,
        found.bounds.at_least,
        found.bounds.at_most,
        tuple(sorted(_buffers(inlined, found.at_peak), key=lambda one: -one.nbytes)),
    )


def needs_of(
    skeleton: Skeleton,
    shardings: Mapping[int, TensorSharding],
    returned: Sequence[TensorSharding],
    donated: Sequence[bool],
    collectives: Iterable[Collective],
    moves: Iterable[UnknownMove],
    is_cpu: bool,
) -> Needs:
    """What a program needs with these shardings of its values, by their numbers, and of what it returns.

    See `estimate_memory`.
    """
    shard, known = functools.cache(_shard_bytes), dict[Variable, int]()

    def size(var: Variable) -> int:
        found = known.get(var)
        if found is None:
            sharding = None if var.number is None else shardings.get(var.number)
            found = known[var] = 0 if sharding is None else shard(var.shape, var.itemsize, sharding)
        return found

    body, collectives = skeleton.body, [*collectives]

    def packed(var: Variable) -> int:
        return _packed(var, size(var))

    in_bytes = [packed(var) if is_passed else 0 for var, is_passed in zip(body.invars, skeleton.passed, strict=True)]
    arguments = sum(in_bytes) + sum(map(packed, body.constvars))
    results = [
        (var, _packed(var, shard(var.shape, var.itemsize, sharding)))
        for var, sharding in zip(body.outvars, returned, strict=True)
        if isinstance(var, Variable)
    ]
    out_bytes = [nbytes for _, nbytes in results]
    flags = zip(in_bytes, donated, strict=True)
    given = [nbytes for nbytes, is_donated in flags if is_donated and nbytes]
    aliased = _reused(given, out_bytes)
    reused = _reused(given, [min(packed(var), nbytes) for var, nbytes in results])  # before anything is gathered
    at_peak = peak_of(buffers_of(body, size, moves_by_equation(collectives)), reused)
    computed = sum(_computed(body, var, packed(var), nbytes) for var, nbytes in results)
    peak = max(arguments + computed - reused + at_peak.total, arguments + sum(out_bytes) - aliased)
    bounds = range_of(skeleton, peak, at_peak, (collectives, moves), size, is_cpu)
    return Needs(arguments, sum(out_bytes), aliased, peak, at_peak, bounds)


def _computed(body: Body, var: Variable, nbytes: int, returned: int) -> int:
    """The bytes of a result before what gathers it, which is among the temporaries, and of the shard that is returned.

    Of an argument, and of what is made of literals, no more is there than that shard.
    """
    if nbytes <= returned:
        return nbytes
    return returned if var not in body.makers or _is_generated(body, var) else nbytes + returned


def _is_generated(body: Body, var: Variable) -> bool:
    """Whether a value is made of literals and smaller values, as `jnp.zeros` and `jnp.eye` are."""
    pending, seen, size = [var], {var}, math.prod(var.shape)
    while pending:
        maker = body.makers.get(pending.pop())
        if maker is None:
            return False
        operands = {atom for atom in maker.invars if isinstance(atom, Variable) and math.prod(atom.shape) >= size}
        pending += operands - seen
        seen |= operands
    return True


def _shard_bytes(shape: tuple[int, ...], itemsize: int, sharding: TensorSharding) -> int:
    parts = (math.prod(sizes) for sizes in sharding.parts)
    return math.prod(-(-n // k) for n, k in zip(shape, parts, strict=False)) * itemsize


def _packed(var: Variable, nbytes: int) -> int:
    """The bytes of an argument or result; XLA computes with the elements of types of four bits as bytes."""
    return nbytes if var.bits == 8 * var.itemsize else -(-nbytes // var.itemsize * var.bits // 8)


def _reused(donated: Iterable[int], results: Iterable[int]) -> int:
    """The bytes of donated arguments in whose memory results are: those of as many bytes on a device."""
    matched = collections.Counter(results) & collections.Counter(donated)
    return sum(nbytes * count for nbytes, count in matched.items())


def _buffers(inlined: InlinedProgram, found: Peak) -> Iterator[Buffer]:
    for one in found.alive:
        if one.eqn is not None and one.eqn.number is not None:
            equation = inlined.equations[one.eqn.number]
            number = None if one.var is None else one.var.number
            value = next((v for v in equation.outputs if number is not None and v.number == number), None)
            yield Buffer(aligned(one.nbytes), one.is_saved, equation, value)


def read_memory(name: str, compiled: MeshExecutable) -> Memory | None:
    """What XLA reports for a compiled program; None on platforms where it reports nothing."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    arguments, results = int(stats.argument_size_in_bytes), int(stats.output_size_in_bytes)
    aliased, temporary = int(stats.alias_size_in_bytes), int(stats.temp_size_in_bytes)
    # The peak that XLA reports leaves out temporaries on some platforms.
    peak = max(int(getattr(stats, "peak_memory_in_bytes", 0)), arguments + results - aliased + temporary)
    return Memory(name, arguments, results, aliased, peak, False, None, temporary, (), peak, peak)
