"""How much of what could be tried is tried: a sample in `make test`, everything in `make soak`."""

import os
from collections.abc import Sequence

from hypothesis import settings

EVERYTHING = os.environ.get("PARTJIT_PROFILE") == "soak"


def sample(cases: Sequence, every: int) -> Sequence:
    """One case in `every`, evenly spread and the same ones each time; in `make soak` all of them.

    Args:
        cases: in an order in which neighbors are alike.
        every: best a prime, so that the sample does not keep step with how the cases were enumerated.
    """
    return cases if EVERYTHING else cases[::every]


def examples(count: int) -> settings:
    """Settings of a law of which so many examples show what it is about; `make soak` draws as many as of any law."""
    return settings() if EVERYTHING else settings(max_examples=count)
