"""A process of two, of which one fails after it has called a program, and before the processes do anything together.

python before_programs.py NUMBER COUNT ADDRESS
"""

import faulthandler
import itertools
import re
import sys
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np

number, count, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
faulthandler.dump_traceback_later(100, exit=True)
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, count, number)

import partjit  # noqa: E402
from partjit import OtherProcessError, P, ProgramsDifferError, pjit  # noqa: E402
from partjit._jax.processes import distributed_client  # noqa: E402
from partjit.colocated import colocated_python  # noqa: E402

client, failures = distributed_client(), itertools.count()
assert client is not None
IS_OTHER = number == 1
LIMIT = 10.0
"""Seconds after which an error has to be everywhere; what hangs takes as long as the agreement waits."""
SPECS = {"in_shardings": P("x"), "out_shardings": P("x")}
mesh = partjit.Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
numbers = np.arange(16, dtype=np.float32)
same = colocated_python(lambda v: v, out_specs_fn=lambda v: v, mode="inline")


def array(*spec, size=16):
    sharding = jax.NamedSharding(mesh, P(*spec))
    return jax.make_array_from_callback((size,), sharding, lambda index: numbers[index])


def deleted():
    given = array("x")
    if IS_OTHER:
        given.delete()
    return given


def step(v):
    return same(v + jnp.sum(v)) + jnp.sum(v)


def named(name, **options):
    return pjit(step, **SPECS, name=name, **options)


x = array("x")
check = named("check")


def fails_in_all(what, call, *kinds):
    """All raise: process 1 an error of this kind, the others one that says so; and the next program is right."""
    own = kinds[-1] if IS_OTHER else kinds[0] if len(kinds) > 1 else OtherProcessError
    began, error = time.monotonic(), None
    try:
        call()
    except Exception as raised:
        error = raised
    took = time.monotonic() - began
    assert isinstance(error, own), f"{what}: {error!r}"
    assert took < LIMIT, f"{what}: {took:.1f} s"
    client.wait_at_barrier(f"raised {next(failures)}", 60_000)  # before, it would meet a call of those that wait
    found = np.asarray(check(x).addressable_data(0))[0] - numbers[8 * number]
    assert found == 240, f"{what}: then {found}"
    return error


def calls_of_compiled_programs():
    compiled = named("compiled").lower(x).compile()
    compiled(x)
    fails_in_all("shape", lambda: compiled(array("x", size=8) if IS_OTHER else x), TypeError)
    fails_in_all("structure", lambda: compiled(*(x,) * count) if IS_OTHER else compiled(x), TypeError)
    fails_in_all("sharding", lambda: compiled(array("y") if IS_OTHER else x), ValueError)
    pieces = named("pieces", positional_semantics="local")
    piece = numbers[8 * number :][:8]
    compiled_of_pieces = pieces.lower(piece).compile()
    compiled_of_pieces(piece)
    fails_in_all("piece", lambda: compiled_of_pieces("no array" if IS_OTHER else piece), TypeError)


def on_another_mesh():
    """On which the call is one of this process alone, as far as it has come."""
    program = pjit(step, **SPECS, name="elsewhere")
    program(x)
    own = partjit.Mesh(np.array(jax.local_devices()), "x")
    for _ in range(2):

        def call():
            with own if IS_OTHER else mesh:
                program(x)

        fails_in_all("another mesh", call, ValueError)


def deleted_arguments():
    for program in (named("plain"), named("donating", donate_argnums=0)):
        error = fails_in_all("deleted", lambda: program(deleted()), RuntimeError)  # noqa: B023
        assert re.search(r"of (plain|donating) needs \w+, which was deleted or donated", str(error)), error
        fails_in_all("deleted again", lambda: program(deleted()), RuntimeError)  # noqa: B023


def resharded_arguments():
    program = pjit(lambda v, w: step(v) + w, in_shardings=P("x"), out_shardings=P("x"), name="resharding")
    misplaced = array(("y", "x"))
    wanted = np.asarray(program(x, x).addressable_data(0))
    np.testing.assert_array_equal(np.asarray(program(x, misplaced).addressable_data(0)), wanted)
    for _ in range(2):
        fails_in_all("beside", lambda: program("no array" if IS_OTHER else x, misplaced), TypeError)
    fails_in_all("in one", lambda: program(x, misplaced if IS_OTHER else x), ProgramsDifferError, ProgramsDifferError)
    np.testing.assert_array_equal(np.asarray(program(x, misplaced).addressable_data(0)), wanted)


def refused_before_anything_is_known():
    fails_in_all(
        "piece",
        lambda: named("of_pieces", positional_semantics="local")("no array" if IS_OTHER else numbers[:8]),
        TypeError,
    )
    for k in range(2):
        fails_in_all("argument", lambda: named(f"first_{k}")("no array" if IS_OTHER else x), TypeError)  # noqa: B023


def what_a_function_returns():
    failing = [IS_OTHER]

    def double(v, failing=failing):
        if failing and failing.pop():
            raise LookupError("no such batch")
        return jax.make_array_from_callback(v.shape, v.sharding, lambda index: 2 * numbers[index])

    total = pjit(jnp.sum, in_shardings=P("x"), out_shardings=None)
    call = colocated_python(double)  # its first call shows what it returns
    fails_in_all("first call", lambda: call(x), LookupError)
    for _ in range(2):
        assert float(total(call(x))) == 240


def eager_calls():
    """Before and after the first call that goes well."""
    inline = colocated_python(lambda v: v * 2, out_specs_fn=lambda v: v, mode="inline")
    shows = colocated_python(lambda v: v * 2)
    placed = colocated_python(lambda v: v * 2, in_specs=((x,), {}), out_specs_fn=lambda v: v, mode="inline")
    total = pjit(jnp.sum, in_shardings=P("x"), out_shardings=None)
    for k in range(2):
        for call in (inline, shows)[: 2 - k]:  # what a function returns is known after its first call
            for wrong, kind in ((jax.ShapeDtypeStruct((16,), np.float32), ValueError), (deleted(), RuntimeError)):
                fails_in_all("argument", lambda: call(wrong if IS_OTHER else x), kind)  # noqa: B023
        fails_in_all("sharding", lambda: placed(array("y") if IS_OTHER else x), ValueError)
        for call in (inline, shows, placed):
            assert float(total(call(x))) == 240


with mesh, warnings.catch_warnings():
    warnings.simplefilter("ignore", partjit.ReshardWarning)
    check(x)
    calls_of_compiled_programs()
    on_another_mesh()
    deleted_arguments()
    resharded_arguments()
    refused_before_anything_is_known()
    what_a_function_returns()
    eager_calls()
print("done", flush=True)
