"""A process of several whose colocated functions return arrays over all of them in another sharding than is needed.

To move such an array is a program of all processes, which a function that fails in one of them must not leave the
others in.

python moved_results.py NUMBER COUNT ADDRESS
"""

import faulthandler
import itertools
import os
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

number, count, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
faulthandler.dump_traceback_later(100, exit=True)
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, count, number)

import partjit  # noqa: E402
from partjit import P, pjit  # noqa: E402
from partjit.colocated import colocated_python  # noqa: E402

mesh = partjit.Mesh(np.array(jax.devices()), "x")
split, everywhere = jax.NamedSharding(mesh, P("x")), jax.NamedSharding(mesh, P())
values = np.arange(8.0, dtype=np.float32)
x = jax.make_array_from_callback((8,), split, lambda index: values[index])
total = pjit(jnp.sum, in_shardings=P("x"), out_shardings=None)


def like(x, sharding=None):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def failing(fun):
    """A function that fails in process 1 while there is no space."""

    def may_fail(x):
        if number == 1 and "FULL" in os.environ:
            raise OSError("no space left on device")
        return fun(x)

    return may_fail


def check(step, expected):
    """Right, an error in all processes, and right again; with programs without calls in between."""
    for is_failing in (False, True, False):
        os.environ.pop("FULL", None)
        if is_failing:
            os.environ["FULL"] = "yes"
            with pytest.raises(OSError if number == 1 else partjit.OtherProcessError, match="no space left on device"):
                jax.block_until_ready(step(x))
        else:
            result = step(x)
            assert [*map(np.ndarray.tolist, map(np.asarray, (s.data for s in result.addressable_shards)))] == [
                expected[s.index].tolist() for s in result.addressable_shards
            ]
        assert float(total(x)) == 28


def shards(shard):
    return shard.data * 2


seen = 0
with mesh:
    # The sharding of shards is that of the arguments, or what out_specs say; the program reshards it.
    for out, in_specs, leaves_as, is_used in itertools.product(
        (None, split), (None, split), (P("x"), P(), None), (False, True)
    ):
        fun = failing(shards)
        call = colocated_python(
            fun,
            layout="per_shard",
            in_specs=None if in_specs is None else ((like(x, in_specs),), {}),
            out_specs_fn=lambda x, out=out: like(x, out),
        )

        @pjit(in_shardings=P("x"), out_shardings=leaves_as)
        def step(x, call=call, is_used=is_used):
            made = call(x)
            return jax.lax.with_sharding_constraint(made, P()) + 1 if is_used else made

        plan = step.plan(x)
        (made,) = plan.calls[0].outputs
        assert made.sharding.is_equivalent_to(split, 1), plan
        assert len(plan.fragments) == (is_used or leaves_as != P("x")), plan
        check(step, values * 2 + is_used)
        seen += 1
    assert seen == 24

    # In a loop that the hosts drive, carried in another sharding than it is made in.
    fun = failing(shards)
    call = colocated_python(fun, layout="per_shard", out_specs_fn=lambda x: like(x), stream="shards")

    @pjit(in_shardings=P("x"), out_shardings=P())
    def looped(x, call=call):
        return jax.lax.fori_loop(0, 3, lambda _, x: call(jax.lax.with_sharding_constraint(x, P("x"))), x)

    check(looped, values * 8)

    # An array over all processes, of which only the function knows how it is sharded.
    for out, leaves_as in itertools.product((None, split), (P("x"), P())):
        for mode in ("inline", "stream"):
            fun = failing(lambda x: x + x)
            call = colocated_python(fun, out_specs_fn=lambda x, out=out: like(x, out), mode=mode)

            @pjit(in_shardings=P("x"), out_shardings=leaves_as)
            def step(x, call=call):
                return call(x)

            if mode == "stream" and out is None and leaves_as == P():
                with pytest.raises((ValueError, partjit.OtherProcessError)) as refused:
                    step(x)
                text = str(refused.value)
                moved = r"float32\[8\] with P\('x',\) on \[0, 1, .*\], but is needed with P\(\) on \[0, 1, "
                assert re.search(rf"result of \S*may_fail is {moved}", text), text
                assert "say with a sharding in out_specs or out_specs_fn" in text, text
                assert float(total(x)) == 28
                continue
            check(step, values * 2)

    # Outside of programs: all processes agree on an inline call, and on nothing else.
    for mode in ("inline", "stream"):
        fun = failing(lambda x: x + x)
        call = colocated_python(fun, out_specs_fn=lambda x: like(x, everywhere), mode=mode)
        if mode == "inline":
            check(call, values * 2)
        else:
            with pytest.raises(ValueError, match="to move it takes the devices of processes"):
                jax.block_until_ready(call(x))
        assert float(total(x)) == 28

    # Of typed keys that a process has all of, it puts its own part.
    @pjit(in_shardings=P("x"), out_shardings=(P("x"), P()))
    def drawn(x):
        keys = colocated_python(
            lambda x: jax.random.split(jax.random.key(7), 8),
            out_specs=jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8)),
        )(x)
        return jax.vmap(jax.random.normal)(keys) + 0 * x, keys

    expected = jax.vmap(jax.random.normal)(jax.random.split(jax.random.key(7), 8))
    found, keys = drawn(x)
    for shard in found.addressable_shards:
        np.testing.assert_array_equal(shard.data, np.asarray(expected)[shard.index])
    assert keys.sharding.is_fully_replicated
print("done", flush=True)
