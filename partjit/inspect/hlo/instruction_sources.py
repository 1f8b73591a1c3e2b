"""Where the instructions of a compiled program come from: the user's line, and the equation.

An instruction without such metadata takes that of the nearest one, by operands and users; in a computation without any,
that of the instruction that calls it.
"""

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence

from partjit.inspect.hlo.source_lines import tags_of
from partjit.inspect.hlo.text import Computation, Instruction, Module
from partjit.inspect.modules import module_of
from partjit.inspect.user_lines import Site, is_installed

__all__ = ["InstructionSource", "InstructionSources"]


@dataclasses.dataclass(frozen=True)
class InstructionSource:
    """Where an instruction comes from.

    Attributes:
        site: the user's line, or None.
        tags: the numbers of the equations, outermost first.
        op_name: its name stack.
        library: the line in an installed package that the user's line calls, or None.
        module: the path of the module, "Block_3/Dense_0"; empty if there is none.
    """

    site: Site | None = None
    tags: tuple[int, ...] = ()
    op_name: str = ""
    library: Site | None = None
    module: str = ""

    @property
    def is_known(self) -> bool:
        """Whether the line or the equation is known."""
        return self.site is not None or bool(self.tags)


class InstructionSources:
    """The sources of the instructions of one program; results are cached, so that all take linear time."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self._nearest: dict[str, Mapping[str, InstructionSource]] = {}

    def of(self, instructions: Sequence[Instruction], computation: Computation) -> InstructionSource:
        """The source of the first of these instructions that has one, or else of the one nearest to them.

        The line of an instruction in a loop is known up to the loop: where that is a library's, the user's line is that
        of the loop.
        """
        source = self._nearest_to(instructions, computation)
        if source.site is None or not is_installed(source.site[0]) or computation.name not in self._callers:
            return source
        instruction, around = self._callers[computation.name]
        outer = self.of([instruction], around).site
        if outer is None or is_installed(outer[0]):
            return source
        return dataclasses.replace(source, site=outer, library=source.site)

    def _nearest_to(self, instructions: Sequence[Instruction], computation: Computation) -> InstructionSource:
        op_name = ""
        for instruction in instructions:
            source = self._own(instruction)
            if source.is_known:
                return source
            op_name = op_name or source.op_name
        nearest = self._nearest_in(computation)
        for instruction in instructions:
            if instruction.name in nearest:
                return nearest[instruction.name]
        if computation.name not in self._callers:
            return InstructionSource(op_name=op_name)
        instruction, around = self._callers[computation.name]
        caller = self.of([instruction], around)
        return caller if caller.is_known else InstructionSource(op_name=op_name or caller.op_name)

    def _own(self, instruction: Instruction) -> InstructionSource:
        metadata = instruction.metadata
        op_name = metadata.get("op_name", "")
        site, library = self.module.lines.lines(metadata)
        return InstructionSource(site, tags_of(op_name), op_name, library, _module(op_name))

    def _nearest_in(self, computation: Computation) -> Mapping[str, InstructionSource]:
        """The source nearest to each instruction of a computation, all in one breadth-first search."""
        found = self._nearest.get(computation.name)
        if found is None:
            own = ((name, self._own(one)) for name, one in computation.instructions.items())
            found = {name: source for name, source in own if source.is_known}
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
        """The last instruction that calls each computation, and its computation; callees come first in the text."""
        return {
            name: (instruction, computation)
            for computation in self.module.computations.values()
            for instruction in computation.instructions.values()
            for name in instruction.computations
        }


def _module(op_name: str) -> str:
    """The module path in the `op_name` of an instruction, whose last part is the primitive."""
    return module_of(op_name.rpartition("/")[0])
