"""Which dimensions of a program's arrays belong together: those that are sharded alike if nothing is to be moved.

The hidden dimension of a perceptron is one of the first weight, of the activations and of the second weight. An
equation ties dimensions of its operands and results: an elementwise one those at equal positions, a product those that
it contracts and those that it keeps, a reshape the major ones of what it splits and merges. A class of dimensions that
are tied, directly or not, is what a decision is about: sharding all of it over an axis is what an expert does who
shards "the heads", "the experts" or "the batch".

Source: the named dimension analysis of TOAST (https://arxiv.org/abs/2508.15010), and the propagation of Shardy, whose
rules for single operations these are.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from partjit.inspect.annotated import AnnotatedEquation, AnnotatedJaxpr, AnnotatedValue

__all__ = ["Dimension", "Dimensions"]

Dimension: TypeAlias = tuple[int, int]
"""The number of a value, and a dimension of it."""

_Tie: TypeAlias = tuple[AnnotatedValue, int, AnnotatedValue, int]


class Dimensions:
    """The classes of the dimensions of a program.

    Args:
        program: the annotated program.

    Example:
        >>> import jax.numpy as jnp
        >>> from partjit.inspect import explain
        >>> def perceptron(x, up, down):
        ...     return jnp.tanh(x @ up) @ down
        >>> tree = explain(perceptron, jnp.ones((8, 4)), jnp.ones((4, 16)), jnp.ones((16, 4))).whole.tree
        >>> x, up, down = tree.inputs
        >>> classes = Dimensions(tree)
        >>> classes.of(up)[1] == classes.of(down)[0], classes.of(x)[1] == classes.of(up)[0]
        (True, True)
        >>> len({*classes.of(x), *classes.of(up), *classes.of(down)})
        4
    """

    def __init__(self, program: AnnotatedJaxpr) -> None:
        self._parents: dict[Dimension, Dimension] = {}
        self._visit(program)

    def of(self, value: AnnotatedValue) -> tuple[Dimension, ...]:
        """The class of each dimension of a value: one dimension that stands for all of it."""
        return tuple(self._root((value.number, dim)) for dim in range(len(value.aval.shape)))

    def _root(self, dim: Dimension) -> Dimension:
        root = dim
        while (parent := self._parents.get(root, root)) != root:
            root = parent
        while dim != root:  # the next look-up is short
            self._parents[dim], dim = root, self._parents[dim]
        return root

    def _visit(self, program: AnnotatedJaxpr) -> None:
        for equation in program.equations:
            for one, i, other, j in _ties(equation):
                if one.number >= 0 and other.number >= 0 and one.aval.shape[i] > 1 and other.aval.shape[j] > 1:
                    a, b = self._root((one.number, i)), self._root((other.number, j))
                    self._parents[max(a, b)] = min(a, b)  # the same whatever the order
            for body in equation.bodies.values():
                self._visit(body)


def _ties(equation: AnnotatedEquation) -> Iterator[_Tie]:
    """The dimensions that an equation ties."""
    arrays = [value for value in (*equation.inputs, *equation.outputs) if value.is_array]
    if len(arrays) != len(equation.inputs) + len(equation.outputs):
        return  # refs and tokens
    if equation.bodies:
        yield from _of_bodies(equation)
    elif (rule := _RULES.get(equation.primitive)) is not None:
        yield from rule(equation)
    elif equation.primitive.startswith(("reduce_", "arg")) and "axes" in equation.params:
        yield from _of_reduction(equation)
    else:
        for made in equation.outputs:
            for read in equation.inputs:
                yield from _equal(read, made)


def _equal(one: AnnotatedValue, other: AnnotatedValue, first: int = 0, second: int = 0) -> Iterator[_Tie]:
    """Ties dimensions at equal positions, from these on, where they have the same size."""
    sizes = one.aval.shape[first:], other.aval.shape[second:]
    if len(sizes[0]) == len(sizes[1]):
        for k, (a, b) in enumerate(zip(*sizes, strict=True)):
            if a == b:
                yield one, k + first, other, k + second


def _of_bodies(equation: AnnotatedEquation) -> Iterator[_Tie]:
    inputs, outputs = equation.inputs, equation.outputs
    if equation.primitive == "scan":
        (body,) = equation.bodies.values()
        fixed, carried = equation.constants, equation.constants + equation.carried
        for k, (value, inner) in enumerate(zip(inputs, body.inputs, strict=False)):
            yield from _equal(value, inner, int(k >= carried), 0)
        for k, (value, inner) in enumerate(zip(outputs, body.outputs, strict=False)):
            yield from _equal(value, inner, int(k >= equation.carried), 0)
        for before, after in zip(body.inputs[fixed:carried], body.outputs, strict=False):
            yield from _equal(before, after)
    elif equation.primitive == "while":
        of_cond, of_body = equation.params["cond_nconsts"], equation.params["body_nconsts"]
        body = equation.bodies["body_jaxpr"]
        for value, inner in zip(inputs[of_cond:], body.inputs, strict=False):
            yield from _equal(value, inner)
        for value, inner, before in zip(outputs, body.outputs, body.inputs[of_body:], strict=False):
            yield from itertools.chain(_equal(value, inner), _equal(before, inner))
    elif equation.primitive == "cond":
        for body in equation.bodies.values():
            for value, inner in zip((*inputs[1:], *outputs), (*body.inputs, *body.outputs), strict=False):
                yield from _equal(value, inner)


def _of_reduction(equation: AnnotatedEquation) -> Iterator[_Tie]:
    for read, made in zip(equation.inputs, equation.outputs, strict=False):
        kept = [dim for dim in range(len(read.aval.shape)) if dim not in equation.params["axes"]]
        if len(kept) == len(made.aval.shape):
            yield from ((read, dim, made, k) for k, dim in enumerate(kept))


def _of_transpose(equation: AnnotatedEquation) -> Iterator[_Tie]:
    (read,), (made,) = equation.inputs, equation.outputs
    yield from ((read, dim, made, k) for k, dim in enumerate(equation.params["permutation"]))


def _of_broadcast(equation: AnnotatedEquation) -> Iterator[_Tie]:
    read, made = equation.inputs[0], equation.outputs[0]
    for dim, k in enumerate(equation.params["broadcast_dimensions"]):
        if read.aval.shape[dim] == made.aval.shape[k]:
            yield read, dim, made, k


def _of_squeeze(equation: AnnotatedEquation) -> Iterator[_Tie]:
    (read,), (made,) = equation.inputs, equation.outputs
    kept = [dim for dim in range(len(read.aval.shape)) if dim not in equation.params["dimensions"]]
    yield from ((read, dim, made, k) for k, dim in enumerate(kept))


def _of_reshape(equation: AnnotatedEquation) -> Iterator[_Tie]:
    """The major dimensions of the parts of two shapes that have as many elements."""
    read, made = equation.inputs[0], equation.outputs[0]
    for i, j in major_pairs(read.aval.shape, made.aval.shape):
        yield read, i, made, j


def major_pairs(one: Sequence[int], other: Sequence[int]) -> list[tuple[int, int]]:
    """The pairs of dimensions with which parts of two shapes begin that have as many elements.

    Example:
        >>> major_pairs((8, 64, 3), (8, 4, 16, 3)), major_pairs((8, 4, 6), (32, 6))
        ([(0, 0), (1, 1), (2, 3)], [(0, 0), (2, 1)])
    """
    pairs, i, j = [], 0, 0
    while True:
        while i < len(one) and one[i] == 1:
            i += 1
        while j < len(other) and other[j] == 1:
            j += 1
        if i == len(one) or j == len(other):
            return pairs
        pairs.append((i, j))
        a, b = one[i], other[j]
        i, j = i + 1, j + 1
        while a != b and (i < len(one) if a < b else j < len(other)):
            if a < b:
                a, i = a * one[i], i + 1
            else:
                b, j = b * other[j], j + 1


def _of_product(equation: AnnotatedEquation) -> Iterator[_Tie]:
    (left, right), (made,) = equation.inputs[:2], equation.outputs
    contracted, batch = equation.params["dimension_numbers"]
    yield from ((left, i, right, j) for i, j in zip(*contracted, strict=True))
    yield from ((left, i, right, j) for i, j in zip(*batch, strict=True))
    yield from ((left, i, made, k) for k, i in enumerate(batch[0]))
    start = len(batch[0])
    for value, own, shared in ((left, contracted[0], batch[0]), (right, contracted[1], batch[1])):
        free = [dim for dim in range(len(value.aval.shape)) if dim not in own and dim not in shared]
        yield from ((value, dim, made, start + k) for k, dim in enumerate(free))
        start += len(free)


def _of_convolution(equation: AnnotatedEquation) -> Iterator[_Tie]:
    (left, kernel), (made,) = equation.inputs, equation.outputs
    of_left, of_kernel, of_made = equation.params["dimension_numbers"]
    if equation.params["batch_group_count"] == 1:
        yield left, of_left[0], made, of_made[0]
    if equation.params["feature_group_count"] == 1:
        yield left, of_left[1], kernel, of_kernel[1]
    yield kernel, of_kernel[0], made, of_made[1]
    for i, j in zip(of_left[2:], of_made[2:], strict=True):
        if left.aval.shape[i] == made.aval.shape[j]:
            yield left, i, made, j


def _of_gather(equation: AnnotatedEquation) -> Iterator[_Tie]:
    (operand, indices), (made,) = equation.inputs, equation.outputs
    numbers = equation.params["dimension_numbers"]
    batches = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    yield from _of_windows(operand, indices, made, numbers.collapsed_slice_dims, numbers.offset_dims, batches)


def _of_scatter(equation: AnnotatedEquation) -> Iterator[_Tie]:
    (operand, indices, updates), (made,) = equation.inputs, equation.outputs
    numbers = equation.params["dimension_numbers"]
    batches = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
    yield from _equal(operand, made)
    yield from _of_windows(operand, indices, updates, numbers.inserted_window_dims, numbers.update_window_dims, batches)


def _of_windows(
    operand: AnnotatedValue,
    indices: AnnotatedValue,
    windows: AnnotatedValue,
    inserted: Sequence[int],
    kept: Sequence[int],
    batches: tuple[Sequence[int], Sequence[int]],
) -> Iterator[_Tie]:
    """The dimensions of windows into an operand, one for each index.

    Args:
        operand, indices, windows: what is read or updated, where, and the windows.
        inserted: the dimensions of the operand that the windows lack.
        kept: the dimensions of the windows that are dimensions of the operand, in its order.
        batches: dimensions of the operand, and of the indices, that are the same.
    """
    hidden = (*inserted, *batches[0])
    own = (dim for dim in range(len(operand.aval.shape)) if dim not in hidden)
    for dim, k in zip(own, kept, strict=True):
        if operand.aval.shape[dim] == windows.aval.shape[k]:  # all of the dimension
            yield operand, dim, windows, k
    of_indices = (k for k in range(len(windows.aval.shape)) if k not in kept)
    yield from ((indices, dim, windows, k) for dim, k in enumerate(of_indices))
    yield from ((operand, dim, indices, of) for dim, of in zip(*batches, strict=True))


def _of_update(equation: AnnotatedEquation) -> Iterator[_Tie]:
    operand, update, made = equation.inputs[0], equation.inputs[1], equation.outputs[0]
    yield from itertools.chain(_equal(operand, made), _equal(update, made))


def _nothing(_: AnnotatedEquation) -> Iterator[_Tie]:
    return iter(())


_RULES: dict[str, Callable[[AnnotatedEquation], Iterator[_Tie]]] = {
    "transpose": _of_transpose,
    "broadcast_in_dim": _of_broadcast,
    "squeeze": _of_squeeze,
    "reshape": _of_reshape,
    "dot_general": _of_product,
    "conv_general_dilated": _of_convolution,
    "gather": _of_gather,
    "dynamic_update_slice": _of_update,
    "iota": _nothing,
    "random_bits": _nothing,
    "colocated_call": _nothing,
    "shard_map": _nothing,
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter_add", "scatter_mul", "scatter_max", "scatter_min"), _of_scatter
    ),
}
