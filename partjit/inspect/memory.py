"""Device memory of a program: estimated from its annotated jaxpr, or as XLA reports it for the compiled program."""

import dataclasses
import math
from collections.abc import Callable, Sequence

from jax.core import ShapedArray
from jax.extend.core import Jaxpr, Var, jaxprs_in_params

from partjit._jax.compiling import MeshExecutable
from partjit.inspect.inlining import mark_p
from partjit.inspect.propagation import Partitioned
from partjit.render.numbers import shown_bytes

__all__ = ["Memory", "estimate_memory", "read_memory"]


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on the device that needs most.

    Attributes:
        program: the name of the program, or of the fragment of a plan.
        arguments, results: of its arguments and results.
        donated: of the arguments whose memory it may reuse.
        peak: the most that is live at once, arguments and results included.
        is_estimate: whether the peak was computed from the order of the equations, with each value live until its last
            use. XLA fuses equations and may need less, or pads and needs more.
    """

    program: str
    arguments: int
    results: int
    donated: int
    peak: int
    is_estimate: bool

    def __str__(self) -> str:
        about = "about " if self.is_estimate else ""
        return (
            f"{self.program}: {about}{shown_bytes(self.peak)} at most; arguments {shown_bytes(self.arguments)} "
            f"({shown_bytes(self.donated)} donated), results {shown_bytes(self.results)}"
        )


def estimate_memory(partitioned: Partitioned, donated: Sequence[bool]) -> Memory:
    """The memory of a unit whose arguments are donated as these flags say, without compiling it."""
    inlined, shardings = partitioned.inlined, partitioned.inlined.shardings

    def size(var: Var) -> int:
        sharding, aval = shardings.get(inlined.numbers.get(var, -1)), var.aval
        if sharding is None or not isinstance(aval, ShapedArray):
            return 0
        parts = (math.prod(sizes) for sizes in sharding.parts)
        return math.prod(-(-n // k) for n, k in zip(aval.shape, parts, strict=False)) * aval.dtype.itemsize

    inner = inlined.jaxpr.jaxpr
    kept = {var for var, is_donated in zip(inner.invars, donated, strict=True) if not is_donated} | {*inner.constvars}
    arguments = [*map(size, inner.invars)]
    return Memory(
        partitioned.unit.name,
        sum(arguments) + sum(map(size, inner.constvars)),
        sum(size(var) for var in inner.outvars if isinstance(var, Var)),
        sum(nbytes for nbytes, is_donated in zip(arguments, donated, strict=True) if is_donated),
        _peak(inner, kept, size),
        True,
    )


def _peak(jaxpr: Jaxpr, kept: set[Var], size: Callable[[Var], int]) -> int:
    """The most bytes that are live while the equations run in their order; those kept are live to the end."""
    last: dict[Var, int] = {}
    eqns = [eqn for eqn in jaxpr.eqns if eqn.primitive is not mark_p]
    for k, eqn in enumerate(eqns):
        last.update((atom, k) for atom in eqn.invars if isinstance(atom, Var))
    last.update((atom, len(eqns)) for atom in jaxpr.outvars if isinstance(atom, Var))
    dying: dict[int, set[Var]] = {}
    for var, k in last.items():
        if var not in kept:
            dying.setdefault(k, set()).add(var)
    live = sum(map(size, (*jaxpr.constvars, *jaxpr.invars)))
    peak = live
    for k, eqn in enumerate(eqns):
        within = 0
        for inner in jaxprs_in_params(eqn.params):
            own = getattr(inner, "jaxpr", inner)
            outside = sum(map(size, (*own.constvars, *own.invars)))
            within = max(within, _peak(own, {*own.constvars, *own.invars}, size) - outside)
        live += sum(map(size, eqn.outvars))
        peak = max(peak, live + max(0, within))
        live -= sum(size(var) for var in dying.get(k, ()))
        live -= sum(size(var) for var in eqn.outvars if var not in last)
    return peak


def read_memory(name: str, compiled: MeshExecutable) -> Memory | None:
    """What XLA reports for a compiled program; None on platforms where it reports nothing."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    arguments, results = int(stats.argument_size_in_bytes), int(stats.output_size_in_bytes)
    aliased, temporary = int(stats.alias_size_in_bytes), int(stats.temp_size_in_bytes)
    # The peak that XLA reports leaves out temporaries on some platforms.
    peak = max(int(getattr(stats, "peak_memory_in_bytes", 0)), arguments + results - aliased + temporary)
    return Memory(name, arguments, results, aliased, peak, False)
