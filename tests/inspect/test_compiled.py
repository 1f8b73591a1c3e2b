"""What XLA made of a program is read from the program itself, also where compiled programs are kept in files."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import partjit
from partjit import P, pjit
from partjit.inspect import explain


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A folder in which jax keeps everything it compiles, as users have it."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_a_program_has_its_own_lines_where_the_same_program_is_in_the_cache(cache):
    mesh = partjit.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    numbers = jnp.ones(8, jnp.float32)
    line = inspect.currentframe().f_lineno
    one = pjit(lambda x: jnp.sum(x), P("x"), None)
    same = pjit(lambda x: jnp.sum(x), P("x"), None)
    with mesh:
        one(numbers)
    written = {*cache.iterdir()}
    assert written
    sites = [explain(f, numbers, mesh=mesh, compiled=True).collectives[0].site for f in (one, same, one)]
    assert sites == [(__file__, line + k, "<lambda>") for k in (1, 2, 1)]
    assert {*cache.iterdir()} == written
    with mesh:
        pjit(lambda x: x * 3, P("x"), None)(numbers)
    assert {*cache.iterdir()} > written, "the cache is in use again"
