"""Specs that were found for a program, as plain data, and the folder in which they are kept for other processes."""

import dataclasses
import json
import os
import pathlib
import tempfile
import warnings
from collections.abc import Mapping
from typing import Any

from partjit.inspect.changes import Axes

__all__ = ["SettledSpecs", "folder_of", "keep", "kept"]

VARIABLE = "PARTJIT_SEARCH_CACHE"
"""The environment variable that names the folder; empty for none."""


@dataclasses.dataclass(frozen=True)
class SettledSpecs:
    """Specs that were found for a program.

    Attributes:
        arguments, results: the axes of its arguments and results, by dimensions.
        constraints: the axes that values are constrained to, by their numbers.
        seconds, peak: the estimated time of a step, and the bytes that a device needs.
        questions: how many questions were asked.
    """

    arguments: tuple[Axes, ...]
    results: tuple[Axes, ...]
    constraints: Mapping[int, Axes]
    seconds: float
    peak: int
    questions: int

    def to_json(self, name: str) -> str:
        """As JSON, with the name of the program for those who read it."""
        constraints = [[number, axes] for number, axes in sorted(self.constraints.items())]
        return json.dumps({"program": name, **dataclasses.asdict(self), "constraints": constraints})

    @staticmethod
    def from_json(text: str, arguments: tuple[int, ...], results: tuple[int, ...]) -> "SettledSpecs":
        """What `to_json` wrote, for a program with arguments and results of these ranks.

        Raises:
            ValueError: it is not that.
        """
        try:
            data = json.loads(text)
            found = SettledSpecs(
                tuple(map(_axes, data["arguments"])),
                tuple(map(_axes, data["results"])),
                {int(number): _axes(axes) for number, axes in data["constraints"]},
                float(data["seconds"]),
                int(data["peak"]),
                int(data["questions"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None
        if (tuple(map(len, found.arguments)), tuple(map(len, found.results))) != (arguments, results):
            raise ValueError("it is about other arguments or results")
        return found


def _axes(dims: Any) -> Axes:
    if not isinstance(dims, list) or not all(isinstance(dim, list) for dim in dims):
        raise ValueError("axes are a list of lists")
    if not all(isinstance(axis, str) for dim in dims for axis in dim):
        raise ValueError("axes have names")
    return tuple(tuple(dim) for dim in dims)


def folder_of(cache: bool | str | os.PathLike[str]) -> pathlib.Path | None:
    """The folder that `SearchOptions.cache` names, None for none."""
    if not isinstance(cache, bool):
        return pathlib.Path(cache)
    named = os.environ.get(VARIABLE)
    if not cache or named == "":
        return None
    if named is not None:
        return pathlib.Path(named)
    home = os.environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(home) if home else pathlib.Path.home() / ".cache") / "partjit" / "search"


def kept(folder: pathlib.Path, key: str, arguments: tuple[int, ...], results: tuple[int, ...]) -> SettledSpecs | None:
    """What is kept under a key for a program with arguments and results of these ranks; None if there is nothing.

    A file that cannot be read is nothing, with a warning.
    """
    path = folder / f"{key}.json"
    try:
        return SettledSpecs.from_json(path.read_text(encoding="utf-8"), arguments, results)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        warnings.warn(
            f"specs that were found before cannot be read from {path}: {error}. They are searched again, and the file "
            "is replaced",
            stacklevel=2,
        )
        return None


def keep(folder: pathlib.Path, key: str, text: str) -> None:
    """Keeps a text under a key: other processes see all of it or nothing. If that is impossible there is a warning."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".part")
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(temporary, folder / f"{key}.json")
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        warnings.warn(
            f"specs that were found cannot be kept in {folder}: {error}. The next process searches them again; "
            f"{VARIABLE} names another folder, or none if it is empty",
            stacklevel=2,
        )
