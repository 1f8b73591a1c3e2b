"""Compiled programs: their collectives, memory and FLOPs as XLA has them."""

import dataclasses
from collections.abc import Sequence

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
        memory: per device; None where XLA does not report it.
        flops: as XLA counts them, per device; the body of a loop counts once.
        rematerializations: the arrays that XLA replicates in full to reshard them.
        text: the optimized program.
    """

    unit: Unit
    collectives: tuple[Collective, ...]
    memory: Memory | None
    flops: float
    rematerializations: tuple[Rematerialization, ...]
    text: str


def compile_unit(unit: Unit, donated: Sequence[bool]) -> CompiledUnit:
    """Compiles a unit whose arguments are donated as these flags say, in order to read the result."""
    lowering = lower_jaxpr_anew(
        unit.jaxpr,
        unit.in_shardings,
        unit.out_shardings,
        tuple(donated),
        unit.mesh,
        unit.name,
        keep_unused=unit.keep_unused,
    )
    # A cached program has the source lines of the program that was compiled first.
    with no_compilation_cache() if unit.mesh.empty else catch_rematerializations(unit.mesh) as caught:
        executable = lowering.compile()
    text = executable.as_text() or ""
    collectives = [] if unit.mesh.empty else read_collectives(text, unit.mesh, unit.name, unit.iterations)
    costs = executable.cost_analysis()
    costs = costs[0] if isinstance(costs, list) else costs
    return CompiledUnit(
        unit,
        tuple(repeated(collective, unit.times) for collective in collectives),
        read_memory(unit.name, executable),
        float((costs or {}).get("flops", 0.0)),
        tuple(with_sites(caught or (), text)),
        text,
    )
