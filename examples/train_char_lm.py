"""Train a small transformer on characters, split over a mesh of devices with pjit, with Python beside the devices.

Run it with no arguments; it takes a minute or two on two CPU cores:

    pip install "partjit[viz]"
    python examples/train_char_lm.py

It learns to write Python from the sources of the standard library, on a mesh with two axes. The batch is split over
'data'; the attention heads, the hidden layer and the vocabulary are split over 'model'. The arithmetic knows nothing of
it: the layout is in the trees of specs (BLOCK_SPECS, PARAM_SPECS, STATE_SPECS), in the arguments of the four `pjit`
functions, in the spec of a batch, and in three `with_sharding_constraint` calls.

The training step itself loads its batch, logs its metrics, saves checkpoints and samples text, in Python on the hosts
while the devices go on. What it writes is in the folder train_char_lm, or in --out; a new run replaces the one before.
Kill it whenever you like: this goes on from the newest checkpoint, with the same losses as if nothing had happened.

    python examples/train_char_lm.py --resume

A machine without accelerators gets 8 virtual CPU devices. Other things to try:

    python examples/train_char_lm.py --mesh data=2,model=4
    python examples/train_char_lm.py --text my_notes.txt --steps 1000
"""

import argparse
import json
import os
import re
import sys
import sysconfig
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

# Both are read when JAX starts. XLA sizes its CPU thread pool by NPROC, and virtual devices that wait for each other in
# an all-reduce need a thread each, however few cores there are.
os.environ.setdefault("NPROC", "32")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from partjit import Mesh, P, colocated, pjit, record, set_mesh, with_sharding_constraint

try:
    from rich.console import Console
    from rich.progress import BarColumn, Progress
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError:
    sys.exit('train_char_lm.py: error: rich is missing; run: pip install "partjit[viz]"')

VOCAB = 256  # a character is a byte of UTF-8, so that any text will do
CONTEXT, BATCH = 64, 32
LAYERS, MODEL, HEADS, HIDDEN = 3, 128, 4, 512
PEAK_RATE, WARMUP = 6e-3, 40
VALID_BATCHES, SAMPLE_CHARS, TEMPERATURE = 16, 200, 0.8
MIN_CHARS, MAX_CHARS = 10 * (CONTEXT + 1), 5_000_000  # a tenth of them must hold one window and the next character
METRICS, KEPT = "metrics.jsonl", 2  # the newest two checkpoints

# ---- The model: a tree of parameters, and beside it the tree of their specs ----


def init_params(rng):
    """The parameters as NumPy arrays; `init_state` puts them on the mesh."""

    def normal(*shape):
        return rng.normal(0, shape[-2] ** -0.5, shape).astype(np.float32)

    def init_block():
        return {
            "qkv": normal(3, MODEL, MODEL),
            "proj": normal(MODEL, MODEL),
            "up": normal(MODEL, HIDDEN),
            "down": normal(HIDDEN, MODEL),
        }

    return {
        "embed": normal(VOCAB, MODEL),
        "blocks": [init_block() for _ in range(LAYERS)],
        "head": normal(MODEL, VOCAB),
    }


# A matrix that widens is split by columns and the one that narrows after it by rows,
# so a block needs only two sums over 'model': one after "proj", one after "down".
BLOCK_SPECS = {
    "qkv": P(None, None, "model"),
    "proj": P("model", None),
    "up": P(None, "model"),
    "down": P("model", None),
}
PARAM_SPECS = {
    "embed": None,  # None: a full copy on every device
    "blocks": [BLOCK_SPECS] * LAYERS,
    "head": P(None, "model"),
}
# Adam's two averages lie exactly as the parameters do.
STATE_SPECS = {"params": PARAM_SPECS, "mean": PARAM_SPECS, "square": PARAM_SPECS}


def rms_norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def attention(p, x):
    def heads(matrix):
        return jnp.reshape(x @ matrix, (*x.shape[:-1], HEADS, -1))

    q, k, v = map(heads, p["qkv"])
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5 + position_bias()
    weights = jax.nn.softmax(with_sharding_constraint(scores, P("data", "model", None, None)))
    return jnp.reshape(jnp.einsum("bhqk,bkhd->bqhd", weights, v), x.shape) @ p["proj"]


def position_bias():
    """What a head adds to its scores: less with distance, nothing from the future."""
    distance = np.arange(CONTEXT)[:, None] - np.arange(CONTEXT)
    slopes = 2.0 ** -np.arange(HEADS)[:, None, None]
    return np.where(distance < 0, -np.inf, -slopes * distance).astype(np.float32)


def feed_forward(p, x):
    hidden = jax.nn.relu(x @ p["up"])
    return with_sharding_constraint(hidden, P("data", None, "model")) @ p["down"]


def logits_fn(params, chars):
    x = params["embed"][chars]
    for p in params["blocks"]:
        x = x + attention(p, rms_norm(x))
        x = x + feed_forward(p, rms_norm(x))
        x = with_sharding_constraint(x, P("data", None, None))
    return rms_norm(x) @ params["head"]


def loss_fn(params, batch):
    """Mean cross entropy of each next character, in nats."""
    logits = logits_fn(params, batch[:, :-1])
    # A product with one-hot rows, because picking entries by index from logits
    # that are split over the vocabulary would first gather them everywhere.
    chosen = jnp.sum(logits * jax.nn.one_hot(batch[:, 1:], VOCAB), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


# ---- What runs on the mesh: each function says where its inputs and outputs lie ----


@partial(pjit, in_axis_resources=(PARAM_SPECS,), out_axis_resources=STATE_SPECS)
def init_state(params):
    zeros = jax.tree.map(jnp.zeros_like, params)
    return {"params": params, "mean": zeros, "square": zeros}


def make_train_step(mesh, batches, records, sampler):
    """The training step, which calls methods of these objects. What each call returns is said beforehand."""
    batch = jax.ShapeDtypeStruct((BATCH, CONTEXT + 1), jnp.int32, sharding=NamedSharding(mesh, P("data", None)))
    next_batch = batches.next_batch.specialize(out_specs=batch, stream="load", run_ahead=2)
    log_metrics = records.log_metrics.specialize(out_specs_fn=lambda *_: None, stream="log")
    save_if_due = records.save_if_due.specialize(out_specs_fn=lambda *_: None, stream="checkpoint")
    sample_if_due = sampler.sample_if_due.specialize(out_specs_fn=lambda *_: None, stream="sample")

    @partial(
        pjit,
        in_axis_resources=(STATE_SPECS, None, None),
        out_axis_resources=(STATE_SPECS, None),
        donate_argnums=0,  # the new state takes over the old one's memory
    )
    def train_step(state, step, rate):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], next_batch())
        state = adam(state, grads, step, rate)
        log_metrics(step, loss, rate)
        save_if_due(step, state)
        sample_if_due(step, state["params"])
        return state, loss

    return train_step


def adam(state, grads, step, rate, b1=0.9, b2=0.98, eps=1e-8):
    mean = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state["mean"], grads)
    square = jax.tree.map(lambda s, g: b2 * s + (1 - b2) * g * g, state["square"], grads)

    def update(p, m, s):
        return p - rate * (m / (1 - b1**step)) / (jnp.sqrt(s / (1 - b2**step)) + eps)

    params = jax.tree.map(update, state["params"], mean, square)
    return {"params": params, "mean": mean, "square": square}


eval_step = pjit(loss_fn, in_axis_resources=(PARAM_SPECS, P("data", None)), out_axis_resources=None)


@partial(pjit, in_axis_resources=(PARAM_SPECS, P("data", None), None), out_axis_resources=P("data", None))
def continue_text(params, window, seed):
    """Write SAMPLE_CHARS characters after each row, through a sliding window."""

    def write_one(window, key):
        logits = logits_fn(params, window)[:, -1]
        char = jax.random.categorical(key, logits / TEMPERATURE).astype(window.dtype)
        return jnp.concatenate([window[:, 1:], char[:, None]], axis=1), char

    keys = jax.random.split(jax.random.key(seed), SAMPLE_CHARS)
    return jax.lax.scan(write_one, window, keys)[1].T


# ---- What runs on the hosts: the objects live there, and the training step calls their methods ----


@colocated.colocated_python_class
class Batches:
    """One random batch after the other. Which ones follows from the seed and from how many were drawn before."""

    def __init__(self, text, seed, drawn):
        self.text, self.seed, self.drawn = text, seed, drawn

    def next_batch(self):
        self.drawn += 1
        return jnp.asarray(draw_batch(self.text, np.random.default_rng([self.seed, self.drawn])))


@colocated.colocated_python_class
class Records:
    """The metrics and the checkpoints of a run.

    The methods of an object run in the order of their calls, on whichever streams: metrics come before checkpoints.
    """

    def __init__(self, folder, save_every, steps):
        self.folder, self.save_every, self.steps = folder, save_every, steps

    def log_metrics(self, step, loss, rate):
        line = json.dumps({"step": int(step), "loss": float(loss), "rate": float(rate)}) + "\n"
        with open(self.folder / METRICS, "ab", buffering=0) as file:  # no buffer: the line is written in one piece
            file.write(line.encode())

    def save_if_due(self, step, state):
        if int(step) % self.save_every == 0 or int(step) == self.steps:
            path = self.folder / f"checkpoint-{int(step):08}.npz"
            replace_file(path, lambda file: np.savez(file, **by_name(state)))
            for old in [*by_step(self.folder, "checkpoint").values()][:-KEPT]:
                old.unlink()


@colocated.colocated_python_class
class Sampler:
    """Lets the model write, after half of the steps and at the end. What a kill interrupts here is not made up for."""

    def __init__(self, folder, prompts, seed, steps):
        self.folder, self.prompts, self.seed, self.due = folder, prompts, seed, (steps // 2, steps)

    def sample_if_due(self, step, params):
        if int(step) in self.due:
            with set_mesh(params["head"].sharding.mesh):  # where the parameters are here: on CPU devices of the hosts
                written = np.asarray(continue_text(params, self.prompts, self.seed))
            text = readable(self.prompts[0]) + readable(written[0])
            replace_file(self.folder / f"sample-{int(step):08}.txt", lambda file: file.write(text.encode()))


# ---- Files: whenever the process is killed, each is there whole or not at all ----


def replace_file(path, write):
    """Write a file under another name, and give it its own when all of it is on the disk."""
    partial_path = path.with_name(f"{path.name.partition('-')[0]}.partial")  # a killed run leaves one of a kind
    with open(partial_path, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial_path, path)


def by_step(folder, kind):
    """The checkpoints or the samples in a folder, the newest last."""
    return {int(path.stem[-8:]): path for path in sorted(folder.glob(f"{kind}-{'[0-9]' * 8}.*"))}


def by_name(state):
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def load_checkpoint(path, state):
    """What was saved, in the form of a state and where that one lies."""
    with np.load(path) as saved:
        leaves = [jax.device_put(saved[name], leaf.sharding) for name, leaf in by_name(state).items()]
    return jax.tree.unflatten(jax.tree.structure(state), leaves)


def open_folder(folder, done):
    """Make a folder ready for a run of which so many steps are done: what goes beyond is of an earlier one."""
    folder.mkdir(parents=True, exist_ok=True)
    for step, path in [*by_step(folder, "checkpoint").items(), *by_step(folder, "sample").items()]:
        if step > done:
            path.unlink()
    lines = (folder / METRICS).read_bytes().splitlines(keepends=True) if done else []
    replace_file(folder / METRICS, lambda file: file.writelines(lines[:done]))  # one for each step


# ---- The host's part: text, the training loop ----


def draw_batch(text, rng, rows=BATCH):
    """Random windows of CONTEXT characters and the one that follows, as NumPy."""
    starts = rng.integers(len(text) - CONTEXT, size=(rows, 1))
    return text[starts + np.arange(CONTEXT + 1)].astype(np.int32)


def unigram_loss(train_text, valid_text):
    """Nats per character for a model that knows only how frequent each one is."""
    counts = np.bincount(train_text, minlength=VOCAB) + 1
    return -np.mean(np.log(counts / counts.sum())[valid_text])


def train(train_step, state, done, steps, report):
    """Take the steps that are not done yet."""
    losses = []
    for step in range(done + 1, steps + 1):
        state, loss = train_step(state, step, PEAK_RATE * min(step / WARMUP, 1 - (step - 1) / steps))
        if losses:  # reading one waits for its step: read that of the step before, and the devices work on this one
            report(step - 1, float(losses[-1]))
        losses = [loss]
    for loss in losses:
        report(steps, float(loss))
    return state


# ---- What the terminal shows ----


def parameter_table(params):
    """Where the parameters lie, read from the arrays rather than from the specs."""
    table = Table("parameter", "shape", "spec", title="Parameters on the mesh")
    table.add_column("bytes per device", justify="right")
    total = local = 0
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        spec = str(x.sharding.spec).replace("PartitionSpec", "P")
        here = max(shard.data.nbytes for shard in x.addressable_shards)
        table.add_row(name, str(x.shape), spec, f"{here:,} of {x.nbytes:,}")
        total, local = total + x.nbytes, local + here
    table.caption = f"Each device holds {local:,} of {total:,} bytes, and twice that for Adam."
    return table


@contextmanager
def progress(console, steps):
    """Give a report(step, loss): a live bar in a terminal, a few lines elsewhere."""
    live, every = console.is_interactive, max(1, steps // 80) * 10
    columns = "{task.description}", BarColumn(None), "{task.completed}/{task.total}"
    with Progress(*columns, console=console, expand=True, disable=not live) as bar:
        task = bar.add_task("compiling the training step", total=steps)
        losses, times = [], []

        def report(step, loss):
            losses.append(loss)
            times.append(time.perf_counter())
            speed = (len(times) - 1) * BATCH * CONTEXT / max(times[-1] - times[0], 1e-9)  # without the compilation
            line = f"loss {np.mean(losses[-10:]):.3f}  {speed:>7,.0f} tokens/s"
            bar.update(task, completed=step, description=line)
            if not live and (step % every == 0 or step == steps):
                console.print(f"step {step:>4}/{steps}  {line}")

        yield report


def readable(chars):
    """Text for any terminal: a question mark for what is not printable ASCII, no spaces that end a line."""
    text = bytes(chars.tolist()).decode("ascii", "replace").expandtabs()
    return re.sub(r"[^\n -~]", "?", re.sub(r" +\n", "\n", text))


# ---- The command line: each option checks its own value ----


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors leave out the usage."""

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n")


def parse_count(value):
    if not (value.isdecimal() and 0 < int(value[:10]) < 10**9):
        raise argparse.ArgumentTypeError(f"expected a whole number, 1 or more, got {value!r}")
    return int(value)


def parse_mesh(value):
    try:
        sizes = {axis.strip(): int(size) for axis, size in (part.split("=") for part in value.split(","))}
    except ValueError:
        sizes = {}
    if sizes.keys() != {"data", "model"} or min(sizes.values()) < 1:
        raise argparse.ArgumentTypeError(f"expected a size for each of two axes, like data=4,model=2, got {value!r}")
    return make_mesh(**sizes)


def make_mesh(data, model):
    """A mesh of the first data * model devices."""
    devices = jax.devices()
    problem = None
    if data * model > len(devices):
        problem = f"{data} x {model} devices are more than the {len(devices)} there are; use smaller sizes"
    elif BATCH % data:
        problem = f"data={data} does not divide the {BATCH} rows of a batch; use a power of two up to {BATCH}"
    elif HEADS % model:
        problem = f"model={model} does not divide the {HEADS} attention heads; use a power of two up to {HEADS}"
    if problem:
        raise argparse.ArgumentTypeError(problem)
    # Auto: the partitioner adds the two sums of a block. Over Explicit axes, which jax.make_mesh makes, the products
    # before them would need an out_sharding.
    types = (jax.sharding.AxisType.Auto,) * 2
    return Mesh(np.array(devices[: data * model]).reshape(data, model), ("data", "model"), types)


def default_mesh():
    """As many devices as a power of two allows, two of them along 'model': 4x2 of 8."""
    count = min(1 << (len(jax.devices()).bit_length() - 1), 2 * BATCH)
    model = min(2, count)
    return make_mesh(count // model, model)


def read_text(value):
    """The bytes of a file, or of the text files that lie right in a folder, by name."""
    path = Path(value)
    try:
        files = sorted(f for f in path.iterdir() if f.suffix in (".py", ".txt", ".md")) if path.is_dir() else [path]
        text = b"".join(file.read_bytes() for file in files).replace(b"\r\n", b"\n")[:MAX_CHARS]
    except OSError as error:
        problem = f"cannot read {value!r} ({error.strerror}); give a text file, or a folder of .py, .txt or .md files"
        raise argparse.ArgumentTypeError(problem) from None
    if len(text) < MIN_CHARS:
        problem = f"{len(text)} characters in {value!r} are too few; give a file or a folder with {MIN_CHARS} or more"
        raise argparse.ArgumentTypeError(problem)
    return np.frombuffer(text, np.uint8)


def parse_options():
    stdlib = sysconfig.get_path("stdlib")
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=parse_count, default=250, help="training steps (default: %(default)s)")
    parser.add_argument("--mesh", type=parse_mesh, metavar="data=N,model=M", help="devices along each axis")
    parser.add_argument(
        "--text", type=read_text, default=stdlib, metavar="PATH", help="a text file or a folder of them"
    )
    parser.add_argument("--seed", type=parse_count, default=1, help="another one, another run (default: %(default)s)")
    parser.add_argument("--out", type=Path, default="train_char_lm", metavar="DIR", help="where its files are written")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    parser.add_argument("--save-every", type=parse_count, default=50, metavar="N", help="steps from one to the next")
    options = parser.parse_args()
    options.done = max(by_step(options.out, "checkpoint"), default=0) if options.resume else 0
    if options.resume and not options.done:
        parser.error(f"argument --resume: there is no checkpoint in {str(options.out)!r}; start without it")
    try:
        open_folder(options.out, options.done)
    except OSError as error:
        parser.error(f"argument --out: cannot write to {str(options.out)!r} ({error.strerror}); give another folder")
    return options


def main():
    options = parse_options()
    mesh = options.mesh or default_mesh()
    train_text, valid_text = np.split(options.text, [len(options.text) * 9 // 10])
    rng = np.random.default_rng(options.seed)

    console = Console(highlight=False, markup=False)
    kind = mesh.devices.flat[0].device_kind
    console.print(f"mesh  data={mesh.shape['data']}, model={mesh.shape['model']} of {mesh.size} devices ({kind})")
    console.print(f"text  {len(train_text):,} characters to train on, {len(valid_text):,} held back")
    since = f", from step {options.done} on" if options.done else ""
    console.print(f"out   {options.out.resolve()}{since}\n", soft_wrap=True)

    with mesh:
        state = init_state(init_params(rng))
        if options.done:
            state = load_checkpoint(by_step(options.out, "checkpoint")[options.done], state)
        console.print(parameter_table(state["params"]))

        valid_batches = [draw_batch(valid_text, rng) for _ in range(VALID_BATCHES)]
        prompts = draw_batch(valid_text, rng, rows=mesh.shape["data"])[:, 1:]
        batches = Batches(train_text, options.seed, options.done)
        records = Records(options.out, options.save_every, options.steps)
        sampler = Sampler(options.out, prompts, options.seed, options.steps)
        train_step = make_train_step(mesh, batches, records, sampler)
        console.print("\nThe training step, as its caller takes it:\n")
        console.print(f"{train_step.plan(state, 1, PEAK_RATE)}\n", soft_wrap=True)

        with record() as timeline:
            with progress(console, options.steps) as report:
                state = train(train_step, state, options.done, options.steps, report)
            with console.status("validating, while the last files are written"):
                valid_loss = np.mean([eval_step(state["params"], batch) for batch in valid_batches])
                colocated.wait()

    console.print("\nTime in the training loop (a call that reads a result waits for the devices):\n")
    console.print(timeline.summary(), soft_wrap=True)
    console.print("\nLoss on the text held back, in nats per character:")
    console.print(f"  this model     {valid_loss:.3f}")
    console.print(
        f"  unigram model  {unigram_loss(train_text, valid_text):.3f}  (knows only how frequent each one is)\n"
    )
    console.rule("Sample: a piece of that text, and what the model writes after it")
    for path in [*by_step(options.out, "sample").values()][-1:]:
        prompt = readable(prompts[0])
        console.print(Text(prompt, "dim") + Text(path.read_text().removeprefix(prompt), "bold"))


if __name__ == "__main__":
    main()
