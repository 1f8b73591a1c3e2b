"""The mesh a program runs on: the ambient mesh of each call, and how it is set.

A mesh is ambient in a thread, never in a function: `with mesh:` (a `partjit.Mesh` or a jax one), `partjit.set_mesh`
and `jax.set_mesh` all set it, the innermost `with` wins, and other threads start with none.

Axes of type Explicit stay so in programs: the types of values say how they are sharded over them (see `typed`).
"""

import contextlib
import functools
import threading
from collections.abc import Hashable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, cast

import jax
import numpy as np
from jax.sharding import AxisType

from partjit import lazy
from partjit._jax.meshes import (
    EMPTY_MESH,
    AmbientMeshes,
    abstract_mesh,
    entered_mesh,
    innermost_mesh,
    manual_axes,
    physical_mesh,
    under_mesh,
)
from partjit.checks import items_of, require, require_mesh_type, shown, wrong_type, wrong_value
from partjit.errors import MeshChangedError

if TYPE_CHECKING:
    from partjit.render import picture as pictures
    from partjit.render import piece_grid
else:
    pictures, piece_grid = lazy.module("partjit.render.picture"), lazy.module("partjit.render.piece_grid")

__all__ = [
    "Mesh",
    "Outside",
    "ambient_mesh",
    "ambient_or_abstract_mesh",
    "auto_twin",
    "describe_mesh",
    "device_ids",
    "explicit_axes",
    "has_explicit_axes",
    "is_abstract_mesh",
    "picture",
    "program_mesh",
    "set_mesh",
    "tracing_under",
]


class Mesh(jax.sharding.Mesh):
    """A grid of devices with a name for each of its axes; `with mesh:` makes it the ambient mesh of the thread.

    It is a `jax.sharding.Mesh`, equal to jax's mesh of the same devices, names and axis types and usable wherever one
    is; unlike jax's, entering it warns of no deprecation.

    Args:
        devices: an array or (nested) list of devices, one array dimension per name.
        axis_names: the names of the axes: a sequence, or one bare name.
        axis_types: the `jax.sharding.AxisType` of each axis, Auto if not given.

    Raises:
        TypeError: `devices` are no devices, or the names cannot be names.
        ValueError: the number of names is not the number of dimensions, or a name is repeated.

    Example:
        >>> import numpy as np
        >>> with Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model")) as mesh:
        ...     print(mesh.shape["data"], mesh == jax.sharding.Mesh(mesh.devices, mesh.axis_names))
        4 True
    """

    _interned: jax.sharding.Mesh

    def __new__(
        cls,
        devices: np.ndarray | Sequence[Any],
        axis_names: str | Sequence[str],
        axis_types: tuple[jax.sharding.AxisType, ...] | None = None,
    ) -> "Mesh":
        """See the class."""
        # jax interns its meshes and creates them as its own class whatever `cls` is. So the interned mesh is kept as
        # the identity of this one, and everything that reads the mesh's data finds it here as well.
        grid = _grid(devices)
        names = _axis_names(axis_names, grid)
        interned = jax.sharding.Mesh(grid, names, _axis_types(axis_types, names))
        mesh = object.__new__(cls)
        mesh.__dict__.update(vars(interned), _interned=interned)
        return mesh

    def __eq__(self, other: object) -> bool:
        return self._interned == (other._interned if isinstance(other, Mesh) else other)

    def __hash__(self) -> int:
        return hash(self._interned)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.devices, self.axis_names, self.axis_types)

    def __enter__(self) -> "Mesh":
        # Values on Explicit axes have types that name the mesh, and jax looks for its devices where jax.set_mesh puts
        # them.
        context = (under_mesh if has_explicit_axes(self) else entered_mesh)(self._interned)
        context.__enter__()
        _entered.contexts.append(context)
        return self

    def _repr_html_(self) -> str:
        return picture(self)._repr_html_()

    def __exit__(self, *_: object) -> Literal[False]:
        _entered.contexts.pop().__exit__(None, None, None)
        return False


def _grid(devices: object) -> np.ndarray:
    """The devices as an array of them."""
    expected = "an array or (nested) list of devices, one dimension per axis"
    remedy = "as in numpy.array(jax.devices()).reshape(4, 2)"
    if not isinstance(devices, np.ndarray | list | tuple | jax.Device):
        raise wrong_type("Mesh", "devices", devices, expected, remedy)
    try:
        grid = np.asarray(devices)
    except (ValueError, TypeError, RuntimeError):  # lists of different lengths, or arrays that cannot be read
        raise wrong_type("Mesh", "devices", devices, expected, remedy) from None
    if not grid.size:
        raise wrong_value("Mesh", "devices", devices, expected, f"there is none; {remedy}")
    is_empty_mesh = grid.ndim == 0 and grid.dtype == object and grid.item() is None
    if not is_empty_mesh:
        for device in grid.flat:
            if not isinstance(device, jax.Device):
                raise wrong_type("Mesh", "devices", devices, expected, f"there is {shown(device)} in it; {remedy}")
    return grid


def _axis_names(axis_names: object, grid: np.ndarray) -> tuple[Hashable, ...]:
    expected = "a sequence of names, one per dimension of the devices, or one bare name"
    names = (axis_names,) if isinstance(axis_names, str) else items_of("Mesh", "axis_names", axis_names, expected)
    for i, name in enumerate(names):
        if name is None or not isinstance(name, Hashable):
            raise wrong_type("Mesh", f"axis_names[{i}]", name, "the name of an axis, a str")
    if len(names) != grid.ndim:
        raise ValueError(
            f"Mesh: axis_names must be {expected}, but devices.ndim is {grid.ndim} and axis_names are {shown(names)}: "
            "reshape the devices, or name as many axes as they have dimensions"
        )
    if len({*names}) < len(names):
        raise ValueError(f"Mesh: axis_names must name each axis differently, but are {shown(names)}")
    return names


def _axis_types(axis_types: object, names: tuple[Hashable, ...]) -> Any:
    if axis_types is None or isinstance(axis_types, jax.sharding.AxisType):
        return axis_types
    expected = "a tuple with a jax.sharding.AxisType for each axis, or None for Auto"
    types = items_of("Mesh", "axis_types", axis_types, expected)
    for i, kind in enumerate(types):
        require("Mesh", f"axis_types[{i}]", kind, jax.sharding.AxisType, "a jax.sharding.AxisType")
    if len(types) != len(names):
        raise ValueError(f"Mesh: axis_types must be {expected}, but there are {len(types)} for {len(names)} axes")
    return types


class _Entered(threading.local):
    """The contexts of the meshes this thread has entered, innermost last; a mesh may be entered twice."""

    def __init__(self) -> None:
        self.contexts: list[contextlib.AbstractContextManager[None]] = []


_entered = _Entered()


class set_mesh:
    """Sets the ambient mesh of this thread: for good when called, for a block when used with `with`.

    It does all that `jax.set_mesh` does, so `jax.jit` sees the mesh too.

    Args:
        mesh: the mesh, or None for none.

    Raises:
        TypeError: `mesh` is no mesh.
        ValueError: a function is being traced.

    Example:
        >>> with set_mesh(jax.make_mesh((8,), ("x",))) as mesh:
        ...     print(mesh.shape["x"])
        8
    """

    def __init__(self, mesh: jax.sharding.Mesh | None) -> None:
        if mesh is not None:
            require_mesh_type("set_mesh", "mesh", mesh)
        self._mesh = mesh
        self._jax_state = jax.set_mesh(_interned(mesh))

    def __enter__(self) -> jax.sharding.Mesh | None:
        # An enclosing `with mesh:` is read first, so it is shadowed for the block. Outside a block there is no end at
        # which to take the shadow away. Without one there is nothing to shadow, and the caches' keys stay jax's.
        shadows = not physical_mesh().empty
        self._shadow = entered_mesh(EMPTY_MESH) if shadows else contextlib.nullcontext()
        self._shadow.__enter__()
        return self._mesh

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._shadow.__exit__(exc_type, exc, traceback)
        self._jax_state.__exit__(exc_type, exc, traceback)


def ambient_mesh() -> jax.sharding.Mesh:
    """The mesh of the innermost `with mesh:` or `set_mesh` of this thread; the empty mesh if there is neither.

    Example:
        >>> ambient_mesh().empty
        True
    """
    return innermost_mesh()


def ambient_or_abstract_mesh() -> jax.sharding.Mesh:
    """The ambient mesh; where there is none, that of `jax.sharding.use_abstract_mesh`, on which a program is lowered.

    An abstract mesh is passed wherever a mesh is: it only has no devices.
    """
    return cast(jax.sharding.Mesh, abstract_mesh()) or ambient_mesh()


def is_abstract_mesh(mesh: object) -> bool:
    """Whether a mesh has no devices, but axes."""
    return isinstance(mesh, jax.sharding.AbstractMesh)


@functools.lru_cache(maxsize=256)
def auto_twin(mesh: jax.sharding.Mesh) -> jax.sharding.Mesh:
    """The mesh of the same devices and names whose axes are all Auto; `mesh` itself if they are already."""
    if mesh.empty or mesh.are_all_axes_auto:
        return mesh
    if is_abstract_mesh(mesh):
        return mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    return jax.sharding.Mesh(mesh.devices, mesh.axis_names)


def has_explicit_axes(mesh: jax.sharding.Mesh) -> bool:
    """Whether types of values say how they are sharded over an axis of the mesh."""
    return AxisType.Explicit in mesh.axis_types


def explicit_axes(mesh: jax.sharding.Mesh) -> frozenset[str]:
    """The axes of type Explicit."""
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in types if kind is AxisType.Explicit)


_tracing = threading.local()


@contextlib.contextmanager
def tracing_under(mesh: jax.sharding.Mesh) -> Iterator[None]:
    """Makes `mesh` ambient while a program's function is traced, for partjit's and for jax's code.

    Inside a `shard_map` jax's own context stays: it knows which axes are manual.
    """
    if mesh.empty or manual_axes():
        yield
        return
    outer = getattr(_tracing, "mesh", None)
    _tracing.mesh = mesh
    try:
        with under_mesh(mesh):
            yield
    finally:
        _tracing.mesh = outer


class Outside:
    """The meshes that are ambient here, to be restored for a block inside of a program."""

    def __init__(self) -> None:
        self._meshes = AmbientMeshes()
        self._tracing = getattr(_tracing, "mesh", None)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Restores them in the block."""
        outer, _tracing.mesh = getattr(_tracing, "mesh", None), self._tracing
        try:
            with self._meshes.restored():
                yield
        finally:
            _tracing.mesh = outer


def program_mesh(own_meshes: Sequence[jax.sharding.Mesh], *, has_bare_specs: bool) -> jax.sharding.Mesh:
    """The mesh a program runs on.

    Args:
        own_meshes: the meshes of its `NamedSharding` specs.
        has_bare_specs: whether it has specs that name axes of the ambient mesh.

    Raises:
        MeshChangedError: the program is part of one on another mesh.
    """
    mesh = ambient_or_abstract_mesh()
    outer = getattr(_tracing, "mesh", None)
    if outer is not None and not mesh.empty and auto_twin(mesh) != auto_twin(outer):
        raise _mesh_changed(outer, mesh)
    if own_meshes and (mesh.empty or not has_bare_specs):
        own = own_meshes[0]
        if outer is not None and _is_of_other_devices(own, outer):
            raise _mesh_changed(outer, own)
        return own
    return mesh


def _is_of_other_devices(mesh: jax.sharding.Mesh, outer: jax.sharding.Mesh) -> bool:
    return mesh.size != outer.size if is_abstract_mesh(outer) else [*mesh.devices.flat] != [*outer.devices.flat]


def describe_mesh(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> str:
    """The axes and their sizes for messages: `data=4, model=2`."""
    return ", ".join(f"{name}={size}" for name, size in mesh.shape.items()) or "no axes"


def picture(mesh: jax.sharding.Mesh) -> "pictures.Picture":
    """The devices along the axes, or the positions of those that an abstract mesh does not have, as text or SVG."""
    sizes = tuple(mesh.shape.values())
    if is_abstract_mesh(mesh):
        ids, remote, kind = np.arange(mesh.size).reshape(sizes), frozenset[int](), "devices, which are not chosen yet"
    else:
        devices = mesh.devices
        remote = frozenset(d.id for d in devices.flat if d.process_index != d.client.process_index())
        kind = f"{next((d.platform for d in devices.flat), 'no')} devices"
        ids = np.array(device_ids(mesh), int).reshape(sizes)
    steps = piece_grid.grouping(sizes, mesh.size)
    cells = [-(-size // step) for size, step in zip(sizes, steps, strict=True)]
    notes = (f"a cell is a group of {' x '.join(map(str, steps))} devices",) if max(steps, default=1) > 1 else ()
    grid = piece_grid.PieceGrid(
        f"mesh ({describe_mesh(mesh)}) of {mesh.size} {kind}",
        notes,
        tuple(
            piece_grid.Dimension(name, f"{size} ({kind.name})", tuple(_labels(size, step)))
            for name, kind, size, step in zip(mesh.axis_names, mesh.axis_types, sizes, steps, strict=True)
        ),
        "",
        tuple(
            piece_grid.Piece(at, tuple(sorted(_cell(ids, at, steps).ravel().tolist())), k)
            for k, at in enumerate(np.ndindex(*cells))
        ),
        remote,
        noun="cell" if notes else "device",
    )
    return pictures.Picture(grid)


def _labels(size: int, step: int) -> Iterator[str]:
    """Those of the positions along an axis, or of so many neighbours together."""
    for first in range(0, size, step):
        yield str(first) if step == 1 else f"{first}:{min(first + step, size)}"


def _cell(ids: Any, at: tuple[int, ...], steps: tuple[int, ...]) -> Any:
    return ids[tuple(slice(k * step, (k + 1) * step) for k, step in zip(at, steps, strict=True))]


def _mesh_changed(outer: jax.sharding.Mesh, mesh: jax.sharding.Mesh) -> MeshChangedError:
    return MeshChangedError(
        "Changing the physical mesh is not allowed inside a pjit: the function is being traced for a program on the "
        f"mesh ({describe_mesh(outer)}) with {_with(outer)}, and an inner pjit is called under the mesh "
        f"({describe_mesh(mesh)}) with {_with(mesh)}. Leave the inner mesh out, or call the inner "
        "function outside."
    )


def _with(mesh: jax.sharding.Mesh) -> str:
    return "no devices" if is_abstract_mesh(mesh) else f"devices {device_ids(mesh)}"


def device_ids(mesh: jax.sharding.Mesh) -> list[int]:
    """The ids of the devices of a mesh, in their order."""
    return [device.id for device in mesh.devices.flat]


def _interned(mesh: jax.sharding.Mesh | None) -> Any:
    return mesh._interned if isinstance(mesh, Mesh) else mesh
