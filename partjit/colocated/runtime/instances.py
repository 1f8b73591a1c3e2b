"""The objects of colocated classes on this host: constructed by the first call, destroyed after the last one."""

import copy
import functools
import types
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from partjit._jax.types import PyTree
from partjit.colocated.isolation.objects import IsolatedObject
from partjit.colocated.runtime import scheduler, threads
from partjit.colocated.runtime.call import Call, Lane
from partjit.colocated.runtime.failures import add_note, call_site, code_site, site_text
from partjit.colocated.runtime.history import History
from partjit.colocated.runtime.interrupts import is_interrupt
from partjit.colocated.runtime.streams import current_stream
from partjit.colocated.serialization import copied

__all__ = ["Instance", "destroy_all", "instance_of", "instances"]

_Result = TypeVar("_Result")


class Instance:
    """One object on this host, from its construction by the first call to its destruction after the last one.

    The handle and the calls that have not run yet refer to it. When nothing does any more, the object is destroyed.

    Attributes:
        lane: orders its calls; None if they may overlap.
        history: what its calls see of those made ahead; None if they may overlap.
        cls, name: the class, and its name.
        uses_jax: whether its methods may use jax.
        is_context_manager: whether it has `__enter__` and `__exit__`.
        number: its id, which no object of another process has.
        error: what the constructor raised, if it did.
    """

    def __init__(
        self,
        cls: type,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        concurrent: bool,
        state: tuple[str, str] | None,
        is_isolated: bool,
        *,
        uses_jax: bool,
    ) -> None:
        self.lane = None if concurrent else Lane(is_of_object=True)
        self.history = None if concurrent else History(*map(self._hook, state or ()))
        self._shows_state = state and state[0]
        self.name = cls.__name__
        self.number = uuid.uuid4().int
        self.cls = cls
        self.uses_jax = uses_jax
        args, kwargs = _as_they_are((args, kwargs), {})
        self._recipe: Callable[[], object] | None = functools.partial(cls, *args, **kwargs)  # until it has run
        self._is_isolated = is_isolated
        self._box: list[object] = []  # holds the only reference to the object, so that it can be dropped from elsewhere
        self.error: BaseException | None = None
        self._traceback: types.TracebackType | None = None
        self._made_at = code_site()
        self.is_context_manager = hasattr(cls, "__enter__") and hasattr(cls, "__exit__")
        self._is_entered = self._is_closed = False
        self._life = Lane()  # not a lock: the constructor and `close` may make calls and wait for them
        threads.start_deferred()
        weakref.finalize(self, _destroy_later, self._box).atexit = False
        instances[self.number] = self

    def object(self) -> Any:
        """The object, constructed on first use.

        Raises:
            Exception: what the constructor raised, every time.
            RuntimeError: it was closed.
        """
        if not self._is_closed:
            for constructed in self._box:  # at most one; another thread may destroy it in between
                return constructed
            if self._life in scheduler.entered_lanes():
                raise RuntimeError(
                    f"deadlock: the constructor of {self.name} calls a method of the object that it constructs, which "
                    "can only run when the constructor has ended. Call the plain method of `self` instead"
                )
        return self._in_life("__init__", self._construct)

    def _construct(self) -> Any:
        if self._is_closed:
            raise RuntimeError(f"this {self.name} was closed")
        if self.error is not None:
            raise self.error.with_traceback(self._traceback)  # without the frames in which it was raised so far
        if not self._box:
            try:
                self._box.append(self._constructed())
                self._recipe = None
            except BaseException as error:
                if not is_interrupt(error):  # not an error of the constructor
                    self._traceback = error.__traceback__
                    self.error = error
                    add_note(error, f"It is from the constructor of {self.name}, called at {site_text(self._made_at)}")
                    self._recipe = None
                raise
        return self._box[0]

    def _constructed(self) -> Any:
        assert self._recipe is not None, "an object is constructed once"
        if self._is_isolated:
            made: Any = IsolatedObject(self._recipe, self.cls)
        else:
            made = copied(self._recipe, f"{self.name} and the arguments of its constructor", self.cls.__mro__)()
        if self._is_entered:
            made.__enter__()
        return made

    def method(self, name: str) -> Callable[..., PyTree]:
        """A method of the object, looked up when it is called, so that it does not keep the object alive."""

        def call(*args: PyTree, **kwargs: PyTree) -> PyTree:
            return getattr(self.object(), name)(*args, **kwargs)

        def state(*args: PyTree, **kwargs: PyTree) -> PyTree:
            assert self.history is not None
            shown = self.history.shown()
            return shown[0] if shown else call(*args, **kwargs)

        return state if self.shows_state(name) else call

    def saved(self) -> Any:
        """The state that the program has consumed, once the calls made so far have ended."""
        history = self.history
        assert history is not None

        def save() -> Any:
            shown = history.shown()
            return shown[0] if shown else history.save()

        return self._in_turn(history, "save", save)

    def restored(self, state: Any) -> None:
        """Sets the state, once the calls made so far have ended."""
        history = self.history
        assert history is not None
        self._in_turn(history, "restore", lambda: history.restore(state))

    def _in_turn(self, history: History, name: str, body: Callable[[], _Result]) -> _Result:
        lanes = scheduler.not_entered([lane for lane in (current_stream(), self.lane) if lane is not None])
        call = Call(f"{self.name}.{name}", call_site(), current_stream(), lanes, body)
        history.order(call, shows_state=name == "save")
        return scheduler.run_here(call)

    def shows_state(self, name: str) -> bool:
        """Whether this is the name of the method that returns the state of the object."""
        return name == self._shows_state

    def _hook(self, name: str) -> Callable[..., Any]:
        """A method of the object for its history, which does not keep it alive."""
        reference = weakref.ref(self)

        def hook(*args: object) -> Any:
            instance = reference()
            assert instance is not None, "a call of its refers to it"
            return getattr(instance.object(), name)(*args)

        return hook

    def enter(self) -> None:
        """Begins a `with` block of the object, of its own: its `__enter__` is called once it is constructed."""
        self._in_life("__enter__", self._enter)

    def _enter(self) -> None:
        self._is_entered = True
        constructed: Any
        for constructed in self._box:
            constructed.__enter__()

    def leave(self, error: BaseException | None) -> None:
        """Ends the `with` block of the object, as `close` does; if its class has its own, by its `__exit__`.

        Args:
            error: what ends the block, if anything does.
        """
        if not self._is_entered:
            self.close()
        elif error is None:
            self._in_life("__exit__", lambda: self._close("__exit__", None, None, None))
        else:
            traceback = None if self._is_isolated else error.__traceback__  # which cannot be sent to another process
            self._in_life("__exit__", lambda: self._close("__exit__", type(error), error, traceback))

    def close(self) -> None:
        """Closes the object, if it was constructed, and destroys it."""
        self._in_life("close", lambda: self._close("close"))

    def _close(self, name: str, *args: Any) -> None:
        self._is_closed = True
        closing = getattr(self._box[0], name, None) if self._box else None
        try:
            if closing is not None:
                closing(*args)
        finally:
            closing = None
            self._box.clear()

    def _in_life(self, name: str, action: Callable[[], _Result]) -> _Result:
        return scheduler.run_in_lanes(f"{self.name}.{name}", call_site(), current_stream(), [self._life], action)


def _as_they_are(value: Any, made: dict[int, Any]) -> Any:
    """A value with copies of the NumPy arrays in it, which the user may change before the object is constructed.

    Args:
        value: the value.
        made: what takes the place of values seen so far, by their ids: what is one and the same, remains so.
    """
    kind = type(value)
    if kind not in _CHANGING:
        return value
    if id(value) in made:
        return made[id(value)]
    if kind is tuple:
        items = tuple([_as_they_are(item, made) for item in value])
        return made.setdefault(id(value), items)
    own = made[id(value)] = copy.copy(value)  # before what is in it, which it may be a part of
    if kind is dict:
        own.update((key, _as_they_are(item, made)) for key, item in value.items())
    elif kind is list:
        own[:] = [_as_they_are(item, made) for item in value]
    return own


_CHANGING = frozenset({np.ndarray, dict, list, tuple})


instances: "weakref.WeakValueDictionary[int, Instance]" = weakref.WeakValueDictionary()
"""The objects of this process, by number."""


def instance_of(handle: object) -> Instance | None:
    """The object that a user's reference refers to; None for other objects."""
    found = getattr(handle, "_colocated_instance", None)
    return found if isinstance(found, Instance) else None


def _destroy_later(box: list[object]) -> None:
    if box:
        threads.run_later_on_few(box.clear)


def destroy_all() -> None:
    """Destroys the remaining objects, at exit."""
    for instance in [*instances.values()]:
        instance._box.clear()
