"""Calls of random programs, for the promises: what is called, under which mesh, with which specs, and from where."""

import dataclasses

import jax
import jax.numpy as jnp
from hypothesis import strategies as st
from jax.sharding import NamedSharding

import partjit
from partjit import P
from partjit.testing import ShardedProgram, meshes, partition_specs, sharded_programs
from tests import census

AMBIENCES = ["with", "with", "partjit.set_mesh", "jax.set_mesh", "named"]
PLACES = ["numpy", "uncommitted", "right", "elsewhere"]
# The simplest is the first that hypothesis tries, and of a law of few examples the only one that is certain.
TWO_AXES = [(2, 2), (4, 2), (2, 4), (2, 2, 2), (4, 1, 2)]
# XLA of jax 0.12 ends the process ("Could not slice dimension 0 with size 3") where it moves a value between
# P(("y", "x")) and P("x", "y") on a mesh of 3 x 2, with jax.jit alone too.
if jax.__version_info__ < (0, 11):
    TWO_AXES += [(3, 2), (2, 1, 3)]
ANY_AXES = [*TWO_AXES, *TWO_AXES, (2,), (8,), (1, 8), (5,), (1,)]


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
    """Calls of random programs; with `spmd`, such that one mesh axis is free.

    On every mesh of more than one device the first argument and the first result are partitioned.
    """
    mesh = draw(meshes(mesh_shapes=TWO_AXES if spmd else ANY_AXES, explicit=explicit))
    free = draw(st.sampled_from(_axes_that_may_be_free(mesh))) if spmd else None
    avoid = (free,) if free else ()
    size = {"max_steps": max_steps, "depth": depth, "max_size": max_size}
    program = draw(sharded_programs(mesh=mesh, avoid=avoid, partitioned=mesh.size > 1, **size))
    arg_shapes = program.arg_shapes
    ambience = draw(st.sampled_from(ambiences))
    in_specs, out_specs = (
        [
            draw(partition_specs(mesh=mesh, shape=shape, avoid=avoid, partitioned=mesh.size > 1 and i == 0))
            for i, shape in enumerate(shapes)
        ]
        for shapes in (arg_shapes, program.result_shapes)
    )
    places = [draw(st.sampled_from(PLACES)) for _ in arg_shapes]
    others = [draw(partition_specs(mesh=mesh, shape=shape)) for shape in arg_shapes]
    seed = draw(st.integers(0, 2**16))
    return Case(mesh, ambience, program, *map(tuple, (in_specs, out_specs, places, others)), seed, free)


def _axes_that_may_be_free(mesh):
    """The axes without which there is still something to partition over."""
    return [axis for axis in mesh.axis_names if mesh.size > mesh.shape[axis]]


@census.features.register
def _(case: Case):
    """What a law of a case sees: by the definition of a spec, not by what was asked of the strategies."""

    def partitioned(specs):
        return any(census.is_partitioned(case.mesh, spec) for spec in specs)

    found = census.features(case.mesh) | census.features((*case.in_specs, *case.out_specs))
    elsewhere = zip(case.places, case.in_specs, case.other_specs, strict=True)
    shown = {
        "a value of several dimensions": any(sum(n > 1 for n in shape) > 1 for shape in case.program.arg_shapes),
        "a partitioned argument": partitioned(case.in_specs),
        "a partitioned result": partitioned(case.out_specs),
        "a spec inside": partitioned(specs_inside(case.program.steps)),
        "an argument elsewhere": any(place == "elsewhere" and spec != other for place, spec, other in elsewhere),
        "an axis for the batch": case.spmd is not None and case.mesh.shape[case.spmd] > 1,
        "a loop": _has(case.program.steps, "scan", "map", "fori", "while"),
        "a branch": _has(case.program.steps, "cond"),
    }
    return found | {feature for feature, is_there in shown.items() if is_there}


def specs_inside(step):
    """The specs in the steps of a program."""
    if isinstance(step, P):
        return [step]
    return [spec for part in step for spec in specs_inside(part)] if isinstance(step, tuple) else []


def _has(step, *kinds):
    """Whether an operation of such a kind is in the steps of a program."""
    return step in kinds if isinstance(step, str) else isinstance(step, tuple) and any(_has(s, *kinds) for s in step)


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
