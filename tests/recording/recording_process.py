"""One of several processes that record the same programs and merge what they recorded: `test_gathering` runs it.

Its arguments are its number, how many there are, where they meet, and a folder.
"""

import pathlib
import sys
import time

import jax
import numpy as np

import partjit
from partjit.colocated import colocated_python

number, count = int(sys.argv[1]), int(sys.argv[2])
folder = pathlib.Path(sys.argv[4])
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[3], count, number)

mesh = partjit.Mesh(np.array(jax.devices()), ("data",))
SLOW = count - 1


def load(x):
    if number == SLOW:
        time.sleep(0.05)
    return x


call = colocated_python(load, out_specs_fn=lambda x: x)


def train_step(x):
    return call(x * 2).sum() + x


with mesh:
    step = partjit.pjit(train_step, in_axis_resources=partjit.P("data"), out_axis_resources=partjit.P("data"))
    data = jax.make_array_from_callback(
        (8 * count,), jax.sharding.NamedSharding(mesh, partjit.P("data")), lambda index: np.ones(8 * count)[index]
    )
    data = step(data)  # compiles
    with partjit.record() as timeline:
        for _ in range(3):
            data = step(data)

timeline.save(folder / f"process_{number}.json")
gathered = partjit.gather_timelines(timeline, timeout=60)
gathered.save(folder / f"gathered_{number}.json")
print(gathered.summary())
if number == 0:  # and the others do not
    try:
        partjit.gather_timelines(timeline, timeout=0.2)
    except TimeoutError as error:
        print(error)
