"""Objects that live in worker processes: constructed there, used there, destroyed with their worker."""

import weakref
from collections.abc import Callable
from typing import Any

from partjit.colocated.isolation.functions import died_text, packed_arguments, pickled
from partjit.colocated.isolation.process import Died, WorkerProcess
from partjit.errors import WorkerDiedError
from partjit.signatures import method_signature_of

__all__ = ["IsolatedObject"]


class IsolatedObject:
    """An object in a worker of its own; its attributes are its methods, to be called one at a time.

    Args:
        recipe: constructs the object when it is called, in the worker.
        cls: its class.

    Raises:
        WorkerDiedError: the worker ended in the constructor.
        BaseException: what the constructor raised.
    """

    def __init__(self, recipe: Callable[[], object], cls: type) -> None:
        # These names leave all others to the methods of the object.
        self.__cls = cls
        self.__loss: str | None = None
        self.__worker = WorkerProcess(is_disposable=False)
        weakref.finalize(self, self.__worker.end).atexit = False
        definition = pickled(recipe, f"{cls.__name__} and the arguments of its constructor")
        name = f"{cls.__name__}.__init__"
        try:
            body, pieces = packed_arguments(name, None, (), {}, definition)
            self.__ask("construct", name, body, pieces, definition=True)
        except BaseException:
            self.__worker.kill()
            raise

    def __getattr__(self, name: str) -> Callable[..., Any]:
        signature = method_signature_of(self.__cls, name)  # raises if there is none

        def call(*args: Any, **kwargs: Any) -> Any:
            full = f"{self.__cls.__name__}.{name}"
            body, pieces = packed_arguments(full, signature, args, kwargs)
            return self.__ask("method", full, body, pieces, method=name)

        return call

    def __ask(self, action: str, name: str, *packed: Any, **fields: Any) -> Any:
        if self.__loss is None:
            try:
                return self.__worker.ask(action, *packed, **fields)
            except Died as died:
                if died.was_asked:
                    how = died_text(name, self.__worker, died)
                else:
                    how = f"the worker process of {self.__cls.__name__} (pid {self.__worker.pid}) {died.how}"
                self.__loss = f"{how}: the state of the object is lost with it. Make another object"
        raise WorkerDiedError(self.__loss)
