"""The objects whose state is committed with the program's: saved, and restored."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from partjit.checks import wrong_type
from partjit.colocated.journaling.payloads import packed, unpacked
from partjit.colocated.runtime.history import History
from partjit.colocated.runtime.instances import Instance, instance_of
from partjit.errors import JournalError

__all__ = ["Kept", "kept", "own_state", "saved"]


class Kept(Protocol):
    """An object with a state."""

    def save(self) -> object:
        """Its state."""
        ...

    def restore(self, state: Any) -> object:
        """Sets it."""
        ...


class _KeptInstance:
    """A colocated object, whose methods of these names are called in its lane."""

    def __init__(self, instance: Instance) -> None:
        self.save, self.restore = instance.saved, instance.restored


def kept(name: str, value: object) -> tuple[Kept, History | None]:
    """What saves and restores an object, and what orders its calls.

    Raises:
        ValueError: it is a colocated object without a state.
        TypeError: it is another object without `save` and `restore`.
    """
    instance = instance_of(value)
    if instance is None:
        if not callable(getattr(value, "save", None)) or not callable(getattr(value, "restore", None)):
            what = "a colocated object of a class with a state, or an object with methods save() and restore(state)"
            raise wrong_type("colocated.journal", f"objects[{name!r}]", value, what)
        return cast(Kept, value), None
    if instance.history is None or not instance.history.can_save:
        raise ValueError(
            f"colocated.journal: objects[{name!r}] is a {instance.name} without a state to be committed: give "
            "colocated_python_class(state=(..., ...)) the names of the methods that return and set it"
        )
    return _KeptInstance(instance), instance.history


def own_state(
    name: str,
    states: Sequence[bytes],
    process: int,
    count: int,
    repartition: Callable[[str, Sequence[Any]], Any] | None,
) -> Any:
    """The state of an object in this process, from those in each of the processes that committed.

    Raises:
        JournalError: these were others in number and had different states, and nobody says what becomes of them.
    """
    what = f"the state of {name!r}"
    if len(states) == count:
        return unpacked(states[process], what)
    if repartition is None:
        if any(state != states[0] for state in states):
            raise JournalError(
                f"{what} is not the same in the {len(states)} processes that committed, and now there are {count}: "
                "give colocated.journal(repartition=...) a function of the name and the list of states"
            )
        return unpacked(states[0], what)
    return repartition(name, [unpacked(state, what) for state in states])


def saved(objects: dict[str, Kept]) -> dict[str, bytes]:
    """The states of objects, each as bytes."""
    return {name: packed(value.save(), f"the state of {name!r}") for name, value in objects.items()}
