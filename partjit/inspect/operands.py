"""What XLA's CPU compiler does to operands of products, convolutions and concatenations, and what its library computes.

Source: `DotDecomposer`, `ConvCanonicalization`, `CpuInstructionFusion` and `YnnMatcher` of XLA.
"""

import itertools
import math
from collections.abc import Iterable

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Var

from partjit._jax.jaxprs import type_of
from partjit._jax.versions import RELEASE

__all__ = [
    "CUMULATIVE",
    "contracted",
    "is_in_library",
    "is_in_windows",
    "is_multiplication",
    "joined_bytes",
    "transposed_operands",
    "turned_operands",
]

CUMULATIVE = ("cumsum", "cumprod", "cummax", "cummin")
_VIEWS = {"reshape", "squeeze", "expand_dims", "copy", "copy_p", "sharding_constraint", "name", "reshard", "pvary"}
_UNARY = {"abs", "ceil", "convert_element_type", "erf", "exp", "expm1", "floor", "integer_pow", "log", "log1p"}
_UNARY |= {"logistic", "neg", "round", "rsqrt", "sign", "sqrt", "square", "tanh"}
_UNARY |= {"cos", "sin", "tan"} if RELEASE >= (0, 12) else set[str]()
_BINARY = {"add", "add_any", "sub", "mul", "div", "max", "min", "pow"}
_OTHERS = {"broadcast_in_dim", "iota", "transpose", "tile", "reduce_sum", "reduce_max", "reduce_min"}
_SMALL_PRODUCT, _FEW_FEATURES = 8, 16


def transposed_operands(eqn: JaxprEqn) -> Iterable[Var]:
    """The operands of which an equation needs a transposed copy.

    Those of a product may have the contracted dimensions first or last, behind those of the batch. Those of a
    convolution have their features last, and a kernel those of its result behind those of its operand. That of a
    cumulative sum has the dimension last along which it is summed.
    """
    if eqn.primitive.name == "conv_general_dilated":
        for atom, spec, wanted in zip(eqn.invars, _layouts(eqn), _canonical(eqn), strict=False):
            if isinstance(atom, Var) and spec != wanted:
                yield atom
    elif eqn.primitive.name == "dot_general":
        for k, (atom, inner_dims, batch) in enumerate(zip(eqn.invars, *eqn.params["dimension_numbers"], strict=True)):
            inner = [dim for dim in range(type_of(atom).ndim) if dim not in batch]
            changes = sum((a in inner_dims) != (b in inner_dims) for a, b in itertools.pairwise(inner))
            is_turned = len(inner) > 2 and (inner[0] in inner_dims) == (k == 0) and changes > 0
            if isinstance(atom, Var) and (changes > 1 or is_turned or sorted(batch) != [*range(len(batch))]):
                yield atom
    elif is_in_windows(eqn):
        (atom,) = eqn.invars
        if isinstance(atom, Var) and eqn.params["axis"] != type_of(atom).ndim - 1:
            yield atom


def is_in_windows(eqn: JaxprEqn) -> bool:
    """Whether it is a cumulative sum that XLA makes in windows of 16, to whose elements it adds those before them.

    Source: `ReduceWindowRewriter` of XLA.
    """
    return eqn.primitive.name in CUMULATIVE and type_of(eqn.invars[0]).shape[eqn.params["axis"]] > _WINDOW


_WINDOW = 16


def _layouts(eqn: JaxprEqn) -> tuple[tuple[int, ...], ...]:
    """The dimensions of operand, kernel and result of a convolution: batch, features, space; or both features first."""
    numbers = eqn.params["dimension_numbers"]
    return tuple(map(tuple, (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec)))


def _canonical(eqn: JaxprEqn) -> tuple[tuple[int, ...], ...]:
    last = type_of(eqn.invars[0]).ndim - 1
    data = 0, last, *range(1, last)
    return data, (last, last - 1, *range(last - 1)), data


def contracted(eqn: JaxprEqn) -> tuple[int, ...]:
    """Of a matrix product, how many terms an element of it has, as each of the operands says."""
    if eqn.primitive.name != "dot_general":
        return ()
    dims_of_operands, _ = eqn.params["dimension_numbers"]
    shapes = (type_of(atom).shape for atom in eqn.invars)
    return tuple(math.prod(shape[dim] for dim in dims) for shape, dims in zip(shapes, dims_of_operands, strict=True))


def is_multiplication(eqn: JaxprEqn) -> bool:
    """Whether an equation is a matrix product of which each element has one term: XLA multiplies the elements."""
    return eqn.primitive.name == "dot_general" and max(contracted(eqn)) == 1


def turned_operands(eqn: JaxprEqn) -> Iterable[Var]:
    """The operands of which an iteration of a loop has transposed copies from its start, if it is given them.

    These are products' in which several dimensions are contracted that come first on the left, or last on the right.
    """
    if eqn.primitive.name == "dot_general":
        (left, right), _ = eqn.params["dimension_numbers"]
        for atom, dims, wrong in zip(eqn.invars, (left, right), (0, type_of(eqn.invars[1]).ndim - 1), strict=True):
            if isinstance(atom, Var) and len(dims) > 1 and wrong in dims:
                yield atom


def joined_bytes(eqn: JaxprEqn) -> int:
    """The contiguous bytes of a concatenation along the last dimension of a matrix; 0 for others."""
    name, params = eqn.primitive.name, eqn.params
    dim = params["dimension"] if name == "concatenate" else params.get("axis") if name == "stack" else None
    result = type_of(eqn.outvars[0]) if dim is not None else None
    if result is None or result.ndim < 2 or dim != result.ndim - 1:
        return 0
    return result.shape[-1] * result.dtype.itemsize


def is_in_library(eqn: JaxprEqn) -> bool:
    """Whether the library of kernels computes an equation, if it is large enough."""
    name, atoms = eqn.primitive.name, (*eqn.invars, *eqn.outvars)
    if len(eqn.outvars) != 1 or not all(_is_float(atom) for atom in atoms):
        return name == "iota"
    if name == "dot_general" and not is_multiplication(eqn):
        sizes = math.prod(type_of(eqn.outvars[0]).shape), *(math.prod(type_of(a).shape) for a in eqn.invars)
        return all(size > max(contracted(eqn)) for size in sizes[1:]) and max(sizes) >= _SMALL_PRODUCT
    if name == "conv_general_dilated":
        return _is_convolution_in_library(eqn)
    return name in _VIEWS or name in _UNARY or name in _BINARY or name in _OTHERS or name == "dot_general"


def _is_float(atom: object) -> bool:
    return jax.dtypes.issubdtype(getattr(getattr(atom, "aval", None), "dtype", np.int32), np.floating)


def _is_convolution_in_library(eqn: JaxprEqn) -> bool:
    (data, kernel), result, params = map(type_of, eqn.invars), type_of(eqn.outvars[0]), eqn.params
    if data.ndim != 4 or _layouts(eqn) != _canonical(eqn) or params["batch_group_count"] != 1:
        return False
    is_wide = max(data.shape[-1], result.shape[-1]) > _FEW_FEATURES
    is_larger = any(result.shape[k] > data.shape[k] or kernel.shape[k - 1] > data.shape[k] for k in (1, 2))
    return is_wide and not is_larger and all(n == 1 for n in params["lhs_dilation"])
