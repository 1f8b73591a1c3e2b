"""The table in docs/features.md says what `jax.jit` and `pjit` give with the jax that runs, and they give the same."""

import importlib.util
import pathlib

import jax.numpy as jnp
import pytest

from partjit import pjit

_PATH = pathlib.Path(__file__).parents[2] / "docs" / "features.py"


def _load():
    spec = importlib.util.spec_from_file_location("features", _PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = _load()


def test_the_table_has_these_rows_and_a_cell_for_each_version():
    written = script.written()
    assert [*written] == [*script.FEATURES]
    assert len(written) >= 12
    assert all(len(cells) == len(script.VERSIONS) and all(cells) for cells in written.values())
    assert not any("DIFFERS" in cell for cells in written.values() for cell in cells)


@pytest.mark.parametrize("name", script.FEATURES)
def test_a_cell_says_what_both_give(name):
    assert script.cell(name) == script.written()[name][script.column()]


def test_what_differs_in_values_types_or_refusals_would_be_in_the_cell(monkeypatch):
    def refused(*_):
        raise TypeError("no")

    def feature(wrap):
        return wrap(lambda x: 2 * x)(jnp.arange(8.0))

    monkeypatch.setitem(script.FEATURES, "double", feature)
    assert script.cell("double") == "`f32[8]`"
    for other in (lambda x: 3 * x, lambda x: 2 * x[:4], refused):
        monkeypatch.setattr(script.partjit, "pjit", lambda _, other=other: pjit(other))
        assert script.cell("double").startswith("DIFFERS: `f32[8]` under `jax.jit`")
