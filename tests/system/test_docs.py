"""Every Python block of the documents runs, those of one document one after the other, also on Explicit meshes."""

import jax
import pytest
from jax.sharding import AxisType

from partjit import mesh
from tests.system.documents import DEMO, DOCS, NOTEBOOKS, README, blocks_of

CHOOSE = {
    DEMO.name,
    "inspect.md",
    "meshes.md",
    "search.md",
    "02_reading_a_transformer.py",
    "04_property_tests.py",
    "05_finding_specs.py",
}
"""Those that show what the partitioner chooses: they say that their axes are Auto."""
EXPLICIT = [
    path for path in (README, *DOCS, *NOTEBOOKS) if path.name not in CHOOSE and "Mesh(" in path.read_text("utf-8")
]


def run(document, blocks):
    namespace, text = {"__name__": document.stem}, document.read_text(encoding="utf-8")
    for block in blocks:
        above = text[: text.index(block)].count("\n")  # lines are those of the document, where sources are looked up
        exec(compile("\n" * above + block, str(document), "exec"), namespace)


@pytest.mark.parametrize("document", DOCS, ids=lambda path: path.name)
def test_the_examples_of_a_document_run(document):
    run(document, blocks_of(document))


@pytest.mark.parametrize("document", EXPLICIT, ids=lambda path: path.name)
def test_the_programs_of_a_text_run_unchanged_on_meshes_with_explicit_axes(document, monkeypatch, tmp_path):
    types_of, made = mesh._axis_types, []

    def explicit(axis_types, names):
        made.append(axis_types)
        return types_of(axis_types, names) if axis_types else (AxisType.Explicit,) * len(names)

    monkeypatch.setattr(mesh, "_axis_types", explicit)
    monkeypatch.setenv("NPROC", "32")  # the notebooks set it
    monkeypatch.chdir(tmp_path)
    # Tests draw meshes of their own, and programs of several processes need these: both run elsewhere.
    elsewhere = ("@given", "test_centered()", "jax.distributed.initialize()")
    blocks = [block for block in blocks_of(document) if not any(text in block for text in elsewhere)]
    with jax.numpy_rank_promotion("allow"):  # outside of tests it is
        run(document, blocks)
    assert None in made


@pytest.mark.parametrize(
    "document", [path for path in (DEMO, *DOCS, *NOTEBOOKS) if path.name in CHOOSE], ids=lambda path: path.name
)
def test_a_program_that_leaves_sums_to_the_partitioner_says_so(document):
    text = document.read_text(encoding="utf-8")
    assert "AxisType.Auto" in text
    assert "Explicit" in text
