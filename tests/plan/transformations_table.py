"""The script that writes the table of transformations, and the table that it wrote."""

import importlib.util
import pathlib

_PATH = pathlib.Path(__file__).parents[2] / "docs" / "transformations.py"


def _load():
    spec = importlib.util.spec_from_file_location("transformations", _PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = _load()
TABLE = script.DOCUMENT.read_text(encoding="utf-8").partition(script.BEGIN)[2]


def part(title):
    """A part of the table as lines."""
    return TABLE[TABLE.index(f"| {title} |") :].partition("\n\n")[0].splitlines()
