"""Finds what `module:function` names, and reports exceptions of the user's code."""

import contextlib
import importlib
import importlib.util
import os
import pkgutil
import sys
import traceback
from collections.abc import Iterator
from types import ModuleType, TracebackType

from partjit._jax.sources import is_user_file
from partjit.command.mistakes import CANNOT, Mistake, did_you_mean

__all__ = ["find", "users_code"]

_HOW = "it is written as module:function, or as path/to/file.py:function"


def find(text: str, argument: str, beside: str = "") -> object:
    """Imports a module, and returns its attribute.

    Args:
        text: `module:function`, where either may have dots, or `path/to/file.py:function`.
        argument: the name of the argument, for messages.
        beside: the module, if `text` is only the name of a function.

    Raises:
        Mistake: the text is malformed, there is no such module or attribute, or importing it fails.

    Example:
        >>> find("os:path.join", "FUNCTION").__name__
        'join'
    """
    module_name, colon, path = text.rpartition(":")
    if not colon and beside:
        module_name = beside
    if not (module_name and path and all(part.isidentifier() for part in path.split("."))):
        raise Mistake(f"{argument} should name a function: {_HOW}", argument, text, (0, len(text)))
    start = len(text) - len(path)
    found: object = _module(module_name, argument, text)
    for name in path.split("."):
        if not hasattr(found, name):
            what = f"the module {module_name}" if isinstance(found, ModuleType) else repr(found)
            public = [other for other in dir(found) if not other.startswith("__")]
            message = f"{what} has no {name!r}{did_you_mean(name, public)}"
            raise Mistake(message, argument, text, (start, start + len(name)), CANNOT)
        found = getattr(found, name)
        start += len(name) + 1
    return found


def _module(name: str, argument: str, text: str) -> ModuleType:
    span = (0, len(name)) if text.startswith(name) else None
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    if name.endswith(".py") or os.sep in name:
        return _file(name, argument, text, span)
    if not all(part.isidentifier() for part in name.split(".")):
        raise Mistake(f"{name!r} is no name of a module: {_HOW}", argument, text, span)
    with users_code(f"importing {name}"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = error.name or name
            if not f"{name}.".startswith(f"{missing}."):  # the module exists, and imports one that does not
                raise
            outer, _, last = missing.rpartition(".")
            paths = [here] if not outer else getattr(sys.modules.get(outer), "__path__", None) or []
            near = [f"{outer}.{found.name}".lstrip(".") for found in pkgutil.iter_modules([*paths])]
            hint = did_you_mean(missing, near) if last else ""
            if not hint and os.path.exists(f"{name.replace('.', os.sep)}.py"):
                hint = f"; for a file write {name.replace('.', os.sep)}.py:..."
            raise Mistake(f"there is no module {missing!r}{hint}", argument, text, span, CANNOT) from None


def _file(path: str, argument: str, text: str, span: tuple[int, int] | None) -> ModuleType:
    if not os.path.isfile(path):
        folder = os.path.dirname(path) or "."
        near = [name for name in os.listdir(folder) if name.endswith(".py")] if os.path.isdir(folder) else []
        hint = did_you_mean(os.path.basename(path), near)
        raise Mistake(f"there is no file {path!r}{hint}", argument, text, span, CANNOT)
    full = os.path.abspath(path)
    name = os.path.splitext(os.path.basename(full))[0]
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == full:
        return known
    # As for a script: modules in its folder can be imported, and itself by its name, unless that is taken.
    sys.path.insert(0, os.path.dirname(full))
    name = name if known is None else f"_explained_{name}"
    spec = importlib.util.spec_from_file_location(name, full)
    if spec is None or spec.loader is None:
        raise Mistake(f"{path!r} is no file of Python", argument, text, span, CANNOT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with users_code(f"importing {path}"):
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return module


@contextlib.contextmanager
def users_code(doing: str) -> Iterator[None]:
    """Raises a `Mistake` for an exception in the block, with the user's part of the traceback.

    What the block prints goes to the standard error, which leaves the standard output to the answer.

    Args:
        doing: what the block does, for the message: "importing model".

    Raises:
        Mistake: something was raised.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (Mistake, KeyboardInterrupt):
        raise
    except BaseException as error:  # also SystemExit, and what a test framework raises to skip
        raise Mistake(_report(error, doing), code=CANNOT) from error


def _report(error: BaseException, doing: str) -> str:
    frames = [frame for frame in traceback.extract_tb(_users_part(error.__traceback__)) if _is_users(frame.filename)]
    said = "".join(traceback.TracebackException(type(error), error, None).format_exception_only())
    # jax adds a note about the frames that it removed, which are left out here anyway.
    said = said.split("\n--------------------\n")[0].rstrip()
    if not frames:
        return f"{doing} failed: {said.partition(': ')[2] or said}"
    return f"{doing} failed:\n{''.join(traceback.format_list(frames))}{said}"


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame of the user's."""
    while trace is not None and not _is_users(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def _is_users(file: str) -> bool:
    return is_user_file(file) and not file.startswith("<frozen ") and os.path.dirname(file) not in _PYTHONS_OWN


_PYTHONS_OWN = frozenset(map(os.path.dirname, (contextlib.__file__, importlib.__file__)))
