"""Source lines of the user's code, and how they are shown."""

import os
import sys

__all__ = ["Site", "shown_file", "shown_line", "shown_site"]

Site = tuple[str, int, str]
"""File, line and function of the user's code."""


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
