"""Python's garbage collector while a report is made."""

import gc
import sys

import jax.numpy as jnp
import pytest

from partjit.inspect import explain
from partjit.inspect.collector import without_collections


@pytest.mark.parametrize("enabled", [True, False])
def test_it_is_afterwards_as_it_was(enabled):
    (gc.enable if enabled else gc.disable)()
    try:
        with without_collections():
            assert not gc.isenabled()
        with pytest.raises(KeyError), without_collections():
            raise KeyError
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_no_pass_is_made_while_a_report_is(monkeypatch):
    passes = []

    def count(phase, info):
        passes.append(info)

    def fun(x):
        for _ in range(200):
            x = jnp.sin(x) + 1
        return x

    inner = sys.modules["partjit.inspect.explain"]
    real = inner.partition

    def partition(*args, **kwargs):
        gc.callbacks.append(count)
        return real(*args, **kwargs)

    def predict(program, real=inner.predict):
        result = real(program)
        gc.callbacks.remove(count)
        return result

    monkeypatch.setattr(inner, "partition", partition)
    monkeypatch.setattr(inner, "predict", predict)
    explain(fun, jnp.ones(8))
    assert not passes
    assert gc.isenabled()
