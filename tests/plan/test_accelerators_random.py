"""Random programs with calls on accelerators, which CPU devices play: the laws of other programs hold."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import partjit
from partjit.colocated.runtime.moved_by_calls import MovedByCall
from tests.census import of_its_own, saw, sees
from tests.plan import random_control_flow as rc
from tests.plan.test_programs_random import drawn, obeys_all_laws

pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")


@pytest.mark.soak
@pytest.mark.parametrize("about", ["a row", "scan", "branch"])
def test_on_accelerators_a_random_program_obeys_all_laws(accelerators, monkeypatch, about):
    devices = np.array(accelerators)
    meshes = {
        1: partjit.Mesh(devices[:1].reshape(1, 1), ("x", "y")),
        8: partjit.Mesh(devices.reshape(2, 2), ("x", "y")),
    }
    # Executables for accelerators make no calls yet; those of CPU devices that play some would.
    kind = (
        rc.straight_programs(without_jax=False)
        if about == "a row"
        else rc.random_programs(3, about=about, without_jax=False)
    )
    real = MovedByCall.__call__

    def call(left):
        saw("a move that is left to a call")
        return real(left)

    monkeypatch.setattr(MovedByCall, "__call__", call)

    @sees("a colocated call", "two streams", "a donated argument", "a call that fails", "a move that is left to a call")
    @of_its_own("accelerators" + about)
    @settings(drawn)
    @given(kind, st.integers(0, 4), st.integers(0, 2))
    def holds(program, which, turn):
        program = dataclasses.replace(program, emits=False)
        # Odd: what makes calls without jit takes arrays on the first device.
        obeys_all_laws(meshes, monkeypatch, program, 2 * which + 1, turn)

    holds()
