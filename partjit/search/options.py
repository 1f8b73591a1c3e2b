"""What the options of a search mean, whoever gives them."""

import contextlib
import sys
from collections.abc import Iterator

from jax.core import ShapedArray
from jax.sharding import Mesh

from partjit.checks import items_of, require, require_callable, require_integer, wrong_type
from partjit.inspect.asked_pool import processors
from partjit.inspect.tracing import TracedFunction
from partjit.mesh import describe_mesh, has_explicit_axes, is_abstract_mesh
from partjit.render.numbers import shown_duration
from partjit.search.find import Progress
from partjit.search.machine import Machine, h100, tpu_v5p, tpu_v6e

__all__ = [
    "bytes_of",
    "machine_of",
    "names_of",
    "require_auto_axes",
    "require_mesh_of",
    "shown_progress",
    "workers_of",
]

_MACHINES = {"v5p": tpu_v5p, "v6": tpu_v6e, "H100": h100}

_MOST_WORKERS = 8


def machine_of(mesh: Mesh) -> Machine:
    """The machine whose devices a mesh has, H100 if they are of none that is known."""
    kind = "" if is_abstract_mesh(mesh) else next(iter(mesh.devices.flat)).device_kind
    return next((preset for part, preset in _MACHINES.items() if part in kind), h100)(mesh)


def names_of(where: str, constrain: object) -> tuple[str, ...] | None:
    """The names of activations that may be constrained; None for those that are found."""
    if isinstance(constrain, bool):
        return None if constrain else ()
    expected = "True, False, or the names of activations"
    names = items_of(where, "constrain", constrain, expected)
    return tuple(require(where, "constrain", name, str, expected) for name in names)


def workers_of(workers: int | None, where: str = "search_specs") -> int:
    """How many processes are asked."""
    return min(processors(), _MOST_WORKERS) if workers is None else require_integer(where, "workers", workers, 1)


@contextlib.contextmanager
def shown_progress(where: str, progress: Progress | bool | None) -> Iterator[Progress | None]:
    """What is notified of the progress: a function, or a line on the standard error, which ends with the block."""
    if progress is not None and not isinstance(progress, bool):
        if isinstance(progress, contextlib.ContextDecorator):  # a mesh, which decorates functions
            raise wrong_type(where, "progress", progress, "a function, True, False or None")
        yield require_callable(where, "progress", progress)
    elif progress or (progress is None and sys.stderr.isatty()):
        try:
            yield _line
        finally:
            print(file=sys.stderr)
    else:
        yield None


def _line(asked: int, limit: int, seconds: float) -> None:
    """Shows the progress on one line of the standard error."""
    text = f"searching: {asked} of {limit} questions, best step {shown_duration(seconds)}"
    print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def bytes_of(memory: float) -> int:
    """A limit of the memory as a whole number; without a limit, more than there is anywhere."""
    return sys.maxsize if memory >= sys.maxsize else int(memory)


def require_mesh_of(where: str, traced: TracedFunction, mesh: Mesh) -> None:
    """Refuses a program that is on another mesh than the one that is searched, whose axes it does not have."""
    own = traced.whole.mesh
    if own.shape_tuple != mesh.shape_tuple:
        raise ValueError(
            f"{where}: {traced.whole.name} is on the mesh {describe_mesh(own)}, as its NamedShardings or its arguments "
            f"say, and mesh is {describe_mesh(mesh)}. Give the function without them and types "
            "(jax.ShapeDtypeStruct) as arguments, or search on its own mesh"
        )


def require_auto_axes(where: str, traced: TracedFunction, mesh: Mesh) -> None:
    """Refuses a program on a mesh with axes of type Explicit, where specs are parts of types."""
    types = (aval.sharding.mesh for aval in traced.whole.jaxpr.in_avals if isinstance(aval, ShapedArray))
    if any(has_explicit_axes(on) for on in (mesh, *types)):
        raise ValueError(
            f"{where}: {traced.whole.name} is on a mesh with axes of type Explicit, where specs are part of the types "
            "of values: with others it is another program, and nothing is left to be searched. Give a mesh whose axes "
            "are Auto"
        )
