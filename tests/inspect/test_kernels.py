"""Estimated memory of what XLA computes in one kernel, or not at all: compared with its own figure."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partjit
from partjit import P, pjit
from partjit.inspect import explain


@pytest.fixture(scope="module")
def mesh():
    return partjit.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def convolved(x, kernel):
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def normalized(x, axis):
    mean = x.mean(axis, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(axis, keepdims=True) + 1e-6)


def reduced_product(x, w):
    return (jnp.tanh(x @ w) ** 2).mean(1)


def softmax_of_products(x, w):
    return jax.nn.softmax(x @ w).T @ x


def convolved_twice(x, kernel, second):
    return convolved(jnp.tanh(convolved(x, kernel)), second)


def reduced_convolution(x, kernel, second):
    return jax.nn.relu(convolved(jnp.tanh(convolved(x, kernel)), second)).mean((1, 2))


def constants_in_a_kernel(x, kernel, second):
    return jax.nn.relu(convolved(jax.nn.relu(convolved(x, kernel)), second)).mean((1, 2))


def limited(x, kernel, second):
    return jax.nn.relu6(convolved(jax.nn.relu6(convolved(x, kernel)), second)).mean((1, 2))


def small_rows(x):
    for _ in range(3):
        x = x + normalized(x, -1)
    return x


def over_the_batch(x, w):
    for _ in range(2):
        x = normalized(x @ w, 0)
    return x


def gradient_of_convolutions(kernels, x):
    def loss(kernels):
        hidden = functools.reduce(lambda hidden, kernel: jax.nn.silu(convolved(hidden, kernel)), kernels, x)
        return (hidden**2).mean()

    return jax.grad(loss)(kernels)


def product_of_a_kernel(x, y, a):
    return jnp.exp(-0.5 * ((x[:, None] - y[None]) ** 2).sum(-1)) @ a


def moved_rows(x):
    return jnp.sin(jnp.roll(x, 1, 1)) + jnp.cos(jnp.roll(x, -1, 1)) * jnp.sin(x @ jnp.roll(x, 2, 1).swapaxes(1, 2)) @ x


def moved_columns(x, w):
    return jnp.tanh(jnp.roll(x, 3, 2)) @ w


def products_of_slices(x, w):
    for k in range(3):
        x = jnp.tanh(x @ w[k])
    return x


def cumulated(x):
    return jnp.cumsum(x, 0), jnp.sin(jax.lax.cummax(x, 1))


def cumulated_in_a_kernel(x):
    return jnp.sin(jnp.cumsum(jnp.sin(x), 1)).sum(1)


def differences_of_padded(x):
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1)))
    return jnp.abs(padded[:, 1:-1, 2:] - padded[:, 1:-1, :-2]) + jnp.abs(padded[:, 2:, 1:-1] - padded[:, :-2, 1:-1])


def padded_in_its_use(x):
    return jnp.sin(jnp.pad(x, ((0, 0), (1, 1), (1, 1))))


def transposed_product(x, w):
    return (x @ w).T


def gradient_of_a_dense_layer(w, x):
    return jax.grad(lambda w, x: ((x @ w) ** 2).sum(), argnums=(0, 1))(w, x)


def with_an_unused_loop(x):
    jax.lax.scan(lambda state, row: (state + row, state * row), x[0], x)
    return jnp.sin(x)


IMAGES, KERNEL = f32(16, 16, 16, 8), f32(3, 3, 8, 8)
WIDE = f32(3, 3, 8, 32), f32(3, 3, 32, 32)
PROGRAMS = {
    "reduced product": (reduced_product, [f32(256, 64), f32(64, 256)], [P("data"), P()]),
    "softmax": (softmax_of_products, [f32(256, 128), f32(128, 128)], [P("data"), P()]),
    "convolved twice": (convolved_twice, [IMAGES, *WIDE], [P("data"), P(), P()]),
    "reduced convolution": (reduced_convolution, [IMAGES, *WIDE], [P("data"), P(), P()]),
    "constants": (constants_in_a_kernel, [IMAGES, *WIDE], [P("data"), P(), P()]),
    "limits": (limited, [IMAGES, *WIDE], [P("data"), P(), P()]),
    "small rows": (small_rows, [f32(64, 128)], [P("data")]),
    "over the batch": (over_the_batch, [f32(256, 64), f32(64, 64)], [P("data"), P()]),
    "gradient of convolutions": (gradient_of_convolutions, [[KERNEL] * 3, IMAGES], [P(), P("data")]),
    "product of a kernel": (product_of_a_kernel, [f32(256, 8), f32(128, 8), f32(128, 4)], [P("data"), P(), P()]),
    "moved rows": (moved_rows, [f32(16, 64, 64)], [P("data")]),
    "moved columns": (moved_columns, [f32(16, 64, 256), f32(256, 64)], [P("data"), P()]),
    "cumulated": (cumulated, [f32(512, 256)], [P()]),
    "cumulated in a kernel": (cumulated_in_a_kernel, [f32(512, 256)], [P()]),
    "differences of padded": (differences_of_padded, [f32(32, 64, 64)], [P("data")]),
    "padded in its use": (padded_in_its_use, [f32(32, 64, 64)], [P("data")]),
    "transposed product": (transposed_product, [f32(256, 32), f32(32, 512)], [P(), P()]),
    "gradient of a dense layer": (gradient_of_a_dense_layer, [f32(64, 128), f32(8, 128, 64)], [P(), P("data")]),
    "with an unused loop": (with_an_unused_loop, [f32(64, 64)], [P()]),
    "products of slices": (products_of_slices, [f32(256, 64), f32(3, 64, 64)], [P("data"), P()]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_kernels_take_in_has_no_memory_and_what_they_read_has(name, mesh):
    function, args, specs = PROGRAMS[name]
    report = explain(pjit(function, in_shardings=tuple(specs)), *args, mesh=mesh, compiled=True)
    (estimate,), (found,) = report.estimates, report.memory
    assert estimate.unknown == ()
    assert 0.9 <= estimate.peak / found.peak <= 1.1, (str(estimate), str(found))


def test_what_varies_over_a_mesh_is_no_copy(mesh):
    def local(x, w, u):
        return jax.lax.psum(jax.nn.relu(x @ w) @ u, "model")

    specs = P("data"), P(None, "model"), P("model")
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("data"))
    report = explain(
        pjit(mapped, in_shardings=specs), f32(128, 64), f32(64, 256), f32(256, 64), mesh=mesh, compiled=True
    )
    assert report.estimates[0].peak == pytest.approx(report.memory[0].peak, rel=0.05)


def test_sums_in_the_body_of_a_shard_map_are_one_collective(mesh):
    """All that is summed is alive at once, and so are the sums."""

    def local(params, x):
        def loss(params):
            return (functools.reduce(lambda hidden, w: jnp.tanh(hidden @ w), params, x) ** 2).mean()

        grads = jax.grad(loss)(params)
        return [p - jax.lax.pmean(g, ("data", "model")) for p, g in zip(params, grads, strict=True)]

    everywhere = P(("data", "model"))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), everywhere), out_specs=P(), check_vma=False)
    made = pjit(mapped, in_shardings=(P(), everywhere))
    report = explain(made, [f32(64, 64)] * 4, f32(256, 64), mesh=mesh, compiled=True)
    assert report.estimates[0].peak == pytest.approx(report.memory[0].peak, rel=0.1)


@pytest.mark.parametrize("keep_unused", [False, True])
def test_arguments_that_are_not_used_are_counted_if_they_are_passed(keep_unused, mesh):
    def step(state, x):
        carried, _ = jax.lax.scan(lambda state, _: ({**state, "a": state["a"] * 2}, None), state, length=3)
        return carried["a"] * x.sum()

    state = {"a": f32(64), "b": f32(512), "c": f32(64, 64)}
    made = pjit(step, in_shardings=P(), donate_argnums=0, keep_unused=keep_unused)
    report = explain(made, state, f32(8), mesh=mesh, compiled=True)
    (estimate,), (found,) = report.estimates, report.memory
    assert estimate.arguments == found.arguments == 4 * (64 + 8 + keep_unused * (512 + 64 * 64))
    assert estimate.donated == found.donated == 4 * 64


def test_donated_arguments_are_reused_for_results_of_as_many_bytes(mesh):
    made = pjit(lambda w, x, y: (x @ w, y + 1), in_shardings=(P(), P("data"), P("data")), donate_argnums=(0, 2))
    report = explain(made, f32(32, 32), f32(256, 32), f32(64, 32), mesh=mesh, compiled=True)
    assert report.estimates[0].donated == report.memory[0].donated == 4 * 16 * 32
