"""Several processes: each runs the function on its own shards, on the hosts that were asked for only."""

import os
import socket
import subprocess
import sys
import textwrap

PROGRAM = """
import os, sys
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
number = int(sys.argv[1])
jax.distributed.initialize(sys.argv[2], num_processes=2, process_id=number)
from jax.sharding import NamedSharding
from partjit import Mesh, P, colocated

assert jax.device_count() == 4
mesh = Mesh(jax.devices(), "x")
sharding = NamedSharding(mesh, P("x"))
x = jax.make_array_from_callback((4,), sharding, lambda index: np.arange(4.0, dtype=np.float32)[index])

def local(array):
    return [float(shard.data[0]) for shard in array.addressable_shards]

def double(x):
    shards = [jax.device_put(2 * np.asarray(shard.data), shard.device) for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)

for mode in ("inline", "stream", "auto"):
    f = colocated.colocated_python(double, mode=mode)
    for _ in range(3):
        y = f(x)
        assert y.shape == (4,) and y.sharding == sharding
        assert local(y) == [[0.0, 2.0], [4.0, 6.0]][number], local(y)

# A call that still runs keeps its argument, of which each process has a part.
keep = colocated.colocated_python(lambda x: __import__("time").sleep(0.3) or double(x), out_specs_fn=lambda x: x)
z = double(x)
y = keep(z)
z.delete()
assert local(y) == [[0.0, 4.0], [8.0, 12.0]][number]

# On the hosts of some devices only.
first = jax.devices()[:2]
spec = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=NamedSharding(Mesh(first, "x"), P("x")))
ran = []
sys.modules["ran"] = type(sys)("ran")
sys.modules["ran"].ran = ran

def on_first():
    import ran
    ran.ran.append(1)
    return jnp.arange(2, dtype=jnp.float32)

y = colocated.colocated_python(on_first, devices=first, out_specs=spec)()
assert y.shape == (2,) and y.sharding == spec.sharding
assert (local(y) == [0.0, 1.0]) if number == 0 else (len(y.addressable_shards) == 0)
assert len(ran) == (number == 0)
try:
    colocated.colocated_python(on_first, devices=first)()
    assert number == 0
except ValueError as error:
    assert number == 1 and "none of which belongs to process 1" in str(error), error

# What one process wrote the other reads.
data = colocated.serialize(lambda v: v + number)
client = jax._src.distributed.global_state.client
client.key_value_set(f"data{number}", data.hex())
other = bytes.fromhex(client.blocking_key_value_get(f"data{1 - number}", 30_000))
assert colocated.deserialize(other)(10) == 10 + (1 - number)
print("done", number)
"""


def test_two_processes(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(PROGRAM), encoding="utf-8")
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(number), address],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
        )
        for number in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for number, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0, output
        assert f"done {number}" in output
