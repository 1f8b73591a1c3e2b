"""From a function and the types of its arguments to a jaxpr.

Tracing is cached on the function, the types, the static arguments and the mesh, and on nothing else: two pjits of one
function with other specs share one trace, because specs do not change what the function computes.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from partjit import _compat
from partjit.mesh import tracing_under

__all__ = ["Arguments", "Trace", "abstract_arguments", "flatten_arguments", "trace"]


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of one call, taken apart.

    Attributes:
        leaves: the flat arguments that are traced.
        tree: the structure of `(args, kwargs)` without the static arguments.
        static: position or name and value of each static argument.
        paths: the key path of each leaf in terms of the function's parameters: `params['layers'][3]['w']`.
        donated: for each leaf whether its argument was donated.
    """

    leaves: list[Any]
    tree: Any
    static: tuple[tuple[int | str, Any], ...]
    paths: tuple[str, ...]
    donated: tuple[bool, ...]


def flatten_arguments(
    signature: inspect.Signature | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    static: tuple[tuple[int, ...], tuple[str, ...]],
    donate: tuple[tuple[int, ...], tuple[str, ...]],
) -> Arguments:
    """Takes the arguments of a call apart.

    Args:
        signature: the signature of the user's function, or None if it has none.
        args, kwargs: what it is called with.
        static: numbers and names of the static arguments.
        donate: numbers and names of the donated arguments, in the user's numbering.
    """
    static_numbers = positions(static[0], len(args))
    donated_numbers = positions(donate[0], len(args))
    names = _parameter_names(signature, len(args))
    dynamic = [(names[i], i in donated_numbers, arg) for i, arg in enumerate(args) if i not in static_numbers]
    dynamic_kwargs = {name: value for name, value in kwargs.items() if name not in static[1]}

    leaves: list[Any] = []
    paths: list[str] = []
    donated: list[bool] = []
    for name, is_donated, arg in [
        *dynamic,
        *((name, name in donate[1], dynamic_kwargs[name]) for name in sorted(dynamic_kwargs)),
    ]:
        for path, leaf in jax.tree_util.tree_leaves_with_path(arg):
            leaves.append(leaf)
            paths.append(name + jax.tree_util.keystr(path))
            donated.append(is_donated)
    return Arguments(
        leaves,
        jax.tree.structure((tuple(arg for _, _, arg in dynamic), dynamic_kwargs)),
        (
            *((number, args[number]) for number in sorted(static_numbers)),
            *((name, kwargs[name]) for name in sorted(static[1]) if name in kwargs),
        ),
        tuple(paths),
        tuple(donated),
    )


def positions(numbers: Sequence[int], count: int) -> set[int]:
    """The numbers of arguments, which may count from the end, as positions in a call with `count` of them."""
    return {number % count for number in numbers if -count <= number < count}


def _parameter_names(signature: inspect.Signature | None, count: int) -> list[str]:
    """The name of each positional argument in the user's function; `rest[1]` for those a `*rest` takes."""
    names: list[str] = []
    for parameter in signature.parameters.values() if signature is not None else ():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}[{i}]" for i in range(count - len(names))]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return (names + [f"args[{i}]" for i in range(len(names), count)])[:count]


def abstract_arguments(arguments: Arguments, name: str) -> tuple[Any, ...]:
    """The abstract value of each leaf; TypeError names the argument that is no array."""
    avals = []
    for path, leaf in zip(arguments.paths, arguments.leaves, strict=True):
        try:
            avals.append(_compat.abstractify(leaf))
        except TypeError:
            raise TypeError(
                f"Argument {path} of {name} is {leaf!r} of type {type(leaf).__name__}, which is not a valid JAX type: "
                "pass an array or a scalar, or mark the argument static (static_argnums, static_argnames)"
            ) from None
    return tuple(avals)


@dataclasses.dataclass(frozen=True)
class Trace:
    """A traced function.

    Attributes:
        jaxpr: the closed jaxpr of flat arguments and results, `consts` being its leading arguments.
        consts: the values of outer traces (and refs) the function closes over.
        out_tree: the structure of its result.
        out_paths: the key path of each flat result: `result['loss']`.
    """

    jaxpr: Any
    consts: list[Any]
    out_tree: Any
    out_paths: tuple[str, ...]


@_compat.weakref_cache
def trace(
    fun: Callable[..., Any],
    in_tree: Any,
    in_avals: tuple[Any, ...],
    static: tuple[tuple[int | str, Any], ...],
    arg_names: tuple[str, ...],
    source: str,
    mesh: Mesh,
) -> Trace:
    """Traces `fun` once for these types, static arguments and mesh; an exception of `fun` is not remembered."""
    out_paths: tuple[str, ...] = ()
    out_tree = None

    def flat_fun(*leaves: Any) -> list[Any]:
        nonlocal out_paths, out_tree
        args, kwargs = jax.tree.unflatten(in_tree, leaves)
        args = list(args)
        for key, value in static:
            if isinstance(key, int):
                args.insert(key, value)
            else:
                kwargs[key] = value
        leaves_out, out_tree = jax.tree_util.tree_flatten_with_path(fun(*args, **kwargs))
        out_paths = tuple("result" + jax.tree_util.keystr(path) for path, _ in leaves_out)
        return [leaf for _, leaf in leaves_out]

    with tracing_under(mesh):
        jaxpr = _compat.trace_to_jaxpr(flat_fun, in_avals, source=source, arg_names=arg_names)
    _compat.name_results(jaxpr, out_paths)
    jaxpr, consts = _compat.separate_consts(jaxpr)
    return Trace(jaxpr, consts, out_tree, out_paths)
