"""Fixtures of the tests of plans."""

import pytest

from partjit.plan.passes import emit


@pytest.fixture
def by_the_host(monkeypatch):
    """The host drives all loops and branches with calls: no executable makes a call."""
    monkeypatch.setattr(emit, "MOST_BYTES_WAITING", -1)
