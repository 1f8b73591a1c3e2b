"""`pjit`: ties the stages together.

specs -> parse -> validate -> trace -> compile -> dispatch; each stage is a module of its own, and nothing else is here.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from partjit import _compat, rules
from partjit._compat import UNSPECIFIED, UnspecifiedValue, core
from partjit.arguments import (
    Arguments,
    Numbered,
    abstract_arguments,
    argument_numbers,
    check_call,
    check_callable,
    check_names,
    check_numbers,
    flatten_arguments,
    name_of,
    signature_of,
    source_of,
)
from partjit.checks import require, require_flag
from partjit.compile import Program, Traced
from partjit.dispatch import CacheMiss, make_function
from partjit.eager import Inferred, OnValues, on_values
from partjit.errors import ShardingError
from partjit.mesh import ambient_mesh, program_mesh
from partjit.plan.ir.flat import has_calls
from partjit.plan.plan import Plan
from partjit.plan.run.stages import PlannedTraced
from partjit.spec import FROM_ARRAY, ParsedPartitionSpec, parse_spec_tree
from partjit.structs import is_abstract, on_devices, require_devices
from partjit.trace import trace
from partjit.trees import broadcast_specs
from partjit.validate import Failure, check_devices, check_specs, raise_failures, require_mesh

__all__ = ["pjit"]

del rules  # imported to register the rules of the primitives


@dataclasses.dataclass(frozen=True, eq=False)
class _Definition:
    """What `pjit` was given besides the function, checked as far as that goes without a call.

    It is part of the keys of caches that must not keep the function.

    Attributes:
        name: what the program is called.
        source: where the function is, for the jaxpr's debug information.
        signature: the function's signature, or None if it has none.
        in_name, out_name: what the user called the spec trees.
        in_specs, out_specs: the parsed spec trees.
        static, donate: (numbers, names) of static and donated arguments in the user's numbering.
        keep_unused: see `Program`.
    """

    name: str
    source: str
    signature: inspect.Signature | None
    in_name: str
    out_name: str
    in_specs: Any
    out_specs: Any
    static: Numbered
    donate: Numbered
    keep_unused: bool

    @property
    def dispatch_key(self) -> tuple[Any, ...]:
        """What must be equal for two pjits of one function to share compiled calls.

        The length of a spec counts here, unlike in its equality: P() and P(None) mean the same, but only one of them
        may stand for a scalar.
        """
        in_leaves, in_tree = jax.tree.flatten(self.in_specs)
        out_leaves, out_tree = jax.tree.flatten(self.out_specs)
        leaves = [*in_leaves, *out_leaves]
        ranks = tuple(len(leaf) if isinstance(leaf, ParsedPartitionSpec) else -1 for leaf in leaves)
        names = (self.name, self.in_name, self.out_name)
        return (tuple(leaves), in_tree, out_tree, ranks, names, self.static, self.donate, self.keep_unused)


class _Methods:
    """What a function made by `pjit` can do besides being called: stop at an earlier stage."""

    def __init__(self, fun: Callable[..., Any], definition: _Definition) -> None:
        self._fun = fun
        self._definition = definition

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """Traces and validates a call with these arguments (`jax.ShapeDtypeStruct` will do) without executing it."""
        program, leaves = _infer(self._fun, self._definition, args, kwargs)
        return (PlannedTraced if has_calls(program.jaxpr.jaxpr) else Traced)(program, leaves)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """What a call with these arguments does: which fragments are dispatched and which colocated calls are made, in
        which order. Nothing is compiled or executed.
        """
        return PlannedTraced(*_infer(self._fun, self._definition, args, kwargs)).plan

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Traces and lowers a call with these arguments; `.compile()` of the result gives a `jax.stages.Compiled`."""
        return self.trace(*args, **kwargs).lower()

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """A tree like the result, of `jax.ShapeDtypeStruct` with the shardings the out specs promise."""
        return self.trace(*args, **kwargs).out_info

    def forget(self) -> None:
        """Empties the caches of traces and programs of the function."""
        trace.evict_weakref(self._fun)
        _program.evict_weakref(self._fun)


def pjit(
    fun: Callable[..., Any] | None = None,
    in_axis_resources: Any = UNSPECIFIED,
    out_axis_resources: Any = UNSPECIFIED,
    static_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
    *,
    in_shardings: Any = UNSPECIFIED,
    out_shardings: Any = UNSPECIFIED,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    keep_unused: bool = False,
    name: str | None = None,
) -> Any:
    """Compiles `fun` into one program partitioned over a mesh.

    The mesh is the ambient one of each call: that of `with mesh:` or `set_mesh`. An argument that is not yet placed as
    its spec says is placed so: silently if it is a NumPy array, a scalar or uncommitted, with a `ReshardWarning` if it
    is a committed array on the same devices (see `reshard_policy`).

    Args:
        fun: a function of pytrees of arrays. Left out, `pjit(...)` is a decorator.
        in_axis_resources: how the arguments are laid out: a tree prefix of the tuple of positional arguments (without
            the static ones), with leaves

            * `PartitionSpec`: per dimension, the mesh axes that divide it;
            * None: replicated over the mesh;
            * `NamedSharding`: brings its own mesh;
            * `UNSPECIFIED` (the default): the partitioner chooses; a committed array stays as it is;
            * `FROM_ARRAY`: as the committed array that is passed.
        out_axis_resources: how the results are laid out, a tree prefix of the result with leaves as above but
            `FROM_ARRAY`. What it says is what the results have.
        static_argnums: numbers of arguments that are compile-time constants; they must be hashable.
        donate_argnums: numbers of arguments whose buffers the program may reuse; they are gone after the call.
        in_shardings, out_shardings: today's names of `in_axis_resources` and `out_axis_resources`.
        static_argnames, donate_argnames: the same as the numbers, by name.
        keep_unused: pass arguments that `fun` does not read to the executable all the same.
        name: what the program is called, `fun.__name__` by default.

    Returns:
        A function like `fun`, with the methods `trace`, `plan`, `lower`, `eval_shape` and `clear_cache`. Keyword
        arguments are accepted if the in specs are UNSPECIFIED or FROM_ARRAY throughout: others describe positional
        ones.

    Raises:
        TypeError: `fun` is not callable, a leaf is no spec, or an option is of a wrong type.
        ValueError: a spec is wrong by itself (an axis used twice), old and new names are mixed, static and donated
            arguments intersect, or one of them is none that `fun` has.

        When called: `ShardingError` (a ValueError) listing every spec that does not fit its value or the mesh, and
        `MissingMeshError` where a spec needs a mesh and none is set.

    Example:
        >>> import jax.numpy as jnp
        >>> from partjit import Mesh, P
        >>> @pjit(in_axis_resources=(P("data"), None), out_axis_resources=P("data"))
        ... def affine(x, w):
        ...     return x @ w
        >>> with Mesh(jax.devices(), "data"):
        ...     y = affine(jnp.ones((16, 4)), jnp.ones((4, 2)))
        >>> y.sharding.spec, y.addressable_shards[0].data.shape
        (P('data',), (2, 2))

    Source: `jax.experimental.pjit.pjit` as of jax 0.2.26, the classic positional order included.
    """
    static_argnums = check_numbers("pjit", "static_argnums", static_argnums)
    donate_argnums = check_numbers("pjit", "donate_argnums", donate_argnums)
    static_argnames = check_names("pjit", "static_argnames", static_argnames)
    donate_argnames = check_names("pjit", "donate_argnames", donate_argnames)
    keep_unused = require_flag("pjit", "keep_unused", keep_unused)
    require("pjit", "name", name, str | None, "the name of the program, a str, or None")
    if fun is None:
        return functools.partial(
            pjit,
            in_axis_resources=in_axis_resources,
            out_axis_resources=out_axis_resources,
            static_argnums=static_argnums,
            donate_argnums=donate_argnums,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            static_argnames=static_argnames,
            donate_argnames=donate_argnames,
            keep_unused=keep_unused,
            name=name,
        )
    check_callable(fun)
    in_name, in_tree = _one_of("in_axis_resources", in_axis_resources, "in_shardings", in_shardings)
    out_name, out_tree = _one_of("out_axis_resources", out_axis_resources, "out_shardings", out_shardings)
    signature = signature_of(fun)
    static, donate = argument_numbers(
        fun, signature, (static_argnums, static_argnames), (donate_argnums, donate_argnames)
    )
    definition = _Definition(
        name or name_of(fun),
        source_of(fun),
        signature,
        in_name,
        out_name,
        # A list of in specs is meant as the argument list; arguments come in a tuple.
        parse_spec_tree(tuple(in_tree) if isinstance(in_tree, list) else in_tree, in_name),
        parse_spec_tree(out_tree, out_name),
        static,
        donate,
        keep_unused,
    )
    cache_miss = CacheMiss(fun, definition.name, functools.partial(_infer, fun, definition), static)
    methods = _Methods(fun, definition)
    known, out_specs = functools.partial(_known, definition), functools.partial(_out_specs, definition)
    key = definition.dispatch_key
    return make_function(
        fun,
        on_values(fun, key, lambda weak: OnValues(weak, definition.name, known, out_specs)),
        definition.name,
        cache_miss,
        (static, donate),
        key,
        {"trace": methods.trace, "plan": methods.plan, "lower": methods.lower, "eval_shape": methods.eval_shape},
        methods.forget,
    )


def _infer(
    fun: Callable[..., Any], definition: _Definition, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Program, list[Any]]:
    """The program of a call, and its flat arguments."""
    known = _known(definition, args, kwargs)
    arguments, in_specs, mesh = known.arguments, known.in_specs, known.mesh
    donated = arguments.donated if not _compat.results_are_checked() else (False,) * len(arguments.donated)
    outcome = _program(
        fun, definition, arguments.tree, known.avals, arguments.static, arguments.paths, in_specs, donated, mesh
    )
    failures = [] if isinstance(outcome, Program) else outcome
    raise_failures(
        [*failures, *check_devices(arguments.paths, arguments.leaves, in_specs, mesh)], definition.name, mesh
    )
    return outcome, arguments.leaves


def _known(definition: _Definition, args: Sequence[Any], kwargs: dict[str, Any]) -> Inferred:
    """What is known of a call before the function is traced."""
    check_call(definition.name, definition.signature, definition.static, definition.donate, args, kwargs)
    _check_keywords(definition, kwargs)
    arguments = flatten_arguments(definition.signature, args, kwargs, definition.static, definition.donate)
    arguments = on_devices(arguments, ambient_mesh())
    avals = abstract_arguments(arguments, definition.name)
    in_specs = _in_specs(definition, arguments)
    out_leaves = jax.tree.leaves(definition.out_specs)
    parsed = [spec for spec in (*in_specs, *out_leaves) if isinstance(spec, ParsedPartitionSpec)]
    mesh = program_mesh(
        [spec.mesh for spec in parsed if spec.mesh is not None] if parsed else _meshes_of_arrays(arguments.leaves),
        has_bare_specs=any(spec.mesh is None for spec in parsed),
    )
    require_mesh(mesh, parsed, "pjit", definition.name)
    arguments = on_devices(arguments, mesh)
    require_devices(arguments, in_specs, definition.name, mesh)
    return Inferred(arguments, avals, in_specs, mesh)


@_compat.weakref_cache
def _program(
    fun: Callable[..., Any],
    definition: _Definition,
    in_tree: Any,
    avals: tuple[Any, ...],
    static: tuple[tuple[int | str, Any], ...],
    paths: tuple[str, ...],
    in_specs: tuple[Any, ...],
    donated: tuple[bool, ...],
    mesh: Mesh,
) -> Program | list[Failure]:
    """The program of a call, or all that is wrong with its specs."""
    failures = check_specs("pjit arguments", paths, avals, in_specs, mesh)
    try:
        traced = trace(fun, in_tree, avals, static, paths, definition.source, mesh)
    except Exception:
        if failures:  # most likely the reason
            return failures
        raise
    out_specs = _out_specs(definition, traced.out_tree, traced.jaxpr.out_avals)
    failures += check_specs("pjit outputs", traced.out_paths, traced.jaxpr.out_avals, out_specs, mesh)
    if failures:
        return failures
    consts = len(traced.consts)
    return Program(
        traced.jaxpr,
        traced.consts,
        (*[UNSPECIFIED] * consts, *in_specs),
        out_specs,
        mesh,
        (*[False] * consts, *donated),
        definition.name,
        definition.keep_unused,
        in_tree,
        traced.out_tree,
        paths,
    )


def _in_specs(definition: _Definition, arguments: Arguments) -> tuple[Any, ...]:
    """One spec per flat argument; FROM_ARRAY is replaced by the array's."""
    specs = definition.in_specs
    if isinstance(specs, UnspecifiedValue) or specs is FROM_ARRAY:
        flat = [specs] * len(arguments.leaves)
    else:
        positional, _ = jax.tree.unflatten(arguments.tree, arguments.leaves)
        flat = broadcast_specs(specs, positional, definition.in_name, single_argument=len(positional) == 1)
    return tuple(
        _spec_of_array(leaf, path, definition.in_name) if spec is FROM_ARRAY else spec
        for spec, leaf, path in zip(flat, arguments.leaves, arguments.paths, strict=True)
    )


def _meshes_of_arrays(leaves: Sequence[Any]) -> list[Any]:
    """The meshes on which arrays lie that stay as they are, where nothing else says which mesh the program is for.

    Those of the shape of the ambient mesh are left out: it is they that are on it.
    """
    ambient = ambient_mesh()
    return [
        leaf.sharding.mesh
        for leaf in leaves
        if isinstance(leaf, jax.Array)
        and not isinstance(leaf, core.Tracer)
        and isinstance(leaf.sharding, jax.sharding.NamedSharding)
        and not ambient.empty
        and leaf.sharding.mesh.shape != ambient.shape
        and leaf.sharding.device_set == {*ambient.devices.flat}
    ]


def _spec_of_array(leaf: Any, path: str, in_name: str) -> Any:
    if isinstance(leaf, core.Tracer):
        return UNSPECIFIED  # the enclosing program decides where its values are
    if is_abstract(leaf):
        return UNSPECIFIED  # its devices are those of the program, if there is one
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
    return UNSPECIFIED  # a committed array stays as it is


def _out_specs(definition: _Definition, out_tree: Any, out_avals: Sequence[Any]) -> tuple[Any, ...]:
    specs = definition.out_specs
    if isinstance(specs, UnspecifiedValue):
        return (specs,) * len(out_avals)
    return tuple(broadcast_specs(specs, jax.tree.unflatten(out_tree, out_avals), definition.out_name))


def _check_keywords(definition: _Definition, kwargs: dict[str, Any]) -> None:
    dynamic = [name for name in kwargs if name not in definition.static[1]]
    specs = definition.in_specs
    if dynamic and not isinstance(specs, UnspecifiedValue) and specs is not FROM_ARRAY:
        raise ValueError(
            f"pjit does not support kwargs when {definition.in_name} is specified: its specs are for positional "
            f"arguments, and {definition.name} was called with {', '.join(f'{name}=' for name in dynamic)}. Pass "
            f"{'it' if len(dynamic) == 1 else 'them'} by position, or leave {definition.in_name} out"
        )


def _one_of(old_name: str, old: Any, new_name: str, new: Any) -> tuple[str, Any]:
    if isinstance(new, UnspecifiedValue):
        return old_name, old
    if isinstance(old, UnspecifiedValue):
        return new_name, new
    raise ValueError(f"pjit got both {old_name} and {new_name}, which are two names of the same thing: give one")
