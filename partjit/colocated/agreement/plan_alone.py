"""A program whose processes agree that they run the same plan, and on nothing else."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from partjit._jax.arrays import is_computed
from partjit.colocated.agreement.program import Agreement
from partjit.colocated.runtime.moves import together

__all__ = ["PlanAgreement"]


class PlanAgreement(Agreement):
    """What is agreed on is the plan, before its first execution; what is raised later is of one process alone."""

    _is_same = False

    def dispatching(
        self,
        node: str,
        dispatch: Callable[..., Any],
        on_zeros: Callable[[], object] | None = None,
        names: Sequence[str] = (),
    ) -> Callable[..., Any]:
        """The function that dispatches a fragment."""
        del node, on_zeros, names
        return dispatch

    def calling(
        self, names: Sequence[str], call: Callable[..., Sequence[jax.Array]]
    ) -> Callable[..., Sequence[jax.Array]]:
        """The function that makes a call."""
        del names
        return call

    def moving(self, move: Callable[..., Any]) -> Callable[..., Any]:
        """The function that moves values."""
        return move

    def reading(
        self, read: Callable[[jax.Array], bool | int], is_there: Callable[[jax.Array], bool] = is_computed
    ) -> Callable[[jax.Array, str], bool | int]:
        """A function that reads what a loop or branch goes by."""
        del is_there
        return lambda array, _: read(array)

    def waiting(self, wait: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
        """The function that waits for a result of a call."""
        return wait

    def releasing(self, release: Callable[..., None]) -> Callable[..., None]:
        """The function that gives up the memory of donated arguments."""
        return release

    def run(self, execute: Callable[..., Any], args: Sequence[object]) -> Any:
        """Executes the program, after all processes have come to its first execution."""
        if not self._is_same:
            super().run(lambda: None, ())
            self._is_same = True
        with together(self):
            return execute(*args)

    def do(self, what: str, action: Callable[[], Any]) -> Any:
        """Does something in this process, as in the others at the same point of the program."""
        del what
        return action()

    def fail(self, error: BaseException, begun: int) -> None:
        """Lets the others know what was raised here before the first execution."""
        if not self._is_same:
            super().fail(error, begun)
