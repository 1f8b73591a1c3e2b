"""The page that says which file to open names files that there are, and each behaviour's once."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "where-is-what.md").read_text(encoding="utf-8")


def test_every_file_that_the_page_names_is_there():
    named = re.findall(r"`([\w/]+\.py)`", PAGE)
    assert len(named) > 80
    assert [path for path in named if not (ROOT / "partjit" / path).is_file()] == []


def test_no_file_is_the_one_for_two_behaviours_of_different_sections():
    rows = [line.split("|")[2] for line in PAGE.splitlines() if line.startswith("|") and "`" in line]
    named = [path for row in rows for path in re.findall(r"`([\w/]+\.py)`", row)]
    assert sorted({path for path in named if named.count(path) > 1}) == []
