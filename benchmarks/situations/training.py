"""Calls beside the steps of a training: logs, a slow loader, checkpoints."""

import concurrent.futures
import functools
import queue
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from partjit import colocated, pjit
from situations import host
from situations.in_loops import nothing
from situations.ways import (
    BY_HAND,
    DEBUG,
    IO,
    JAX,
    OURS,
    PURE,
    THREAD,
    Place,
    Run,
    Situation,
    callback,
    ended,
    finished,
    made_by_jax,
    waited_for,
)

WIDTH, BATCH = 64, 64
pool = concurrent.futures.ThreadPoolExecutor(1)

Params = tuple[jax.Array, jax.Array]


def new_params(place: Place, hidden: int = WIDTH) -> Params:
    rng = np.random.default_rng(0)
    shapes = (WIDTH, hidden), (hidden, WIDTH)
    return place.replicate(tuple(rng.normal(size=shape).astype(np.float32) / 16 for shape in shapes))


def batch_for(place: Place) -> jax.Array:
    return place.put(np.random.default_rng(1).normal(size=(BATCH, WIDTH)).astype(np.float32))


def update(params: Any, batch: Any) -> Any:
    def loss_of(params: Any) -> Any:
        return jnp.mean((jnp.tanh(batch @ params[0]) @ params[1] - batch) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


# Logs


def log(place: Place, iterations: int) -> Situation:
    """The loss of each step is logged."""
    return _logged(place, iterations, host.log)


def log_by_method(place: Place, iterations: int) -> Situation:
    """The same by a method of an object, which counts what it has logged."""
    tracker: Any = colocated.colocated_python_class(host.Tracker)()
    return _logged(place, iterations, host.Tracker().log, of_ours=tracker.log.specialize)


def log_with_step(place: Place, iterations: int) -> Situation:
    """The number and the loss of each step are logged: `log(step, loss)`."""
    return _logged(place, iterations, host.log_step, with_step=True)


def log_now_and_then(place: Place, iterations: int) -> Situation:
    """The same for every tenth step; in a program, the step itself says when, in a `lax.cond`."""
    return _logged(place, iterations, host.log_step, with_step=True, every=10)


def log_as_counted(place: Place, iterations: int) -> Situation:
    """The same, where a program counts its steps in its state. A loop by hand counts them itself."""
    return _logged(place, iterations, host.log_step, with_step=True, every=10, is_counted=True)


def log_text(place: Place, iterations: int) -> Situation:
    """A text that Python has, and the loss, of each step. What runs in a `jax.jit` gets no texts."""
    params, batch = new_params(place), batch_for(place)
    jitted = jax.jit(update, donate_argnums=0)
    ours = colocated.colocated_python(host.log_text, stream="log", out_specs_fn=nothing)

    def train_step(params: Any, batch: Any, text: str) -> Any:
        params, loss = update(params, batch)
        ours(text, loss)
        return params

    called = pjit(train_step, donate_argnums=0, host_argnames="text")

    def by_hand(submit: Any, end: Any) -> Run:
        def run() -> Any:
            own, calls = jax.tree.map(jnp.copy, params), []
            for step in range(iterations):
                own, loss = jitted(own, batch)
                calls.append(submit(f"step {step}", loss))
            end(calls)
            return jax.block_until_ready(own), host.seen()

        return run

    def with_ours() -> Any:
        own = jax.tree.map(jnp.copy, params)
        for step in range(iterations):
            own = called(own, batch, text=f"step {step}")
        return ended(own), host.seen()

    return Situation(
        iterations,
        {
            BY_HAND: by_hand(host.log_text, nothing),
            THREAD: by_hand(functools.partial(pool.submit, host.log_text), waited_for),
            OURS: with_ours,
        },
    )


def log_metrics(place: Place, iterations: int) -> Situation:
    """40 numbers of each step are logged, as a dict."""

    def metrics_of(loss: Any) -> Any:
        return {f"metric {i}": loss * (i + 1) for i in range(40)}

    return _logged(place, iterations, host.log_metrics, metrics_of)


def _logged(
    place: Place,
    iterations: int,
    record: Any,
    shown_of: Any = lambda loss: loss,
    *,
    with_step: bool = False,
    every: int = 1,
    is_counted: bool = False,
    of_ours: Any = None,
) -> Situation:
    """What is shown of the loss is logged, in each step or in some; the number of the step may be in the state.

    `of_ours` makes ours with options; that of `record` unless it is given.
    """
    of_ours = of_ours or functools.partial(colocated.colocated_python, record)
    params, batch = new_params(place), batch_for(place)

    def updated(params: Any, batch: Any) -> Any:
        params, loss = update(params, batch)
        return params, shown_of(loss)

    jitted = jax.jit(updated, donate_argnums=0)

    def logged(step: int, loss: Any) -> Any:
        return (step, loss) if with_step else (loss,)

    def plain(submit: Any, end: Any) -> Run:
        """A loop that calls the logger after each step."""

        def run() -> Any:
            own, calls = jax.tree.map(jnp.copy, params), []
            for step in range(iterations):
                own, loss = jitted(own, batch)
                if step % every == 0:
                    calls.append(submit(*logged(step, loss)))
            end(calls)
            return jax.block_until_ready(own), host.seen()

        return run

    def within(wrap: Any, call: Any, end: Any) -> Run:
        """A loop over a step that calls the logger."""

        def train_step(params: Any, batch: Any, step: Any) -> Any:
            params, loss = updated(params, batch)
            if every == 1:
                call(*logged(step, loss))
            else:
                lax.cond(step % every == 0, lambda: nothing(call(*logged(step, loss))), nothing)
            return params

        def counting_step(state: Any, batch: Any) -> Any:
            params, step = state
            return train_step(params, batch, step), step + 1

        called = wrap(counting_step if is_counted else train_step, donate_argnums=0)

        def run() -> Any:
            own = jax.tree.map(jnp.copy, params)
            if is_counted:
                state = own, place.replicate(np.int32(0))
                for _ in range(iterations):
                    state = called(state, batch)
                own = state[0]
            else:
                for step in range(iterations):
                    own = called(own, batch, step)
            return end(own), host.seen()

        return run

    def with_jax(*args: Any) -> Any:
        record(*args)
        return args[-1]

    by_jax = made_by_jax(with_jax)
    ours = of_ours(stream="log", out_specs_fn=nothing)
    inline = of_ours(mode="inline", out_specs_fn=nothing)

    def as_arrays(*args: Any) -> Any:
        """It takes no numbers, and no arrays on other devices than those of the others."""
        return [place.replicate(np.int32(arg)) if isinstance(arg, int) else arg for arg in args]

    return Situation(
        iterations,
        {
            BY_HAND: plain(record, nothing),
            THREAD: plain(functools.partial(pool.submit, record), waited_for),
            JAX: plain(lambda *args: by_jax(*as_arrays(*args)), nothing),
            OURS: within(pjit, ours, ended),
            f"{OURS}, called after the step": plain(ours, ended),
            f"{OURS}, mode='inline'": within(pjit, inline, ended),
            IO: within(jax.jit, functools.partial(callback, IO, record, None), finished),
            DEBUG: within(jax.jit, functools.partial(callback, DEBUG, record, None), finished),
        },
    )


# A slow loader


def slow_loader(place: Place, iterations: int) -> Situation:
    """A loader of 2 ms for each step."""
    params, shape, seconds = new_params(place), (BATCH, WIDTH), 2e-3
    jitted = jax.jit(update, donate_argnums=0)

    def to_rows(x: Any) -> Any:
        return jax.device_put(x, place.rows)

    def reading() -> Any:
        return host.Batches(iterations, shape, seconds).next

    def fed_by(next_batch: Any, begin: Any = nothing, end: Any = nothing) -> Run:
        def run() -> Any:
            begun = begin()
            own, loss = jax.tree.map(jnp.copy, params), None
            for _ in range(iterations):
                own, loss = jitted(own, next_batch())
            end(begun)
            return jax.block_until_ready((own, loss))

        return run

    ready: queue.Queue[Any] = queue.Queue(2)
    read_ahead = reading()

    def prefetch() -> threading.Thread:
        def work() -> None:
            for _ in range(iterations):
                ready.put(to_rows(read_ahead()))

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    read = reading()
    read_by_jax = reading()
    by_jax = made_by_jax(lambda: to_rows(read_by_jax())).specialize(devices=[*place.mesh.devices.flat])

    def within(wrap: Any, call: Any, end: Any) -> Run:
        called = wrap(lambda params: update(params, call()), donate_argnums=0)

        def run() -> Any:
            own, loss = jax.tree.map(jnp.copy, params), None
            for _ in range(iterations):
                own, loss = called(own)
            return end((own, loss))

        return run

    batches: Any = colocated.colocated_python_class(host.Batches)(iterations, shape, seconds)
    next_batch = batches.next.specialize(
        out_specs=place.spec(*shape), devices=[*place.mesh.devices.flat], run_ahead=2, stream="load"
    )
    return Situation(
        iterations,
        {
            BY_HAND: fed_by(lambda: place.quickest(to_rows)(read())),
            THREAD: fed_by(ready.get, prefetch, lambda thread: thread.join()),
            JAX: fed_by(by_jax),
            OURS: within(pjit, next_batch, ended),
            f"{OURS}, called before the step": fed_by(next_batch, end=lambda _: colocated.wait()),
            IO: within(jax.jit, functools.partial(callback, IO, reading(), place.spec(*shape)), finished),
        },
    )


def augmentation(place: Place, iterations: int) -> Situation:
    """Each batch, which is bytes in memory, is augmented by NumPy before its step."""
    rng = np.random.default_rng(0)
    raw = [rng.integers(0, 255, (BATCH, WIDTH), dtype=np.uint8) for _ in range(8)]
    params, to_rows = new_params(place), place.quickest(place.put)
    jitted = jax.jit(update, donate_argnums=0)
    spec = place.spec(BATCH, WIDTH)

    def over(step: Any) -> Run:
        def run() -> Any:
            own, loss = jax.tree.map(jnp.copy, params), None
            for i in range(iterations):
                own, loss = step(own, raw[i % len(raw)])
            return ended((own, loss))

        return run

    def by_hand(own: Any, batch: Any) -> Any:
        return jitted(own, to_rows(host.augmented(batch)))

    devices = [*place.mesh.devices.flat]
    ours = colocated.colocated_python(host.augmented, out_specs=spec, devices=devices, uses_jax=False)
    with_jax = colocated.colocated_python(host.augmented, out_specs=spec, devices=devices)

    def within(wrap: Any, augmented: Any) -> Run:
        return over(wrap(lambda own, batch: update(own, augmented(batch)), donate_argnums=0))

    return Situation(
        iterations,
        {
            BY_HAND: over(by_hand),
            OURS: within(pjit, ours),
            f"{OURS}, without uses_jax": within(pjit, with_jax),
            f"{OURS}, called before the step": over(lambda own, batch: jitted(own, ours(batch))),
            IO: within(jax.jit, lambda batch: callback(IO, host.augmented, spec, batch)),
            PURE: within(jax.jit, lambda batch: callback(PURE, host.augmented, spec, batch)),
        },
    )


# Checkpoints


def checkpoints(place: Place, iterations: int) -> Situation:
    """Parameters of 1 MB are saved after every tenth step."""
    every = 10
    params, batch = new_params(place, 2048), batch_for(place)
    jitted = jax.jit(update, donate_argnums=0)

    def is_due(step: Any) -> Any:
        return step % every == every - 1

    def plain(save: Any, end: Any) -> Run:
        def run() -> Any:
            own, calls = jax.tree.map(jnp.copy, params), []
            for step in range(iterations):
                own, _ = jitted(own, batch)
                if is_due(step):
                    calls.append(save(own))
            end(calls)
            return jax.block_until_ready(own), host.seen()

        return run

    def within(wrap: Any, call: Any, end: Any) -> Run:
        def train_step(params: Any, batch: Any, step: Any) -> Any:
            params, _ = update(params, batch)
            call(step, params)
            return params

        called = wrap(train_step, donate_argnums=0)

        def run() -> Any:
            own = jax.tree.map(jnp.copy, params)
            for step in range(iterations):
                own = called(own, batch, step)
            return end(own), host.seen()

        return run

    def in_cond(save: Any) -> Any:
        return lambda step, params: lax.cond(is_due(step), lambda: nothing(save(params)), lambda: None)

    def save_if_due(step: Any, params: Any) -> None:
        if is_due(int(step)):
            host.save(params)

    def with_jax(params: Any) -> Any:
        host.save(params)
        return params

    by_jax = made_by_jax(with_jax)
    options: Any = {"stream": "checkpoint", "out_specs_fn": nothing}
    saving = colocated.colocated_python(host.save, **options)
    saving_if_due = colocated.colocated_python(save_if_due, **options)
    copied = jax.jit(lambda params: jax.tree.map(jnp.copy, params))
    return Situation(
        iterations,
        {
            BY_HAND: plain(host.save, nothing),
            # The next step takes the memory of the parameters, so what is saved is a copy.
            THREAD: plain(lambda own: pool.submit(host.save, copied(own)), waited_for),
            JAX: plain(by_jax, nothing),
            OURS: plain(saving, ended),
            f"{OURS}, save_if_due in the program": within(pjit, saving_if_due, ended),
            f"{OURS}, cond in the program": within(pjit, in_cond(saving), ended),
            IO: within(jax.jit, in_cond(lambda params: callback(IO, lambda *p: host.save(p), None, *params)), finished),
        },
    )
