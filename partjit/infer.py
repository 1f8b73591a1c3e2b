"""What a call needs to know before it runs: its arguments, their specs, its mesh, and the traced, validated program.

Plain functions of a definition (what `pjit` was given) and the arguments of a call. `dispatch` uses the program,
`eager` what is known without a trace.
"""

import dataclasses
import functools
import inspect
from collections.abc import Hashable, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.core import AbstractValue, ShapedArray, Tracer
from jax.sharding import Mesh

from partjit import lazy, rules
from partjit._jax.caches import weakref_cache
from partjit._jax.dispatch import results_are_checked
from partjit._jax.shardings import UNSPECIFIED, UnspecifiedValue
from partjit._jax.tracing import transformed
from partjit._jax.types import Device, PyTree, PyTreeDef
from partjit.argument_specs import spec_of_array, specs_of_arguments
from partjit.arguments import Arguments, Function, Numbered, Statics, abstract_argument, check_call, flatten_arguments
from partjit.auto_specs import DEFAULT_SEARCH, Auto, SearchOptions
from partjit.compile import Program
from partjit.errors import MissingMeshError
from partjit.host_objects import HostReference, referenced
from partjit.mesh import (
    ambient_mesh,
    ambient_or_abstract_mesh,
    describe_mesh,
    has_explicit_axes,
    program_mesh,
)
from partjit.spec import FROM_ARRAY, ParsedPartitionSpec, Spec
from partjit.structs import abstract_mesh_of, on_devices, require_devices, with_devices_of
from partjit.trace import trace
from partjit.trees import Values, broadcast_specs
from partjit.typed import own_type, requested_type, with_result_types
from partjit.validate import Mismatch, check_captured_refs, check_devices, check_specs, raise_mismatches, require_mesh

__all__ = ["Definition", "Inferred", "forget", "infer", "infer_program", "out_specs_of"]

del rules  # imported to register the rules of the primitives

_searching: Any = lazy.module("partjit.search.auto")  # a reader of programs, which is asked where a spec is AUTO


@dataclasses.dataclass(frozen=True, eq=False)
class Definition:
    """What `pjit` was given besides the function, checked as far as possible without a call.

    It is part of the keys of caches that must not keep the function alive.

    Attributes:
        name: the name of the program.
        source: where the function is, for the jaxpr's debug information.
        signature: the function's signature, or None if it has none.
        in_name, out_name: what the user called the spec trees.
        in_specs, out_specs: the parsed spec trees.
        static, donate: (numbers, names) of static and donated arguments in the user's numbering.
        keep_unused: see `Program`.
        host: (numbers, names) of host arguments.
        device: the device that arguments are moved to and that results are on, or the name of its platform; None for
            that of the mesh or of the arguments.
        inline: whether a call in a trace becomes the equations of the function.
        agree: see `Program`.
        is_local: whether each process passes and receives its own pieces of arrays.
        search: how specs are searched where they are AUTO.
    """

    name: str
    source: str
    signature: inspect.Signature | None
    in_name: str
    out_name: str
    in_specs: PyTree
    out_specs: PyTree
    static: Numbered
    donate: Numbered
    keep_unused: bool
    host: Numbered = ((), ())
    device: Device | str | None = None
    inline: bool = False
    agree: bool | str = True
    is_local: bool = False
    search: SearchOptions = DEFAULT_SEARCH

    @functools.cached_property
    def untraced(self) -> Numbered:
        """(numbers, names) of the arguments that are not traced: static and host arguments."""
        return self.static[0] + self.host[0], self.static[1] + self.host[1]

    @functools.cached_property
    def is_searched(self) -> bool:
        """Whether a spec is AUTO."""
        return any(isinstance(spec, Auto) for spec in jax.tree.leaves((self.in_specs, self.out_specs)))

    def specs_of(self, given: PyTree) -> PyTree:
        """The spec tree that the user gave, or the spec of all values on the device that the user named."""
        if self.device is None:
            return given
        # What a platform is for is asked here, since asking when a function is defined would start the backend.
        is_name = isinstance(self.device, str)
        device = jax.local_devices(backend=self.device)[0] if is_name else self.device
        return ParsedPartitionSpec(None, (), mesh=Mesh(np.array([device]), ("device",)))

    def referenced(
        self, args: Sequence[PyTree], kwargs: dict[str, PyTree]
    ) -> tuple[Sequence[PyTree], dict[str, PyTree], dict[HostReference, object]]:
        """The arguments of a call with references in the place of host arguments, and what these refer to."""
        if self.host == ((), ()):
            return args, kwargs, {}
        return referenced(self.name, self.signature, self.host, args, kwargs)

    @functools.cached_property
    def dispatch_key(self) -> tuple[Hashable, ...]:
        """What must be equal for two pjits of one function to share compiled calls.

        The length of a spec counts here, unlike in its equality: P() and P(None) mean the same, but only the first is a
        spec of scalars.
        """
        in_leaves, in_tree = jax.tree.flatten(self.in_specs)
        out_leaves, out_tree = jax.tree.flatten(self.out_specs)
        leaves = [*in_leaves, *out_leaves]
        ranks = tuple(len(leaf) if isinstance(leaf, ParsedPartitionSpec) else -1 for leaf in leaves)
        names = (self.name, self.in_name, self.out_name)
        numbers = (self.static, self.donate, self.host)
        flags = (self.keep_unused, self.inline, self.agree, self.is_local)
        return (tuple(leaves), in_tree, out_tree, ranks, names, numbers, flags, self.device, self.search)


@dataclasses.dataclass(frozen=True)
class Inferred:
    """What is known of a call before its function is traced.

    Attributes:
        arguments: its flat arguments.
        avals: their types.
        in_specs: their specs; UNSPECIFIED where they are AUTO.
        mesh: the mesh of the program.
        auto: for each argument whether its spec is AUTO; None if none is, nor that of a result.
    """

    arguments: Arguments
    avals: tuple[AbstractValue, ...]
    in_specs: tuple[Spec, ...]
    mesh: Mesh
    auto: tuple[bool, ...] | None = None


def infer(definition: Definition, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> Inferred:
    """What is known of a call before the function is traced."""
    args, kwargs, _ = definition.referenced(args, kwargs)
    check_call(definition.name, definition.signature, definition.static, definition.donate, args, kwargs)
    _check_keywords(definition, kwargs)
    arguments = flatten_arguments(definition.signature, args, kwargs, definition.untraced, definition.donate)
    arguments = on_devices(arguments, ambient_or_abstract_mesh())
    avals = tuple(
        abstract_argument(leaf, path, definition.name)
        for leaf, path in zip(arguments.leaves, arguments.paths, strict=True)
    )
    if definition.device is not None and not ambient_mesh().empty:
        raise ValueError(
            "Mesh context manager should not be used with pjit when backend or device is also specified: "
            f"{definition.name} runs on {definition.device}, but the mesh ({describe_mesh(ambient_mesh())}) is set. "
            "Call it outside of the mesh, or leave device and backend out"
        )
    specs = definition.specs_of(definition.in_specs)
    given = specs_of_arguments(specs, definition.in_name, arguments, definition.name, definition.signature)
    out_leaves = jax.tree.leaves(definition.specs_of(definition.out_specs))
    auto = None
    if any(isinstance(spec, Auto) for spec in (*given, *out_leaves)):
        auto = tuple(isinstance(spec, Auto) for spec in given)
        given = tuple(map(_beside_auto, given, arguments.leaves))
    in_specs = cast(tuple[Spec, ...], given)
    parsed = [spec for spec in (*in_specs, *out_leaves) if isinstance(spec, ParsedPartitionSpec)]
    mesh = program_mesh(
        [spec.mesh for spec in parsed if spec.mesh is not None] if parsed else _meshes_of_arrays(arguments.leaves),
        has_bare_specs=auto is not None or any(spec.mesh is None for spec in parsed),
    )
    if mesh.empty and not any(spec.mesh is not None for spec in parsed):
        mesh = abstract_mesh_of(arguments, parsed, definition.name) or mesh
    require_mesh(mesh, parsed, "pjit", definition.name)
    if auto is not None and mesh.empty:
        raise MissingMeshError(
            f"pjit requires a non-empty mesh to search the specs of {definition.name} that are AUTO, and no mesh is "
            "set in this thread. Enter one with `with partjit.Mesh(devices, axis_names):`, or set one with "
            "partjit.set_mesh(mesh)"
        )
    mesh = with_devices_of(arguments.leaves, mesh)
    arguments = on_devices(arguments, mesh)
    require_devices(arguments, in_specs, definition.name, mesh)
    if has_explicit_axes(mesh):
        avals = tuple(
            own_type(aval, leaf, mesh) if isinstance(spec, UnspecifiedValue) else aval
            for aval, leaf, spec in zip(avals, arguments.leaves, in_specs, strict=True)
        )
    return Inferred(arguments, avals, in_specs, mesh, auto)


def infer_program(
    fun: Function, definition: Definition, args: Sequence[PyTree], kwargs: dict[str, PyTree]
) -> tuple[Program, list[object]]:
    """The program of a call, and its flat arguments."""
    known = infer(definition, args, kwargs)
    arguments, in_specs, mesh = known.arguments, known.in_specs, known.mesh
    donated = arguments.donated if not results_are_checked() else (False,) * len(arguments.donated)
    # A search depends on whether the program may be transformed; no other program does.
    is_traced = known.auto is not None and any(isinstance(leaf, Tracer) for leaf in arguments.leaves)
    outcome = _program(
        fun,
        definition,
        arguments.tree,
        known.avals,
        arguments.static,
        arguments.paths,
        in_specs,
        donated,
        mesh,
        known.auto,
        is_traced,
    )
    mismatches = [] if isinstance(outcome, Program) else outcome
    if definition.device is None:  # to which arguments are moved from anywhere
        mismatches = [*mismatches, *check_devices(arguments.paths, arguments.leaves, in_specs, mesh)]
    raise_mismatches(mismatches, definition.name, mesh)
    assert isinstance(outcome, Program)  # mismatches have been raised
    return outcome, arguments.leaves


def out_specs_of(definition: Definition, out_tree: PyTreeDef, out_avals: Sequence[AbstractValue]) -> tuple[Spec, ...]:
    """One spec per flat result of a function, from the structure of its result and their types.

    It is UNSPECIFIED where it is AUTO.
    """
    found = _out_specs(definition, out_tree, out_avals)
    return tuple(UNSPECIFIED if isinstance(spec, Auto) else spec for spec in found)


def _out_specs(
    definition: Definition, out_tree: PyTreeDef, out_avals: Sequence[AbstractValue]
) -> Sequence[Spec | Auto]:
    specs = definition.specs_of(definition.out_specs)
    if isinstance(specs, UnspecifiedValue):
        return (specs,) * len(out_avals)
    result = jax.tree.unflatten(out_tree, out_avals)
    return broadcast_specs(
        specs, result, definition.out_name, lambda: Values(f"the result of {definition.name}", "result")
    )


def forget(fun: Function) -> None:
    """Empties the caches of traces and programs of a function."""
    trace.evict_weakref(fun)
    _program.evict_weakref(fun)


@weakref_cache
def _program(
    fun: Function,
    definition: Definition,
    in_tree: PyTreeDef,
    avals: tuple[AbstractValue, ...],
    static: Statics,
    paths: tuple[str, ...],
    in_specs: tuple[Spec, ...],
    donated: tuple[bool, ...],
    mesh: Mesh,
    auto: tuple[bool, ...] | None,
    is_traced: bool,
) -> Program | list[Mismatch]:
    """The program of a call, or every mismatch of its specs.

    Where specs are AUTO, as `auto` says of the arguments, they are searched.
    """
    mismatches = check_specs("pjit arguments", paths, avals, in_specs, mesh)
    if not mismatches:
        avals = tuple(requested_type(aval, spec, mesh) for aval, spec in zip(avals, in_specs, strict=True))
    try:
        traced = trace(fun, in_tree, avals, static, paths, definition.source, mesh)
    except Exception:
        if mismatches:  # most likely the reason
            return mismatches
        raise
    out_specs = out_specs_of(definition, traced.out_tree, traced.jaxpr.out_avals)
    mismatches += check_specs("pjit outputs", traced.out_paths, traced.jaxpr.out_avals, out_specs, mesh)
    mismatches += check_captured_refs(definition.name, traced.consts, mesh)
    if mismatches:
        return mismatches
    consts = len(traced.consts)
    program = Program(
        with_result_types(traced.jaxpr, out_specs, mesh),
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
        _host_arguments(static),
        definition.agree,
    )
    if auto is None:
        return program
    results = [isinstance(spec, Auto) for spec in _out_specs(definition, traced.out_tree, traced.jaxpr.out_avals)]
    is_traced = is_traced or any(isinstance(const, Tracer) for const in traced.consts)  # which it closes over
    return _searching.with_found_specs(program, (*[False] * consts, *auto), results, definition.search, is_traced)


def _host_arguments(static: Statics) -> tuple[tuple[int | str, HostReference], ...]:
    """The host arguments among those that are not traced, numbered as in a call without static arguments."""
    static_numbers = [key for key, value, _ in static if isinstance(key, int) and not isinstance(value, HostReference)]
    return tuple(
        (key - sum(number < key for number in static_numbers) if isinstance(key, int) else key, value)
        for key, value, _ in static
        if isinstance(value, HostReference)
    )


def _beside_auto(spec: Spec | Auto, leaf: object) -> Spec:
    """The spec of an argument where some are searched: a committed array whose spec is UNSPECIFIED keeps its own."""
    if isinstance(spec, Auto):
        return UNSPECIFIED
    is_committed = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.committed
    return spec_of_array(leaf, "", "") if isinstance(spec, UnspecifiedValue) and is_committed else spec


def _meshes_of_arrays(leaves: Sequence[object]) -> list[Mesh]:
    """The meshes of arrays one of which is that of a program without specs.

    These are the meshes on the ambient one's devices in another shape or, if there is none, those with Explicit axes,
    which types are over.
    """
    ambient = ambient_mesh()
    if ambient.empty:
        return [mesh for mesh in map(_mesh_in_type, leaves) if mesh is not None and has_explicit_axes(mesh)]
    devices = {*ambient.devices.flat}
    meshes = [mesh for leaf in leaves if not isinstance(leaf, Tracer) and (mesh := _mesh_of(leaf)) is not None]
    return [mesh for mesh in meshes if mesh.shape != ambient.shape and {*mesh.devices.flat} == devices]


def _mesh_in_type(leaf: object) -> Mesh | None:
    """The mesh of an array; of one that is staged that in its type, which has no devices."""
    leaf = transformed(leaf)
    aval = jax.typeof(leaf) if isinstance(leaf, Tracer) else None
    return cast(Mesh, aval.sharding.mesh) if isinstance(aval, ShapedArray) else _mesh_of(leaf)


def _mesh_of(leaf: object) -> Mesh | None:
    sharding = leaf.sharding if isinstance(leaf, jax.Array) else None
    if isinstance(sharding, jax.sharding.NamedSharding) and isinstance(sharding.mesh, Mesh):
        return sharding.mesh
    return None


def _check_keywords(definition: Definition, kwargs: dict[str, PyTree]) -> None:
    dynamic = [name for name in kwargs if name not in definition.untraced[1]]
    specs = definition.in_specs
    if dynamic and not isinstance(specs, UnspecifiedValue | Auto) and specs is not FROM_ARRAY:
        raise ValueError(
            f"pjit does not support kwargs when {definition.in_name} is specified: its specs are for positional "
            f"arguments, and {definition.name} was called with {', '.join(f'{name}=' for name in dynamic)}. Pass "
            f"{'it' if len(dynamic) == 1 else 'them'} by position, or leave {definition.in_name} out"
        )
