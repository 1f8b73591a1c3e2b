"""Lowering and compiling programs, and what XLA says meanwhile."""

import contextlib
import os
import re
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, cast

import jax
from jax._src import compilation_cache, config, core, dispatch, source_info_util, stages
from jax._src.interpreters import mlir, pxla
from jax._src.interpreters.pxla import MeshComputation, MeshExecutable
from jax._src.lib import utils as xla_utils
from jax._src.stages import DeviceAssignmentMismatchError
from jax.core import AbstractValue, ShapedArray
from jax.extend.backend import get_backend
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxprs_in_params
from jax.interpreters.mlir import LoweringParameters
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from partjit._jax.shardings import MaybeSharding, UnspecifiedValue

__all__ = [
    "MLIR_BINDINGS",
    "DeviceAssignmentMismatchError",
    "MeshComputation",
    "MeshExecutable",
    "equations_that_need_devices",
    "executable_key",
    "lower_to_computation",
    "mismatches_inside",
    "move_outputs",
    "no_compilation_cache",
    "output_shardings",
    "shard_constants",
    "xla_warnings",
]


def lower_to_computation(
    jaxpr: ClosedJaxpr,
    name: str,
    in_shardings: Sequence[MaybeSharding],
    out_shardings: Sequence[MaybeSharding],
    donated: Sequence[bool],
    platforms: tuple[str, ...] | None = None,
    parameters: LoweringParameters | None = None,
    *,
    keep_unused: bool,
    context_mesh: Mesh | AbstractMesh,
) -> MeshComputation:
    """Lowers a closed jaxpr to a program over all devices of its shardings, a `jax.stages.Lowering`.

    Args:
        jaxpr: the closed jaxpr.
        name: the name of the program.
        in_shardings, out_shardings: one sharding or UNSPECIFIED per argument and per result.
        donated: one flag per argument.
        platforms, parameters: what `jax.export` requests.
        keep_unused: whether the program keeps arguments that it does not use.
        context_mesh: decides the devices where no sharding does.
    """
    mesh = _mesh_without_devices(context_mesh, (*in_shardings, *out_shardings))
    if mesh is not None:
        platforms = platforms or (_platform_to_lower_for(mesh),)
        in_shardings, out_shardings = _as_on_devices(jaxpr, in_shardings, out_shardings, mesh)
    elif context_mesh.size > 1:
        out_shardings = _over_the_mesh(jaxpr, out_shardings, context_mesh)
    computation = pxla.lower_sharding_computation(
        jaxpr,
        "pjit",
        name,
        tuple(in_shardings),
        tuple(out_shardings),
        (None,) * len(in_shardings),
        (None,) * len(out_shardings),
        tuple(donated),
        keep_unused=keep_unused,
        context_mesh=context_mesh,
        compiler_options_kvs=(),
        lowering_platforms=platforms,
        lowering_parameters=mlir.LoweringParameters() if parameters is None else parameters,
        pgle_profiler=None,
    )
    if keep_unused:
        # Since jax 0.12 this cache has for a jaxpr that loses no argument the jaxpr itself, its own weak key. It would
        # stay as long as the process, with the constants in it and the objects whose methods it calls.
        pxla._dce_jaxpr.evict_weakref(jaxpr)
    return computation


def _over_the_mesh(
    jaxpr: ClosedJaxpr, out_shardings: Sequence[MaybeSharding], mesh: Mesh | AbstractMesh
) -> Sequence[MaybeSharding]:
    """With results that are left to the partitioner over the mesh, in a program that calls Python.

    XLA has the results of a callback on one device. Where nothing else is computed of one it would leave the program
    so, and jax fails to say in terms of the mesh how it is sharded.
    """
    if not any(isinstance(s, UnspecifiedValue) for s in out_shardings) or not equations_that_need_devices(jaxpr):
        return out_shardings
    entry = PartitionSpec.UNCONSTRAINED if AxisType.Auto in mesh.axis_types else None

    def over_mesh(sharding: MaybeSharding, aval: AbstractValue) -> MaybeSharding:
        if not isinstance(sharding, UnspecifiedValue) or not isinstance(aval, ShapedArray):
            return sharding
        if AxisType.Explicit in aval.sharding.mesh.axis_types:  # then jax has it from the type
            return sharding
        return NamedSharding(mesh, PartitionSpec(*[entry] * aval.ndim))

    return [over_mesh(*pair) for pair in zip(out_shardings, jaxpr.out_avals, strict=True)]


def equations_that_need_devices(jaxpr: ClosedJaxpr | Jaxpr) -> list[str]:
    """The primitives in a jaxpr, at any depth, that jax lowers for devices only, such as callbacks with results."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive in dispatch.prim_requires_devices_during_lowering:
            found.append(eqn.primitive.name)
        for inner in jaxprs_in_params(eqn.params):
            found += equations_that_need_devices(inner)
    return [*dict.fromkeys(found)]


def _mesh_without_devices(context_mesh: Mesh | AbstractMesh, shardings: Sequence[MaybeSharding]) -> AbstractMesh | None:
    """The mesh of a program whose meshes are all abstract; None if there are devices, or no mesh."""
    found = [context_mesh, *(s.mesh for s in shardings if isinstance(s, NamedSharding))]
    abstract = [mesh for mesh in found if isinstance(mesh, AbstractMesh) and not mesh.empty]
    has_devices = any(isinstance(mesh, Mesh) and not mesh.empty for mesh in found)
    return None if has_devices else next(iter(abstract), None)


def _as_on_devices(
    jaxpr: ClosedJaxpr,
    in_shardings: Sequence[MaybeSharding],
    out_shardings: Sequence[MaybeSharding],
    mesh: AbstractMesh,
) -> tuple[list[MaybeSharding], list[MaybeSharding]]:
    """With those that jax adds where there are devices: of scalars, and of results whose types have Explicit axes.

    Source: `lower_sharding_computation` and `_concretize_abstract_out_shardings` of jax.
    """

    def of_argument(sharding: MaybeSharding, aval: AbstractValue) -> MaybeSharding:
        is_open = isinstance(sharding, UnspecifiedValue) and isinstance(aval, ShapedArray) and aval.ndim == 0
        return NamedSharding(mesh, PartitionSpec()) if is_open else sharding

    def of_result(sharding: MaybeSharding, aval: AbstractValue) -> MaybeSharding:
        if not isinstance(sharding, UnspecifiedValue) or not isinstance(aval, ShapedArray):
            return sharding
        own, spec = aval.sharding.mesh, aval.sharding.spec
        if own.empty or AxisType.Explicit not in own.axis_types:
            return sharding
        if AxisType.Auto in own.axis_types:
            spec = PartitionSpec(*[PartitionSpec.UNCONSTRAINED if entry is None else entry for entry in spec])
        return NamedSharding(own, spec)

    arguments = [of_argument(*pair) for pair in zip(in_shardings, jaxpr.in_avals, strict=True)]
    return arguments, [of_result(*pair) for pair in zip(out_shardings, jaxpr.out_avals, strict=True)]


def _platform_to_lower_for(mesh: AbstractMesh) -> str:
    """The platform for which a program on a mesh without devices is lowered: that of its devices, or the default one.

    On GPUs jax names the platform of a device "gpu", and lowers for "cuda" or "rocm".
    """
    device = mesh.abstract_device
    if device is None:
        backend = get_backend()
        return getattr(backend, "_raw_platform", backend.platform)  # jax 0.12 has the first, for which it lowers itself
    if device.platform == "gpu":
        return "rocm" if device.device_kind.startswith(("gfx", "AMD")) else "cuda"
    return device.platform


def mismatches_inside(error: Exception) -> list[tuple[str, list[int]]]:
    """What is on other devices than the rest of a program, and on which, besides arguments and results."""
    (mismatches,) = error.args
    found = []
    for mismatch in mismatches:
        if mismatch.m_type in (stages.MismatchType.ARG_SHARDING, stages.MismatchType.OUT_SHARDING):
            continue
        what = "the mesh" if mismatch.m_type is stages.MismatchType.CONTEXT_DEVICES else "something"
        if mismatch.source_info is not None:
            site = source_info_util.summarize(mismatch.source_info.source_info)
            what = f"the {mismatch.source_info.eqn_name}{site and f' at {site}'}"
        found.append((what, [device.id for device in mismatch.da]))
    return found


def executable_key(computation: MeshComputation) -> Hashable | None:
    """What is equal for lowered programs that one executable can run; None if none but its own can run this one.

    Their names and the places of their operations in the source may differ.
    """
    known = computation.compile_args
    if any(known[what] for what in ("unordered_effects", "ordered_effects", "host_callbacks", "keepalive")):
        return None
    text = re.sub(r"^module @\S+", "module", str(computation.stablehlo()))
    kept = tuple(sorted(known["kept_var_idx"]))
    types = (*known["global_in_avals"], None, *known["global_out_avals"])
    return text, kept, types, (*known["in_shardings"], None, *known["out_shardings"])


def shard_constants(computation: MeshComputation, executable: MeshExecutable) -> list[jax.Array]:
    """The constants of a lowered program, sharded as its executable wants them; they come before the arguments."""
    return executable.shard_const_args(computation.const_args)


def output_shardings(executable: MeshExecutable) -> Sequence[Sharding]:
    """The shardings of the results of an executable."""
    return executable._out_shardings


def move_outputs(executable: MeshExecutable, mesh: Mesh, avals: Sequence[AbstractValue] | None = None) -> None:
    """Lets an executable return its outputs on `mesh`, which has the devices and names of theirs but other axis types.

    Where the partitioner chose the sharding of an output, jax has no way to know that the user's mesh is meant. Only
    the Python objects are changed; the same bytes come out. Given the types of the outputs, one with other axis types
    is on a mesh with these: a residual of what `jax.sharding.auto_axes` wraps.
    """
    own = executable._out_shardings
    shardings = tuple(
        sharding.update(mesh=_with_types_of(aval, mesh))
        if isinstance(sharding, NamedSharding) and sharding.mesh.shape == mesh.shape
        else sharding
        for sharding, aval in zip(own, avals or [None] * len(own), strict=True)
    )
    if shardings != tuple(own):
        avals = [core.update_aval_with_sharding(a, s) for a, s in zip(executable.out_avals, shardings, strict=True)]
        unloaded: Any = executable._unloaded_executable
        executable._out_shardings = unloaded.output_shardings = shardings
        executable.out_avals = unloaded.output_avals = avals
        executable._unsafe_call = None  # built from these when next asked for


def _with_types_of(aval: AbstractValue | None, mesh: Mesh) -> Mesh:
    """The mesh with the axis types that the type of a value has."""
    own: Any = aval.sharding.mesh if isinstance(aval, ShapedArray) else mesh
    differs = own.shape == mesh.shape and own.axis_types != mesh.axis_types and AxisType.Manual not in own.axis_types
    return Mesh(mesh.devices, mesh.axis_names, own.axis_types) if differs else mesh


def without_tokens(executable: MeshExecutable) -> None:
    """Lets an executable that calls Python run as one that does not; for callers that see to its calls and failures.

    jax would keep a token of each execution, to wait for at exit, where it raises the errors of failed ones again; and
    it would not dispatch the executable from C++.
    """
    unsafe_call: Any = executable.unsafe_call
    unsafe_call.has_host_callbacks = unsafe_call.has_unordered_effects = False


@contextlib.contextmanager
def no_compilation_cache() -> Iterator[None]:
    """Has XLA compile what is compiled in the block, also where users keep compiled programs in files.

    Programs that other threads compile meanwhile may miss that cache as well.
    """
    # jax asks once whether there is a cache, and remembers the answer until it is reset.
    compilation_cache.reset_cache()
    try:
        with config.enable_compilation_cache(False):
            yield
    finally:
        compilation_cache.reset_cache()


@contextlib.contextmanager
def xla_warnings() -> Iterator[int]:
    """Has XLA write its warnings in the block; gives the level below which it writes nothing otherwise.

    The levels are 0 information, 1 warnings, 2 errors, 3 what ends the process. Nothing says which one is in force: it
    is taken to be jax's own setting, or else what the environment says, which counts when jax is imported.
    """
    named = {"DEBUG": 0, "INFO": 0, "WARN": 1, "WARNING": 1, "ERROR": 2, "FATAL": 3, "CRITICAL": 3}
    environment = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "")
    level = named.get(cast(Any, config).config.jax_logging_level, int(environment) if environment.isdigit() else 0)
    if level <= 1:
        yield level
        return
    xla_utils.absl_set_min_log_level(1)
    try:
        yield level
    finally:
        xla_utils.absl_set_min_log_level(level)


# What a process needs in order to run Shardy's passes without jax: the package of the bindings (`jax.extend.mlir`
# imports all of jax, which takes twice as long), the module in it that registers the passes, and for each dialect that
# jax lowers to the function that registers it.
MLIR_BINDINGS: dict[str, str | dict[str, str]] = {
    "bindings": "jaxlib.mlir",
    "passes": "_mlir_libs._jax_mlir_ext",
    "dialects": {
        **dict.fromkeys(("sdy", "mpmd", "stablehlo", "chlo"), "register_dialect"),
        "mhlo": "register_mhlo_dialect",
    },
}
