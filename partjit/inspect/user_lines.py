"""Source lines of the user's code, and how they are shown."""

import functools
import os
import sys
import sysconfig
from collections.abc import Iterable

__all__ = ["Site", "is_installed", "nearest_lines", "shown_file", "shown_line", "shown_lines", "shown_site"]

Site = tuple[str, int, str]
"""File, line and function of the user's code."""

_INSTALLED = ("/site-packages/", "/dist-packages/")


@functools.cache
def is_installed(file: str) -> bool:
    """Whether a file belongs to an installed package or to the standard library.

    Example:
        >>> is_installed("/home/me/.venv/lib/python3.12/site-packages/flax/linen/linear.py")
        True
        >>> is_installed("/home/me/model.py")
        False
    """
    path = file.replace("\\", "/")
    return path.startswith(("<frozen ", *_standard_library())) or any(part in path for part in _INSTALLED)


@functools.cache
def _standard_library() -> tuple[str, ...]:
    paths = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
    return tuple(f"{path.replace(os.sep, '/')}/" for path in paths if path)


def nearest_lines(frames: Iterable[Site]) -> tuple[Site | None, Site | None]:
    """The user's line among frames, innermost first, and the line of the library that it calls, if it calls one.

    The user's line is the nearest one outside of installed packages. Where there is none, it is the innermost frame.

    Example:
        >>> dense = "/home/me/.venv/lib/python3.12/site-packages/flax/linen/linear.py", 287, "__call__"
        >>> nearest_lines([dense, ("/home/me/model.py", 12, "loss")]) == (("/home/me/model.py", 12, "loss"), dense)
        True
        >>> nearest_lines([dense]) == (dense, None)
        True
    """
    innermost: Site | None = None
    for frame in frames:
        if not is_installed(frame[0]):
            return frame, innermost
        innermost = innermost or frame
    return innermost, None


def shown_file(file: str) -> str:
    """The name of a file; a cell of a notebook by its number, as in tracebacks there.

    Example:
        >>> shown_file("/home/me/model.py")
        'model.py'
    """
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is not None:
        named = shell.compile.format_code_name(file)  # ("Cell", "In[5]") for a cell
        if named is not None:
            return named[1]
    return os.path.basename(file.replace("\\", "/"))


def shown_line(site: Site | None) -> str:
    """A line of the user's code with the name of its file alone.

    Example:
        >>> shown_line(("/home/me/model.py", 12, "loss"))
        'model.py:12'
    """
    return "an unknown line" if site is None else f"{shown_file(site[0])}:{site[1]}"


def shown_lines(site: Site | None, library: Site | None) -> str:
    """A line of the user's code, with that of the library that it calls.

    Example:
        >>> shown_lines(("/home/me/model.py", 12, "loss"), ("/lib/flax/linen/linear.py", 287, "__call__"))
        'model.py:12 loss (linear.py:287)'
    """
    if site is None:
        return "-"
    return f"{shown_line(site)} {site[2]}".rstrip() + ("" if library is None else f" ({shown_line(library)})")


def shown_site(site: Site | None) -> str:
    """A line of the user's code in the form that terminals turn into a link.

    Example:
        >>> shown_site(("/home/me/model.py", 12, "loss"))
        '/home/me/model.py:12 in loss'
    """
    if site is None:
        return "an unknown line"
    name = shown_file(site[0])
    return f"{name if name.startswith('In[') else site[0]}:{site[1]} in {site[2]}"
