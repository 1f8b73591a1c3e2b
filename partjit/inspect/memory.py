"""Device memory of a program: estimated from its annotated jaxpr, or as XLA reports it for the compiled program."""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from partjit._jax.compiling import MeshExecutable
from partjit.devices import platform_of
from partjit.inspect.annotated import AnnotatedEquation, AnnotatedValue
from partjit.inspect.buffer_assignment import Peak, aligned, peak_of
from partjit.inspect.buffers import buffers_of
from partjit.inspect.collectives import Collective, UnknownMove
from partjit.inspect.equation_moves import moves_by_equation
from partjit.inspect.inlining import InlinedProgram
from partjit.inspect.propagation import Partitioned
from partjit.inspect.skeleton import Skeleton, Variable, skeleton_of
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
        unknown: what the estimate leaves out, so that the peak is at least as large.
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
    buffers: tuple[Buffer, ...] = dataclasses.field(default=(), repr=False)

    def __str__(self) -> str:
        about = "about " if self.is_estimate else ""
        least = "" if self.is_estimate else " at most"
        least = f" or more, without {', '.join(self.unknown)}" if self.unknown else least
        saved = f", saved for the backward pass {shown_bytes(self.saved)}" if self.saved else ""
        return (
            f"{self.program}: {about}{shown_bytes(self.peak)}{least}; arguments {shown_bytes(self.arguments)} "
            f"({shown_bytes(self.donated)} donated), results {shown_bytes(self.results)}{saved}, temporaries "
            f"{shown_bytes(self.temporaries)}"
        )


class Needs(NamedTuple):
    """What a program needs on a device, as far as it is known without its annotated equations.

    Attributes:
        arguments, results, donated: as those of `Memory`.
        at_peak: what is alive at the peak besides.
        unknown: what the estimate leaves out.
    """

    arguments: int
    results: int
    donated: int
    at_peak: Peak
    unknown: tuple[str, ...]

    @property
    def peak(self) -> int:
        """The most that is live at once."""
        return self.arguments + self.results - self.donated + self.at_peak.total


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
    found = needs_of(skeleton_of(inlined), inlined.shardings, donated, collectives, moves, is_cpu)
    return Memory(
        partitioned.unit.name,
        found.arguments,
        found.results,
        found.donated,
        found.peak,
        True,
        found.at_peak.saved,
        found.at_peak.others,
        found.unknown,
        tuple(sorted(_buffers(inlined, found.at_peak), key=lambda one: -one.nbytes)),
    )


def needs_of(
    skeleton: Skeleton,
    shardings: Mapping[int, TensorSharding],
    donated: Sequence[bool],
    collectives: Iterable[Collective],
    moves: Iterable[UnknownMove],
    is_cpu: bool,
) -> Needs:
    """What a program needs with these shardings of its values, by their numbers; see `estimate_memory`."""
    shard, known = functools.cache(_shard_bytes), dict[Variable, int]()

    def size(var: Variable) -> int:
        found = known.get(var)
        if found is None:
            sharding = None if var.number is None else shardings.get(var.number)
            found = known[var] = 0 if sharding is None else shard(var.shape, var.itemsize, sharding)
        return found

    body, collectives = skeleton.body, [*collectives]
    in_bytes = [size(var) if is_passed else 0 for var, is_passed in zip(body.invars, skeleton.passed, strict=True)]
    arguments = sum(in_bytes) + sum(map(size, body.constvars))
    results = [var for var in body.outvars if isinstance(var, Variable)]
    flags = zip(body.invars, in_bytes, donated, strict=True)
    reused = _reused([var for var, nbytes, is_donated in flags if is_donated and nbytes], results, size)
    at_peak = peak_of(buffers_of(body, size, moves_by_equation(collectives)), reused)
    needs = Needs(arguments, sum(map(size, results)), reused, at_peak, ())
    random = sum(max(size(var), _OF_RANDOM) for var in skeleton.random)
    interleaved = sum(map(size, skeleton.interleaved))
    unknown = _unknown(skeleton, needs.peak, (_gathered(collectives), random, interleaved), moves, is_cpu)
    return needs._replace(unknown=tuple(unknown))


def _shard_bytes(shape: tuple[int, ...], itemsize: int, sharding: TensorSharding) -> int:
    parts = (math.prod(sizes) for sizes in sharding.parts)
    return math.prod(-(-n // k) for n, k in zip(shape, parts, strict=False)) * itemsize


def _reused(donated: Iterable[Variable], results: Iterable[Variable], size: Callable[[Variable], int]) -> int:
    """The bytes of donated arguments in whose memory results are: those of as many bytes on a device."""
    matched = collections.Counter(map(size, results)) & collections.Counter(map(size, donated))
    return sum(nbytes * count for nbytes, count in matched.items())


def _gathered(collectives: Iterable[Collective]) -> int:
    return sum(one.result_bytes for one in collectives if one.kind != "all-reduce")


def _buffers(inlined: InlinedProgram, found: Peak) -> Iterator[Buffer]:
    for one in found.alive:
        if one.eqn is not None and one.eqn.number is not None:
            equation = inlined.equations[one.eqn.number]
            number = None if one.var is None else one.var.number
            value = next((v for v in equation.outputs if number is not None and v.number == number), None)
            yield Buffer(aligned(one.nbytes), one.is_saved, equation, value)


_LARGE_PART = 0.1
_OF_RANDOM = 1 << 8
"""Bytes that XLA may need for random numbers besides, however few."""


def _unknown(
    skeleton: Skeleton, peak: int, sizes: tuple[int, int, int], moves: Iterable[UnknownMove], is_cpu: bool
) -> Iterator[str]:
    """What is not in an estimate; the sizes are those of what is gathered, of random numbers, of interleaved arrays."""
    gathered, random, interleaved = sizes
    if any(not move.operation.startswith("cpu.") for move in moves):
        yield "what XLA may move besides"
    if gathered > _LARGE_PART * peak:
        yield "the lifetime of what collectives gather"
    if random > _LARGE_PART * peak:
        yield "the workspace of random numbers"
    if interleaved > _LARGE_PART * peak:  # XLA may keep them with their gaps instead of the sum
        yield "the parts of interleaved arrays, as those of associative scans"
    if skeleton.has_unrolled_loops:
        yield "the iterations of unrolled loops, which XLA may run at once"
    if skeleton.workspace:
        yield f"the workspace of {', '.join(skeleton.workspace)}"
    if skeleton.has_narrow_products and is_cpu:
        yield "the matrix products that the CPU computes in 32 bits"


def read_memory(name: str, compiled: MeshExecutable) -> Memory | None:
    """What XLA reports for a compiled program; None on platforms where it reports nothing."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    arguments, results = int(stats.argument_size_in_bytes), int(stats.output_size_in_bytes)
    aliased, temporary = int(stats.alias_size_in_bytes), int(stats.temp_size_in_bytes)
    # The peak that XLA reports leaves out temporaries on some platforms.
    peak = max(int(getattr(stats, "peak_memory_in_bytes", 0)), arguments + results - aliased + temporary)
    return Memory(name, arguments, results, aliased, peak, False, None, temporary)
