"""Threads of the devices, which call Python and are not Python's.

The interpreter makes a state for such a thread when it calls Python, and destroys it, with all that is local to the
thread, when Python returns. That takes several times as long as the rest of a small call: what jax and functions keep
per thread is made anew as well. So a thread keeps its state from its first call on, as threads of Python do. XLA has
few threads and ends none of them, and at exit the interpreter stops those that have a state as it stops daemon threads.
"""

import ctypes
import threading

__all__ = ["keep_state"]

_kept = threading.local()


def keep_state() -> None:
    """Has this thread keep its state."""
    if not hasattr(_kept, "was_taken"):
        # The state is destroyed by the `PyGILState_Release` that belongs to the first `PyGILState_Ensure`. This is one
        # more of the latter, without its counterpart.
        _kept.was_taken = ctypes.pythonapi.PyGILState_Ensure()
