"""Calls without results before an inline call on their stream: which thread runs them, and what their failures do."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partjit import colocated, pjit

number = jax.ShapeDtypeStruct((), jnp.float32)


@colocated.colocated_python_class
class Buffer:
    def __init__(self):
        self.values, self.threads = [], []

    def add(self, value):
        self.threads.append(threading.get_ident())
        if float(value) == 2:
            raise ValueError("two")
        self.values.append(float(value))

    def total(self):
        return np.float32(sum(self.values))

    def seen(self):
        return np.array(self.threads) % 2**31


@pytest.mark.parametrize("mode", [None, "stream"])
def test_they_run_in_the_calling_thread_and_fail_as_on_another(mode):
    buffer, device = Buffer(), jax.devices()[0]
    add = buffer.add.specialize(out_specs_fn=lambda value: None, mode=mode)
    total = buffer.total.specialize(devices=device, out_specs=number)

    @pjit
    def run(x):
        def body(x, i):
            add(x + i)
            value = total()
            return x + 0 * value, value

        return jax.lax.scan(body, x, jnp.arange(4.0))

    totals = run(jnp.float32(0))[1]
    assert totals.tolist() == [0, 1, 1, 4]  # the program and the calls after the one that fails go on
    with pytest.raises(ValueError, match="two") as caught:
        colocated.wait()
    assert "in the colocated call of 'Buffer.add' made at " in caught.value.__notes__[0]
    threads = np.asarray(buffer.seen.specialize(devices=device)()).tolist()
    here = threading.get_ident() % 2**31
    assert [thread == here for thread in threads] == [mode is None] * 4
    (where,) = {call.where for call in run.plan(jnp.float32(0)).calls if "add" in call.name}
    assert where == ("on a thread, the caller's stream" if mode else "inline, the caller's stream")
