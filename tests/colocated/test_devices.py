"""The CPU devices on the hosts of other devices."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

import partjit
from partjit.colocated import colocated_cpu_devices, devices
from tests.census import sees


@sees("different examples", "several elements")
@given(st.permutations(range(8)), st.integers(0, 8))
def test_cpu_devices_are_their_own_in_any_order_and_subset(order, count):
    chosen = [jax.devices()[i] for i in order[:count]]
    assert colocated_cpu_devices(chosen) == chosen
    assert colocated_cpu_devices(tuple(chosen)) == chosen


@pytest.mark.parametrize("types", [(AxisType.Auto, AxisType.Auto), (AxisType.Explicit, AxisType.Auto)])
def test_a_mesh_of_cpu_devices_is_its_own(types):
    mesh = partjit.Mesh(np.array(jax.devices())[::-1].reshape(4, 2), ("x", "y"), axis_types=types)
    assert colocated_cpu_devices(mesh) is mesh


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """What the rule looks at."""

    id: int
    process_index: int
    platform: str = "tpu"


def make_devices(patch, per_process, cpus_per_process):
    """Devices of another platform, so many in each process, and CPU devices for each."""
    others = [Accelerator(10 * p + i, p) for p, count in enumerate(per_process) for i in range(count)]
    cpus = [Accelerator(100 * p + i, p, "cpu") for p, count in enumerate(cpus_per_process) for i in range(count)]
    patch.setattr(jax, "devices", lambda platform=None: cpus if platform == "cpu" else others)
    patch.setattr(jax, "Device", Accelerator)
    devices._colocated.cache_clear()
    return others, cpus


@pytest.fixture(autouse=True)
def forget():
    yield
    devices._colocated.cache_clear()


@sees("different examples", "several elements")
@given(data=st.data())
def test_the_accelerators_of_a_process_share_its_cpu_devices_in_turn(data):
    counts = st.lists(st.integers(1, 4), min_size=2, max_size=3)
    per_process = data.draw(counts)
    cpus_per_process = [data.draw(st.integers(1, 4)) for _ in per_process]
    with pytest.MonkeyPatch.context() as patch:
        others, cpus = make_devices(patch, per_process, cpus_per_process)
        chosen = data.draw(st.permutations(others))[: data.draw(st.integers(1, len(others)))]
        for device, cpu in zip(chosen, colocated_cpu_devices(chosen), strict=True):
            own = [c for c in cpus if c.process_index == device.process_index]
            assert cpu == own[device.id % 10 % len(own)]


def test_a_process_without_cpu_devices_is_an_error(monkeypatch):
    others, _ = make_devices(monkeypatch, [1, 1], [1, 0])
    with pytest.raises(ValueError, match=r"process 1 of .* has no CPU devices.*JAX_PLATFORMS=tpu,cpu"):
        colocated_cpu_devices(others)


@pytest.mark.parametrize("wrong", [[0], ["cpu"], [None]], ids=repr)
def test_what_is_no_device_is_a_type_error(wrong):
    with pytest.raises(TypeError, match=r"devices_or_mesh\[0\] must be a device, as in jax.devices\(\), but is"):
        colocated_cpu_devices(wrong)


def test_a_number_is_no_devices():
    with pytest.raises(
        TypeError, match="colocated_cpu_devices: devices_or_mesh must be devices or a mesh, but is 3, an int"
    ):
        colocated_cpu_devices(3)
