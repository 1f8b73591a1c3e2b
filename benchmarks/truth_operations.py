"""Single operations on sharded dimensions, for comparing predicted collectives with those of compiled programs.

`OPERATIONS` is a list; each entry has a name, a function, and its arguments as (shape, dtype, spec). The specs are over
a mesh with the axes "x" of 4 devices and "y" of 2. Every operation is compiled in less than a second on the CPU.

    python benchmarks/truth_operations.py            # all of them: where prediction and compiled program differ
    python benchmarks/truth_operations.py cumsum rev  # those whose names contain one of these
"""

import collections
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from partjit import Mesh, P, pjit
from partjit.inspect import explain
from partjit.inspect.report import Report

F, S = "float32", "int32"


class Operation(NamedTuple):
    """An operation: its name, its function, and (shape, dtype, spec) of each argument."""

    name: str
    function: Callable[..., Any]
    arguments: Sequence[tuple[tuple[int, ...], str, P]]

    @property
    def structs(self) -> list[jax.ShapeDtypeStruct]:
        """The arguments, without their shardings."""
        return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in self.arguments]

    @property
    def specs(self) -> tuple[P, ...]:
        """The specs of the arguments."""
        return tuple(spec for _, _, spec in self.arguments)


def make_mesh() -> Mesh:
    """The mesh that the specs are over."""
    return Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))


X, Y, XY, BOTH = P("x"), P(None, "y"), P("x", "y"), P(("x", "y"))
NO = P()


def _loop_of_slices(x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 8, lambda i, total: total + lax.dynamic_slice_in_dim(x, i, 1, 0), jnp.zeros((1, 16)))


def _decode(cache: jax.Array, new: jax.Array) -> jax.Array:
    def step(cache, k):
        return lax.dynamic_update_slice_in_dim(cache, new, k, 0), ()

    return lax.scan(step, cache, jnp.arange(3))[0]


def _convolve(
    x: jax.Array, w: jax.Array, stride: int = 1, padding: Any = "SAME", lhs_dilation: int = 1, rhs_dilation: int = 1
) -> jax.Array:
    layouts = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (stride, 1), padding, (lhs_dilation, 1), (rhs_dilation, 1), layouts)


def _pooled(x: jax.Array, window: int = 3, stride: int = 1, padding: str = "SAME") -> jax.Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, (window, 1), (stride, 1), padding)


def _triangular(a: jax.Array, b: jax.Array) -> jax.Array:
    return lax.linalg.triangular_solve(a, b, left_side=True, lower=True)


def _one(
    name: str, function: Callable[..., Any], spec: P, shape: tuple[int, ...] = (16, 16), dtype: str = F
) -> Operation:
    return Operation(name, function, [(shape, dtype, spec)])


def _two(name: str, function: Callable[..., Any], left: P, right: P, *shapes: tuple[int, ...]) -> Operation:
    one, other = shapes or ((16, 16), (16, 16))
    return Operation(name, function, [(one, F, left), (other, F, right)])


def _indexed(
    name: str, function: Callable[..., Any], spec: P, indices: P = NO, shape: tuple[int, ...] = (8,)
) -> Operation:
    return Operation(name, function, [((16, 16), F, spec), (shape, S, indices)])


IMAGE, KERNEL = (8, 16, 16, 8), (3, 3, 8, 16)
CUBE = (8, 16, 16)
SPACE = P(None, "x")

OPERATIONS = [
    # Windows: shards need the borders of their neighbours.
    _one("cumsum", lambda x: jnp.cumsum(x, 0), X),
    _one("cumsum of the other dimension", lambda x: jnp.cumsum(x, 1), X),
    _one("cumsum of both axes", lambda x: jnp.cumsum(x, 0), BOTH),
    _one("cumsum, reverse", lambda x: lax.cumsum(x, 0, reverse=True), X),
    _one("cumprod", lambda x: jnp.cumprod(x, 0), X),
    _one("cummax", lambda x: lax.cummax(x, 0), XY),
    _one("cumlogsumexp", lambda x: lax.cumlogsumexp(x, 0), X),
    _one("associative_scan", lambda x: lax.associative_scan(jnp.add, x, axis=0), X),
    _one("roll", lambda x: jnp.roll(x, 1, 0), X),
    _one("roll by more than a shard", lambda x: jnp.roll(x, 5, 0), X),
    _one("roll of both", lambda x: jnp.roll(x, (1, 2), (0, 1)), XY),
    _one("rev", lambda x: x[::-1], X),
    _one("rev of both", lambda x: x[::-1, ::-1], XY),
    _one("pad", lambda x: jnp.pad(x, ((1, 1), (0, 0))), X),
    _one("pad, uneven", lambda x: jnp.pad(x, ((0, 3), (1, 0))), XY),
    _one("pad, interior", lambda x: lax.pad(x, 0.0, [(0, 1, 1), (0, 0, 0)]), X),
    _one("slice", lambda x: x[1:], X),
    _one("slice, half", lambda x: x[:8], X),
    _one("slice, middle", lambda x: x[4:12], XY),
    _one("slice, strided", lambda x: x[::2], X),
    _one("slice of the first", lambda x: x[0], X),
    _one("slice of the first, of both", lambda x: x[0], XY),
    _one("slice of the last, of both", lambda x: x[-1], XY),
    _one("slice of a column, of both", lambda x: x[:, 5], XY),
    _one("slice of a replicated dimension", lambda x: x[:, 1:], X),
    _one("diff", lambda x: x[1:] - x[:-1], X),
    _one("stencil", lambda x: x[:-2] + x[1:-1] + x[2:], X),
    _one("reduce_window", _pooled, X),
    _one("reduce_window, strided", lambda x: _pooled(x, 2, 2), X),
    _one("reduce_window, strided and wide", lambda x: _pooled(x, 3, 2), X),
    _one("reduce_window, valid", lambda x: _pooled(x, 3, 1, "VALID"), XY),
    _one("gradient of a maximum over windows", jax.grad(lambda x: _pooled(x, 2, 2).sum()), X),
    _two("convolution over batch", _convolve, X, NO, IMAGE, KERNEL),
    _two("convolution over features", _convolve, P(None, None, None, "x"), P(None, None, "x"), IMAGE, KERNEL),
    _two("convolution, output features", _convolve, NO, P(None, None, None, "x"), IMAGE, KERNEL),
    _two("convolution over space", _convolve, SPACE, NO, IMAGE, KERNEL),
    _two("convolution over space, valid", lambda x, w: _convolve(x, w, 1, "VALID"), SPACE, NO, IMAGE, KERNEL),
    _two("convolution over space, strided", lambda x, w: _convolve(x, w, 2), SPACE, NO, IMAGE, KERNEL),
    _two("convolution over space, dilated", lambda x, w: _convolve(x, w, rhs_dilation=2), SPACE, NO, IMAGE, KERNEL),
    _two(
        "convolution over space, transposed",
        lambda x, w: _convolve(x, w, 1, [(1, 1), (1, 1)], lhs_dilation=2),
        SPACE,
        NO,
        IMAGE,
        KERNEL,
    ),
    _two(
        "gradient of a convolution over batch",
        jax.grad(lambda w, x: (_convolve(x, w) ** 2).sum()),
        NO,
        X,
        KERNEL,
        IMAGE,
    ),
    _two(
        "gradient of a convolution over space",
        jax.grad(lambda w, x: (_convolve(x, w) ** 2).sum()),
        NO,
        SPACE,
        KERNEL,
        IMAGE,
    ),
    # Orders.
    _one("sort", lambda x: jnp.sort(x, 0), X),
    _one("sort of the other dimension", lambda x: jnp.sort(x, 1), X),
    _one("sort of both", lambda x: jnp.sort(x, 1), XY),
    _one("argsort", lambda x: jnp.argsort(x, 0), X),
    _one("top_k", lambda x: lax.top_k(x, 2), Y),
    _one("top_k of the other dimension", lambda x: lax.top_k(x, 2), X),
    _one("top_k of both", lambda x: lax.top_k(x, 2), XY),
    _one("argmax", lambda x: jnp.argmax(x, 0), X),
    _one("argmax of the other dimension", lambda x: jnp.argmax(x, 1), X),
    _one("argmin of both", lambda x: jnp.argmin(x, 1), XY),
    _one("median", lambda x: jnp.median(x, 0), X),
    _indexed("searchsorted", lambda x, i: jnp.searchsorted(x[:, 0], i.astype(F)), X),
    _one("unique", lambda x: jnp.unique(x, size=4), X, (16,)),
    # Indices.
    _indexed("take", lambda x, i: jnp.take(x, i, 0, mode="clip"), X),
    _indexed("take, filled", lambda x, i: jnp.take(x, i, 0), X),
    _indexed("take of the other dimension", lambda x, i: jnp.take(x, i, 1), X),
    _indexed("take, sharded indices", lambda x, i: x[i], NO, X),
    _indexed("take, both sharded", lambda x, i: x[i], X, P("y")),
    _indexed("take, both sharded alike", lambda x, i: x[i], X, X),
    _indexed("take from columns", lambda x, i: x[i], Y, X),
    _indexed("take_along_axis", lambda x, i: jnp.take_along_axis(x, i, 0), X, NO, (4, 16)),
    _indexed("take_along_axis of the other dimension", lambda x, i: jnp.take_along_axis(x, i, 1), X, X, (16, 4)),
    _indexed("gradient of take", lambda x, i: jax.grad(lambda x: (x[i] ** 2).sum())(x), X),
    _indexed("gradient of take, sharded indices", lambda x, i: jax.grad(lambda x: (x[i] ** 2).sum())(x), NO, X),
    _indexed("scatter", lambda x, i: x.at[i].set(1.0), X),
    _indexed("scatter-add", lambda x, i: x.at[i].add(1.0), X),
    _indexed("scatter-add of the other dimension", lambda x, i: x.at[:, i].add(1.0), X),
    Operation("segment_sum", lambda x, i: jax.ops.segment_sum(x, i, 4), [((16, 8), F, X), ((16,), S, X)]),
    Operation("segment_sum into columns", lambda x, i: jax.ops.segment_sum(x, i, 4), [((16, 8), F, Y), ((16,), S, NO)]),
    Operation("dynamic_slice", lambda x, i: lax.dynamic_slice_in_dim(x, i, 4, 0), [((16, 16), F, X), ((), S, NO)]),
    Operation(
        "dynamic_slice of the other dimension",
        lambda x, i: lax.dynamic_slice_in_dim(x, i, 4, 1),
        [((16, 16), F, X), ((), S, NO)],
    ),
    Operation("dynamic_index", lambda x, i: x[i], [((16, 16), F, XY), ((), S, NO)]),
    _one("dynamic_slice in a loop", _loop_of_slices, X),
    Operation(
        "dynamic_update_slice",
        lambda x, new, i: lax.dynamic_update_slice_in_dim(x, new, i, 0),
        [((16, 16), F, X), ((2, 16), F, NO), ((), S, NO)],
    ),
    Operation(
        "dynamic_update_slice of the other dimension",
        lambda x, new, i: lax.dynamic_update_slice_in_dim(x, new, i, 1),
        [((16, 16), F, X), ((16, 2), F, X), ((), S, NO)],
    ),
    _two("dynamic_update_slice in a loop", _decode, X, NO, (16, 16), (1, 16)),
    _one("static update", lambda x: x.at[2:4].set(0.0), X),
    # Shapes.
    _two("concatenate", lambda x, y: jnp.concatenate([x, y]), X, X),
    _two("concatenate of the other dimension", lambda x, y: jnp.concatenate([x, y], 1), X, X),
    _two("concatenate, one replicated", lambda x, y: jnp.concatenate([x, y]), X, NO),
    _two("stack", lambda x, y: jnp.stack([x, y]), X, X),
    _one("split", lambda x: jnp.split(x, 2), X),
    _one("transpose", lambda x: x.T, XY),
    _one("reshape, merging", lambda x: x.reshape(256), XY),
    _one("reshape, merging a major dimension", lambda x: x.reshape(256), X),
    _one("reshape, splitting", lambda x: x.reshape(4, 4, 16), X),
    _one("reshape, splitting unevenly", lambda x: x.reshape(2, 8, 16), X),
    _one("reshape, splitting a minor dimension", lambda x: x.reshape(16, 4, 4), Y),
    _one("reshape across", lambda x: x.reshape(8, 32), Y),
    _one("broadcast", lambda x: jnp.broadcast_to(x[:, None], (16, 3, 16)), XY),
    _one("repeat", lambda x: jnp.repeat(x, 2, 0), X),
    _one("tile", lambda x: jnp.tile(x, (2, 1)), X),
    _one("squeeze", lambda x: x.squeeze(1), P("x", None, "y"), (16, 1, 16)),
    # Products.
    _two("dot", lambda x, y: x @ y, X, NO),
    _two("dot, contracted", lambda x, y: x @ y, Y, P("y")),
    _two("dot, one contracted", lambda x, y: x @ y, Y, NO),
    _two("dot, other contracted", lambda x, y: x @ y, NO, P("y")),
    _two("dot, both sides", lambda x, y: x @ y, X, Y),
    _two("dot, conflict", lambda x, y: x @ y, X, P(None, "x")),
    _two("dot, transposed", lambda x, y: x.T @ y, XY, X),
    _two("dot, gathered", lambda x, y: x @ y, X, XY),
    _two("einsum, batch", lambda x, y: jnp.einsum("bij,bjk->bik", x, y), X, X, CUBE, CUBE),
    _two("einsum, heads", lambda x, y: jnp.einsum("bqhd,bkhd->bhqk", x, y), XY, XY, (4, 8, 4, 8), (4, 8, 4, 8)),
    _two("einsum, experts", lambda x, y: jnp.einsum("tec,td->ecd", x, y), P("x"), P("x"), (16, 4, 2), (16, 8)),
    _two("outer", lambda x, y: jnp.outer(x, y), P("x"), P("y"), (16,), (16,)),
    _two("gradient of dot", jax.grad(lambda w, x: (jnp.tanh(x @ w) ** 2).sum()), Y, X),
    # Reductions and what is built of them.
    _one("sum", lambda x: x.sum(0), X),
    _one("sum of everything", lambda x: x.sum(), XY),
    _one("maximum", lambda x: x.max(1), XY),
    _one("all", lambda x: (x > 0).all(), X),
    _one("mean and variance", lambda x: (x.mean(0), x.var(0)), X),
    _one("softmax", lambda x: jax.nn.softmax(x), XY),
    _one("logsumexp", lambda x: jax.nn.logsumexp(x, 0), X),
    _one("layernorm", lambda x: jax.nn.standardize(x), XY),
    _one("norm", lambda x: jnp.linalg.norm(x), XY),
    # Elementwise.
    _one("tanh", jnp.tanh, XY),
    _two("add, one replicated", lambda x, y: x + y, X, NO),
    _two("add, conflict", lambda x, y: x + y, X, P(None, "x")),
    _two("add, other axes", lambda x, y: x + y, X, P("y")),
    _two("where", lambda x, y: jnp.where(x > y, x, y), XY, X),
    _one("clamp", lambda x: jnp.clip(x, 0, 1), X),
    _one("bitcast", lambda x: lax.bitcast_convert_type(x, jnp.uint8), X),
    _one("bitcast to wider", lambda x: lax.bitcast_convert_type(x, jnp.uint32), X, (16, 4), "uint8"),
    _one("iota", lambda x: x + lax.iota(F, 16), X),
    _one("tril", lambda x: jnp.tril(x), XY),
    _one("one_hot", lambda i: jax.nn.one_hot(i, 8), X, (16,), S),
    _one("random numbers", lambda x: x + jax.random.normal(jax.random.key(0), x.shape), XY),
    _one("random permutation", lambda x: jax.random.permutation(jax.random.key(0), x), X),
    _one("random choice", lambda x: jax.random.categorical(jax.random.key(0), x), X),
    _one("dropout", lambda x: jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x, 0), X),
    # Transforms and linear algebra.
    _one("fft", lambda x: jnp.fft.fft(x, axis=1), X),
    _one("fft of a sharded dimension", lambda x: jnp.fft.fft(x, axis=-1), Y),
    _one("rfft", lambda x: jnp.fft.rfft(x), Y),
    _one("fft2", lambda x: jnp.fft.fft2(x), XY),
    _one("cholesky", lambda x: jnp.linalg.cholesky(x @ x.T + jnp.eye(16)), X),
    _one("cholesky of a batch", jnp.linalg.cholesky, X, (8, 8, 8)),
    _two("triangular_solve", _triangular, X, NO),
    _two(
        "triangular_solve, other side",
        _triangular,
        NO,
        X,
    ),
    _two("triangular_solve, columns", _triangular, NO, Y),
    _two("solve", jnp.linalg.solve, X, NO),
    _one("qr", jnp.linalg.qr, X),
    _one("eigh", jnp.linalg.eigh, X),
    _one("svd", jnp.linalg.svd, X),
    _one("svd of a batch", jnp.linalg.svd, X, (8, 4, 4)),
    _one("inv", jnp.linalg.inv, X),
    _one("det of a batch", jnp.linalg.det, X, (8, 4, 4)),
    # Sizes that do not divide.
    _one("tanh of 13", lambda x: jnp.tanh(x) + jnp.ones((13, 16)), NO, (13, 16)),
    _one("slice to 13", lambda x: jnp.tanh(x[:13]), X),
    _one("pad to 19", lambda x: jnp.tanh(jnp.pad(x, ((0, 3), (0, 0)))), X),
]


def report_on(operation: Operation, mesh: Mesh) -> Report:
    """The report on an operation, with predicted and compiled collectives."""
    fun = pjit(operation.function, in_shardings=operation.specs)
    return explain(fun, *operation.structs, mesh=mesh, compiled=True)


def verdict(report: Report) -> str:
    """Whether what is predicted is "equal" to what was compiled, or "marked" with bounds that hold, or "different"."""
    predicted, compiled = report.predicted, report.collectives
    low, exact, high = predicted.bytes_per_step, compiled.bytes_per_step, predicted.bytes_per_step_at_most
    if predicted.counts == compiled.counts and round(low) == round(exact):
        return "equal"
    return "marked" if predicted.unknown and low - 0.5 <= exact <= high + 0.5 else "different"


def main(words: Sequence[str]) -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = make_mesh()
    chosen = [one for one in OPERATIONS if not words or any(word in one.name for word in words)]
    verdicts = collections.Counter[str]()
    for operation in chosen:
        report = report_on(operation, mesh)
        found = verdict(report)
        verdicts[found] += 1
        if found != "equal":
            print(f"{found}: {operation.name} {[*operation.specs]}")
            for shown in (report.predicted, report.collectives):
                counts = ", ".join(f"{number} {kind} over {axes}" for (kind, axes), number in shown.counts.items())
                size = f"{shown.bytes_per_step:.0f} to {shown.bytes_per_step_at_most:.0f} B"
                print(f"    {shown.source:<9} {size:>14}  {counts}")
    print(", ".join(f"{number} of {len(chosen)} {found}" for found, number in verdicts.items()))


if __name__ == "__main__":
    main(sys.argv[1:])
