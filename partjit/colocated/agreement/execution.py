"""One execution of a program that agrees with other processes."""

from collections.abc import Callable

import jax

from partjit.colocated.agreement.participant import Pending
from partjit.colocated.agreement.votes import Choice

__all__ = ["Execution"]


class Execution:
    """An execution in one thread.

    Attributes:
        number: in this process.
        begun: see `Point`.
        last: its last vote.
        choices: what decides how it goes on, since then.
        pending: such results of calls that are not known yet, by name.
        released: gives up the memory of arguments, when all processes have come as far.
        ended_by: what it raises because it ends in all processes.
    """

    def __init__(self, number: int, begun: int) -> None:
        self.number = number
        self.begun = begun
        self.last: Pending | None = None
        self.choices: tuple[Choice, ...] = ()
        self.pending: dict[str, jax.Array] = {}
        self.released: list[Callable[[], None]] = []
        self.ended_by: BaseException | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all agreed on its end."""
        last = self.last
        return last is not None and last.vote.is_last and last.decision is not None and not last.decision.failures
