"""Fixtures that several files of tests share."""

import jax
import numpy as np
import pytest
import rendezvous

import partjit
from partjit import colocated


@pytest.fixture(scope="session")
def mesh():
    """Eight devices as 4 x 2, called `x` and `y`."""
    return partjit.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))


@pytest.fixture
def compilations():
    """A list that gets one entry for every program XLA compiles while the test runs."""
    seen = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def meeting():
    """A clean place to meet colocated functions; at the end no call runs, and no failure is left unseen."""
    rendezvous.clear()
    yield rendezvous
    colocated.wait(timeout=60)
