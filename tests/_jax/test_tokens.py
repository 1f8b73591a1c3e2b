"""Tokens are passed on from program to program for the effect of calls alone, and on the same devices.

They have no memory of their own, and none is expected of them.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import io_callback
from jax.sharding import SingleDeviceSharding

from partjit import colocated
from partjit._jax import tokens

nothing = colocated.colocated_python(lambda x: None, out_specs_fn=lambda x: None)


@pytest.fixture
def asked(monkeypatch):
    """What jax's rule is asked for."""
    seen, rule = [], tokens._rule_of_jax

    def listen(own, effect, devices):
        seen.append(str(effect))
        return rule(own, effect, devices)

    monkeypatch.setattr(tokens, "_rule_of_jax", listen)
    jax.effects_barrier()
    yield seen
    jax.effects_barrier()
    colocated.wait()


def test_only_the_first_program_gets_a_new_token(asked):
    program = jax.jit(nothing)
    for _ in range(5):
        program(1)
    assert asked == ["Colocated"]
    x = jax.device_put(1, jax.devices()[1])
    for _ in range(5):
        program(x)
    assert asked == ["Colocated"] * 2


def test_effects_of_jax_are_left_to_jax(asked):
    jax.jit(nothing)(1)
    program = jax.jit(lambda x: io_callback(lambda x: None, None, x, ordered=True))
    for _ in range(3):
        program(jnp.int32(1))
    assert asked == ["Colocated", *["OrderedIO"] * 3]


def test_a_program_with_tokens_has_a_result_in_another_memory(asked):
    on_host = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    result = jax.jit(lambda x: (nothing(x), x + 1)[1], out_shardings=on_host)(jnp.float32(1))
    assert (float(result), result.sharding.memory_kind) == (2, "pinned_host")
