"""Set-up shared by the tests and by the doctests of the package.

It lies in the root because pytest applies a `conftest.py` to what lies below it, and both `tests/` and `partjit/` need
the same settings. The eight devices are those of the package's own plugin: see `partjit_devices` in `pyproject.toml`.
"""

import jax

# No implicit broadcasting between ranks and no implicit promotion of dtypes: either would hide a wrong aval.
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
