"""The notebooks: the halves of each pair agree and hold no outputs, cells are short, and all run from top to bottom."""

import pathlib
import re
import subprocess
import sys
import warnings

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "notebooks"

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what the packages of Jupyter say about each other
    import jupytext
    import nbformat

    sys.path.insert(0, str(FOLDER))
    from write_pairs import paired, texts

every_notebook = pytest.mark.parametrize("text", texts(), ids=lambda path: path.stem)
LONGEST_OUTPUT = 60
"""Lines of text that a reader goes through."""


def plain(text):
    """A text without its colors."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def text_of(output):
    """What an output says."""
    return plain(output.get("text") or output.get("data", {}).get("text/plain", ""))


@pytest.fixture
def execute(tmp_path):
    """Runs a notebook as its readers do; returns what went wrong, if anything did, and its cells."""

    def execute(text):
        script, executed = pathlib.Path(__file__).with_name("run_notebook.py"), tmp_path / "executed.ipynb"
        ran = subprocess.run(
            [sys.executable, str(script), str(text), str(executed)], capture_output=True, text=True, check=False
        )
        return plain(ran.stderr) if ran.returncode else "", nbformat.read(
            executed, 4
        ).cells if executed.exists() else []

    return execute


@every_notebook
def test_the_halves_of_a_pair_agree_and_hold_no_outputs(text):
    notebook = nbformat.read(text.with_suffix(".ipynb"), as_version=4)
    assert notebook == paired(text), "run `make notebooks`"


def test_every_notebook_has_a_text():
    assert sorted(FOLDER.glob("*.ipynb")) == [text.with_suffix(".ipynb") for text in texts()] != []


def test_a_cell_keeps_its_name_when_others_change(tmp_path):
    text = tmp_path / "01_test.py"
    text.write_text("# %%\nx = 1\n\n# %%\ny = 2\n\n# %%\nx = 1\n", encoding="utf-8")
    names = [cell.id for cell in paired(text).cells]
    text.write_text("# %%\nx = 1\n\n# %%\nz = 3\n\n# %%\nx = 1\n", encoding="utf-8")
    changed = [cell.id for cell in paired(text).cells]
    assert len({*names}) == 3
    assert [a == b for a, b in zip(names, changed, strict=True)] == [True, False, True]


@every_notebook
def test_cells_are_short_and_prose_comes_first(text):
    cells = jupytext.read(text).cells
    assert cells[0].cell_type == "markdown"
    assert cells[0].source.startswith("# ")
    assert not [cell.source for cell in cells if cell.cell_type == "code" and len(cell.source.splitlines()) >= 20]


@every_notebook
def test_a_notebook_runs_and_its_outputs_are_small(text, execute):
    error, cells = execute(text)
    assert not error
    outputs = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    assert outputs
    assert not [shown for shown in map(text_of, outputs) if len(shown.splitlines()) > LONGEST_OUTPUT]


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("warnings.warn('about this cell', DeprecationWarning)", "DeprecationWarning: about this cell"),
        ("import os; assert 'NPROC' not in os.environ, 'the tests did it'; 1 / 0", "ZeroDivisionError"),
    ],
)
def test_what_goes_wrong_in_a_cell_is_found(source, error, execute, tmp_path):
    text = tmp_path / "wrong.py"
    text.write_text(f"# %%\n{source}\n", encoding="utf-8")
    found, cells = execute(text)
    assert error in found
    assert not cells
