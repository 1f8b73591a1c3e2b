"""Whether specs fit their values and the mesh: every mismatch of a call is found, then one error lists them all.

The functions named `check_*` return mismatches; `raise_mismatches` turns a non-empty list into a `ShardingError`.
"""

import dataclasses
import difflib
import itertools
import math
from collections.abc import Iterable, Sequence

import jax
from jax.core import AbstractValue, Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, Sharding

from partjit._jax.meshes import manual_axes
from partjit._jax.shardings import UNSPECIFIED, UnspecifiedValue, device_list
from partjit._jax.tracing import abstractify
from partjit.devices import describe_devices, has_devices_of, ids_of, no_devices
from partjit.errors import MissingMeshError, ShardingError
from partjit.mesh import describe_mesh, device_ids, is_abstract_mesh
from partjit.paths import folded_texts
from partjit.spec import UNCONSTRAINED, ParsedPartitionSpec, Spec

__all__ = [
    "Mismatch",
    "check_captured_refs",
    "check_devices",
    "check_specs",
    "listing",
    "raise_mismatches",
    "require_devices_of_mesh",
    "require_mesh",
]


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """One reason why a call cannot be partitioned.

    Attributes:
        problem: which value, what its spec implies and what it is, in one line.
        remedy: what the user can do.
        path: the path of that value, if it is one of many.
    """

    problem: str
    remedy: str
    path: str = ""


def raise_mismatches(mismatches: Sequence[Mismatch], name: str, mesh: Mesh) -> None:
    """Raises one `ShardingError` that lists `mismatches`, if there are any."""
    if not mismatches:
        return
    place = f"the mesh ({describe_mesh(mesh)})"
    if mesh.empty:  # specs are not checked without a mesh
        headline = f"The arguments of {name} are on different devices, and no mesh says on which it runs:"
    elif len(mismatches) == 1:
        headline = f"A spec of {name} does not fit on {place}:"
    else:  # one spec may fail in several ways
        headline = f"The specs of {name} do not fit on {place}, for {len(mismatches)} reasons:"
    raise ShardingError(listing(headline, mismatches))


def listing(headline: str, mismatches: Iterable[Mismatch]) -> str:
    """The message of an error that lists mismatches below a headline; those of equal layers are one."""
    texts = [(one.path, "\n    ".join([one.problem, *one.remedy.splitlines()])) for one in mismatches]
    return "\n\n".join([headline, *folded_texts(texts)])


def require_mesh(mesh: Mesh, specs: Iterable[Spec], caller: str, name: str) -> None:
    """Raises `MissingMeshError` if a spec needs a mesh and there is none.

    A value whose spec is None is replicated over the mesh, if there is one: it needs none.
    """
    if not mesh.empty:
        return
    for spec in specs:
        if isinstance(spec, ParsedPartitionSpec) and spec.mesh is None and spec.unsafe_user_spec is not None:
            raise MissingMeshError(
                f"{caller} requires a non-empty mesh, but {name} has the spec {spec.unsafe_user_spec} and no mesh is "
                "set in this thread. Enter one with `with partjit.Mesh(devices, axis_names):`, set one with "
                "partjit.set_mesh(mesh), or give NamedShardings, which bring their own"
            )


def require_devices_of_mesh(mesh: Mesh, name: str) -> None:
    """Raises `MissingMeshError` for a call on an abstract mesh."""
    if is_abstract_mesh(mesh):
        raise no_devices(f"{name} cannot be called", mesh)


def check_specs(
    what: str,
    paths: Sequence[str],
    avals: Sequence[AbstractValue],
    specs: Sequence[Spec],
    mesh: Mesh,
    *,
    allow_uneven: bool = False,
) -> list[Mismatch]:
    """Checks specs against shapes and mesh.

    Args:
        what: the kind of value, for messages: `"pjit arguments"`.
        paths: the key path of each value.
        avals: the abstract value of each.
        specs: the spec of each.
        mesh: the program's mesh.
        allow_uneven: whether a dimension need not be divisible over Auto axes: the partitioner pads constrained
            intermediates.

    Returns:
        Every mismatch: too small ranks, axes that are manual or not in the mesh, and dimensions that are not divisible.
    """
    mismatches = []
    for path, aval, spec in zip(paths, avals, specs, strict=True):
        if isinstance(spec, ParsedPartitionSpec):
            found = _check_spec(what, path, aval, spec, mesh, allow_uneven)
            mismatches += (dataclasses.replace(mismatch, path=path) for mismatch in found)
    return mismatches


def _check_spec(
    what: str, path: str, aval: AbstractValue, spec: ParsedPartitionSpec, program_mesh: Mesh, allow_uneven: bool
) -> Iterable[Mismatch]:
    mesh = spec.mesh or program_mesh
    if mesh is not program_mesh and not program_mesh.empty and not has_devices_of(mesh, program_mesh):
        place = "is on the abstract mesh, which has none"
        if not is_abstract_mesh(program_mesh):
            place = f"runs on the devices {describe_devices(program_mesh.devices.flat)}"
        yield Mismatch(
            f"One of {what}, {path} ({aval.str_short()}), has a NamedSharding over the incompatible devices "
            f"{describe_devices(mesh.devices.flat)}, but the program {place}",
            f"give all NamedShardings the same devices in the same order; if it is that of the array, move the array: "
            f"jax.device_put({path}, NamedSharding(mesh, spec))",
        )
        return
    given = (
        f"One of {what}, {path} ({aval.str_short()}), was given the resource assignment of "
        f"{spec.unsynced_user_spec(spec.sync)}"
    )
    shape = getattr(aval, "shape", ())
    if len(spec) > len(shape):
        yield Mismatch(
            f"{given}, which implies that it has a rank of at least {len(spec)}, but it is {len(shape)}",
            f"give {path} a spec with at most {len(shape)} entr{'y' if len(shape) == 1 else 'ies'}",
        )
    undefined = [axis for axis in (*spec.mesh_axes, *spec.reduction_axes) if axis not in mesh.shape]
    for axis in undefined:
        spellings = {str(name).casefold(): name for name in mesh.axis_names}
        close = difflib.get_close_matches(str(axis).casefold(), spellings, cutoff=0.5)
        yield Mismatch(
            f"{given}, but resource axis {axis} is undefined: Resource axis: {axis} of {spec.unsafe_user_spec} is not "
            f"found in mesh: ({describe_mesh(mesh)})",
            f"did you mean {spellings[close[0]]!r}?"
            if close
            else "name one of its axes, or declare the axis in the mesh",
        )
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    for axis in spec.reduction_axes:
        if types.get(axis) is AxisType.Auto:
            yield Mismatch(
                f"{given}, but resource axis {axis} is Auto: how far a value is reduced over it is up to the "
                "partitioner",
                f"leave {axis!r} out of unreduced and reduced, or make it an axis of type Explicit",
            )
    manual = [axis for axis in spec.mesh_axes if axis in manual_axes()]
    for axis in manual:
        yield Mismatch(
            f"{given}, but resource axis {axis} is manual here: inside shard_map the value is one device's own",
            f"leave {axis!r} out of the spec, or out of the axis_names of the shard_map",
        )
    for dim, (axes, size) in enumerate(zip(spec, shape, strict=False)):
        if axes is UNCONSTRAINED or not set(axes).isdisjoint([*undefined, *manual]):
            continue
        if allow_uneven:  # over axes that are not in the type of the value
            axes = tuple(axis for axis in axes if types[axis] is AxisType.Explicit)
        divisor = math.prod(mesh.shape[axis] for axis in axes)
        if size % divisor:
            product = " * ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
            yield Mismatch(
                f"{given}, which implies that the size of its dimension {dim} should be divisible by {divisor}, but it "
                f"is equal to {size} ({divisor} is {product}; mesh: {describe_mesh(mesh)})",
                _divisibility_remedy(path, dim, size, divisor, mesh, free_axes=_free_axes(mesh, spec, dim)),
            )


def _free_axes(mesh: Mesh, spec: ParsedPartitionSpec, dim: int) -> list[str]:
    """The axes this dimension may be sharded over: those that no other dimension uses and that are not manual."""
    others = {axis for i, axes in enumerate(spec) if i != dim and axes is not UNCONSTRAINED for axis in axes}
    return [axis for axis in mesh.axis_names if axis not in others and axis not in manual_axes()]


def _divisibility_remedy(path: str, dim: int, size: int, divisor: int, mesh: Mesh, *, free_axes: Sequence[str]) -> str:
    padded = -(-size // divisor) * divisor
    remedy = f"make dimension {dim} of {path} a multiple of {divisor}: {padded} is the next one"
    # Subsets of axes, smallest first; a mesh has few axes, so there are few subsets.
    fitting = [
        (math.prod(mesh.shape[axis] for axis in axes), axes)
        for count in range(1, len(free_axes) + 1)
        for axes in itertools.combinations(free_axes, count)
    ]
    divisors = [f"{product} ({', '.join(axes)})" for product, axes in fitting if product > 1 and size % product == 0]
    if divisors:
        return f"{remedy}\nor shard it over other axes: {size} is divisible by {', '.join(divisors[:6])}"
    return f"{remedy}\nor leave the dimension unsharded (None): no free axes of the mesh divide {size}"


def check_devices(paths: Sequence[str], args: Sequence[object], specs: Sequence[Spec], mesh: Mesh) -> list[Mismatch]:
    """Checks that committed arrays are on the devices of the mesh, in its order where nothing asks to move them.

    Without a mesh all of them must be on the same devices.
    """
    if mesh.empty:
        return _check_same_devices(paths, args)
    if is_abstract_mesh(mesh):
        return [
            Mismatch(
                f"One of pjit arguments, {path} ({_short(arg)}), is committed to the devices "
                f"{describe_devices(device_list(sharding))}, but the program is on the abstract mesh, which has none",
                f"give a type in its place, jax.ShapeDtypeStruct({path}.shape, {path}.dtype), or a spec of {path}",
                path,
            )
            for path, arg, spec in zip(paths, args, specs, strict=True)
            if isinstance(spec, UnspecifiedValue) and (sharding := _committed_sharding(arg)) is not None
        ]
    devices = set(mesh.devices.flat)
    mismatches = []
    for path, arg, spec in zip(paths, args, specs, strict=True):
        if isinstance(arg, jax.Ref) and not isinstance(arg, Tracer):
            mismatches += _check_ref(f"One of pjit arguments, {path},", path, arg, spec, mesh)
        sharding = _committed_sharding(arg)
        if sharding is not None and (sharding.device_set != devices or not _in_order(sharding, spec, mesh)):
            mismatches.append(
                Mismatch(
                    f"One of pjit arguments, {path} ({_short(arg)}), is committed to the incompatible devices "
                    f"{describe_devices(device_list(sharding))}, but the program runs on the devices "
                    f"{describe_devices(mesh.devices.flat)} of the mesh",
                    _remedy_for_devices(path, sharding, mesh),
                    path,
                )
            )
    return mismatches


def check_captured_refs(name: str, captured: Sequence[object], mesh: Mesh) -> list[Mismatch]:
    """Checks that the refs among what the function `name` closes over are on the devices of the mesh."""
    if mesh.empty or is_abstract_mesh(mesh):
        return []
    mismatches = []
    for ref in captured:
        if isinstance(ref, jax.Ref) and not isinstance(ref, Tracer):
            what = f"What {name} closes over, {_short(ref)},"
            mismatches += _check_ref(what, "it", ref, UNSPECIFIED, mesh)
    return mismatches


def _check_ref(what: str, path: str, ref: jax.Ref, spec: Spec, mesh: Mesh) -> list[Mismatch]:
    """Checks that a ref, which cannot be moved, is where the program is to find it."""
    remedy = f"make the ref of an array placed with jax.device_put, or leave the spec of {path} out"
    if isinstance(spec, ParsedPartitionSpec):
        if ref.sharding.is_equivalent_to(spec.named_sharding(mesh), ref.ndim):
            return []
        where, wanted = f"with the sharding {ref.sharding}", f"its spec says {spec.unsafe_user_spec}"
    elif ref.sharding.device_set == {*mesh.devices.flat}:
        return []
    else:
        where = f"on the devices {describe_devices(device_list(ref.sharding))}"
        wanted = f"the program runs on the devices {describe_devices(mesh.devices.flat)} of the mesh"
        remedy = "make the ref of an array on the mesh: jax.new_ref(jax.device_put(value, NamedSharding(mesh, spec)))"
    problem = f"{what} is a ref {where}, but {wanted}, and what others see change cannot be moved"
    return [Mismatch(problem, remedy)]


def _remedy_for_devices(path: str, sharding: Sharding, mesh: Mesh) -> str:
    """What to do with an argument that is on other devices than those of the mesh."""
    if len({device.process_index for device in mesh.devices.flat}) > 1 and sharding.is_fully_addressable:
        return (
            f"it is this process's own: make a global array of the pieces of all processes, "
            f"partjit.from_process_local(spec, {path}), or call with positional_semantics='local'"
        )
    return f"move it first: jax.device_put({path}, NamedSharding(mesh, spec)), or call under its own mesh"


def _check_same_devices(paths: Sequence[str], args: Sequence[object]) -> list[Mismatch]:
    committed = [
        (path, arg, sharding)
        for path, arg in zip(paths, args, strict=True)
        if (sharding := _committed_sharding(arg)) is not None
    ]
    if not committed:
        return []
    first_path, first_arg, first = committed[0]
    devices = device_list(first)
    return [
        Mismatch(
            f"One of pjit arguments, {path} ({_short(arg)}), is committed to the incompatible devices "
            f"{describe_devices(device_list(sharding))}, but {first_path} ({_short(first_arg)}) is on the devices "
            f"{describe_devices(devices)}",
            f"put them on the same devices, in the same order: jax.device_put({path}, NamedSharding(mesh, spec)), or "
            "enter the mesh on which the program should run",
        )
        for path, arg, sharding in committed[1:]
        if (other := device_list(sharding)) is not devices and other != devices
    ]


def _committed_sharding(arg: object) -> Sharding | None:
    """The sharding to which an argument is committed, as a struct with a sharding says it is; None if it is to none."""
    if isinstance(arg, Tracer):
        return None  # up to the enclosing trace
    if isinstance(arg, jax.Array):
        return arg.sharding if arg.committed else None
    sharding = arg.sharding if isinstance(arg, jax.ShapeDtypeStruct) else None
    return None if isinstance(getattr(sharding, "mesh", None), AbstractMesh) else sharding


def _short(arg: object) -> str:
    return abstractify(arg).str_short()


def _in_order(sharding: Sharding, spec: Spec, mesh: Mesh) -> bool:
    """Whether an array that stays where it is has its shards on the devices in the order of the mesh."""
    if isinstance(spec, ParsedPartitionSpec) or not isinstance(sharding, NamedSharding):
        return True
    return ids_of(sharding) == device_ids(mesh)
