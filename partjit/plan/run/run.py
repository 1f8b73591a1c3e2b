"""A compiled plan: what runs it, as it is asked to at the time."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax

from partjit import events
from partjit._jax.types import PyTree, PyTreeDef
from partjit.colocated.agreement.program import Agreement
from partjit.colocated.journaling import log as journal
from partjit.plan.plan import Plan
from partjit.plan.run.direct import LeftToDispatch
from partjit.plan.run.first import AfterFirst
from partjit.plan.run.so_far import keep_results

__all__ = ["Execute", "Run"]

Execute: TypeAlias = Callable[..., Sequence[jax.Array]]
"""The function of a plan: from flat arguments, sharded as the plan says, to flat results."""


class Run:
    """A compiled plan.

    Args:
        plan: the plan.
        quiet, with_events: its function, and the one that emits events.
        agreement: of the processes, if there are several.
        wait: waits for a result, as all of them do.
        direct: what of its values are NumPy arrays.

    Attributes:
        rest: what it does after its first fragment, if that can be dispatched without it.
    """

    __slots__ = ("_agreement", "_direct", "_plan", "_quiet", "_wait", "_with_events", "rest")

    def __init__(
        self,
        plan: Plan,
        quiet: Execute,
        with_events: Execute,
        agreement: Agreement | None,
        wait: Callable[[jax.Array], jax.Array],
        direct: LeftToDispatch,
        rest: AfterFirst | None,
    ) -> None:
        self._plan = plan
        self._quiet = quiet
        self._with_events = with_events
        self._agreement = agreement
        self._wait = wait
        self._direct = direct
        self.rest = rest

    def __call__(self, args: Sequence[object], tree: PyTreeDef | None) -> PyTree:
        """Runs it, for flat arguments; the result has the structure, or is flat where that is None."""
        plan, agreement = self._plan, self._agreement
        execute = self._with_events if events.listeners else self._quiet
        if journal.current is not None:
            execute = journal.current.executing(plan.name, execute)
        try:
            if agreement is None:
                results = execute(*args)
            elif plan.agree:
                results = agreement.run(lambda: [*map(self._wait, execute(*args))], ())  # until then it may fail
            else:
                results = agreement.run(execute, args)
        except BaseException as error:
            keep_results(error, plan, tree, self._direct)
            raise
        return results if tree is None else tree.unflatten(results)
