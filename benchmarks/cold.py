"""Cold calls: how long a transformer's training step takes to trace, lower and compile, as a ratio to `jax.jit`.

The step is that of a transformer of twelve layers on a mesh of 4x2 devices, `data` by `model`. Each measurement has a
function object of its own and follows `jax.clear_caches()`, so that nothing is left from an earlier one; the
contestants take turns in a rotating order. Medians are compared. The control is `jax.jit` a second time: its
ratio to the first shows how much the machine can tell apart.

The compiled programs are compared too, for the training step and for the gradient of a function that is itself wrapped:
their FLOPs and their peak memory must be those of `jax.jit`.
"""

import argparse
import contextlib
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

import report
from partjit import Mesh, P, pjit, with_sharding_constraint

TIME_BOUND = 1.10
PROGRAM_BOUND = 1.0
STAGES = ("trace", "lower", "compile")

VOCAB, WIDTH, HEADS, HIDDEN, LENGTH, BATCH = 256, 64, 4, 256, 32, 16

Tree = Any
Constrain = Callable[[jax.Array, P], jax.Array]
Clock = Callable[[], float]


# The model: functions of arrays. It takes the way to constrain an activation as an argument, which is all that the
# contestants do differently inside the function.


def parameter_specs(layers: int) -> Tree:
    layer = {
        "qkv": P(None, None, "model", None),
        "proj": P("model", None, None),
        "up": P(None, "model"),
        "down": P("model", None),
        "norm1": P(),
        "norm2": P(),
    }
    return {
        "embed": P(None, "model"),
        "layers": [dict(layer) for _ in range(layers)],
        "norm": P(),
        "head": P(None, "model"),
    }


def make_parameters(layers: int) -> Tree:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(scale=WIDTH**-0.5, size=shape).astype(np.float32)

    def layer() -> Tree:
        return {
            "qkv": normal(3, WIDTH, HEADS, WIDTH // HEADS),
            "proj": normal(HEADS, WIDTH // HEADS, WIDTH),
            "up": normal(WIDTH, HIDDEN),
            "down": normal(HIDDEN, WIDTH),
            "norm1": np.ones(WIDTH, np.float32),
            "norm2": np.ones(WIDTH, np.float32),
        }

    return {
        "embed": normal(VOCAB, WIDTH),
        "layers": [layer() for _ in range(layers)],
        "norm": np.ones(WIDTH, np.float32),
        "head": normal(WIDTH, VOCAB),
    }


def normalise(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def attend(layer: Tree, x: jax.Array, constrain: Constrain) -> jax.Array:
    q, k, v = jnp.einsum("bld,cdhe->cblhe", x, layer["qkv"])
    q = constrain(q, P("data", None, "model", None))
    scores = jnp.einsum("blhe,bmhe->bhlm", q, k) * (WIDTH // HEADS) ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e9)
    return jnp.einsum("bhlm,bmhe,hed->bld", jax.nn.softmax(scores), v, layer["proj"])


def loss(params: Tree, tokens: jax.Array, constrain: Constrain) -> jax.Array:
    x = constrain(params["embed"][tokens], P("data", None, None))
    for layer in params["layers"]:
        x = x + attend(layer, normalise(x, layer["norm1"]), constrain)
        hidden = jax.nn.gelu(normalise(x, layer["norm2"]) @ layer["up"])
        x = x + constrain(hidden, P("data", None, "model")) @ layer["down"]
        x = constrain(x, P("data", None, None))
    logits = normalise(x, params["norm"]) @ params["head"]
    logp = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.mean(jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1))


def train_step(state: Tree, tokens: jax.Array, constrain: Constrain) -> tuple[Tree, jax.Array]:
    value, grads = jax.value_and_grad(loss)(state["params"], tokens, constrain)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
    params = jax.tree.map(lambda p, m: p - 0.01 * m, state["params"], momentum)
    return {"params": params, "momentum": momentum}, value


# The contestants.


class Contestant(NamedTuple):
    """A way to wrap a function, whose specs are trees of `P`."""

    wrap: Callable[..., Any]
    constrain: Constrain
    context: Callable[[], contextlib.AbstractContextManager[Any]]


def make_contestants(mesh: Mesh | AbstractMesh) -> dict[str, Contestant]:
    def shardings(specs: Tree) -> Tree:
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))

    def wrap_jit(fun: Callable[..., Any], ins: Tree, outs: Tree, donate: tuple[int, ...] = ()) -> Any:
        return jax.jit(fun, in_shardings=shardings(ins), out_shardings=shardings(outs), donate_argnums=donate)

    def wrap_pjit(fun: Callable[..., Any], ins: Tree, outs: Tree, donate: tuple[int, ...] = ()) -> Any:
        return pjit(fun, in_axis_resources=ins, out_axis_resources=outs, donate_argnums=donate)

    def constrain_jit(x: jax.Array, spec: P) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return {
        "jit": Contestant(wrap_jit, constrain_jit, contextlib.nullcontext),
        "control": Contestant(wrap_jit, constrain_jit, contextlib.nullcontext),
        "pjit": Contestant(wrap_pjit, with_sharding_constraint, lambda: mesh),
    }


class Problem(NamedTuple):
    """The specs and the arguments of the training step."""

    specs: Tree
    state: Tree
    tokens: np.ndarray


def make_problem(layers: int) -> Problem:
    params = make_parameters(layers)
    specs = parameter_specs(layers)
    return Problem(
        {"params": specs, "momentum": specs},
        {"params": params, "momentum": jax.tree.map(np.zeros_like, params)},
        np.random.default_rng(1).integers(VOCAB, size=(BATCH, LENGTH)).astype(np.int32),
    )


# The measurements.


class Counter:
    """Counts the traces of the functions it wraps and the compilations of the process."""

    def __init__(self) -> None:
        self.traces = 0
        self.compilations = 0
        jax.monitoring.register_event_duration_secs_listener(self.on_event)

    def on_event(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        self.compilations += event == "/jax/core/compile/backend_compile_duration"

    def counted(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            self.traces += 1
            return fun(*args)

        return wrapper

    def reset(self) -> None:
        self.traces = self.compilations = 0


def fresh_step(contestant: Contestant, problem: Problem, counter: Counter) -> Any:
    def step(state: Tree, tokens: jax.Array) -> tuple[Tree, jax.Array]:
        return train_step(state, tokens, contestant.constrain)

    return contestant.wrap(counter.counted(step), (problem.specs, P("data")), (problem.specs, P()), (0,))


def fresh_nested_grad(contestant: Contestant, problem: Problem, counter: Counter) -> Any:
    def wrapped_loss(params: Tree, tokens: jax.Array) -> jax.Array:
        return loss(params, tokens, contestant.constrain)

    specs = problem.specs["params"]
    inner = contestant.wrap(counter.counted(wrapped_loss), (specs, P("data")), P())
    return contestant.wrap(jax.grad(inner), (specs, P("data")), specs)


def place(mesh: Mesh, problem: Problem) -> tuple[Tree, jax.Array]:
    """The arguments of a step on the devices; new ones, since the step donates its state."""
    specs = (problem.specs, P("data"))
    placed = jax.tree.map(
        lambda spec, x: jax.device_put(x, NamedSharding(mesh, spec)),
        specs,
        (problem.state, problem.tokens),
        is_leaf=lambda x: isinstance(x, P),
    )
    return jax.block_until_ready(placed)


def forget_everything() -> None:
    jax.clear_caches()
    gc.collect()


def time_stages(
    contestant: Contestant, problem: Problem, args: Any, counter: Counter, clock: Clock
) -> dict[str, float]:
    forget_everything()
    step = fresh_step(contestant, problem, counter)
    with contestant.context():
        marks = [clock()]
        traced = step.trace(*args)
        marks.append(clock())
        lowered = traced.lower()
        marks.append(clock())
        lowered.compile()
        marks.append(clock())
    times = dict(zip(STAGES, (b - a for a, b in itertools.pairwise(marks)), strict=True))
    return times | {"the three stages": marks[-1] - marks[0]}


def time_first_call(
    contestant: Contestant, problem: Problem, args: Any, counter: Counter, clock: Clock
) -> dict[str, Any]:
    forget_everything()
    step = fresh_step(contestant, problem, counter)
    counter.reset()
    with contestant.context():
        start = clock()
        result = jax.block_until_ready(step(*args))
        seconds = clock() - start
        counts = {"traces": counter.traces, "compilations": counter.compilations}
        jax.block_until_ready(step(*result[:1], *args[1:]))
    counts_second = {
        "traces, 2nd call": counter.traces - counts["traces"],
        "compilations, 2nd call": counter.compilations - counts["compilations"],
    }
    return {"first call": seconds, **counts, **counts_second}


def describe_program(compiled: Any) -> dict[str, int]:
    memory = compiled.memory_analysis()
    cost = compiled.cost_analysis()
    peak = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )
    return {"FLOPs": int(cost["flops"]), "peak bytes": int(peak)}


def compare_times(
    contestants: Mapping[str, Contestant], mesh: Mesh, problem: Problem, counter: Counter, repeats: int, clock: Clock
) -> tuple[Sequence[report.Row], Sequence[report.Row]]:
    """Two tables: the times of the stages and of the first call, and the counts of traces and compilations."""
    times: dict[str, dict[str, list[float]]] = {name: {} for name in contestants}
    counts: dict[str, dict[str, int]] = {}
    order = list(contestants)
    # The first round warms up what clearing the caches does not bring back: imports, and pages of the allocator.
    for repeat in range(repeats + 1):
        for name in order:
            args = place(mesh, problem)
            stages = time_stages(contestants[name], problem, args, counter, clock)
            first = time_first_call(contestants[name], problem, args, counter, clock)
            if repeat:
                for key, value in [*stages.items(), ("first call", first.pop("first call"))]:
                    times[name].setdefault(key, []).append(value)
                counts[name] = first
        order = [*order[1:], order[0]]

    time_rows = []
    for key in times["jit"]:
        theirs, control, ours = (statistics.median(times[name][key]) for name in ("jit", "control", "pjit"))
        # A stage has no bound of its own: what a caller waits for is the sum.
        bounded = key in ("the three stages", "first call")
        row = {"stage": key, "jit s": theirs, "pjit s": ours}
        row |= {"control ratio": control / theirs, "pjit ratio": ours / theirs}
        bound, verdict = (TIME_BOUND, report.verdict(ours / theirs, TIME_BOUND)) if bounded else ("", "")
        time_rows.append(row | {"bound": bound, "verdict": verdict})
    count_rows = [{"count": key, "jit": counts["jit"][key], "pjit": counts["pjit"][key]} for key in counts["jit"]]
    return time_rows, count_rows


def compare_programs(
    contestants: Mapping[str, Contestant], mesh: Mesh, problem: Problem, counter: Counter
) -> Sequence[report.Row]:
    rows = []
    for title, make in {"training step": fresh_step, "grad of a wrapped loss": fresh_nested_grad}.items():
        programs = {}
        for name in ("jit", "pjit"):
            contestant = contestants[name]
            state, tokens = place(mesh, problem)
            first = state if make is fresh_step else state["params"]
            with contestant.context():
                programs[name] = describe_program(make(contestant, problem, counter).lower(first, tokens).compile())
        for key, theirs in programs["jit"].items():
            ours = programs["pjit"][key]
            ratio = ours / theirs
            row = {"program": title, "per device": key, "jit": theirs, "pjit": ours, "ratio": ratio}
            rows.append(row | {"bound": PROGRAM_BOUND, "verdict": report.verdict(ratio, PROGRAM_BOUND)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=6, help="measurements of each contestant")
    parser.add_argument(
        "--clock",
        choices=["wall", "cpu"],
        default="wall",
        help="what to measure: the time that passes, or that of all threads, which a busy machine disturbs less",
    )
    options = parser.parse_args()
    clock = time.perf_counter if options.clock == "wall" else time.process_time

    devices = report.set_up_devices(8)
    mesh = Mesh(np.array(devices).reshape(4, 2), ("data", "model"))
    contestants = make_contestants(mesh)
    problem = make_problem(options.layers)
    counter = Counter()
    times, counts = compare_times(contestants, mesh, problem, counter, options.repeats, clock)
    programs = compare_programs(contestants, mesh, problem, counter)
    report.report(
        {"cold call": times, "traces and compilations": counts, "compiled programs": programs}, as_json=options.json
    )


if __name__ == "__main__":
    main()
