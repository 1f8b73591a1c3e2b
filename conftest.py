"""Set-up shared by the tests and by the doctests of the package.

It lies in the root because pytest applies a `conftest.py` to what lies below it, and both `tests/` and `partjit/` need
the same eight devices.
"""

import os

# XLA's CPU client reads NPROC when it is created and sizes its thread pool from it. A collective blocks one thread per
# device until all have arrived, so eight virtual devices on a machine of few cores can wait for each other for ever.
os.environ.setdefault("NPROC", "32")
# The environment, rather than `jax.config`, because child processes that tests start must see it too. Setting it from
# outside runs the suite on another platform.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax

jax.config.update("jax_num_cpu_devices", 8)
# No implicit broadcasting between ranks and no implicit promotion of dtypes: either would hide a wrong aval.
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

hypothesis.settings.register_profile(
    "partjit",
    deadline=None,  # the first example of a shape compiles, which takes a hundred times as long as the next
    # The same examples for everybody; a soak (PARTJIT_EXAMPLES, see tests/test_promises.py) draws others each time.
    derandomize="PARTJIT_EXAMPLES" not in os.environ,
    print_blob=True,
)
hypothesis.settings.load_profile("partjit")
