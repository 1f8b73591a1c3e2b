"""Fixtures of the tests of plans."""

import pytest

from partjit.plan.passes import choose_emitted


@pytest.fixture
def by_the_host(monkeypatch):
    """The host drives all loops and branches with calls: no executable makes a call."""
    monkeypatch.setattr(choose_emitted, "MOST_BYTES_WAITING", -1)
