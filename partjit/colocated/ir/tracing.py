"""Calls of a colocated function while a function is traced: each becomes an equation.

Its results must be known then: from `out_specs` or `out_specs_fn`, from an earlier eager call with arguments of the
same types, or because the function is annotated to return nothing, `-> None`.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.sharding import NamedSharding, Sharding

from partjit._jax.arrays import aval_of_struct
from partjit._jax.threads import has_64_bits
from partjit._jax.tracing import abstractify, type_in_program
from partjit._jax.types import PyTree, PyTreeDef
from partjit.arguments import check_results
from partjit.checks import flattened
from partjit.colocated.cache import SpecializationCache
from partjit.colocated.definition import Definition, HostFunction
from partjit.colocated.devices import replicated_beside
from partjit.colocated.ir.control_flow import install_patches
from partjit.colocated.ir.custom_derivatives import Derivatives
from partjit.colocated.ir.eager import as_array, body, call_in_body
from partjit.colocated.ir.primitive import Callee, colocated_call_p
from partjit.colocated.runtime.host_values import is_object
from partjit.colocated.runtime.in_specs import argument_paths
from partjit.colocated.runtime.pending import require_array
from partjit.colocated.runtime.spec_structs import spec_structs, struct_of
from partjit.colocated.runtime.streams import Stream, traced_stream
from partjit.host_objects import HostConstant
from partjit.typed import sharding_of_type, type_of_result

__all__ = ["TracedCalls"]


_MOST_CALLEES = 1024


class TracedCalls:
    """The calls of one colocated function in traced functions."""

    def __init__(self, definition: Definition, cache: SpecializationCache, derivatives: Derivatives | None) -> None:
        self._definition = definition
        self._cache = cache
        self._derivatives = derivatives
        self._callees: dict[tuple[PyTreeDef, tuple[ShapedArray, ...], bool], Callee] = {}

    def bind(self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> PyTree:
        """Binds a call as an equation of the function being traced.

        Raises:
            ValueError: an argument is not an array or contradicts `in_specs`; the results are unknown; or a call with
                `run_ahead` has arguments.
            TypeError: an argument cannot be passed to the rules for its derivatives.
        """
        function = self._definition.function
        with_paths, tree = flattened((args, kwargs), f"An argument of {function.name}")
        leaves = [leaf for _, leaf in with_paths]
        paths = argument_paths(function.signature, args, kwargs)
        with self.naming_overflows(leaves, args, kwargs):
            leaves = [
                HostConstant(function.name, path, leaf, is_of_function=True) if is_object(leaf) else as_array(leaf)
                for leaf, path in zip(leaves, paths, strict=True)
            ]
        for leaf, path in zip(leaves, paths, strict=True):
            if not isinstance(leaf, Tracer | HostConstant):
                require_array(leaf, lambda path=path: f"{path} of {function.name}")
        args, kwargs = jax.tree.unflatten(tree, leaves)
        if self._derivatives is None:
            return self._bind(args, kwargs)
        return self._derivatives.call(self._bind, function.name, function.signature, args, kwargs)

    @contextlib.contextmanager
    def naming_overflows(
        self, leaves: Sequence[object], args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
    ) -> Iterator[None]:
        """Names the argument whose conversion in the block fails because it is an integer of too many bits."""
        try:
            yield
        except OverflowError:
            function = self._definition.function
            check_results(leaves, argument_paths(function.signature, args, kwargs), function.name)
            raise

    def _bind(self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> PyTree:
        install_patches()
        leaves, tree = jax.tree.flatten((tuple(args), kwargs))
        paths = argument_paths(self._definition.function.signature, args, kwargs)
        avals, types = tuple(map(abstractify, leaves)), tuple(map(type_in_program, leaves))
        key = tree, types, has_64_bits()
        if len(self._callees) >= _MOST_CALLEES:  # there may be an object of its own in every call
            self._callees.clear()
        callee = self._callees.get(key)
        if callee is None:
            self._definition.check_arguments(paths, tree, args, kwargs)
            callee = self._callees[key] = self._make(tree, avals, types, paths)
        elif not callee.options.has_out_specs:  # the results of eager calls may have changed
            anew = self._make(tree, avals, types, paths)
            if callee.results != anew.results:
                callee = self._callees[key] = anew
        stream = self._definition.options.stream or traced_stream()
        return jax.tree.unflatten(callee.out_tree, colocated_call_p.bind(*leaves, callee=callee, stream=stream))

    def _make(
        self,
        tree: PyTreeDef,
        avals: tuple[ShapedArray, ...],
        types: tuple[ShapedArray, ...],
        paths: tuple[str, ...],
    ) -> Callee:
        definition, options, name = self._definition, self._definition.options, self._definition.name
        for aval, path in zip(avals, paths, strict=True):
            if not hasattr(aval, "dtype"):
                raise TypeError(
                    f"{path} of the colocated function {name} has the hijax type {type(aval).__name__}, and a function "
                    "is called with arrays in a program: give it the arrays of the value"
                )
        in_shardings: tuple[NamedSharding | None, ...] = (None,) * len(avals)
        if options.in_specs is not None:
            structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
            options.in_specs.check(structs, tree, lambda: paths, check_shardings=False)
            in_shardings = tuple(_named(spec.sharding) for spec in options.in_specs.leaves)
        seen = None if options.has_out_specs else self._cache.results_for(tree, avals)
        if seen is None and not options.has_out_specs:
            raise _unknown_results(definition.function, avals, paths)
        if seen is not None:
            results = [(type_of_result(spec.aval, None), _named(spec.sharding)) for spec in seen.leaves]
            out_tree = seen.tree
        else:
            own = [sharding or sharding_of_type(aval) for aval, sharding in zip(types, in_shardings, strict=True)]
            out_specs = options.out_specs_for(tree, [*map(struct_of, avals, own)])
            structs, out_tree = spec_structs(out_specs, f"{name}: out_specs")
            results = [
                (type_of_result(aval_of_struct(struct), struct.sharding), _named(struct.sharding)) for struct in structs
            ]
        out_avals, out_shardings = zip(*results, strict=True) if results else ((), ())
        return Callee(definition, tree, avals, in_shardings, out_tree, out_avals, out_shardings, paths, self._cache)


def _named(sharding: Sharding | None) -> NamedSharding | None:
    """The sharding in a program over a mesh; None for one on a single device, which specifies nothing there."""
    return sharding if isinstance(sharding, NamedSharding) else None


def _unknown_results(function: HostFunction, avals: Sequence[ShapedArray], paths: Sequence[str]) -> ValueError:
    given = ", ".join(f"{path}: {aval.str_short()}" for path, aval in zip(paths, avals, strict=True))
    parameters = ", ".join(function.signature.parameters) if function.signature is not None else "*args"
    return ValueError(
        f"the colocated function {function.name} is called in a function that is traced, and it is not known what it "
        f"returns for ({given}). If it returns nothing, annotate it with '-> None'; otherwise say it with out_specs= "
        f"or out_specs_fn=, for example {function.name}.specialize(out_specs_fn=lambda {parameters}: "
        "jax.ShapeDtypeStruct((8,), 'float32')), or call it once outside with arguments of these types"
    )


def _beside_committed(leaves: list[jax.Array]) -> list[jax.Array]:
    """Arguments of which those that are committed nowhere, such as what a number becomes, are put beside the others."""
    committed = [leaf.sharding for leaf in leaves if leaf.committed]
    if not committed or len(committed) == len(leaves):
        return leaves
    there = replicated_beside(committed[0])
    return [leaf if leaf.committed else jax.device_put(leaf, there) for leaf in leaves]


@colocated_call_p.def_impl
def _evaluate(*given: jax.Array | np.ndarray, callee: Callee, stream: Stream | None) -> list[jax.Array]:
    """Evaluates an equation on arrays, as an eager `jax.grad` of a function with a call does."""
    # What jax's transformations were given may be NumPy arrays, in jax's own wrapping.
    leaves = [leaf if isinstance(leaf, jax.Array) else jax.numpy.asarray(leaf) for leaf in given]
    if body.default is not None:
        return call_in_body(body.default, callee, stream, leaves)
    leaves = _beside_committed(leaves)
    args, kwargs = jax.tree.unflatten(callee.in_tree, leaves)
    specialization = callee.cache.find(callee.definition, args, kwargs, stream)
    return jax.tree.leaves(specialization(args, kwargs, leaves, False))
