"""In specs over the arguments of a call: one spec for each array."""

import functools
import inspect
from collections.abc import Sequence

import jax
from jax.core import Tracer

from partjit._jax.shardings import UNSPECIFIED, UnspecifiedValue
from partjit._jax.types import PyTree
from partjit.arguments import Arguments, parameter_names
from partjit.auto_specs import Auto
from partjit.errors import ShardingError
from partjit.mesh import ambient_mesh
from partjit.render.numbers import counted
from partjit.signatures import misfit
from partjit.spec import FROM_ARRAY, ParsedPartitionSpec, Spec
from partjit.structs import is_abstract
from partjit.trees import Values, broadcast_specs

__all__ = ["spec_of_array", "specs_of_arguments"]


def specs_of_arguments(
    specs: PyTree, in_name: str, arguments: Arguments, name: str, signature: inspect.Signature | None
) -> tuple[Spec | Auto, ...]:
    """One spec per flat argument; FROM_ARRAY is replaced by the array's.

    Args:
        specs: the parsed spec tree.
        in_name: what the user called it.
        arguments: the arguments of the call.
        name: the name of the function.
        signature: its signature, or None if it has none.

    Raises:
        ShardingError: `specs` is no tree prefix of the arguments, or an argument whose spec is FROM_ARRAY has no
            sharding.
        TypeError: there are specs for another number of arguments, and the function does not take this one.
    """
    if isinstance(specs, UnspecifiedValue | ParsedPartitionSpec | Auto) or specs is FROM_ARRAY:
        flat = [specs] * len(arguments.leaves)
    else:
        positional, _ = jax.tree.unflatten(arguments.tree, arguments.leaves)
        try:
            named = functools.partial(_named, arguments, len(positional), name, signature)
            flat = broadcast_specs(specs, positional, in_name, named)
        except ShardingError:
            _check_count(specs, in_name, positional, arguments, name, signature)
            raise
    return tuple(
        spec_of_array(leaf, path, in_name) if spec is FROM_ARRAY else spec
        for spec, leaf, path in zip(flat, arguments.leaves, arguments.paths, strict=True)
    )


def _named(arguments: Arguments, count: int, name: str, signature: inspect.Signature | None) -> Values:
    """How messages name the tuple of the arguments of a call that have specs, of which there are `count`."""
    untraced = [key for key, _, _ in arguments.static if isinstance(key, int)]
    names = parameter_names(signature, count + len(untraced))
    which = "the traced arguments" if untraced else "the arguments"
    others = ", ".join(names[i] for i in sorted(untraced))
    beside = f"; static and host arguments, here {others}, have no specs" if untraced else ""
    return Values(f"{which} of {name}", [name for i, name in enumerate(names) if i not in untraced], beside)


def _check_count(
    specs: PyTree,
    in_name: str,
    positional: Sequence[PyTree],
    arguments: Arguments,
    name: str,
    signature: inspect.Signature | None,
) -> None:
    """Raises TypeError if specs are for another number of arguments, which the function does not take.

    A signature alone says too little: a wrapper may have that of what it wraps, and take other arguments.
    """
    if not isinstance(specs, tuple) or len(specs) == len(positional):
        return
    untraced = [key for key, _, _ in arguments.static]
    count = len(positional) + sum(isinstance(key, int) for key in untraced)
    named = {key: None for key in untraced if isinstance(key, str)}
    problem = misfit(name, signature, [None] * count, named)
    if problem is not None:
        raise TypeError(f"{problem}; {in_name} has specs for {counted(len(specs), 'argument')}") from None


def spec_of_array(leaf: object, path: str, in_name: str) -> Spec:
    """The spec of an argument that keeps its own sharding; UNSPECIFIED where that is found otherwise.

    Raises:
        ShardingError: it has no sharding of its own.
    """
    if isinstance(leaf, Tracer):
        return UNSPECIFIED  # its sharding is up to the enclosing program
    if is_abstract(leaf):
        return UNSPECIFIED  # its devices are those of the program's mesh, if there is one
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or not getattr(leaf, "committed", True):
        kind = "an uncommitted array" if isinstance(leaf, jax.Array) else f"a {type(leaf).__name__}"
        raise ShardingError(
            f"{in_name} of {path} cannot be `pjit.FROM_GDA` (FROM_ARRAY), because {path} is {kind}, which has no "
            "sharding of its own to take: place it with jax.device_put, or give a PartitionSpec"
        )
    mesh = ambient_mesh()
    if isinstance(sharding, jax.sharding.NamedSharding) and (mesh.empty or sharding.device_set == {*mesh.devices.flat}):
        return ParsedPartitionSpec.from_user_input(sharding, in_name)
    return UNSPECIFIED  # a committed array keeps its sharding
