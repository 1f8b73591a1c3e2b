"""Modules that are imported when they are first used, so that `import partjit` takes little longer than `import jax`.

A program without colocated calls needs neither `partjit.plan` nor `partjit.colocated`, and only those who read programs
need `partjit.inspect`. Where such a module is used, `if TYPE_CHECKING:` imports it for readers and type checkers, and
its `else:` has `module` or `attributes` stand for that import.
"""

import importlib
import pkgutil
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["attributes", "module"]


class _Module:
    """Stands for a module."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._module: types.ModuleType | None = None

    def __getattr__(self, attribute: str) -> object:
        module = self._module
        if module is None:  # looking it up takes microseconds, and hot calls read attributes
            module = self._module = importlib.import_module(self._name)
        return getattr(module, attribute)

    def __repr__(self) -> str:
        return f"<{self._name}, imported when it is used>"


def module(name: str) -> Any:
    """Stands for a module, which is imported when one of its attributes is read.

    Example:
        >>> text = module("textwrap")
        >>> text.indent("x", "  ")
        '  x'
    """
    return _Module(name)


def attributes(package: str, origins: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package whose attributes are imported when they are first read (PEP 562).

    Args:
        package: the name of the package.
        origins: where each attribute comes from: "module:name", or "module:" for a module.
    """

    def read(name: str) -> object:
        if name not in origins:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = pkgutil.resolve_name(origins[name])
        setattr(sys.modules[package], name, value)  # from here on it is an attribute as any other
        return value

    def names() -> list[str]:
        # Without what the package itself imports.
        return sorted({*origins, *(name for name in vars(sys.modules[package]) if name.startswith("_"))})

    return read, names
