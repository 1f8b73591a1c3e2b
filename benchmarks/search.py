"""What a search of specs finds for models of several libraries, beside the ways to partition that have names.

Each model is searched on 4 x 2 devices under three limits of memory: twice of what data parallelism needs, a little
more than the least that any start needs, and halfway between. All costs are of one machine model, in which the models,
which are small, take the place of large ones: slow devices, and links without latency.

* named: the best of data parallelism, ZeRO-3, Megatron and both that fits.
* hand: the specs that the model was written with, and whether they fit.
* descent, annealing: what these methods find with as many questions, starts included.
* compiled: the bytes that XLA's collectives send with what was found, as a ratio to those predicted; or `said`, where
  the prediction says within which bounds it is not exact and they are kept. `--compile` does so for the middle limit.

`--large` searches a step of a model with 32 layers and 8 billion parameters, not scanned, on a mesh of 64 devices that
are not there, in a process of its own, and prints the time and the memory from the trace to the answer.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib
import resource
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct as S
from jax.sharding import AbstractMesh, AxisType

import report
from partjit.errors import MemoryLimitError
from partjit.inspect.changes import Change
from partjit.inspect.explain import explain
from partjit.inspect.tracing import trace_function
from partjit.search import FoundSpecs, Link, Machine, search_specs, tpu_v5p
from partjit.search.asked import Answer
from partjit.search.find import find
from partjit.search.program import SearchedProgram
from partjit.search.space import Space
from truth_models import MODELS
from truth_models.training import Model

SEARCHED = (
    "Linen language model",
    "Equinox transformer",
    "Linen mixture of experts",
    "Linen ResNet",
    "Equinox Mamba",
    "Linen U-Net",
)
QUICK = ("Linen ResNet",)
MACHINE = Machine("small", {"f32": 1e9}, 1 << 40, 1e9, {"data": Link(1e7, 0.0), "model": Link(1e8, 0.0)})
METHODS = {"descent": ("descent",), "annealing": ("annealing",)}
BYTES_BOUND = 0.05


class Remembered(SearchedProgram):
    """A program that answers each question once: answers do not depend on limits and methods."""

    @functools.cached_property
    def answers(self) -> "dict[object, concurrent.futures.Future[Answer]]":
        """Those so far."""
        return {}

    def submit(self, question: Change) -> "concurrent.futures.Future[Answer]":
        parts = question.arguments, question.results, question.values
        key = tuple(tuple(sorted(part.items())) for part in parts)
        if key not in self.answers:
            self.answers[key] = super().submit(question)
        return self.answers[key]


def is_named(name: str) -> bool:
    """Whether a start is data parallelism, ZeRO-3, Megatron or both."""
    return (
        not name.startswith(("tensor", "columns", "its own"))
        and "sequence" not in name
        and "ZeRO-1" not in name
        and name != "replicated"
    )


@dataclasses.dataclass(frozen=True)
class Found:
    """What was found for a model under a limit: seconds by method, and of the best start with a name."""

    model: str
    limit: int
    named: float
    start: str
    hand: float
    hand_fits: bool
    seconds: Mapping[str, float]


def made(name: str) -> Model:
    module, function = MODELS[name].split(":")
    return getattr(importlib.import_module(f"truth_models.{module}"), function)()


def searched(name: str, model: Model, questions: int) -> Iterator[Found]:
    program = Remembered(trace_function(model.step, model.args, {}, model.mesh), MACHINE, 0.0)
    space = Space(program, {}, {})
    own = Change(dict(enumerate(program.own_arguments)), dict(enumerate(program.own_results)))
    hand = program.submit(own).result()
    begins = find(program, space, 1 << 60, 2 * questions, None, ()).starts
    most = 2 * next(one.score.peak for one in begins if one.origin == "data parallel")
    least = int(1.02 * min(one.score.peak for one in begins))
    for limit in (most, (most // 2 + least) // 2, least):
        fitting = [one for one in begins if one.score.peak <= limit]
        named = min((one for one in fitting if is_named(one.origin)), key=lambda one: one.score.seconds, default=None)
        seconds = {}
        for method, methods in METHODS.items():
            try:
                seconds[method] = find(program, space, limit, questions, None, methods).best.score.seconds
            except MemoryLimitError:
                seconds[method] = float("inf")
        yield Found(
            name,
            limit,
            float("inf") if named is None else named.score.seconds,
            "" if named is None else named.origin,
            hand.seconds,
            hand.peak <= limit,
            seconds,
        )


def row_of(found: Found) -> report.Row:
    return {
        "model": found.model,
        "limit kB": found.limit / 1000,
        "named ms": 1e3 * found.named,
        "start": found.start or "none fits",
        "hand ms": 1e3 * found.hand,
        "hand fits": "yes" if found.hand_fits else "no",
        **{f"{method} ms": 1e3 * seconds for method, seconds in found.seconds.items()},
        "found / named": found.seconds["descent"] / found.named,
    }


def compiled_row(name: str, model: Model, limit: int, questions: int) -> report.Row:
    found = search_specs(
        model.step, *model.args, mesh=model.mesh, machine=MACHINE, memory=limit, questions=questions, progress=False
    )
    reported = compiled_report(found, model)
    predicted, actual = reported.predicted, reported.collectives.bytes_per_step
    ratio = actual / predicted.bytes_per_step if predicted.bytes_per_step else 1.0
    is_said = bool(predicted.unknown) and actual <= predicted.bytes_per_step_at_most * (1 + BYTES_BOUND)
    verdict = "equal" if abs(ratio - 1) <= BYTES_BOUND else "said" if is_said else "WRONG"
    return {"model": name, "compiled / predicted": ratio, "verdict": verdict, "constraints": len(found.constraints)}


def compiled_report(found: FoundSpecs, model: Model) -> Any:
    return explain(found.pjit(), *model.args, mesh=model.mesh, compiled=True)


# The large step.

LAYERS, WIDTH, HIDDEN, HEADS, KV_HEADS, SIZE, VOCABULARY = 32, 4096, 14336, 32, 8, 128, 128256


def large_arguments(batch: int = 64, length: int = 4096) -> tuple[Any, Any, Any]:
    """Those of a model with 8 billion parameters, as Llama 3 has them."""
    block = {
        "query": (WIDTH, HEADS, SIZE),
        "key": (WIDTH, KV_HEADS, SIZE),
        "value": (WIDTH, KV_HEADS, SIZE),
        "out": (HEADS, SIZE, WIDTH),
        "gate": (WIDTH, HIDDEN),
        "up": (WIDTH, HIDDEN),
        "down": (HIDDEN, WIDTH),
        "norms": (2, WIDTH),
    }
    shapes = {f"layer_{k}": block for k in range(LAYERS)}
    shapes |= {"embedding": (VOCABULARY, WIDTH), "head": (WIDTH, VOCABULARY)}
    params = jax.tree.map(lambda shape: S(shape, jnp.bfloat16), shapes, is_leaf=lambda x: isinstance(x, tuple))
    return params, {"mu": params, "nu": params}, S((batch, length), jnp.int32)


def normed(x: Any, scale: Any) -> Any:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)).astype(x.dtype) * scale


def layer(block: Any, x: Any) -> Any:
    h = normed(x, block["norms"][0])
    q, k, v = (jnp.einsum("bsd,dhk->bshk", h, block[name]) for name in ("query", "key", "value"))
    q = q.reshape(*q.shape[:2], KV_HEADS, HEADS // KV_HEADS, SIZE)
    weights = jax.nn.softmax(jnp.einsum("bsgrk,btgk->bgrst", q, k) * SIZE**-0.5)
    mixed = jnp.einsum("bgrst,btgk->bsgrk", weights, v).reshape(*x.shape[:2], HEADS, SIZE)
    x = x + jnp.einsum("bshk,hkd->bsd", mixed, block["out"])
    h = normed(x, block["norms"][1])
    return x + (jax.nn.silu(h @ block["gate"]) * (h @ block["up"])) @ block["down"]


def large_loss(params: Any, tokens: Any) -> Any:
    x = params["embedding"][tokens]
    for k in range(LAYERS):
        x = jax.checkpoint(layer)(params[f"layer_{k}"], x)
    logp = jax.nn.log_softmax((x @ params["head"]).astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(logp, tokens[..., None], -1))


def large_step(params: Any, state: Any, tokens: Any) -> Any:
    value, grads = jax.value_and_grad(large_loss)(params, tokens)
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], grads)
    nu = jax.tree.map(lambda n, g: 0.95 * n + 0.05 * g * g, state["nu"], grads)
    params = jax.tree.map(lambda p, m, n: p - 1e-3 * m / (jnp.sqrt(n) + 1e-8), params, mu, nu)
    return params, {"mu": mu, "nu": nu}, value


def search_large(seconds: float) -> None:
    """Searches it within so many seconds, and prints what it took."""
    mesh = AbstractMesh((16, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    wall, cpu = time.perf_counter(), time.process_time()
    found = search_specs(
        large_step, *large_arguments(), mesh=mesh, machine=tpu_v5p(mesh), donate_argnums=(0, 1), time_limit=seconds,
        questions=1000, progress=False,
    )  # fmt: skip
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(found.to_text(12))
    print(f"{wall:.1f} s ({cpu:.1f} s of one core), {gigabytes:.2f} GiB, {found.questions} questions")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=120, help="how many each search may ask")
    parser.add_argument("--compile", action="store_true", help="compile what was found, and compare bytes")
    parser.add_argument("--large", type=float, metavar="SECONDS", help="search the large step for so long instead")
    parser.add_argument("--quick", action="store_true", help="one model only, with few questions")
    parser.add_argument("--only", nargs="+", choices=SEARCHED, help="these models only")
    args = parser.parse_args()
    if args.large is not None:
        search_large(args.large)
        return
    jax.config.update("jax_num_cpu_devices", 8)
    questions = 30 if args.quick else args.questions
    founds, compiled = list[Found](), list[report.Row]()
    for name in QUICK if args.quick else args.only or SEARCHED:
        start, model = time.perf_counter(), made(name)
        own = [*searched(name, model, questions)]
        founds += own
        for found in own:
            print(dict(row_of(found)), flush=True)
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
        if args.compile:
            compiled.append(compiled_row(name, model, own[1].limit, questions))
            print(compiled[-1], flush=True)
    no_worse = sum(found.seconds["descent"] <= found.named for found in founds)
    print(f"found <= named in {no_worse} of {len(founds)}")


if __name__ == "__main__":
    main()
