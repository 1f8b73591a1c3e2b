"""Timeouts that environment variables set."""

import math
import os
import threading

__all__ = ["seconds_of"]


def seconds_of(variable: str, default: float, *, is_positive: bool = False) -> float:
    """The seconds that an environment variable says, or a default where it is not set or empty.

    Args:
        variable: its name.
        default: in seconds.
        is_positive: whether it has to be positive, and no more than a lock can wait.

    Raises:
        ValueError: it is no number of seconds.
    """
    text = os.environ.get(variable, "")
    try:
        seconds = float(text or default)
    except ValueError:
        seconds = math.nan
    if math.isnan(seconds) or (is_positive and not 0 < seconds < threading.TIMEOUT_MAX):
        raise ValueError(f"{variable} must be a {'positive ' * is_positive}number of seconds, but is {text!r}")
    return seconds
