"""Every Python block of the documents runs, those of one document one after the other."""

import pathlib
import re

import pytest

DOCS = sorted((pathlib.Path(__file__).parents[2] / "docs").glob("*.md"))


@pytest.mark.parametrize("document", DOCS, ids=lambda path: path.name)
def test_the_examples_of_a_document_run(document):
    blocks = re.findall(r"```python\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL)
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(document), "exec"), namespace)
