"""What XLA made of the programs: read after they have been compiled."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from partjit._jax.compiling import no_compilation_cache
from partjit.compile import lower_jaxpr_anew
from partjit.inspect.collectives import Collective, repeated
from partjit.inspect.hlo.optimized import read_collectives
from partjit.inspect.hlo.rematerialization import Rematerialization, catch_rematerializations, with_sites
from partjit.inspect.memory import Memory, read_memory
from partjit.inspect.propagation import Unit

__all__ = ["CompiledUnit", "compile_unit"]


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledUnit:
    """A unit after XLA.

    Attributes:
        unit: the unit.
        collectives: those of the optimized program.
        memory: what it holds on a device; None where XLA does not tell.
        flops: what XLA counts, per device; the body of a loop counts once.
        rematerializations: the arrays that every device gets all of, because XLA knew no other way.
        text: the optimized program.
    """

    unit: Unit
    collectives: tuple[Collective, ...]
    memory: Memory | None
    flops: float
    rematerializations: tuple[Rematerialization, ...]
    text: str


def compile_unit(unit: Unit, donated: Sequence[bool]) -> CompiledUnit:
    """Compiles a unit, for nothing but to be read.

    Args:
        unit: the unit.
        donated: for each argument whether its memory may be reused.
    """
    lowering = lower_jaxpr_anew(
        unit.jaxpr, unit.in_shardings, unit.out_shardings, tuple(donated), unit.mesh, unit.name, keep_unused=False
    )
    if unit.mesh.empty:
        # What is read from the cache has the lines of whoever compiled it first.
        with no_compilation_cache():
            executable = lowering.compile()
        return CompiledUnit(unit, (), read_memory(unit.name, executable), _flops(executable), (), executable.as_text())
    with catch_rematerializations(unit.mesh) as found:
        executable = lowering.compile()
    text = executable.as_text() or ""
    return CompiledUnit(
        unit,
        tuple(repeated(collective, unit.turns) for collective in read_collectives(text, unit.mesh, unit.name)),
        read_memory(unit.name, executable),
        _flops(executable),
        tuple(with_sites(found, text)),
        text,
    )


def _flops(executable: Any) -> float:
    costs = executable.cost_analysis()
    costs = costs[0] if isinstance(costs, list) else costs
    return float((costs or {}).get("flops", 0.0))
