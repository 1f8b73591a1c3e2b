"""A program that is killed while it writes: called with its number, how many there are, where they meet, where the
journal is, whether that keeps results, and before which operation on a file it is to be killed (0: before none).

Every row that it logs, and every effect outside, says which step it is of; so nothing can be lost or doubled unseen.
"""

import builtins
import os
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np

import partjit
from partjit import P, colocated, pjit
from partjit.colocated import colocated_python, colocated_python_class

STEPS, EVERY, WIDTH = 12, 3, 24
if __name__ == "__main__":
    number, count, address, path, keeps, last = *map(int, sys.argv[1:3]), *sys.argv[3:5], *map(int, sys.argv[5:7])


def kill_before_operation(last):
    """Kills this process instead of its operation number `last`; if that writes, after a half of it."""
    done = 0

    def counting(name):
        real = getattr(os, name)

        def operation(*args):
            nonlocal done
            done += 1
            if done == last:
                if name == "write":
                    real(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args)

        setattr(os, name, operation)

    for name in ("write", "fsync", "replace"):
        counting(name)


class Batches:
    def __init__(self):
        self.position = 0

    def following(self):
        self.position += 1
        return np.float32(self.position)

    def save(self):
        return self.position

    def restore(self, position):
        self.position = position


class Metrics:
    """A file of rows of the first process; what is behind the state is cut off."""

    def __init__(self):
        self.rows = 0
        self.file = builtins.open(  # noqa: SIM115 - as long as the object lives
            f"{path}/metrics", "r+b" if os.path.exists(f"{path}/metrics") else "w+b", 0
        )

    def append(self, step, value):
        self.rows += 1
        if number == 0:
            self.file.seek(0, 2)
            self.file.write(f"{int(step)} {float(value.addressable_data(0)):g}".ljust(WIDTH - 1).encode() + b"\n")

    def save(self):
        return self.rows

    def restore(self, rows):
        self.rows = rows
        if number == 0:
            self.file.truncate(rows * WIDTH)


def pay(step):
    """An effect that nothing takes back."""
    with builtins.open(f"{path}/ledger-{number}", "a") as ledger:
        ledger.write(f"{colocated.idempotency_key()} {int(step)}\n")


def main():
    jax.config.update("jax_num_cpu_devices", 4 // count)
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, count, number)
    mesh = partjit.Mesh(np.array(jax.devices()), "x")
    batches = colocated_python_class(Batches, state=("save", "restore"))()
    metrics = colocated_python_class(Metrics, state=("save", "restore"))()
    spec = jax.ShapeDtypeStruct((), jnp.float32)
    following = batches.following.specialize(out_specs=spec, run_ahead=2, devices=jax.devices())
    append = metrics.append.specialize(out_specs_fn=lambda *_: None)
    paying = colocated_python(pay, out_specs_fn=lambda *_: None, mode="inline")

    def step(k, x):
        x = x + following()
        append(k, x.sum())
        paying(k)
        return x

    program = pjit(step, in_shardings=(None, P("x")), out_shardings=P("x"))
    zeros = jax.make_array_from_callback((4,), jax.NamedSharding(mesh, P("x")), lambda i: np.zeros(4, np.float32)[i])
    objects = {"batches": batches, "metrics": metrics}
    if last:
        kill_before_operation(last)
    with mesh, colocated.journal(f"{path}/journal", objects=objects, results=bool(keeps)) as journal:
        state = journal.restore({"step": 0, "x": zeros})
        for k in range(state["step"], STEPS):
            state = {"step": k + 1, "x": program(np.int32(k), state["x"])}
            if k % EVERY == EVERY - 1:
                journal.commit(state)
        print("ended with", [float(v) for shard in state["x"].addressable_shards for v in np.asarray(shard.data)])


if __name__ == "__main__":
    main()
