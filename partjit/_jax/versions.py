"""The jax versions that are supported, checked before anything is imported that others may lack."""

import importlib.metadata


def supported_release(version: str) -> tuple[int, ...]:
    """The numbers of a supported version of jax.

    Raises:
        ImportError: it says which versions to install.
    """
    release = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if not (0, 10, 2) <= release < (0, 13):
        raise ImportError(f"partjit needs jax>=0.10.2,<0.13 but found jax {version}: pip install 'jax>=0.10.2,<0.13'")
    return release


RELEASE = supported_release(importlib.metadata.version("jax"))

COMPILER = "jaxlib"
"""The distribution that has XLA and Shardy, whose version is not always that of jax."""
