"""Set-up shared by the tests and by the doctests of the package.

It lies in the root because pytest applies a `conftest.py` to what lies below it, and both `tests/` and `partjit/` need
the same settings. The eight devices are those of the package's own plugin: see `partjit_devices` in `pyproject.toml`.
"""

import gc
import os
import pathlib
import signal

import jax
import pytest
from hypothesis.internal.conjecture import providers
from jax.experimental.compilation_cache import compilation_cache

# No implicit broadcasting between ranks and no implicit promotion of dtypes: either would hide a wrong aval.
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Most of the time of a run is XLA's. How programs are partitioned does not depend on how well their loops are compiled.
jax.config.update("jax_disable_most_optimizations", True)

# XLA reads it with the first program. Up to jax 0.10 it emits loops through MLIR, with several pipelines of passes for
# each fused operation, which takes more than half of the time that a small program compiles; from jax 0.11 on there is
# no other way, and the option is ignored.
CODEGEN = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {CODEGEN}".strip()

# What one worker, one interpreter or the last run compiled, the next one reads. The key holds the program, the options
# and the version of jaxlib, so that nothing is read which is not what would be compiled. Child processes have none.
CACHE = os.environ.get("PARTJIT_TEST_CACHE", str(pathlib.Path(__file__).parent / ".jax_cache"))
jax.config.update("jax_compilation_cache_dir", CACHE or None)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# For each exception that passes through jax it asks of each frame, by several calls of the system, whose file it is of.
jax.config.update("jax_traceback_filtering", "off")

# What a script starts in the background ignores SIGINT, which tests send to themselves and to their children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Hypothesis also draws numbers and words that it finds in the modules which happen to be imported, so that a law would
# see other examples when it runs alone, or when a number changes somewhere in the package.
if os.environ.get("PARTJIT_PROFILE", "deterministic") == "deterministic" and hasattr(providers, "_get_local_constants"):
    providers._get_local_constants = providers.Constants


def pytest_collection_finish():
    """Keeps collections of garbage, which tests request by the hundred, from looking at jax and all tests each time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, *gc.get_threshold()[1:])  # programs are many small objects, most of which stay


@pytest.fixture
def no_compilation_cache():
    """XLA compiles every program in this test, for what is asserted is read from what it does or counts it."""
    enabled = jax.config.jax_enable_compilation_cache
    compilation_cache.reset_cache()  # jax asks only once whether there is a cache
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    compilation_cache.reset_cache()
    jax.config.update("jax_enable_compilation_cache", enabled)
