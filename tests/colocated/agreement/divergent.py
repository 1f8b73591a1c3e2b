"""A process of two that run programs which are different in each.

    python divergent.py NUMBER COUNT ADDRESS NAMES

For each program it prints what it raised here, as a line of JSON, after a program that is the same in both was right.
"""

import faulthandler
import functools
import json
import os
import sys
import traceback
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

number, count, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
faulthandler.dump_traceback_later(110, exit=True)
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, count, number)

import partjit  # noqa: E402
from partjit import P, pjit  # noqa: E402
from partjit.colocated import colocated_python  # noqa: E402

IS_OTHER = number == 1
mesh = partjit.Mesh(np.array(jax.devices()), "x")
one_number = jax.NamedSharding(mesh, P())


def same(x):
    return x


def alike(x):
    return x


first = colocated_python(same, out_specs_fn=same, mode="inline")
second = colocated_python(alike, out_specs_fn=alike, mode="inline")
other_first = colocated_python(same, out_specs_fn=same, mode="stream", stream="s")


def own_number(x):
    """What is not the same in all processes."""
    return jax.make_array_from_callback((), one_number, lambda _: np.asarray(number + 2, np.int32))


def is_first(x):
    """What is not the same in all processes."""
    return jax.make_array_from_callback((), one_number, lambda _: np.asarray(number == 0))


def own_weights(x):
    """What is not the same in all processes."""
    return np.asarray([1, 2, 3, 4, 5 + number], np.float32)


def own_bias(x):
    """What is not the same in all processes."""
    return np.asarray([1, 2, 3, 4 + number], np.float32)


def own_keys(x):
    """What is not the same in all processes."""
    return jax.random.split(jax.random.key(number), 3)


def giving(function: Callable, dtype, shape=(), mode="inline") -> Callable:
    struct = jax.ShapeDtypeStruct(shape, dtype, sharding=one_number)
    return colocated_python(function, out_specs_fn=lambda _: struct, mode=mode)


decide, go_on = giving(own_number, np.int32), giving(is_first, np.bool_)
weights, keys = giving(own_weights, np.float32, (5,)), giving(own_keys, jax.random.key(0).dtype, (3,))


def array(dtype=np.float32, size=16, mesh=mesh):
    sharding = jax.NamedSharding(mesh, P("x"))
    return jax.make_array_from_callback((size,), sharding, lambda index: np.arange(size, dtype=dtype)[index])


def step(x, by=1):
    return first(x + jnp.sum(x)) * by + jnp.sum(x)


def of(function: Callable, argument: jax.Array | None = None, **options) -> Callable[[], object]:
    program = pjit(function, **{"in_shardings": P("x"), "out_shardings": P("x")} | options)
    return lambda: program(array() if argument is None else argument)


def constant():
    return of(lambda x: step(x, 3 if IS_OTHER else 2), name="step")


def constant_array():
    numbers = np.arange(16, dtype=np.float32) + IS_OTHER
    return of(lambda x: step(x) + numbers, name="step")


def constant_of_a_nested_program():
    numbers = np.arange(16, dtype=np.float32) + IS_OTHER
    return of(lambda x: step(x) + jax.jit(lambda x: jnp.sin(x) * numbers)(x), name="step")


def constant_keys():
    keys = jax.random.split(jax.random.key(IS_OTHER), 16)
    return of(lambda x: step(x) + jax.vmap(jax.random.normal)(keys), name="step")


def order_of_calls():
    calls = (second, first) if IS_OTHER else (first, second)
    return of(lambda x: calls[1](calls[0](x + jnp.sum(x))) + jnp.sum(x), name="step")


def shape():
    return of(step, array(size=8 if IS_OTHER else 16))


def dtype():
    return of(step, array(np.int32 if IS_OTHER else np.float32))


def agreement():
    return of(step, agree=not IS_OTHER)


def spec():
    return of(step, out_shardings=P() if IS_OTHER else P("x"))


def order_of_devices():
    own = partjit.Mesh(np.array(jax.devices()[:: -1 if IS_OTHER else 1]), "x")
    specs = jax.NamedSharding(own, P("x"))
    return of(step, array(mesh=own), in_shardings=specs, out_shardings=specs)


def loop_count():
    return of(lambda x: jax.lax.fori_loop(0, 3 + IS_OTHER, lambda _, v: first(v + jnp.sum(v)), x), name="step")


def static_argument():
    program = pjit(step, in_shardings=P("x"), out_shardings=P("x"), static_argnums=1)
    return lambda: program(array(), 5 + IS_OTHER)


def branch():
    def run(x):
        otherwise = (lambda v: v - 2) if IS_OTHER else (lambda v: v - 1)
        return jax.lax.cond(jnp.sum(x) > 0, lambda v: first(v) + jnp.sum(v), otherwise, x)

    return of(run, name="step")


def extra_call():
    return of(lambda x: second(step(x)) + 1 if IS_OTHER else step(x) + 1, name="step")


def other_function():
    call = second if IS_OTHER else first
    return of(lambda x: call(x + 1) + jnp.sum(x), name="step")


def donation():
    return of(step, donate_argnums=0 if IS_OTHER else ())


def precision():
    program = of(step)

    def run():
        with jax.default_matmul_precision("highest" if IS_OTHER else "default"):
            return program()

    return run


def flags():
    def run():
        before = os.environ.get("XLA_FLAGS", "")
        try:
            if IS_OTHER:
                os.environ["XLA_FLAGS"] = f"{before} --xla_cpu_enable_fast_math=true --xla_dump_to=/nowhere"
            return of(step, name="step_with_flags")()
        finally:
            os.environ["XLA_FLAGS"] = before

    return run


def stream():
    call = other_first if IS_OTHER else first
    return of(lambda x: call(x + 1) + jnp.sum(x), name="step")


def line():
    if IS_OTHER:
        return of(lambda x: first(x + 1) + jnp.sum(x), name="step")
    return of(lambda x: first(x + 1) + jnp.sum(x), name="step")


def other_program():
    programs = of(step), of(lambda x: first(x) - jnp.sum(x), name="another")
    return programs[IS_OTHER]


def number_of_calls():
    program, after = of(step), of(lambda x: first(x) - jnp.sum(x), name="after")

    def run():
        for _ in range(2 + IS_OTHER):
            program()
        return after()

    return run


def index_of_a_branch():
    """Nothing in the branches is agreed on."""

    def run(x):
        return jax.lax.cond(go_on(x), first, lambda v: v, x) + 1

    return of(run, name="step")


def predicate():
    """In one process it would go on for ever, with calls alone."""

    def run(x):
        return jax.lax.while_loop(lambda carried: carried[1], lambda c: (first(c[0]), go_on(c[0])), (x, True))[0]

    return of(run, name="step")


def number_from_a_call():
    """By which a loop in a fragment would go."""
    return of(lambda x: jax.lax.fori_loop(0, decide(x), lambda _, v: v + jnp.sum(v), x), name="step")


def array_from_a_call():
    """What the devices compute with it would not be one array."""
    return of(lambda x: x * jnp.sum(weights(x)), name="step")


def returned_by_a_call():
    """With which the next program would compute."""
    return of(lambda x: (weights(x), x + jnp.sum(x)), out_shardings=(None, P("x")), name="step")


def returned_later():
    later = giving(own_weights, np.float32, (5,), "stream")
    return of(lambda x: later(x), out_shardings=None, name="step")


def keys_from_a_call():
    return of(lambda x: x + jnp.sum(jax.vmap(jax.random.normal)(keys(x))), name="step")


def parts_from_a_call():
    """Each process has all of it, sharded over its own devices."""
    grid = partjit.Mesh(np.array(jax.devices()).reshape(2, 2), ("process", "device"))
    bias = jax.ShapeDtypeStruct((4,), np.float32, sharding=jax.NamedSharding(grid, P("device")))
    give = colocated_python(own_bias, out_specs_fn=lambda _: bias, mode="inline")
    specs = jax.NamedSharding(grid, P(("process", "device")))
    return of(lambda x: x * jnp.sum(give(x)), in_shardings=specs, out_shardings=specs, name="step")


PROGRAMS = {name: make for name, make in [*globals().items()] if getattr(make, "__module__", "") == "__main__"}


def main() -> None:
    with mesh:
        check = of(functools.partial(step, by=1), name="check")
        right = 120.0 + 120.0
        for name in sys.argv[4].split(","):
            try:
                PROGRAMS[name]()()
                said = ["nothing", ""]
            except Exception as error:
                said = [type(error).__name__, str(error)]
            found = np.asarray(check().addressable_shards[0].data)[0] - (8.0 if number else 0.0)
            assert found == right, f"{name}: after {said}: {found}"
            print(json.dumps([name, *said]), flush=True)


try:
    main()
except BaseException:
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)  # the other may be waiting for this process
