"""Every private name of jax that partjit uses, and every difference between the jax versions it supports, by topic.

No other package imports `jax._src`; `make check` sees to that. What jax offers publicly on all supported versions (in
`jax.core`, `jax.extend`, `jax.interpreters`) is imported from there by the modules that use it. Names are exported,
never modules, and with one signature on every version: a gate stands beside its reason, in the file of its topic.

The largest difference: jax 0.10 keeps a jaxpr and its constants apart (`ClosedJaxpr(jaxpr, consts)`), jax 0.12 merges
them: a `Jaxpr` has `consts`, and its `.jaxpr` is itself. "Closed jaxpr" means whichever carries its constants.
"""

from partjit._jax.versions import RELEASE as RELEASE
