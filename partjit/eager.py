"""`jax.disable_jit()`: the function of a program runs on values, operation by operation, for debugging.

The rest is as in the program: specs are checked, arguments are sharded as the in specs say and results as the out specs
say, the mesh is ambient, colocated calls are made. Nothing is donated. Tracers, as of an enclosing `jax.grad`, are left
alone.
"""

import dataclasses
import inspect
import weakref
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, cast

import jax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, Sharding

from partjit import lazy
from partjit._jax.arrays import device_put
from partjit._jax.shardings import MaybeSharding, UnspecifiedValue
from partjit._jax.tracing import abstractify
from partjit._jax.types import PyTree
from partjit.arguments import Function, flattened_results
from partjit.compile import own_sharding
from partjit.host_objects import check_returned, explaining_misuse, given
from partjit.infer import Definition, infer, out_specs_of
from partjit.mesh import auto_twin, tracing_under
from partjit.pieces.calls import NOT_LOCAL, call_locally
from partjit.primitive import shardings_of
from partjit.trace import with_static
from partjit.validate import check_devices, check_specs, raise_mismatches

if TYPE_CHECKING:
    from partjit.colocated.ir import eager
    from partjit.plan.passes import propagate
else:
    eager, propagate = lazy.module("partjit.colocated.ir.eager"), lazy.module("partjit.plan.passes.propagate")

__all__ = ["OnValues", "on_values"]


class OnValues:
    """The function of a pjit, to be called with values.

    Args:
        fun: a weak reference to the user's function, which the caller keeps alive.
        definition: what `pjit` was given with it.
    """

    def __init__(self, fun: "weakref.ref[Function]", definition: Definition) -> None:
        self._fun = fun
        self._definition = definition

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the user's function; jax's C++ function reads it."""
        return inspect.signature(cast(Any, self._fun()))

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """The result of a call."""
        if self._definition.is_local:
            of_arrays = OnValues(self._fun, dataclasses.replace(self._definition, is_local=False))
            result = call_locally(self._definition, of_arrays, args, kwargs)
            if result is not NOT_LOCAL:
                return result
        with given(self._definition.referenced(args, kwargs)[2]):
            return self._result(args, kwargs)

    def _result(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> PyTree:
        fun = self._fun()
        assert fun is not None
        known = infer(self._definition, args, kwargs)
        arguments, mesh, name = known.arguments, known.mesh, self._definition.name
        mismatches = check_specs("pjit arguments", arguments.paths, known.avals, known.in_specs, mesh)
        if self._definition.device is None:
            mismatches += check_devices(arguments.paths, arguments.leaves, known.in_specs, mesh)
        raise_mismatches(mismatches, name, mesh)
        default = propagate.default_sharding(mesh, map(own_sharding, arguments.leaves))
        shardings = shardings_of(known.in_specs, mesh)
        leaves = [_placed(leaf, s, default, mesh) for leaf, s in zip(arguments.leaves, shardings, strict=True)]
        positional, named = with_static(arguments.tree, leaves, arguments.static)
        misuse = explaining_misuse(value for _, value, _ in arguments.static)
        with eager.evaluated_with(default), tracing_under(mesh), misuse:
            result = fun(*positional, **named)
            check_returned(result, name)
            returned, paths, out_tree = flattened_results(result, name)
        results = [*map(eager.as_array, returned)]
        avals = [*map(abstractify, results)]
        out_specs = out_specs_of(self._definition, out_tree, avals)
        raise_mismatches(check_specs("pjit outputs", paths, avals, out_specs, mesh), name, mesh)
        shardings = shardings_of(out_specs, mesh)
        return out_tree.unflatten(
            [_placed(leaf, sharding, default, mesh) for leaf, sharding in zip(results, shardings, strict=True)]
        )


_made: dict[int, dict[Hashable, OnValues]] = {}


def on_values(fun: Function, definition: Definition) -> OnValues:
    """The `OnValues` of a function and a definition.

    It is by the identity of this object that jax's C++ function finds compiled calls again, so it must be the same
    when the same function is wrapped once more with an equal dispatch key, and live as long as that function.
    """
    key = definition.dispatch_key
    if id(fun) not in _made:
        weakref.finalize(fun, _made.pop, id(fun), None).atexit = False
    of_fun = _made.setdefault(id(fun), {})
    return of_fun.get(key) or of_fun.setdefault(key, OnValues(weakref.ref(fun), definition))


def _placed(value: object, sharding: MaybeSharding, default: "eager.DefaultSharding", mesh: Mesh) -> object:
    """A value with its sharding on `mesh`; with an UNSPECIFIED one a committed array keeps its own."""
    if isinstance(value, Tracer):
        return value
    value = eager.as_array(value)
    if not isinstance(value, jax.Array):  # a ref
        return value
    if isinstance(sharding, UnspecifiedValue):
        if not default.committed:
            return value
        sharding = _on(mesh, value.sharding) if value.committed else default.sharding
    is_there = value.committed and value.sharding == sharding
    return value if is_there else device_put(value, sharding)


def _on(mesh: Mesh, sharding: Sharding) -> Sharding:
    """The same sharding on `mesh`, if its own mesh differs from that only in the types of axes."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    own = cast(Mesh, sharding.mesh)
    differs = own != mesh and own.shape == mesh.shape
    return sharding.update(mesh=mesh) if differs and auto_twin(own) == auto_twin(mesh) else sharding
