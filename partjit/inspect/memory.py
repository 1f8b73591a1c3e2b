"""What a program holds in the memory of a device: estimated from its annotation, or read from what was compiled."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Var, jaxprs_in_params

from partjit.inspect.inlining import mark_p
from partjit.inspect.propagation import Partitioned
from partjit.render.numbers import shown_bytes

__all__ = ["Memory", "estimate_memory", "read_memory"]


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on the device that holds most.

    Attributes:
        program: the name of the program, or of the fragment of a plan.
        arguments, results: what it takes and gives.
        donated: the part of the arguments whose memory it may reuse.
        peak: the most that it holds at once, arguments and results among it.
        is_estimate: whether the peak was computed from the order of the equations, each value kept until its last use.
            XLA fuses equations and may take less, or pad and take more.
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
    """What a unit holds, without compiling it.

    Args:
        partitioned: the unit.
        donated: for each argument whether its memory may be reused.
    """
    inlined, layouts = partitioned.inlined, partitioned.inlined.layouts

    def size(var: Any) -> int:
        layout = layouts.get(inlined.numbers.get(var, -1))
        if layout is None or not hasattr(var.aval, "dtype"):
            return 0
        parts = (math.prod(sizes) for sizes in layout.parts)
        return math.prod(-(-n // k) for n, k in zip(var.aval.shape, parts, strict=False)) * var.aval.dtype.itemsize

    inner = inlined.jaxpr.jaxpr
    kept = {var for var, is_given in zip(inner.invars, donated, strict=True) if not is_given} | {*inner.constvars}
    arguments = [*map(size, inner.invars)]
    return Memory(
        partitioned.unit.name,
        sum(arguments) + sum(map(size, inner.constvars)),
        sum(size(var) for var in inner.outvars if isinstance(var, Var)),
        sum(nbytes for nbytes, is_given in zip(arguments, donated, strict=True) if is_given),
        _peak(inner, kept, size),
        True,
    )


def _peak(jaxpr: Any, kept: set[Any], size: Any) -> int:
    """The most bytes that are held while the equations run in their order."""
    last: dict[Any, int] = {}
    eqns = [eqn for eqn in jaxpr.eqns if eqn.primitive is not mark_p]
    for k, eqn in enumerate(eqns):
        last.update((atom, k) for atom in eqn.invars if isinstance(atom, Var))
    last.update((atom, len(eqns)) for atom in jaxpr.outvars if isinstance(atom, Var))
    dying: dict[int, set[Any]] = {}
    for var, k in last.items():
        if var not in kept:
            dying.setdefault(k, set()).add(var)
    held = sum(map(size, (*jaxpr.constvars, *jaxpr.invars)))
    most = held
    for k, eqn in enumerate(eqns):
        within = 0
        for inner in jaxprs_in_params(eqn.params):
            own = getattr(inner, "jaxpr", inner)
            outside = sum(map(size, (*own.constvars, *own.invars)))
            within = max(within, _peak(own, {*own.constvars, *own.invars}, size) - outside)
        held += sum(map(size, eqn.outvars))
        most = max(most, held + max(0, within))
        held -= sum(size(var) for var in dying.get(k, ()))
        held -= sum(size(var) for var in eqn.outvars if var not in last)
    return most


def read_memory(name: str, compiled: Any) -> Memory | None:
    """What XLA says of a compiled program; None if it says nothing on this platform."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    arguments, results = int(stats.argument_size_in_bytes), int(stats.output_size_in_bytes)
    aliased, temporary = int(stats.alias_size_in_bytes), int(stats.temp_size_in_bytes)
    # The peak that XLA tells leaves out temporaries on some platforms.
    peak = max(int(getattr(stats, "peak_memory_in_bytes", 0)), arguments + results - aliased + temporary)
    return Memory(name, arguments, results, aliased, peak, False)
