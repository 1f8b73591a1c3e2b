"""A process of several whose colocated functions return all of an array, of which each puts its part on its devices, or
nothing, and fail in one process; and of which a call raises something before its program is planned.

python local_results.py NUMBER COUNT ADDRESS
"""

import contextlib
import faulthandler
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

number, count, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
faulthandler.dump_traceback_later(100, exit=True)
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, count, number)

import partjit  # noqa: E402
from partjit import P, pjit  # noqa: E402
from partjit._jax.processes import distributed_client  # noqa: E402
from partjit.colocated import cheapness, colocated_python  # noqa: E402

mesh = partjit.Mesh(np.array(jax.devices()), "x")
sharded, everywhere = jax.NamedSharding(mesh, P("x")), jax.NamedSharding(mesh, P())
client = distributed_client()
assert client is not None
first = [number == 1]
if number == 1:  # the first copy of a function in the group, which needs nothing of the other processes
    assert float(colocated_python(lambda x: x + 1, out_specs_fn=lambda x: x)(np.float32(1))) == 2
    client.key_value_set("copied", "")
client.blocking_key_value_get("copied", 30_000)


@pjit(in_shardings=None, out_shardings=None)
def begun_late(x):
    if first.pop():
        raise LookupError("no such batch")
    return colocated_python(lambda x: x, out_specs_fn=lambda x: x, mode="inline")(x) + 1


with mesh:
    with pytest.raises(LookupError if number == 1 else partjit.OtherProcessError, match="no such batch"):
        begun_late(1.0)
    client.key_value_set(f"learned/{number}", "")  # what this process calls next may meet a call of those that wait
    for k in range(count):
        client.blocking_key_value_get(f"learned/{k}", 60_000)
    first.append(False)
    assert float(begun_late(1.0)) == 2

for kind in (np, jnp):
    drawn = [0]

    def load(kind=kind, drawn=drawn):
        drawn[0] += 1
        # What the other processes put on their devices is theirs to say.
        return kind.arange(8.0) + 100 * drawn[0] + 10 * number, kind.asarray(drawn[0])

    specs = (
        jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharded),
        jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere),
    )
    call = colocated_python(load, out_specs=specs, stream="load", run_ahead=2)

    @pjit(in_shardings=None, out_shardings=None)
    def step(x, call=call):
        batch, drawn = call()
        return jnp.sum(batch) + 0 * x, drawn

    with mesh:
        for i in range(1, 6):
            total, found = step(np.float32(i))
            assert float(total) == 28 + 8 * 100 * i + 10 * (8 // count) * sum(range(count)), (kind, total)
            assert int(found) == i


@colocated_python(out_specs_fn=lambda x: None, stream="log")
def log(x):
    if number == 1:
        raise OSError("no space left on device")


@pjit(in_shardings=P("x"), out_shardings=None)
def logged(x):
    log(x)
    return jnp.sum(x)


@colocated_python(out_specs_fn=lambda x: x)
def double(x, times=[]):  # noqa: B006
    times.append(None)
    if number == 1 and len(times) % 3 == 2:
        raise OSError("no space left on device")
    return x + x


with mesh:
    total = pjit(jnp.sum, in_shardings=P("x"), out_shardings=None)
    x = jax.make_array_from_callback((8,), sharded, lambda index: np.arange(8, dtype=np.float32)[index])
    whole = jax.make_array_from_callback((1, 8), everywhere, lambda _: np.arange(8, dtype=np.float32)[None])
    for given, program in (
        (x, total),
        (x, lambda v: jax.jvp(total, (v,), (x,))[0]),
        (whole, lambda x: jax.vmap(total)(x)[0]),
        (x, lambda x: total(partjit.with_sharding_constraint(x, P()))),
    ):
        assert float(program(double(given))) == 56
        pending = double(given)
        with pytest.raises(OSError if number == 1 else partjit.OtherProcessError, match="no space left on device"):
            program(pending)
        assert float(program(double(given))) == 56
        assert float(total(x)) == 28


@colocated_python(out_specs_fn=lambda x: x)
def one_more_in_the_caller(x):
    return x + (threading.current_thread() is threading.main_thread())


# Process 0 soon makes the calls in their caller, the others never do.
cheapness._CHEAP_SECONDS = 60.0 if number == 0 else 0.0
with mesh:
    totals = {float(total(one_more_in_the_caller(x))) for _ in range(2 * cheapness._CHEAP_IN_A_ROW)}
    assert totals == {28, 28 + 8 // count}, totals


error = None
deadline = time.monotonic() + 60
with mesh:
    while error is None and time.monotonic() < deadline:
        try:
            assert float(logged(np.arange(8.0))) == 28
        except (OSError, partjit.OtherProcessError) as raised:
            error = raised
        else:
            time.sleep(0.01)
    assert isinstance(error, OSError) == (number == 1), error
    assert "no space left on device" in str(error)
    assert float(pjit(jnp.sum, in_shardings=P("x"), out_shardings=None)(np.arange(8.0))) == 28
    if number == 1:  # what the last execution has logged
        with contextlib.suppress(OSError):
            partjit.colocated.wait()
print("done", flush=True)
