"""Train the model of train_char_lm.py in several processes, and go on exactly after one of them was killed.

    pip install "partjit[viz]"
    python -m partjit.launch -n 2 --devices-per-process 4 examples/train_distributed.py

Every process runs this script. The mesh spans the devices of all of them, the training step is one program over it,
and its calls run in each process on what that one has: a process reads its own rows of a batch. The metrics are the
same everywhere, so the first process writes them.

A journal (partjit.colocated.journal) commits the state, of which each process writes its shards, together with the
position in the data and the length of the metrics. Whenever processes are killed, --resume goes on from the last
commit, in as many processes as you like; rows of metrics that are newer are cut off, and written again. With
--kill-at 25 the last process kills itself before that step; kill_and_resume.py tries this, and compares.
"""

import json
import os
import shutil
import signal
import sysconfig
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from train_char_lm import (
    BATCH,
    CONTEXT,
    METRICS,
    PEAK_RATE,
    STATE_SPECS,
    WARMUP,
    OneLineParser,
    adam,
    init_params,
    init_state,
    loss_fn,
    make_mesh,
    parse_count,
    read_text,
)

from partjit import P, colocated, pjit

JOURNAL = "journal"
MESH = {"data": 4, "model": 2}  # of eight devices, in however many processes
LAUNCH = (
    "Start it in several processes of this machine with `partjit launch -n 2 --devices-per-process 4 "
    "examples/train_distributed.py`, and on a cluster as docs/processes.md says."
)


# ---- What runs on the hosts, in each process ----


class Batches:
    """One random batch after the other. Which ones follows from the seed and from how many were drawn before."""

    def __init__(self, text, seed, sharding):
        self.text, self.seed, self.sharding, self.drawn = text, seed, sharding, 0

    def next_batch(self):
        """A batch, of which this process reads its own rows."""
        self.drawn += 1
        starts = np.random.default_rng([self.seed, self.drawn]).integers(len(self.text) - CONTEXT, size=(BATCH, 1))

        def rows(index):
            return self.text[starts[index[0]] + np.arange(CONTEXT + 1)].astype(np.int32)

        return jax.make_array_from_callback((BATCH, CONTEXT + 1), self.sharding, rows)

    def save(self):
        return self.drawn

    def restore(self, drawn):
        self.drawn = drawn


class Metrics:
    """A file with a row for each step, which the first process writes."""

    def __init__(self, path):
        self.path, self.is_writer = path, jax.process_index() == 0
        self.path.touch()

    def append(self, step, loss):
        if self.is_writer:
            row = json.dumps({"step": int(step), "loss": float(loss)}) + "\n"
            with open(self.path, "ab", buffering=0) as file:  # no buffer: the row is written in one piece
                file.write(row.encode())

    def save(self):
        with open(self.path, "rb") as file:
            os.fsync(file.fileno())
            return file.seek(0, os.SEEK_END)

    def restore(self, length):
        if self.is_writer:
            os.truncate(self.path, length)


# ---- The training step, and the loop around it ----


def make_train_step(mesh, batches, metrics):
    batch = jax.ShapeDtypeStruct((BATCH, CONTEXT + 1), jnp.int32, sharding=NamedSharding(mesh, P("data", None)))
    next_batch = batches.next_batch.specialize(out_specs=batch, stream="load", run_ahead=2)
    append_metrics = metrics.append.specialize(out_specs_fn=lambda *_: None, stream="log")

    @partial(
        pjit,
        in_axis_resources=(STATE_SPECS, None, None),
        out_axis_resources=(STATE_SPECS, None),
        donate_argnums=0,
    )
    def train_step(state, step, rate):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], next_batch())
        append_metrics(step, loss)
        return adam(state, grads, step, rate), loss

    return train_step


def train(train_step, state, done, options, commit):
    """Take the steps that are not done yet, with one of them on the devices while the next one is dispatched."""
    before = None
    for step in range(done + 1, options.steps + 1):
        if step == options.kill_at and jax.process_index() == jax.process_count() - 1:
            print(f"kills itself before step {step}")
            os.kill(os.getpid(), signal.SIGKILL)
        rate = PEAK_RATE * min(step / WARMUP, 1 - (step - 1) / options.steps)
        state, loss = train_step(state, step, rate)
        jax.block_until_ready(before)
        before = loss
        if step % options.commit_every == 0 or step == options.steps:
            commit({"done": step, "state": state})  # waits for the calls until here
            if jax.process_index() == 0:
                print(f"step {step:>4}/{options.steps}  loss {float(loss):.3f}")


def parse_options():
    stdlib = sysconfig.get_path("stdlib")
    parser = OneLineParser(description=__doc__.splitlines()[0], epilog=LAUNCH)
    parser.add_argument("--steps", type=parse_count, default=60, help="training steps (default: %(default)s)")
    parser.add_argument(
        "--text", type=read_text, default=stdlib, metavar="PATH", help="a text file or a folder of them"
    )
    parser.add_argument("--seed", type=parse_count, default=1, help="another one, another run (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default="train_distributed", metavar="DIR", help="a folder all processes see"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last commit in --out")
    parser.add_argument("--commit-every", type=parse_count, default=10, metavar="N", help="steps from one to the next")
    parser.add_argument("--kill-at", type=parse_count, metavar="STEP", help="the last process kills itself before it")
    options = parser.parse_args()
    if options.resume and not (options.out / JOURNAL).exists():
        parser.error(f"argument --resume: there is no journal in {str(options.out)!r}; start without it")
    return options


def main():
    options = parse_options()  # first, so that --help and mistakes need no other processes
    jax.distributed.initialize()
    mesh = make_mesh(**MESH)
    multihost_utils.sync_global_devices("all have read their options")
    if jax.process_index() == 0:
        options.out.mkdir(parents=True, exist_ok=True)
        if not options.resume:
            shutil.rmtree(options.out / JOURNAL, ignore_errors=True)
            (options.out / METRICS).unlink(missing_ok=True)
    multihost_utils.sync_global_devices("the folder is ready")

    stateful = colocated.colocated_python_class(state=("save", "restore"))
    batches = stateful(Batches)(options.text, options.seed, NamedSharding(mesh, P("data", None)))
    metrics = stateful(Metrics)(options.out / METRICS)
    objects = {"batches": batches, "metrics": metrics}
    with mesh, colocated.journal(options.out / JOURNAL, objects=objects, repartition=of_first_process) as journal:
        state = init_state(init_params(np.random.default_rng(options.seed)))
        start = journal.restore({"done": 0, "state": state})
        if jax.process_index() == 0:
            since = f", from step {start['done']} on" if start["done"] else ""
            processes = "1 process" if jax.process_count() == 1 else f"{jax.process_count()} processes"
            print(f"{processes}, {mesh.size} devices, out {options.out.resolve()}{since}")
        train(make_train_step(mesh, batches, metrics), start["state"], start["done"], options, journal.commit)


def of_first_process(_name, states):
    """The states of objects in another number of processes: all have one position, and the first wrote the file."""
    return states[0]


if __name__ == "__main__":
    main()
