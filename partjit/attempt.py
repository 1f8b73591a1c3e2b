"""A call of a program that may fail before the program begins, of which other processes then have to know."""

from typing import TYPE_CHECKING

from partjit import lazy
from partjit.mesh import ambient_mesh

if TYPE_CHECKING:
    from partjit.colocated.agreement.program import Agreement
    from partjit.plan.plan import Plan
    from partjit.plan.run import program as plans
else:  # a program without calls does without
    plans = lazy.module("partjit.plan.run.program")

__all__ = ["Attempt"]


class Attempt:
    """A call of which other processes may have to know if it fails before its program begins.

    Args:
        last: the agreement of the last call with a plan: most likely that of this one, while nothing is known.
    """

    __slots__ = ("_agreement", "_begun", "_is_known")

    def __init__(self, last: "Agreement | None") -> None:
        self._agreement = last
        self._begun = 0 if last is None else last.begun
        self._is_known = False

    def runs(self, plan: "Plan") -> "Agreement | None":
        """Notes which plan it is of, and returns its agreement."""
        agreement = plans.agreement_for(plan)
        if self._agreement is None and agreement is not None:
            self._begun = agreement.begun
        self._agreement, self._is_known = agreement, True
        return agreement

    def fail(self, error: BaseException) -> None:
        """Lets the others know."""
        agreement = self._agreement
        if agreement is None:
            return
        mesh = ambient_mesh()
        processes = {device.process_index for device in mesh.devices.flat} if not mesh.empty else None
        if self._is_known or processes is None or processes == {*agreement.group}:
            agreement.fail(error, self._begun)
