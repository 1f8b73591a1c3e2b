"""Colocated functions over processes: each runs its part on its own shards, or takes part without running."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from started import (
    columns,
    count,
    distributed,
    grid,
    held,
    mesh,
    number,
    numbers,
    on_each_shard,
    refused,
    require_equal,
)

from partjit import Mesh, P, colocated, pjit, record
from partjit.colocated import colocated_python, colocated_python_class

x = distributed(numbers, "x")
ran = []


def _double(v):
    return on_each_shard(lambda part: 2 * part, v)


double = colocated_python(_double, out_specs_fn=lambda v: v)
WANTED = 2 * (numbers + 120)


def of_shards(function, **options):
    return pjit(function, **{"in_shardings": P("x"), "out_shardings": P("x"), **options})


def check_ways_to_run():
    for mode in ("inline", "stream", "auto"):
        call = double.specialize(mode=mode)
        for _ in range(2):
            require_equal(call(x), 2 * numbers)
            require_equal(of_shards(lambda x: call(x + jnp.sum(x)))(x), WANTED)  # noqa: B023
    with columns:
        require_equal(of_shards(lambda x: double(x + jnp.sum(x)))(distributed(numbers, "x", mesh=columns)), WANTED)
    program = of_shards(lambda x: double(x + jnp.sum(x)), donate_argnums=0)
    require_equal(program.lower(x).compile()(distributed(numbers, "x")), WANTED)
    given = distributed(numbers, "x")
    require_equal(program(given), WANTED)
    assert given.is_deleted()
    inner = of_shards(lambda x: double(x) + jnp.sum(x))
    require_equal(of_shards(lambda x: double(inner(x)))(x), 2 * (2 * numbers + 120))


def check_shards():
    per_shard = colocated_python(lambda v: 2 * v.data, out_specs_fn=lambda v: v, layout="per_shard")
    require_equal(per_shard(x), 2 * numbers)
    require_equal(of_shards(lambda x: per_shard(x + jnp.sum(x)))(x), WANTED)
    of_numpy = colocated_python(lambda v: 2 * v, out_specs_fn=lambda v: v, arrays="numpy")
    inside = colocated_python(lambda v: 2 * v, out_specs_fn=lambda v: v)

    for call in (inside, of_numpy):
        mapped = jax.shard_map(
            lambda v: call(v) + jax.lax.psum(jnp.sum(v), "x"),  # noqa: B023
            mesh=mesh,
            in_specs=P("x"),
            out_specs=P("x"),
            check_vma=False,
        )
        require_equal(of_shards(mapped)(x), 2 * numbers + 120)


def check_numpy_arrays():
    of_numpy = colocated_python(lambda v: 2 * v, out_specs_fn=lambda v: v, arrays="numpy")
    require_equal(of_shards(lambda x: x + of_numpy(jnp.sum(x)))(x), numbers + 240)
    text = refused(of_shards(lambda x: of_numpy(x + 1)), x)
    assert f"is sharded over the devices {held([*mesh.devices.flat])}, so that no process has all of it" in text, text
    require_equal(of_shards(lambda x: double(x) + jnp.sum(x))(x), 2 * numbers + 120)


def check_control_flow():
    def body(v):
        return double(v) + jnp.sum(v)

    wanted, sums = numbers, []
    for k in range(3):
        sums.append(k * wanted.sum())
        wanted = 2 * wanted + wanted.sum()
    require_equal(of_shards(lambda x: jax.lax.fori_loop(0, 3, lambda _, v: body(v), x))(x), wanted)
    scan = of_shards(
        lambda x: jax.lax.scan(lambda v, k: (body(v), jnp.sum(v) * k), x, jnp.arange(3.0)), out_shardings=None
    )
    for result, expected in zip(scan(x), (wanted, np.array(sums)), strict=True):
        require_equal(result, expected)
    until = of_shards(lambda x: jax.lax.while_loop(lambda v: jnp.sum(v) < 1e5, double, x))
    require_equal(until(x), 2**10 * numbers)
    branch = of_shards(lambda x: jax.lax.cond(jnp.sum(x) > 0, double, lambda v: v - 1, x))
    require_equal(branch(x), 2 * numbers)
    require_equal(branch(distributed(-numbers, "x")), -numbers - 1)


def check_transformations():
    rows = numbers.reshape(4, 4)
    wanted = 2 * rows + rows.sum(axis=1, keepdims=True)

    def of_row(v):
        return double(v) + jnp.sum(v)

    require_equal(of_shards(jax.vmap(of_row))(distributed(rows, "x")), wanted)
    require_equal(jax.vmap(pjit(of_row, in_shardings=P(None)))(distributed(rows)), wanted)
    host_sin = colocated_python(lambda v: on_each_shard(np.sin, v), out_specs_fn=lambda v: v)
    host_cos = colocated_python(lambda v: on_each_shard(np.cos, v), out_specs_fn=lambda v: v)
    sin = jax.custom_vjp(host_sin)
    sin.defvjp(lambda v: (host_sin(v), v), lambda v, ct: (host_cos(v) * ct,))

    def loss(x):
        return jnp.sum(sin(2 * x))

    wanted = 2 * np.cos(2 * numbers)
    require_equal(of_shards(jax.grad(loss))(x), wanted)
    require_equal(jax.grad(of_shards(loss, out_shardings=None))(x), wanted)


def check_classes():
    made = ran
    made.clear()

    @colocated_python_class
    class Counter:
        def __init__(self, start):
            _ran().append(start)
            self.count = start

        def add(self, v):
            self.count += 1
            count = self.count
            return on_each_shard(lambda part: part + count, v)

        def next(self):
            self.count += 1
            count = self.count
            return jax.make_array_from_callback((16,), _sharding(), lambda index: np.full(16, count, np.float32)[index])

    counter = Counter(10)
    for k in range(3):
        require_equal(counter.add(x), numbers + 11 + k)
    require_equal(of_shards(lambda x: counter.add(x) + jnp.sum(x))(x), numbers + 14 + 120)
    assert made == [10]
    spec = jax.ShapeDtypeStruct((16,), jnp.float32, sharding=_sharding())
    Counter.next = Counter.next.specialize(run_ahead=2, out_specs_fn=lambda: spec, mode="stream")
    ahead = Counter(0)
    program = of_shards(lambda x: ahead.next() + x)
    for k in range(1, 6):
        require_equal(program(x), numbers + k)
    assert made == [10, 0]
    ahead.close()
    counter.close()


def _sharding():
    return NamedSharding(mesh, P("x"))


def _ran():
    import calls  # a function of a call is a copy, and so would the list be

    return calls.ran


def check_devices_of_some_processes():
    first = [device for device in grid if device.process_index == 0]
    sharding = NamedSharding(Mesh(first, "z"), P("z"))
    spec = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)

    def made_there():
        _ran().append("made")
        return jax.make_array_from_callback((8,), sharding, lambda index: np.arange(8, dtype=np.float32)[index])

    def noted(v):
        _ran().append(float(v.addressable_data(0)))

    ran.clear()
    for mode in ("inline", "stream", "auto"):
        result = colocated_python(made_there, devices=first, out_specs_fn=lambda: spec, mode=mode)()
        require_equal(result, np.arange(8))
        assert len(result.addressable_shards) == (8 // count if number == 0 else 0)
    assert ran == (["made"] * 3 if number == 0 else [])
    ran.clear()
    note = colocated_python(noted, devices=first[:1], out_specs_fn=lambda v: None)
    for mode in ("inline", "auto"):
        one = note.specialize(mode=mode)
        require_equal(of_shards(lambda x: (one(jnp.sum(x)), x + 1)[1])(x), numbers + 1)  # noqa: B023
        with record():  # listeners see other paths
            require_equal(of_shards(lambda x: (one(jnp.sum(x)), x + 1)[1])(x), numbers + 1)  # noqa: B023
        one(jax.device_put(3.0, jax.local_devices()[0]))
    colocated.wait()
    assert ran.count(120.0) == (4 if number == 0 else 0)


def check_meshes_without_devices_of_a_process():
    def body(v):
        return double(v) + jnp.sum(v)

    for process in (0, count - 1):
        there = Mesh([device for device in grid if device.process_index == process], "x")
        with there:
            for given in (numbers, jnp.asarray(numbers), distributed(numbers, "x", mesh=there)):
                require_equal(of_shards(body)(given), 2 * numbers + 120)
                until = of_shards(lambda x: jax.lax.while_loop(lambda v: jnp.sum(v) < 1e5, double, x))
                require_equal(until(given), 2**10 * numbers)
                branch = of_shards(lambda x: jax.lax.cond(jnp.sum(x) > 0, double, lambda v: v - 1, x))
                require_equal(branch(given), 2 * numbers)


def check_errors():
    one = SingleDeviceSharding(grid[0])
    spec = jax.ShapeDtypeStruct((), jnp.float32, sharding=one)
    there = colocated_python(lambda v: 2 * v, devices=grid[:1].tolist(), out_specs_fn=lambda v: spec)
    text = refused(of_shards(lambda x: there(jnp.sum(x)) + x), x)
    assert f"runs on the hosts of the devices {held([grid[0]])}, but its result has shards on the devices" in text, text
    colocated.wait()
    require_equal(of_shards(lambda x: double(x + jnp.sum(x)))(x), WANTED)
