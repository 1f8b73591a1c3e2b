"""Python's garbage collector, in what makes many objects that are kept."""

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["without_collections"]


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """No garbage is collected in the block.

    Each pass looks at all objects of the process, jax's modules among them, and is due when so many new ones were made.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
