"""The user's function and its arguments: its name, which arguments are static or donated, and the arguments of a call
flattened, each leaf with its key path in terms of the function's parameters.
"""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from partjit._jax.tracing import abstractify, resolve_argnums
from partjit._jax.types import PyTree, PyTreeDef
from partjit.checks import abridged, flattened, items_of, require_integer, require_text, shown
from partjit.paths import paths_of
from partjit.render.numbers import counted

__all__ = [
    "Arguments",
    "Function",
    "Numbered",
    "Statics",
    "abstract_argument",
    "are_positional",
    "argument_numbers",
    "check_call",
    "check_callable",
    "check_names",
    "check_numbers",
    "check_results",
    "code_of",
    "flatten_arguments",
    "flattened_results",
    "host_argument_numbers",
    "known_paths",
    "name_of",
    "parameter_names",
    "positions",
    "require_values",
    "signature_of",
    "source_of",
]

Function: TypeAlias = Callable[..., PyTree]
"""A function of the user's."""

Numbered: TypeAlias = tuple[tuple[int, ...], tuple[str, ...]]
"""Numbers and names of some of the arguments of a function, in the user's numbering."""

Statics: TypeAlias = tuple[tuple[int | str, Hashable, type], ...]
"""Static arguments of a call, each with its number or name."""


def check_callable(fun: object) -> None:
    """Raises TypeError if `fun` is not callable or a generator function."""
    if not callable(fun):
        raise TypeError(f"Expected a callable value, got {shown(fun)}")
    if inspect.isgeneratorfunction(fun):
        raise TypeError(f"Expected a function, got a generator function: {shown(fun)}")


def signature_of(fun: Function) -> inspect.Signature | None:
    """The signature of `fun`, or None if it has none."""
    try:
        return inspect.signature(fun)
    except (ValueError, TypeError):
        return None  # some builtins have none


_Given: TypeAlias = tuple[tuple[int, ...] | None, tuple[str, ...] | None]


def argument_numbers(
    fun: Function, signature: inspect.Signature | None, static: _Given, donate: _Given
) -> tuple[Numbered, Numbered]:
    """The (numbers, names) of static and of donated arguments that the user gave, completed from the signature.

    Args:
        fun: the user's function.
        signature: its signature, or None if it has none.
        static, donate: the pairs, as `check_numbers` and `check_names` give them.

    Raises:
        ValueError: a number or a name is not in the signature, or an argument is both static and donated.
    """

    def given(numbers: tuple[int, ...] | None, names: tuple[str, ...] | None) -> _Given:
        # No numbers and some names means: find the numbers. Only None says "no numbers" to jax.
        return (numbers or None) if names is not None else numbers, names

    static_given, donate_given = given(*static), given(*donate)
    for kind, (numbers, names) in (("static", static_given), ("donate", donate_given)):
        _check_signature(fun, signature, kind, numbers or (), names or ())
    both = set(static_given[0] or ()) & set(donate_given[0] or ())
    if both:
        raise ValueError(
            f"static_argnums {static_given[0]} and donate_argnums {donate_given[0]} cannot intersect: "
            f"{sorted(both)} are in both, and a static argument has no buffer to give away"
        )
    donate_numbers, donate_names, static_numbers, static_names = resolve_argnums(
        fun, signature, donate_given, static_given
    )
    return (tuple(static_numbers), tuple(static_names)), (tuple(donate_numbers), tuple(donate_names))


def host_argument_numbers(
    fun: Function, signature: inspect.Signature | None, host: _Given, others: Mapping[str, Numbered]
) -> Numbered:
    """The (numbers, names) of host arguments that the user gave, completed from the signature.

    Args:
        fun: the user's function.
        signature: its signature, or None if it has none.
        host: the pair, as `check_numbers` and `check_names` give it.
        others: those of other arguments, which must be others, by what they are.

    Raises:
        ValueError: a number or a name is not in the signature, or one of an argument that is something else as well.
    """
    numbers, names = host
    _check_signature(fun, signature, "host", numbers or (), names or ())
    given = (numbers or None if names is not None else numbers), names
    *_, found_numbers, found_names = resolve_argnums(fun, signature, ((), None), given)
    for what, (their_numbers, their_names) in others.items():
        both = [*({*found_numbers} & {*their_numbers}), *({*found_names} & {*their_names})]
        if both:
            raise ValueError(f"pjit: {abridged(both[0])} names a host argument, which cannot be {what} as well")
    return tuple(found_numbers), tuple(found_names)


def check_numbers(where: str, option: str, given: object) -> tuple[int, ...]:
    """The numbers of arguments, of which one may be given by itself; None is none. TypeError if they are no numbers."""
    if given is None:
        return ()
    if isinstance(given, int | np.integer):
        return (require_integer(where, option, given),)
    numbers = items_of(where, option, given, "the number of an argument, or a sequence of such numbers")
    return tuple(require_integer(where, f"{option}[{i}]", number) for i, number in enumerate(numbers))


def check_names(where: str, option: str, given: object) -> tuple[str, ...] | None:
    """The names of arguments, of which one may be given by itself. TypeError if they are no names."""
    if given is None or isinstance(given, str):
        return None if given is None else (given,)
    names = items_of(where, option, given, "the name of an argument, or a sequence of such names")
    return tuple(require_text(where, f"{option}[{i}]", name, "the name of an argument") for i, name in enumerate(names))


def _check_signature(
    fun: Function, signature: inspect.Signature | None, kind: str, numbers: Sequence[int], names: Sequence[str]
) -> None:
    """Raises ValueError for a number or name of a static or donated argument that the function lacks."""
    if signature is None:
        return
    parameters = [*signature.parameters.values()]
    kinds = {p.kind for p in parameters}
    count = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    wrong = [number for number in numbers if not -count <= number < count]
    if wrong and inspect.Parameter.VAR_POSITIONAL not in kinds:
        raise ValueError(
            f"pjit: {kind}_argnums names the argument number {wrong[0]}, but {name_of(fun)} takes "
            f"{counted(count, 'positional argument')}" + (f": give numbers from 0 to {count - 1}" if count else "")
        )
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unknown = [name for name in names if name not in known]
    if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
        there = f"those that can be named are {', '.join(known)}" if known else "none of its arguments can be named"
        raise ValueError(
            f"pjit: {kind}_argnames names the argument {abridged(unknown[0])}, which {name_of(fun)} lacks: {there}"
        )


def name_of(fun: Function) -> str:
    """The name of `fun`, through any `functools.partial`."""
    while isinstance(fun, functools.partial) and not hasattr(fun, "__name__"):
        fun = fun.func
    return getattr(fun, "__name__", type(fun).__name__)


def source_of(fun: Function) -> str:
    """The name of `fun` and where it is, for the debug information of its jaxpr."""
    code = code_of(fun)
    return f"{name_of(fun)} at {code.co_filename}:{code.co_firstlineno}" if code is not None else name_of(fun)


def code_of(fun: Function) -> types.CodeType | None:
    """The code of `fun`, through wrappers that say what they wrap and any `functools.partial`; None without one."""
    inner = inspect.unwrap(fun)
    while isinstance(inner, functools.partial):
        inner = inspect.unwrap(inner.func)
    return getattr(inner, "__code__", None)


def check_call(
    name: str,
    signature: inspect.Signature | None,
    static: Numbered,
    donate: Numbered,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
) -> None:
    """Checks that a call has the arguments that are needed, and that static ones are hashable.

    Raises:
        ValueError: there are fewer positional arguments than static and donated ones need, or a static argument is not
            hashable.
    """
    # A number that counts from the end is needed as well: `*args` may be empty.
    needed = [number for number in (*static[0], *donate[0]) if not -len(args) <= number < len(args)]
    parameters = list(signature.parameters.values()) if signature else []
    for number in needed:
        parameter = parameters[number] if 0 <= number < len(parameters) else None
        if parameter is not None and (parameter.name in kwargs or parameter.default is not parameter.empty):
            continue
        raise ValueError(
            f"pjitted function {name} has static_argnums={static[0]}, "
            f"donate_argnums={donate[0]} but was called with only "
            f"{counted(len(args), 'positional argument')}"
        )
    for number in static[0]:
        if -len(args) <= number < len(args):
            _check_hashable(args[number], f"number {number}", name)
    for key in static[1]:
        if key in kwargs:
            _check_hashable(kwargs[key], key, name)


def _check_hashable(value: object, which: str, name: str) -> None:
    try:
        hash(value)
    except TypeError:
        raise ValueError(
            f"Non-hashable static arguments are not supported: static argument {which} of {name} is of type "
            f"{type(value).__name__}. Static arguments must be hashable, since calls are cached on them"
        ) from None


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The flattened arguments of a call.

    Attributes:
        leaves: the flat arguments that are traced.
        tree: the structure of `(args, kwargs)` without the static arguments.
        static: position or name, value and type of each static argument: `1`, `True` and `1.0` are equal.
        paths: the key path of each leaf in terms of the function's parameters: `params['layers'][3]['w']`.
        donated: for each leaf whether its argument was donated.
    """

    leaves: list[object]
    tree: PyTreeDef
    static: Statics
    paths: tuple[str, ...]
    donated: tuple[bool, ...]


def are_positional(tree: PyTreeDef) -> bool:
    """Whether arguments of this structure are leaves given by position, so that they need not be flattened."""
    return tree == jax.tree.structure(((0,) * tree.num_leaves, {}))


def flatten_arguments(
    signature: inspect.Signature | None,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    static: Numbered,
    donate: Numbered,
) -> Arguments:
    """Flattens the arguments of a call.

    Args:
        signature: the signature of the user's function, or None if it has none.
        args, kwargs: what it is called with.
        static: numbers and names of the static arguments.
        donate: numbers and names of the donated arguments, in the user's numbering.
    """
    static_numbers = positions(static[0], len(args))
    donated_numbers = positions(donate[0], len(args))
    names = parameter_names(signature, len(args))
    dynamic = [(names[i], i in donated_numbers, arg) for i, arg in enumerate(args) if i not in static_numbers]
    dynamic_kwargs = {name: value for name, value in kwargs.items() if name not in static[1]}

    each = [*dynamic, *((name, name in donate[1], dynamic_kwargs[name]) for name in sorted(dynamic_kwargs))]
    own = [arg for _, _, arg in each]
    try:
        leaves, tree = jax.tree_util.tree_flatten((tuple(own[: len(dynamic)]), dynamic_kwargs))
    except ValueError:  # which this says of the argument
        for name, _, arg in each:
            flattened(arg, f"Argument {name}")
        raise
    paths, counts = paths_of(tree, tuple([name for name, _, _ in each]), own)
    donated = [flag for (_, flag, _), count in zip(each, counts, strict=True) for _ in range(count)]
    return Arguments(
        leaves,
        tree,
        (
            *((number, args[number], type(args[number])) for number in sorted(static_numbers)),
            *((name, kwargs[name], type(kwargs[name])) for name in sorted(static[1]) if name in kwargs),
        ),
        paths,
        tuple(donated),
    )


def known_paths(paths: object, count: int, otherwise: str) -> list[str]:
    """The paths that debug information has of arguments or results; `otherwise`, with its number, where it has none."""
    known = paths if isinstance(paths, tuple | list) and len(paths) == count else [""] * count
    return [path or otherwise.format(i) for i, path in enumerate(known)]


def positions(numbers: Sequence[int], count: int) -> set[int]:
    """The numbers of arguments, which may count from the end, as positions in a call with `count` of them."""
    return {number % count for number in numbers if -count <= number < count}


def parameter_names(signature: inspect.Signature | None, count: int) -> list[str]:
    """The name of each positional argument in the user's function; `rest[1]` for those a `*rest` takes."""
    names: list[str] = []
    for parameter in signature.parameters.values() if signature is not None else ():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}[{i}]" for i in range(count - len(names))]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return (names + [f"args[{i}]" for i in range(len(names), count)])[:count]


def abstract_argument(leaf: object, path: str, name: str) -> Any:
    """The abstract value of a leaf; TypeError, or OverflowError, names an argument that is neither array nor number."""
    try:
        aval = abstractify(leaf)
    except OverflowError:  # of a Python int
        raise OverflowError(
            f"Argument {path} of {name} is {shown(leaf)}, which does not fit {_int_dtype()}: pass an array of a dtype "
            "that has room for it, enable 64-bit integers with jax.enable_x64(True), or mark the argument static"
        ) from None
    except (TypeError, ValueError):  # a ValueError for objects with another kind of `shape` and `dtype`
        aval = None
    # jax takes scalars of NumPy whatever their dtype is.
    if aval is None or (isinstance(leaf, np.generic) and leaf.dtype.kind in "mMOSU"):
        remedies = (
            "pass an array or a scalar, or mark the argument static (static_argnums, static_argnames) or, if only "
            "colocated calls get it, as one of the host (host_argnums, host_argnames)"
        )
        if not path.isidentifier():  # a leaf of a tree: of a module, often
            remedies += ", or pass only the arrays of the tree and add the rest inside (equinox.partition, combine)"
        raise TypeError(f"Argument {path} of {name} is {shown(leaf)}, which is not a valid JAX type: {remedies}")
    return aval


def require_values(leaves: Sequence[object], paths: Sequence[str], name: str) -> None:
    """Raises TypeError for an argument that is only a type, in a call that is executed."""
    for leaf, path in zip(leaves, paths, strict=True):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(
                f"Argument {path} of {name} is {shown(leaf)}, which has no value to compute with: pass an array, or "
                "use lower or eval_shape, for which the type is enough"
            )


def _int_dtype() -> np.dtype:
    return jax.dtypes.canonicalize_dtype(np.int64)


def flattened_results(result: PyTree, name: str) -> tuple[list[object], tuple[str, ...], PyTreeDef]:
    """What a function returned: flat, checked by `check_results`, with the key path of each leaf and the structure."""
    with_paths, tree = flattened(result, f"The result of {name}")
    leaves = [leaf for _, leaf in with_paths]
    paths = tuple("result" + jax.tree_util.keystr(path) for path, _ in with_paths)
    check_results(leaves, paths, name)
    return leaves, paths, tree


def check_results(leaves: Sequence[object], paths: Sequence[str], name: str) -> None:
    """Raises TypeError, or OverflowError, for what a function returned that is neither an array nor a number."""
    for leaf, path in zip(leaves, paths, strict=True):
        if isinstance(leaf, jax.Array):
            continue
        try:
            abstractify(leaf)
        except OverflowError:
            raise OverflowError(f"{path} of {name} is {shown(leaf)}, which does not fit {_int_dtype()}") from None
        except (TypeError, ValueError):
            raise TypeError(
                f"{path} of {name} is {shown(leaf)}, which is not a valid JAX type: return arrays and numbers, in a "
                "tree if need be"
            ) from None
