"""The ambient mesh: what `with mesh:`, `jax.set_mesh` and `shard_map` have set in a thread, read and set."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jax._src import config
from jax._src import mesh as mesh_lib
from jax._src.mesh import ResourceEnv
from jax.sharding import AbstractMesh, Mesh
from jaxlib._jax.config import Config

# jax 0.12 moved the states of `jax.set_mesh` from config to mesh.
_states: Any = mesh_lib if hasattr(mesh_lib, "device_context") else config

SET_MESH_STATES: tuple[Config, ...] = (_states.device_context, _states.abstract_mesh_context_manager)
"""What `jax.set_mesh` sets: the mesh, and its abstract mesh."""

EMPTY_MESH = mesh_lib.empty_concrete_mesh


def physical_mesh() -> Mesh:
    """The mesh of the innermost `with mesh:` of this thread, or the empty mesh."""
    return mesh_lib.thread_resources.env.physical_mesh


def innermost_mesh() -> Mesh:
    """The mesh of the innermost `with mesh:` or `jax.set_mesh` of this thread, or the empty mesh.

    jax keeps the two apart and does not say which came last. `entered_mesh` records what `jax.set_mesh` had set by
    then: if that has changed since, it was set later. Of a `with` of jax's own mesh nothing is recorded; it wins.
    """
    entered, set_since = physical_mesh(), mesh_lib.get_concrete_mesh()
    if entered.empty:
        return set_since
    depth, set_before = _entered.records[-1] if _entered.records else (0, set_since)
    is_later = depth == len(mesh_lib.thread_resources.stack) and set_since is not set_before and not set_since.empty
    return set_since if is_later else entered


_Records = list[tuple[int, Mesh]]
"""The depth of jax's stack, and the mesh of `jax.set_mesh` at the time."""


class _Entered(threading.local):
    def __init__(self) -> None:
        self.records: _Records = []


_entered = _Entered()


def manual_axes() -> tuple[str, ...]:
    """The mesh axes that are manual here, because the trace is inside a `shard_map`."""
    return mesh_lib.get_abstract_mesh().manual_axes


@contextlib.contextmanager
def entered_mesh(mesh: Mesh) -> Iterator[None]:
    """What `with` of a `jax.sharding.Mesh` does, without its DeprecationWarning."""
    resources = mesh_lib.thread_resources
    resources.stack.append(resources.stack[-1].with_mesh(mesh))
    _entered.records.append((len(resources.stack), mesh_lib.get_concrete_mesh()))
    _publish_entered_meshes()
    try:
        yield
    finally:
        resources.stack.pop()
        _entered.records.pop()
        _publish_entered_meshes()


@contextlib.contextmanager
def _set_meshes(values: Iterable[object]) -> Iterator[None]:
    """Sets what `jax.set_mesh` sets; its own context manager refuses a mesh of another size than the one set before."""
    outer = [state.swap_local(value) for state, value in zip(SET_MESH_STATES, values, strict=True)]
    try:
        yield
    finally:
        for state, value in zip(SET_MESH_STATES, outer, strict=True):
            state.set_local(value)


@contextlib.contextmanager
def under_mesh(mesh: Mesh | AbstractMesh) -> Iterator[None]:
    """Makes `mesh` the answer to every way of asking: `with mesh:`, `jax.set_mesh` and the abstract mesh."""
    devices = mesh if isinstance(mesh, Mesh) else EMPTY_MESH
    with _set_meshes((devices, mesh.abstract_mesh)), entered_mesh(devices):
        yield


def is_other_mesh_set(mesh: Mesh) -> bool:
    """Whether `jax.set_mesh` has set another mesh: jax then refuses to compute with arrays over this one."""
    set_mesh = mesh_lib.get_concrete_mesh()
    return not set_mesh.empty and set_mesh != mesh


def abstract_mesh() -> AbstractMesh | None:
    """The mesh of `jax.sharding.use_abstract_mesh`, where no mesh of devices is ambient and no axis is manual."""
    mesh = mesh_lib.get_abstract_mesh()
    return None if mesh.empty or mesh.manual_axes or not innermost_mesh().empty else mesh


@contextlib.contextmanager
def ambient_mesh_replaced(replacement: Callable[[Mesh], Mesh]) -> Iterator[None]:
    """Makes `replacement(mesh)` ambient in the ways in which a mesh of devices is."""
    mesh = innermost_mesh()
    replaced = mesh if mesh.empty else replacement(mesh)
    if replaced is mesh:
        yield
    else:
        ambient = entered_mesh if mesh_lib.get_concrete_mesh().empty else under_mesh
        with ambient(replaced):
            yield


@contextlib.contextmanager
def without_mesh() -> Iterator[None]:
    """Makes no mesh ambient where `jax.set_mesh` or a `shard_map` has made one so: it is wrong for a single device."""
    if mesh_lib.get_concrete_mesh().empty and mesh_lib.get_abstract_mesh().empty:
        yield
    else:
        with under_mesh(EMPTY_MESH):
            yield


class EnteredMeshes:
    """The meshes that this thread has entered with `with mesh:`, to be entered again elsewhere.

    The key of jax's caches that they are part of (`config.mesh_context_manager`) is left to the caller.
    """

    __slots__ = ("_records", "_stack")

    def __init__(self, stack: Sequence[ResourceEnv] = (), records: Iterable[tuple[int, Mesh]] = ()) -> None:
        self._stack, self._records = stack, [*records]

    def enter(self) -> tuple[list[ResourceEnv], _Records] | None:
        """Replaces the meshes this thread has entered; returns what `leave` puts back."""
        stack = mesh_lib.thread_resources.stack
        if not self._stack and len(stack) == 1:
            return None
        outer = stack[1:], _entered.records
        self.leave(([*self._stack], [*self._records]))
        return outer

    @staticmethod
    def leave(outer: tuple[list[ResourceEnv], _Records] | None) -> None:
        """Puts back what was entered before."""
        if outer is not None:
            resources = mesh_lib.thread_resources
            resources.stack[1:], _entered.records = outer
            resources.env = resources.stack[-1]


NO_MESHES = EnteredMeshes()
"""Those of a thread that has entered none."""


def entered_meshes() -> EnteredMeshes:
    """Those of this thread."""
    stack = mesh_lib.thread_resources.stack
    return NO_MESHES if len(stack) == 1 else EnteredMeshes(stack[1:], _entered.records)


class AmbientMeshes:
    """The meshes that are ambient in this thread, in every way, to be so again within a block inside of others."""

    def __init__(self) -> None:
        self._set = [state.get_local() for state in SET_MESH_STATES]
        self._entered = entered_meshes()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Makes them ambient in the block."""
        with _set_meshes(self._set):
            outer = self._entered.enter()
            _publish_entered_meshes()
            try:
                yield
            finally:
                self._entered.leave(outer)
                _publish_entered_meshes()


def _publish_entered_meshes() -> None:
    resources = mesh_lib.thread_resources
    resources.env = resources.stack[-1]
    # This is part of the key of every cache of jax's. It has to tell which mesh is innermost, so unlike jax's it names
    # empty meshes, which shadow others, and what `jax.set_mesh` had set when a mesh was entered, even if that is none:
    # of a `with` of jax's own mesh and of a `jax.set_mesh` inside of ours nothing else would be different.
    set_before = dict(_entered.records)
    config.mesh_context_manager.set_local(
        tuple(
            (env.physical_mesh, set_before[depth]) if depth in set_before else env.physical_mesh
            for depth, env in enumerate(resources.stack[1:], start=2)
        )
    )
