"""The Python programs of documents and notebooks."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
README = ROOT / "README.md"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.py"))
DEMO = ROOT / "examples" / "train_char_lm.py"


def blocks_of(document: pathlib.Path) -> list[str]:
    """The Python blocks of a Markdown document, or the code cells of the text of a notebook."""
    text = document.read_text(encoding="utf-8")
    if document.suffix == ".md":
        return re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    _, *cells = re.split(r"^# %%(.*)\n", text, flags=re.MULTILINE)
    return [source for kind, source in zip(cells[::2], cells[1::2], strict=True) if "[markdown]" not in kind]
