"""From a jaxpr and specs to an executable, through the stages of jax's ahead-of-time API: Traced, Lowered, Compiled.

`Lowered` and `Compiled` are jax's own; `Traced` is ours because its program is.
"""

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import jax
from jax.core import AbstractValue, ShapedArray, Tracer
from jax.extend.core import ClosedJaxpr
from jax.extend.mlir import ir
from jax.interpreters.mlir import LoweringParameters
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from partjit._jax.analysis import lower_for_analysis
from partjit._jax.caches import weakref_cache
from partjit._jax.compiling import (
    DeviceAssignmentMismatchError,
    MeshComputation,
    MeshExecutable,
    lower_to_computation,
    move_outputs,
)
from partjit._jax.dispatch import USE_OF_DONATED_BUFFERS_CRASHES
from partjit._jax.jaxprs import type_of
from partjit._jax.meshes import EMPTY_MESH, under_mesh
from partjit._jax.shardings import UNSPECIFIED, MaybeSharding, UnspecifiedValue, or_none
from partjit._jax.stages import call_through, make_args_info
from partjit._jax.tracing import low_jaxpr, refuse_high_types
from partjit._jax.types import Device, PyTree, PyTreeDef
from partjit.devices import check_needs_no_devices, incompatible_devices, no_devices
from partjit.host_objects import HostReference
from partjit.mesh import describe_mesh, has_explicit_axes, is_abstract_mesh
from partjit.primitive import device_witness, shardings_of
from partjit.render.numbers import counted
from partjit.retiring import retiring
from partjit.spec import UNCONSTRAINED, Spec
from partjit.typed import sharding_in_type

__all__ = [
    "Program",
    "Traced",
    "as_aliased",
    "in_shardings_of",
    "lower",
    "lower_jaxpr",
    "lower_jaxpr_anew",
    "lower_to_module",
    "own_sharding",
]

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A traced and validated function: all that is known of a call but the values of its arguments.

    Attributes:
        jaxpr: the closed jaxpr; its leading arguments are `consts`.
        consts: values of outer traces, and refs, that the function closes over.
        in_specs, out_specs: one spec per flat argument of the jaxpr, and per flat result.
        mesh: the mesh the user gave, Explicit axes and all; empty if there is none.
        donated_invars: one flag per flat argument of the jaxpr.
        name: the name of the function.
        keep_unused: whether arguments the function does not read are passed to the executable all the same.
        in_tree: the structure of `(args, kwargs)` without static arguments.
        out_tree: the structure of the result.
        arg_paths: the key path of each argument of the user's (not of `consts`).
        host: position, in a call without the static arguments, or name of each host argument.
        agree: how the processes of a program with colocated calls agree; see `pjit`.
    """

    jaxpr: ClosedJaxpr
    consts: list[object]
    in_specs: tuple[Spec, ...]
    out_specs: tuple[Spec, ...]
    mesh: Mesh
    donated_invars: tuple[bool, ...]
    name: str
    keep_unused: bool
    in_tree: PyTreeDef
    out_tree: PyTreeDef
    arg_paths: tuple[str, ...]
    host: tuple[tuple[int | str, HostReference], ...] = ()
    agree: bool | str = True

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the `pjit_p` equation that is this program."""
        return {
            "jaxpr": self.jaxpr,
            "in_specs": self.in_specs,
            "out_specs": self.out_specs,
            "mesh": self.mesh,
            "donated_invars": self.donated_invars,
            "name": self.name,
            "keep_unused": self.keep_unused,
            "agree": self.agree,
            "witness": device_witness(self.mesh),
        }


def lower(
    args: Sequence[object],
    *,
    jaxpr: ClosedJaxpr,
    in_specs: Sequence[Spec],
    out_specs: Sequence[Spec],
    mesh: Mesh,
    donated_invars: tuple[bool, ...],
    name: str,
    keep_unused: bool,
    platforms: tuple[str, ...] | None = None,
    parameters: LoweringParameters | None = None,
    **_: object,
) -> MeshComputation:
    """Lowers a program for arguments sharded like these, to a `jax.stages.Lowering`, which compiles once.

    An argument whose spec is UNSPECIFIED keeps its sharding: that of a committed array is part of the program. This is
    how residuals get their shardings.
    """
    low, out_shardings = low_jaxpr(jaxpr), shardings_of(out_specs, mesh)
    return lower_jaxpr(
        low,
        as_aliased(low, in_shardings_of(args, in_specs, mesh), out_shardings, donated_invars),
        out_shardings,
        donated_invars,
        mesh,
        name,
        keep_unused,
        platforms,
        parameters,
    )


def in_shardings_of(args: Sequence[object], specs: Sequence[Spec], mesh: Mesh) -> tuple[MaybeSharding, ...]:
    """The shardings of a program's arguments: those of their specs, where these are UNSPECIFIED their own."""
    return tuple(
        own_sharding(arg) if isinstance(sharding, UnspecifiedValue) else sharding
        for arg, sharding in zip(args, shardings_of(specs, mesh), strict=True)
    )


def as_aliased(
    jaxpr: ClosedJaxpr,
    in_shardings: Sequence[MaybeSharding],
    out_shardings: Sequence[MaybeSharding],
    donated: Sequence[bool],
) -> tuple[MaybeSharding, ...]:
    """The shardings of arguments, replicated where jax has a result use the memory of an UNSPECIFIED one.

    jax pairs donated arguments and results with shards of one type, and takes an argument for unsharded that is left
    to the partitioner. Where that shards it XLA fails, as the result does not fit into its memory.

    Source: `_set_up_aliases` of jax.
    """
    given = [*in_shardings]
    if not any(isinstance(given[i], UnspecifiedValue) for i, is_donated in enumerate(donated) if is_donated):
        return tuple(given)
    donors: dict[object, collections.deque[int]] = collections.defaultdict(collections.deque)
    for i, is_donated in enumerate(donated):
        if is_donated:
            donors[_shard_type(jaxpr.in_avals[i], given[i])].append(i)
    for aval, sharding in zip(jaxpr.out_avals, out_shardings, strict=True):
        if not (same := donors.get(_shard_type(aval, sharding))):
            continue
        i = same.popleft()
        if not isinstance(sharding, NamedSharding) or UNCONSTRAINED in sharding.spec:
            continue
        if isinstance(given[i], UnspecifiedValue):
            given[i] = NamedSharding(sharding.mesh, P())
    return tuple(given)


def _shard_type(aval: AbstractValue, sharding: MaybeSharding) -> tuple[object, ...] | None:
    if not isinstance(aval, ShapedArray):
        return None
    shape = aval.shape if isinstance(sharding, UnspecifiedValue) else sharding.shard_shape(aval.shape)
    return (shape, aval.dtype)


def own_sharding(arg: object) -> MaybeSharding:
    """The sharding an argument is committed to, UNSPECIFIED if it is not."""
    sharding = getattr(arg, "sharding", None)
    # A ShapeDtypeStruct with a sharding stands for an array committed to it.
    if sharding is None or isinstance(arg, Tracer) or not getattr(arg, "committed", True):
        return UNSPECIFIED
    return sharding


def lower_jaxpr_anew(
    jaxpr: ClosedJaxpr,
    in_shardings: tuple[MaybeSharding, ...],
    out_shardings: tuple[MaybeSharding, ...],
    donated_invars: tuple[bool, ...],
    mesh: Mesh,
    name: str,
    keep_unused: bool,
    platforms: tuple[str, ...] | None = None,
    parameters: LoweringParameters | None = None,
) -> MeshComputation:
    """Lowers a jaxpr for arguments and results with these shardings; UNSPECIFIED ones are left to the partitioner.

    `platforms` and `parameters` are what `jax.export` asks for. `lower_jaxpr` is the same, cached.

    Raises:
        ShardingError: they are not all on the same devices.
    """
    check_needs_no_devices(jaxpr, name, mesh)
    # jax writes shardings the partitioner chose in terms of the context mesh, and fails where an argument is sharded
    # over another mesh of the same devices: a size its axes divide need not be divisible by those of this one.
    elsewhere = any(
        isinstance(sharding, NamedSharding) and sharding.mesh.shape != mesh.shape for sharding in in_shardings
    )
    context_mesh = EMPTY_MESH if elsewhere else mesh
    try:
        with under_mesh(context_mesh):  # jax reads the ambient mesh, which must not be another one
            return lower_to_computation(
                jaxpr,
                name,
                in_shardings,
                out_shardings,
                donated_invars,
                platforms,
                parameters,
                keep_unused=keep_unused,
                context_mesh=context_mesh,
            )
    except DeviceAssignmentMismatchError as error:
        raise incompatible_devices(error, name, jaxpr, in_shardings, out_shardings) from None


lower_jaxpr = weakref_cache(lower_jaxpr_anew)


def lower_to_module(
    jaxpr: ClosedJaxpr,
    in_shardings: tuple[MaybeSharding, ...],
    out_shardings: tuple[MaybeSharding, ...],
    mesh: Mesh,
    name: str,
) -> ir.Module:
    """The module that a jaxpr is lowered to, with all its arguments, for those who only look at it.

    Raises:
        ShardingError: shardings are not all on the same devices.
    """
    with under_mesh(mesh):
        module = lower_for_analysis(jaxpr, name, in_shardings, out_shardings, mesh)
    if module is None:
        donated = (False,) * len(in_shardings)
        module = lower_jaxpr_anew(jaxpr, in_shardings, out_shardings, donated, mesh, name, keep_unused=True).stablehlo()
    return module


class _Lowered(jax.stages.Lowered):
    """Compiles to a program that deletes the arrays it consumed, where jax needs that; see `retiring`."""

    def compile(self, *args: Any, **kwargs: Any) -> jax.stages.Compiled:
        compiled = super().compile(*args, **kwargs)
        donated = [info.donated for info in jax.tree.leaves(self.args_info)]
        if USE_OF_DONATED_BUFFERS_CRASHES and any(donated):
            call_through(compiled, functools.partial(retiring, donated_leaves=donated))
        return compiled


class _LoweredOnExplicitMesh(_Lowered):
    """Compiles to a program whose outputs come back on the user's mesh."""

    def __init__(self, lowering: MeshComputation, args_info: PyTree, program: Program) -> None:
        super().__init__(lowering, args_info, program.out_tree)
        self._mesh, self._avals = program.mesh, program.jaxpr.out_avals

    def compile(self, *args: Any, **kwargs: Any) -> jax.stages.Compiled:
        compiled = super().compile(*args, **kwargs)
        move_outputs(cast(MeshExecutable, compiled._executable), self._mesh, self._avals)
        return compiled


class _LoweredWithoutDevices(_Lowered):
    """Compiles for devices that are named then."""

    def __init__(self, lowering: MeshComputation, args_info: PyTree, program: Program) -> None:
        super().__init__(lowering, args_info, program.out_tree)
        self._program = program

    def compile(self, *args: Any, device_assignment: Sequence[Device] | None = None, **kwargs: Any) -> Any:
        if device_assignment is None:
            raise no_devices(f"{self._program.name} cannot be compiled", self._program.mesh)
        return super().compile(*args, device_assignment=tuple(device_assignment), **kwargs)


class Traced:
    """A traced program, ready to be lowered; nothing has been executed. Mirrors `jax.stages.Traced`.

    Attributes:
        program: the jaxpr with its specs.
        leaves: the flat arguments, or structs in their place.
        jaxpr: the closed jaxpr.
        fun_name: the name of the function.
        in_tree: the structure of `(args, kwargs)`, without static arguments.
        out_tree: the structure of the result.
    """

    def __init__(self, program: Program, leaves: Sequence[object]) -> None:
        self.program = program
        self.leaves = leaves
        self.jaxpr = program.jaxpr
        self.fun_name = program.name
        self.in_tree = program.in_tree
        self.out_tree = program.out_tree

    @property
    def in_avals(self) -> PyTree:
        """A tree like `(args, kwargs)` of abstract values."""
        return jax.tree.unflatten(self.in_tree, self._own(self.jaxpr.in_avals))

    @property
    def out_avals(self) -> PyTree:
        """A tree like the result of abstract values."""
        return jax.tree.unflatten(self.out_tree, self.jaxpr.out_avals)

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """The numbers of the flat arguments that are donated."""
        return tuple(i for i, donated in enumerate(self._own(self.program.donated_invars)) if donated)

    @property
    def args_info(self) -> PyTree:
        """A tree like `(args, kwargs)` of `jax.stages.ArgInfo`: shape, dtype, donated."""
        return make_args_info(self.in_tree, self._own(self.jaxpr.in_avals), self.donate_argnums)

    @property
    def out_info(self) -> PyTree:
        """A tree like the result of `jax.ShapeDtypeStruct`, with the shardings that out specs and types promise."""
        mesh = self.program.mesh
        structs = [
            jax.ShapeDtypeStruct(
                aval.shape, aval.dtype, sharding=or_none(own) or sharding_in_type(aval, mesh), weak_type=aval.weak_type
            )
            for aval, own in zip(
                map(type_of, self.jaxpr.jaxpr.outvars), shardings_of(self.program.out_specs, mesh), strict=True
            )
        ]
        return jax.tree.unflatten(self.out_tree, structs)

    def lower(
        self,
        *,
        lowering_platforms: tuple[str, ...] | None = None,
        _private_parameters: LoweringParameters | None = None,
    ) -> jax.stages.Lowered:
        """Lowers to StableHLO. Raises ValueError if the function closes over values of an outer trace.

        Args:
            lowering_platforms: for which platforms, if not for that of the mesh; `jax.export` says so.
        """
        self._check_closed()
        lowering = lower(
            self.leaves, **self.program.params, platforms=lowering_platforms, parameters=_private_parameters
        )
        if is_abstract_mesh(self.program.mesh):
            return _LoweredWithoutDevices(lowering, self.args_info, self.program)
        if has_explicit_axes(self.program.mesh):
            return _LoweredOnExplicitMesh(lowering, self.args_info, self.program)
        return _Lowered(lowering, self.args_info, self.out_tree)

    def __repr__(self) -> str:
        program = self.program
        mesh = "no mesh" if program.mesh.empty else describe_mesh(program.mesh)
        return f"<traced {program.name}: {counted(len(self.jaxpr.eqns), 'equation')}, {mesh}>"

    def _check_closed(self) -> None:
        refuse_high_types(self.jaxpr, self.fun_name, "lowered ahead of time")
        if self.program.consts:
            raise ValueError(
                f"{self.fun_name} cannot be lowered ahead of time: it closes over {len(self.program.consts)} value(s) "
                "of an enclosing transformation or refs. Pass them as arguments"
            )

    def _own(self, per_argument: Sequence[T]) -> Sequence[T]:
        """Without the entries of the constants, which are not the user's arguments."""
        return per_argument[len(self.program.consts) :]
