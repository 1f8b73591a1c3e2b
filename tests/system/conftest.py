"""Tests of whole systems take minutes: `make system` runs them, `make test` leaves them out.

They need the extras `models` and `notebooks`, which other tests do not.
"""

import pathlib

import pytest

HERE = pathlib.Path(__file__).parent


def pytest_collection_modifyitems(items):
    """Marks everything in this folder, so that `-m "not system"` leaves it out as well."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.system)
