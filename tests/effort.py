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


def examples(count: int, in_soak: int | None = None) -> settings:
    """Settings of a law of which so many examples show what it is about.

    Args:
        count: in `make test`.
        in_soak: in `make soak`, for a law whose examples are expensive; as many as of any law by default.
    """
    return settings(max_examples=(in_soak or settings().max_examples) if EVERYTHING else count)
