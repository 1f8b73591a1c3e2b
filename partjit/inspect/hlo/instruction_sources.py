"""Where the instructions of a compiled program come from: the user's line, and the equation.

What does not say so is taken to come from where the nearest instruction comes from that does, by operands and users; in
a computation where none says so, from where the instruction comes from that calls it.
"""

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence

from partjit.inspect.hlo.source_lines import tags_of
from partjit.inspect.hlo.text import Computation, Instruction, Module
from partjit.inspect.user_lines import Site

__all__ = ["InstructionSource", "InstructionSources"]


@dataclasses.dataclass(frozen=True)
class InstructionSource:
    """Where an instruction comes from.

    Attributes:
        site: the user's line, or None.
        tags: the numbers of the equations, outermost first.
        op_name: the stack of names that jax gave it.
    """

    site: Site | None = None
    tags: tuple[int, ...] = ()
    op_name: str = ""

    @property
    def is_known(self) -> bool:
        """Whether it says a line or an equation."""
        return self.site is not None or bool(self.tags)


class InstructionSources:
    """The origins of the instructions of one program; what is found is kept, so that all are found in linear time."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self._nearest: dict[str, Mapping[str, InstructionSource]] = {}

    def of(self, instructions: Sequence[Instruction], computation: Computation) -> InstructionSource:
        """Where the first of these comes from that says so, or else the nearest one to them.

        Args:
            instructions: of one computation, the first one is asked first.
            computation: that one.
        """
        op_name = ""
        for instruction in instructions:
            source = self._said(instruction)
            if source.is_known:
                return source
            op_name = op_name or source.op_name
        nearest = self._nearest_in(computation)
        for instruction in instructions:
            if instruction.name in nearest:
                return nearest[instruction.name]
        caller = self._origin_of_caller(computation)
        if caller.is_known:
            return caller
        return InstructionSource(op_name=op_name or caller.op_name)

    def _said(self, instruction: Instruction) -> InstructionSource:
        metadata = instruction.metadata
        op_name = metadata.get("op_name", "")
        return InstructionSource(self.module.lines.site(metadata), tags_of(op_name), op_name)

    def _nearest_in(self, computation: Computation) -> Mapping[str, InstructionSource]:
        """Of every instruction of a computation the origin of the nearest one that says it, all in one search."""
        found = self._nearest.get(computation.name)
        if found is None:
            said = {name: self._said(one) for name, one in computation.instructions.items()}
            found = {name: source for name, source in said.items() if source.is_known}
            queue = collections.deque(found)
            while queue:
                name = queue.popleft()
                users = computation.users.get(name, [])
                for near in [*computation.instructions[name].operands, *(user.name for user in users)]:
                    if near not in found and near in computation.instructions:
                        found[near] = found[name]
                        queue.append(near)
            self._nearest[computation.name] = found
        return found

    @functools.cached_property
    def _callers(self) -> Mapping[str, tuple[Instruction, Computation]]:
        """The last instruction that calls each computation, and where it stands: callers come after what they call."""
        return {
            name: (instruction, computation)
            for computation in self.module.computations.values()
            for instruction in computation.instructions.values()
            for name in instruction.computations
        }

    def _origin_of_caller(self, computation: Computation) -> InstructionSource:
        if computation.name not in self._callers:
            return InstructionSource()
        instruction, around = self._callers[computation.name]
        return self.of([instruction], around)
