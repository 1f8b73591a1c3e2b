"""Fixtures that several files of tests share; programs are verified after each pass of the planner."""

import gc
import os

import jax
import numpy as np
import pytest

import partjit
from partjit import colocated
from tests.colocated import rendezvous

os.environ.setdefault("PARTJIT_VERIFY_PASSES", "1")
os.environ["PARTJIT_SEARCH_CACHE"] = ""  # tests search, and leave nothing behind


@pytest.fixture(scope="session")
def mesh():
    """Eight devices as 4 x 2, called `x` and `y`."""
    return partjit.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))


@pytest.fixture
def compilations(no_compilation_cache):
    """A list that gets one entry for every program XLA compiles while the test runs."""
    seen = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def new_garbage():
    """The collector looks at what the test makes only: a pass over all that is imported takes half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def meeting():
    """A clean place to meet colocated functions; at the end no call runs, and no failure is left unseen."""
    rendezvous.clear()
    yield rendezvous
    colocated.wait(timeout=60)


@pytest.fixture
def accelerators(monkeypatch):
    """Devices 4 to 7 play accelerators, whose CPU devices are 0 to 3; no executable waits for calls.

    What is moved between them is read and put, as where they are of different kinds."""
    from partjit._jax import moves
    from partjit.colocated import devices
    from partjit.plan.passes import choose_emitted

    real = devices.colocated_cpu_devices
    by_id = jax.devices()

    def fake(of):
        if isinstance(of, jax.sharding.Mesh):
            hosts = np.array(fake([*of.devices.flat])).reshape(of.devices.shape)
            return jax.sharding.Mesh(hosts, of.axis_names, axis_types=of.axis_types)
        return [by_id[d.id % 4] for d in real(of)]

    monkeypatch.setattr(devices, "colocated_cpu_devices", fake)

    def is_on_hosts(sharding):
        return all(device.id < 4 for device in sharding.device_set)

    def cleared():
        devices.colocated_sharding.cache_clear()
        moves._way.cache_clear()

    monkeypatch.setattr(choose_emitted, "ANSWERED", frozenset())
    monkeypatch.setattr(moves, "_is_on_hosts", is_on_hosts)
    monkeypatch.setattr(moves, "_read", np.array)  # a copy, as of other memory
    cleared()
    yield by_id[4:]
    cleared()


@pytest.fixture
def silent_collector():
    """No garbage collection, in which an interrupt is lost with a warning.

    Hypothesis and jax have callbacks of the collector, and what earlier tests have left has finalizers.
    """
    gc.collect()
    callbacks = gc.callbacks[:]
    gc.callbacks.clear()
    gc.disable()
    yield
    gc.enable()
    gc.callbacks[:] = callbacks
