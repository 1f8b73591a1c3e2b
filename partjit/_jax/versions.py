"""The jax versions that are supported, checked before anything is imported that others may lack."""

import importlib.metadata

SUPPORTED = ">=0.10.2,!=0.11.*,<0.13"

LEFT_OUT = (0, 11)
"""With jax 0.11.2 a thread can wait for ever in a compiled function whose argument others donate, XLA dies of a
segmentation fault where it compiles the sum of an empty array beside random numbers, and some interfaces are still
those of jax 0.10."""


def supported_release(version: str) -> tuple[int, ...]:
    """The numbers of a supported version of jax.

    Raises:
        ImportError: it says which versions to install.
    """
    release = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if not (0, 10, 2) <= release < (0, 13) or release[:2] == LEFT_OUT:
        raise ImportError(f"partjit needs jax{SUPPORTED} but found jax {version}: pip install 'jax{SUPPORTED}'")
    return release


RELEASE = supported_release(importlib.metadata.version("jax"))

COMPILER = "jaxlib"
"""The distribution that has XLA and Shardy, whose version is not always that of jax."""
