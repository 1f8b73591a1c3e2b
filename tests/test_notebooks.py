"""The notebooks: the halves of each pair agree and hold no outputs, cells are short, and all run from top to bottom."""

import os
import pathlib
import re
import sys
import warnings

import pytest

FOLDER = pathlib.Path(__file__).parent.parent / "notebooks"

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what the packages of Jupyter say about each other
    import jupytext
    import nbclient
    import nbformat
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    sys.path.insert(0, str(FOLDER))
    from write_pairs import paired, texts

every_notebook = pytest.mark.parametrize("text", texts(), ids=lambda path: path.stem)
with_warnings_of_jupyter = pytest.mark.filterwarnings("default")

# Warnings of what is ours, or about the cells, are errors; what Jupyter and hypothesis say to each other is not.
STRICT = "import warnings; warnings.filterwarnings('error', module='__main__|partjit|jax')"
LONGEST_OUTPUT = 60
"""Lines of text that a reader goes through."""


def text_of(output):
    """What an output says as text, without colors."""
    text = output.get("text") or output.get("data", {}).get("text/plain", "")
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.fixture
def execute(tmp_path):
    """Runs a notebook from top to bottom in a kernel of its own, as as somebody does, and returns its cells."""

    def execute(notebook):
        notebook.cells.insert(0, nbformat.v4.new_code_cell(STRICT))
        # Without folders to look in, there is no kernel but that of this interpreter, which nobody has to register.
        kernel = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
        # What the tests have set up must not do the work of a notebook's first cell.
        ours = ("JAX_", "NPROC", "PARTJIT_", "PYTEST_")
        env = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
        where = {"metadata": {"path": str(tmp_path)}}
        nbclient.NotebookClient(notebook, km=kernel, timeout=300, resources=where).execute(env=env)
        return notebook.cells[1:]

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
@with_warnings_of_jupyter
def test_a_notebook_runs_and_its_outputs_are_small(text, execute):
    outputs = [out for cell in execute(jupytext.read(text)) if cell.cell_type == "code" for out in cell.outputs]
    assert outputs
    assert not [shown for shown in map(text_of, outputs) if len(shown.splitlines()) > LONGEST_OUTPUT]


@with_warnings_of_jupyter
@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("warnings.warn('about this cell', DeprecationWarning)", "DeprecationWarning: about this cell"),
    ],
)
def test_what_goes_wrong_in_a_cell_is_found(source, error, execute):
    with pytest.raises(nbclient.exceptions.CellExecutionError, match=error):
        execute(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)]))
