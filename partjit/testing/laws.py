"""Laws that partitioned functions obey, as assertions for property tests and others."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh as JaxMesh
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from partjit._jax.shardings import UNSPECIFIED, UnspecifiedValue
from partjit.api import pjit
from partjit.arguments import abstract_argument, check_callable, flattened_results, name_of, require_values
from partjit.checks import require_flag, require_mesh_type, require_number
from partjit.mesh import Mesh, describe_mesh
from partjit.placement import reshard_policy
from partjit.spec import ParsedPartitionSpec, parse_spec_tree
from partjit.testing.derivatives import custom_calls, wrong_derivative
from partjit.testing.donation import reads_of_donated_values
from partjit.testing.expected_shards import assert_laid_out
from partjit.testing.reproduction import canonical, describe, reproduction
from partjit.trees import Values, broadcast_specs

__all__ = ["assert_same_meaning"]

_NEEDS_VALUES = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)
_REMEDY = "; where that is meant, pass custom_derivatives=False"
_TOLERANCES = {"float64": 1e-10, "complex128": 1e-10, "float32": 1e-4, "complex64": 1e-4}


def assert_same_meaning(
    fun: Callable[..., object],
    *args: object,
    mesh: JaxMesh,
    in_specs: object = UNSPECIFIED,
    out_specs: object = UNSPECIFIED,
    grad: bool = True,
    vmap: bool = True,
    reference: Callable[..., object] | None = None,
    tolerance: float | None = None,
    custom_derivatives: bool = True,
) -> None:
    """Asserts that `pjit(fun, in_specs, out_specs)` computes what `fun` computes, with the requested output shardings.

    It checks that the function reads nothing after it donated it to a nested program; the values; the gradients with
    respect to all float arguments; then the batched form: `jax.vmap` over a batch of the arguments and of variations of
    them gives the same results as single calls. A batch is also sharded over a mesh axis that no spec uses, with
    `spmd_axis_name`, if there is one.

    Args:
        fun: a function of pytrees of arrays. One that `pjit` or `jax.jit` returned is compared with the one it wraps.
        *args: its arguments.
        mesh: the ambient mesh.
        in_specs, out_specs: as for `pjit`. Results are checked against `out_specs`, gradients against `in_specs`,
            batches with one more leading dimension.
        grad: whether to check gradients of float results.
        vmap: whether to check the batched form.
        reference: the function to compare with, by default `fun`; another one where `fun` itself has constraints or
            nested partitioned functions that are to be checked, or a `jax.shard_map`: with itself it agrees, whatever
            its shards compute, such as a sum that forgets the other devices or the same random numbers on each.
        tolerance: the maximal difference relative to the greatest absolute value of an array, or to 1 where that is
            less, which cancellation leaves nothing but errors of; by default that of the shortest float among the
            arguments and the result, 1e-4 for float32 and 2e-2 for shorter ones. Where all results are small, scale
            them up, or pass a smaller tolerance.
        custom_derivatives: whether the derivatives that a `jax.custom_vjp` or `jax.custom_jvp` in `fun` defines are
            compared with numerical ones, as part of the gradients; not where they differ on purpose, as those of
            straight-through estimators do.

    Raises:
        TypeError, ValueError: an argument is of a wrong type, or a spec does not fit.
        AssertionError: with what differs, where, the mesh and specs of the simplest case that still fails, and a script
            that reproduces it.

    Example:
        >>> def affine(w, x):
        ...     return x @ w
        >>> mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
        >>> w, x = np.ones((4, 2), np.float32), np.ones((8, 4), np.float32)
        >>> assert_same_meaning(affine, w, x, mesh=mesh, in_specs=(None, P("x")), out_specs=P("x", "y"))
    """
    where = "assert_same_meaning"
    check_callable(fun)
    require_mesh_type(where, "mesh", mesh)
    grad, vmap = require_flag(where, "grad", grad), require_flag(where, "vmap", vmap)
    custom_derivatives = require_flag(where, "custom_derivatives", custom_derivatives)
    for name, specs in (("in_specs", in_specs), ("out_specs", out_specs)):
        parse_spec_tree(specs, name)
    if reference is not None:
        check_callable(reference)
    if tolerance is not None:
        require_number(where, "tolerance", tolerance, "a relative difference, a number, or None")
    for name, leaf in _named_leaves("args", args):
        abstract_argument(leaf, name, where)
        require_values([leaf], [name], where)
    # A function that is partitioned or compiled already is compared with the one it wraps.
    plain = reference or (fun.__wrapped__ if isinstance(fun, jax.stages.Wrapped) else fun)  # type: ignore[attr-defined]
    case = _Case(fun, args, mesh, in_specs, out_specs, grad, vmap, plain, tolerance, custom_derivatives)
    problem = case.problem()
    if problem is None:
        return
    case, problem = _simplest(case, problem)
    options = {"in_specs": case.in_specs, "out_specs": case.out_specs, "grad": case.grad, "vmap": case.vmap}
    if tolerance is not None:
        options["tolerance"] = tolerance
    if not custom_derivatives:
        options["custom_derivatives"] = custom_derivatives
    types = (
        f"{name}: {jnp.result_type(leaf)}{list(np.shape(leaf))}" for name, leaf in _named_leaves("args", case.args)
    )
    script = reproduction("assert_same_meaning", fun, case.args, mesh, options, reference)
    raise AssertionError(
        f"{problem}\n\nThe simplest case that still fails:\n"
        f"  mesh       ({describe_mesh(mesh)})\n"
        f"  in_specs   {describe(case.in_specs)}\n"
        f"  out_specs  {describe(case.out_specs)}\n"
        f"  arguments  {', '.join(types)}\n\n"
        f"To reproduce it:\n\n{script}"
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Case:
    """The arguments of `assert_same_meaning`."""

    fun: Callable[..., object]
    args: tuple[object, ...]
    mesh: JaxMesh
    in_specs: object
    out_specs: object
    grad: bool
    vmap: bool
    reference: Callable[..., object]
    tolerance: float | None
    custom_derivatives: bool

    def problem(self) -> str | None:
        """What differs, or None."""
        # jax's own mesh warns when it is entered.
        mesh = Mesh(self.mesh.devices, self.mesh.axis_names, self.mesh.axis_types)
        with mesh, reshard_policy("allow"), jax.numpy_dtype_promotion("standard"):
            checks = [
                self._donations(),
                # Before anything is compiled for the mesh, with which it has nothing to do.
                self._custom_derivatives() if self.grad and self.custom_derivatives else (),
                self._values(),
                self._gradients() if self.grad else (),
                self._batches() if self.vmap else (),
            ]
            return next((problem for check in checks for problem in check), None)

    def _partitioned(self) -> Callable[..., object]:
        return pjit(self.fun, self.in_specs, self.out_specs)

    def _donations(self) -> Iterator[str]:
        names = [name for name, _ in _named_leaves("args", self.args)]
        yield from reads_of_donated_values(jax.make_jaxpr(self._checked_reference)(*self.args), names)

    def _checked_reference(self, *args: object) -> object:
        result = self.reference(*args)
        flattened_results(result, f"{name_of(self.reference)}, a function given to assert_same_meaning,")
        return result

    def _values(self) -> Iterator[str]:
        expected = self.reference(*jax.tree.map(jnp.asarray, self.args))  # NumPy would compute in 64 bits
        found = self._partitioned()(*self.args)
        yield from self._compare("the value", expected, found)
        yield from self._layout("the value", found, self.out_specs)

    def _gradients(self) -> Iterator[str]:
        leaves, tree = jax.tree.flatten(self.args)
        floats = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]
        if not floats:
            return

        def gradient(fun: Callable[..., object], wrap: Callable[..., Any] = lambda fun: fun) -> list[jax.Array]:
            def total(values: Sequence[ArrayLike]) -> ArrayLike:
                complete = list(leaves)
                for i, value in zip(floats, values, strict=True):
                    complete[i] = value
                outs = jax.tree.leaves(fun(*jax.tree.unflatten(tree, complete)))
                outs = [jnp.asarray(out) for out in outs if jnp.issubdtype(jnp.result_type(out), jnp.inexact)]
                return sum((_weighted(out) for out in outs), start=jnp.float32(0))

            return wrap(jax.grad(total))([jnp.asarray(leaves[i]) for i in floats])

        try:
            expected = gradient(self.reference, jax.jit)  # operation by operation it takes ten times as long
        except _NEEDS_VALUES:
            expected = gradient(self.reference)
        try:
            found = gradient(self._partitioned())
        except Exception as error:
            yield f"the gradient raises {_show(error)}"
            return
        named = _named_leaves("args", self.args)
        names = [named[i][0] for i in floats]
        for name, e, f in zip(names, expected, found, strict=True):
            yield from self._compare(f"the gradient of {name}", e, f)
        if self.mesh.are_all_axes_auto:  # otherwise a gradient has the type of its argument
            with contextlib.suppress(_NoSpecs):
                specs = _flat_specs(self.in_specs, self.args)
                for i, name, f in zip(floats, names, found, strict=True):
                    yield from _laid_out(f"the gradient of {name}", f, self.mesh, specs[i])

    def _custom_derivatives(self) -> Iterator[str]:
        text = str(jax.make_jaxpr(self.reference)(*self.args))
        if "custom_vjp_call" not in text and "custom_jvp_call" not in text:
            return
        args = jax.tree.map(jnp.asarray, self.args)
        for call in custom_calls(self.reference, args):
            with contextlib.suppress(TypeError):  # it cannot be differentiated by all arguments
                if (found := wrong_derivative(call.fun, call.args)) is not None:
                    yield f"the derivative of {call} is wrong: {found}{_REMEDY}"
        # Those in shard_maps run nowhere else; jax.lax.stop_gradient changes derivatives on purpose.
        if "custom_vjp_call" in text and "stop_gradient" not in text:
            found = wrong_derivative(jax.jit(self.reference), args)
            if found is not None:
                yield f"the derivative of a jax.custom_vjp in the function is wrong: {found}{_REMEDY}"

    def _batches(self) -> Iterator[str]:
        args = jax.tree.map(jnp.asarray, self.args)
        if not jax.tree.leaves(args):
            return
        variations = [args, jax.tree.map(_variation, args)]
        one_by_one = [self.reference(*args) for args in variations]
        free = self._free_axis()
        ways = [("the batched value", None), *([] if free is None else [(f"the value batched over {free!r}", free)])]
        for what, axis in ways:
            copies = 1 if axis is None else self.mesh.shape[axis]
            batch, expected = _stacked(variations * copies), _stacked(one_by_one * copies)
            is_batched: list[bool] = []

            def observed(*args: object, is_batched: list[bool] = is_batched) -> object:
                result = self._partitioned()(*args)
                is_batched += [isinstance(leaf, Tracer) for leaf in jax.tree.leaves(result)]
                return result

            try:
                found = jax.vmap(observed, spmd_axis_name=axis)(*batch)
            except Exception as error:
                yield f"{what} raises {_show(error)}"
                continue
            yield from self._compare(what, expected, found)
            leaves, tree = jax.tree.flatten(found)  # what depends on no argument is repeated, and sharded as it is
            placed = tree.unflatten([leaf if own else 0 for leaf, own in zip(leaves, is_batched, strict=True)])
            yield from self._layout(what, placed, self.out_specs, batch=() if axis is None else (axis,))

    def _free_axis(self) -> str | None:
        """A mesh axis that no equation of the program uses, according to the printed jaxpr."""
        text = str(jax.make_jaxpr(self._partitioned())(*self.args))
        return next((axis for axis in self.mesh.axis_names if f"'{axis}'" not in text), None)

    def _compare(self, what: str, expected: object, found: object) -> Iterator[str]:
        if jax.tree.structure(expected) != jax.tree.structure(found):
            yield f"{what} has the structure {jax.tree.structure(found)} instead of {jax.tree.structure(expected)}"
            return
        for (name, e), f in zip(_named_leaves("result", expected), jax.tree.leaves(found), strict=True):
            where = what if name == "result" else f"{what} at {name}"
            dtypes = [jnp.result_type(value) for value in (e, f)]
            if np.shape(e) != np.shape(f) or dtypes[0] != dtypes[1]:
                yield f"{where} is {dtypes[1]}{list(np.shape(f))} instead of {dtypes[0]}{list(np.shape(e))}"
                continue
            e, f = (_plain(value) for value in (e, f))
            if not jnp.issubdtype(dtypes[0], jnp.inexact):
                if not np.array_equal(e, f):
                    yield f"{where} differs in {int((e != f).sum())} of {e.size} elements"
            else:
                tolerance = self._tolerance(dtypes[0]) if self.tolerance is None else self.tolerance
                scale = max(1.0, float(np.abs(e[np.isfinite(e)]).max(initial=0.0)))
                close = np.isclose(f, e, rtol=0, atol=tolerance * scale, equal_nan=True)
                if not close.all():
                    at = tuple(int(i) for i in np.argwhere(~close)[0])
                    yield (
                        f"{where} differs in {int((~close).sum())} of {e.size} elements, first at {list(at)}: "
                        f"{f[at]} instead of {e[at]} (tolerance {tolerance * scale:.3g})"
                    )

    def _tolerance(self, dtype: np.dtype) -> float:
        """The tolerance of the shortest float in the case, which limits the precision of all results."""
        dtypes = [dtype, *map(jnp.result_type, jax.tree.leaves(self.args))]
        return max(_TOLERANCES.get(d.name, 2e-2) for d in dtypes if jnp.issubdtype(d, jnp.inexact))

    def _layout(self, what: str, found: object, specs: object, batch: tuple[str, ...] | None = None) -> Iterator[str]:
        with contextlib.suppress(_NoSpecs):
            for (name, leaf), spec in zip(_named_leaves("result", found), _flat_specs(specs, found), strict=True):
                if spec is not None and batch is not None:
                    spec = P(batch or None, *spec)
                yield from _laid_out(what if name == "result" else f"{what} at {name}", leaf, self.mesh, spec)


def _named_leaves(tree_name: str, tree: object) -> list[tuple[str, Any]]:
    """The leaves of a tree, each with its key path as its name."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(f"{tree_name}{jax.tree_util.keystr(path)}", leaf) for path, leaf in leaves]


def _show(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


class _NoSpecs(Exception):
    """There are no specs to check shardings against."""


def _flat_specs(specs: object, values: object) -> list[P | None]:
    """The spec of each leaf, None where the partitioner chooses. Raises _NoSpecs if it chooses everywhere."""
    if isinstance(specs, UnspecifiedValue):
        raise _NoSpecs
    parsed = parse_spec_tree(tuple(specs) if isinstance(specs, list) else specs, "specs")
    flat = broadcast_specs(parsed, values, "specs", lambda: Values("the values", "values"))
    # The user's specs, not the parsed ones: parsing is checked as well.
    return [(spec.unsafe_user_spec or P()) if isinstance(spec, ParsedPartitionSpec) else None for spec in flat]


def _laid_out(what: str, array: object, mesh: JaxMesh, spec: P | None) -> Iterator[str]:
    if spec is None or not isinstance(array, jax.Array):
        return
    if not array.committed and not np.any(np.asarray(array)):
        return  # jax's own zeros, where nothing depends on the value
    try:
        assert_laid_out(array, mesh, spec)
    except AssertionError as error:
        yield f"{what}: {error}"


def _plain(value: ArrayLike) -> np.ndarray:
    """The values of an array; of a key its words."""
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
        value = jax.random.key_data(value)
    if 0 in np.shape(value):
        return np.empty(np.shape(value))  # jax 0.10 cannot read a sharded array without elements
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype.kind == "V" else array


def _variation(leaf: jax.Array) -> jax.Array:
    """Another value for the batch: other floats, but the same integers and flags, which may be indices."""
    return (leaf * 0.5).astype(leaf.dtype) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf


def _stacked(trees: Sequence[object]) -> Any:
    """A batch of all trees."""

    def stack(*leaves: ArrayLike) -> ArrayLike:
        arrays = [jnp.asarray(jax.device_get(leaf)) for leaf in leaves]
        is_key = jax.dtypes.issubdtype(arrays[0].dtype, jax.dtypes.extended)
        return jnp.stack(arrays) if is_key else np.stack([*map(np.asarray, arrays)])

    return jax.tree.map(stack, *trees)


@jax.jit  # one program for each type of results, and not one for each operation
def _weighted(out: jax.Array) -> jax.Array:
    """A sum that depends on each element differently."""
    weights = np.linspace(0.5, 1.5, out.size).reshape(out.shape)
    return jnp.sum(jnp.real(out).astype(jnp.float32) * weights.astype(np.float32))


def _simplest(case: _Case, problem: str) -> tuple[_Case, str]:
    """The case with as few specs and checks and as plain numbers as still fail, and its problem."""

    def attempt(**changes: object) -> None:
        nonlocal case, problem
        if all(getattr(case, name) is value for name, value in changes.items()):
            return
        candidate = dataclasses.replace(case, **changes)
        with contextlib.suppress(Exception):
            found = candidate.problem()
            if found is not None:
                case, problem = candidate, found

    # No case without gradients has a wrong derivative.
    no_gradients = {} if problem.endswith(_REMEDY) else {"grad": False}
    attempt(vmap=False, in_specs=None, out_specs=None, **no_gradients)  # most often it is none of these
    attempt(vmap=False)
    attempt(**no_gradients)
    attempt(args=jax.tree.map(canonical, case.args))
    for name in ("in_specs", "out_specs"):
        attempt(**{name: None})
        specs = getattr(case, name)
        leaves, tree = jax.tree.flatten(specs, is_leaf=lambda leaf: leaf is None or isinstance(leaf, P))
        for i in range(len(leaves)):
            if leaves[i] is not None and len(leaves) > 1:
                kept = leaves[i]
                leaves[i] = None
                before = case
                attempt(**{name: jax.tree.unflatten(tree, leaves)})
                if case is before:
                    leaves[i] = kept
    return case, problem
