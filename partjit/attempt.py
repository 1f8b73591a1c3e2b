"""A call that may fail before its program, or its function, begins: other processes then have to know of it."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from partjit import lazy
from partjit._jax.processes import group_size
from partjit.mesh import ambient_mesh

if TYPE_CHECKING:
    from partjit.colocated.agreement import program as agreements
    from partjit.colocated.agreement import refusals
    from partjit.colocated.agreement.program import Agreement
    from partjit.plan.plan import Plan
    from partjit.plan.run import program as plans
else:  # a program without calls does without
    plans = lazy.module("partjit.plan.run.program")
    agreements = lazy.module("partjit.colocated.agreement.program")
    refusals = lazy.module("partjit.colocated.agreement.refusals")

__all__ = ["Attempt", "telling_others"]


@contextlib.contextmanager
def telling_others(name: str) -> Iterator[None]:
    """In which other processes learn what is raised before a function of that name has begun to agree with them."""
    refusals.take_back()
    begun = agreements.executions_begun()
    try:
        yield
    except BaseException as error:
        if agreements.executions_begun() == begun:
            refusals.say(name, error)
        raise


class Attempt:
    """A call of which other processes may have to know if it fails before its program begins.

    Args:
        program: the name of the program.
        last: the agreement of the last call with a plan: most likely that of this one, while nothing is known.
    """

    __slots__ = ("_agreement", "_begun", "_is_handed_over", "_is_known", "_program")

    def __init__(self, program: str, last: "Agreement | None") -> None:
        self._program = program
        self._agreement = last
        self._begun = 0 if last is None else last.begun
        self._is_known = self._is_handed_over = False
        if group_size() > 1:
            refusals.take_back()

    def runs(self, plan: "Plan") -> "Agreement | None":
        """Notes which plan it is of, and returns its agreement."""
        agreement = plans.agreement_for(plan)
        if self._agreement is None and agreement is not None:
            self._begun = agreement.begun
        self._agreement, self._is_known = agreement, True
        return agreement

    def handing_over(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A function that is an attempt of its own: what is raised from there on is not to be told twice."""

        def hand_over_and_call(*args: Any, **kwargs: Any) -> Any:
            self._is_handed_over = True
            return call(*args, **kwargs)

        return hand_over_and_call

    def fail(self, error: BaseException) -> None:
        """Lets the others know."""
        if self._is_handed_over:
            return
        agreement = self._agreement
        if agreement is not None and (self._is_known or self._is_of(agreement.group)):
            agreement.fail(error, self._begun)
        elif group_size() > 1 and not self._is_known:
            refusals.say(self._program, error)

    def _is_of(self, group: tuple[int, ...]) -> bool:
        """Whether this call, of which nothing is known, may be one of these processes, as the last one was."""
        mesh = ambient_mesh()
        return mesh.empty or {device.process_index for device in mesh.devices.flat} == {*group}
