"""The table of transformations in the documents, computed anew: every kind of call under every transformation."""

import pytest

from tests.plan.transformations_table import part, script


@pytest.mark.parametrize("title", script.SECTIONS)
def test_the_table_says_what_happens(title):
    computed = script.part(title)
    assert [line for line in computed.splitlines() if script.FAULT in line] == []
    assert computed.splitlines() == part(title)
