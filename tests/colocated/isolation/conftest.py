"""Fixtures of the tests of worker processes."""

import signal

import pytest


@pytest.fixture
def ctrl_c():
    """Ctrl-C raises KeyboardInterrupt, also where a shell has started the tests in the background and ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
