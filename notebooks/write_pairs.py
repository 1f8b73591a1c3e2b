"""Writes the .ipynb of every notebook from its text, without outputs: `make notebooks`.

The text is what is written and reviewed; the other half is there for who opens it without Jupytext. It depends on
nothing but the text: cells are named after what is in them, so that a change of one cell is a change of one cell.
"""

import collections
import hashlib
import pathlib

import jupytext
import nbformat

FOLDER = pathlib.Path(__file__).parent
METADATA = {
    "jupytext": {"formats": "ipynb,py:percent"},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
}


def texts():
    """The texts of all notebooks, in order."""
    return sorted(FOLDER.glob("[0-9]*.py"))


def paired(text):
    """The notebook of a text."""
    seen = collections.Counter()
    cells = []
    for cell in jupytext.read(text).cells:
        digest = hashlib.sha256(cell.source.encode()).hexdigest()[:8]
        seen[digest] += 1
        make = nbformat.v4.new_code_cell if cell.cell_type == "code" else nbformat.v4.new_markdown_cell
        cells.append(make(cell.source, id=f"{digest}-{seen[digest]}"))
    return nbformat.v4.new_notebook(cells=cells, metadata=METADATA)


if __name__ == "__main__":
    for text in texts():
        text.with_suffix(".ipynb").write_text(nbformat.writes(paired(text)) + "\n", encoding="utf-8")
