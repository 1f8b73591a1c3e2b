"""Calls of random programs, for the promises: what is called, under which mesh, with which specs, and from where."""

import dataclasses

import jax
import jax.numpy as jnp
from hypothesis import strategies as st
from jax.sharding import NamedSharding

import partjit
from partjit import P
from partjit.testing import ShardedProgram, meshes, partition_specs, sharded_programs

AMBIENCES = ["with", "with", "partjit.set_mesh", "jax.set_mesh", "named"]
PLACES = ["numpy", "uncommitted", "right", "elsewhere"]


@dataclasses.dataclass(frozen=True)
class Case:
    """A call.

    Attributes:
        mesh: the mesh.
        ambience: how it becomes the program's: by a context, or "named" by NamedShardings.
        program: the function.
        in_specs, out_specs: one `PartitionSpec` or None per argument and result.
        places: where each argument is before the call.
        other_specs: the spec of each argument that is "elsewhere".
        seed: of the values.
        spmd: a mesh axis that no spec names, for `spmd_axis_name`, or None.
    """

    mesh: partjit.Mesh
    ambience: str
    program: ShardedProgram
    in_specs: tuple
    out_specs: tuple
    places: tuple[str, ...]
    other_specs: tuple
    seed: int
    spmd: str | None


@st.composite
def cases(draw, *, explicit=False, ambiences=tuple(AMBIENCES), spmd=False, max_steps=4, depth=2, max_size=2):
    """Calls of random programs; with `spmd`, such that one mesh axis is free."""
    mesh = draw(meshes(explicit=explicit))
    free = draw(st.sampled_from(mesh.axis_names)) if spmd else None
    avoid = (free,) if free else ()
    program = draw(sharded_programs(mesh=mesh, avoid=avoid, max_steps=max_steps, depth=depth, max_size=max_size))
    arg_shapes = program.arg_shapes
    ambience = draw(st.sampled_from(ambiences))
    in_specs = [draw(partition_specs(mesh=mesh, shape=shape, avoid=avoid)) for shape in arg_shapes]
    out_specs = [draw(partition_specs(mesh=mesh, shape=shape, avoid=avoid)) for shape in program.result_shapes]
    places = [draw(st.sampled_from(PLACES)) for _ in arg_shapes]
    others = [draw(partition_specs(mesh=mesh, shape=shape)) for shape in arg_shapes]
    seed = draw(st.integers(0, 2**16))
    return Case(mesh, ambience, program, *map(tuple, (in_specs, out_specs, places, others)), seed, free)


def numpy_args(case):
    """The arguments: distinct floats in [-1, 1], and indices."""
    return case.program.arguments(case.seed)


def placed_args(case):
    """The arguments where the case says they are."""
    placed = []
    for arg, place, spec, other in zip(numpy_args(case), case.places, case.in_specs, case.other_specs, strict=True):
        if place == "uncommitted":
            arg = jnp.asarray(arg)
        elif place != "numpy":
            arg = jax.device_put(arg, NamedSharding(case.mesh, (spec if place == "right" else other) or P()))
        placed.append(arg)
    return placed


def to_pjit(case, fun=None):
    """The partitioned function of a case."""
    fun = fun or case.program
    if case.ambience != "named":
        return partjit.pjit(fun, case.in_specs, case.out_specs)

    def named(spec):
        return NamedSharding(case.mesh, P() if spec is None else spec)

    return partjit.pjit(
        fun, in_shardings=tuple(map(named, case.in_specs)), out_shardings=tuple(map(named, case.out_specs))
    )


def enter(case):
    """The context that makes the mesh of a case ambient."""
    match case.ambience:
        case "with":
            return case.mesh
        case "partjit.set_mesh":
            return partjit.set_mesh(case.mesh)
        case "jax.set_mesh":
            return jax.set_mesh(case.mesh)
    return partjit.reshard_policy("allow")  # nothing to enter
