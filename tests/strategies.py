"""Hypothesis strategies: random meshes, specs that fit a shape, and small differentiable programs with their specs.

A program is data, so that a failing example prints as what it is; `run` interprets it, either with the partitioned
functions inside or, for comparison, with none of them. All values stay bounded, so that float32 is precise enough to
compare derivatives of any order.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding

import partjit
from partjit import P

MESH_SHAPES = [(8,), (4, 2), (2, 4), (2, 2, 2), (2, 2), (4, 1, 2), (3, 2), (2, 1, 3), (1, 8), (6,), (5,), (2,), (1,)]
AXIS_NAMES = [("x", "y", "z"), ("z", "x", "y"), ("data", "model", "stage")]
DIMS = [1, 2, 4, 6, 8, 8, 12]
MAX_ELEMENTS = 256


@st.composite
def meshes(draw, *, explicit=False):
    """Meshes of 1 to 3 axes over any devices in any order; with `explicit`, at least one axis is Explicit."""
    shape = draw(st.sampled_from(MESH_SHAPES))
    order = draw(st.one_of(st.just(list(range(8))), st.permutations(range(8))))[: math.prod(shape)]
    names = draw(st.sampled_from(AXIS_NAMES))[: len(shape)]
    kinds = [AxisType.Explicit, AxisType.Auto]
    types = draw(
        st.permutations([kinds[0], *(draw(st.sampled_from(kinds)) for _ in shape[1:])])
        if explicit
        else st.just([kinds[1]] * len(shape))
    )
    return partjit.Mesh(np.array(jax.devices())[order].reshape(shape), names, axis_types=tuple(types))


def shapes(min_rank=0, max_rank=3):
    return (
        st.lists(st.sampled_from(DIMS), min_size=min_rank, max_size=max_rank)
        .map(tuple)
        .filter(lambda shape: math.prod(shape) <= MAX_ELEMENTS)
    )


@st.composite
def specs(draw, mesh, shape, *, avoid=(), uneven=False, unconstrained=False):
    """A spec for a value of `shape`: None, or any axes on any dimensions they divide, in any spelling.

    Args:
        mesh: where the axes come from.
        shape: the shape of the value.
        avoid: axes that do not appear.
        uneven: whether axes need not divide the dimension.
        unconstrained: whether dimensions may be UNCONSTRAINED.
    """
    if draw(st.integers(0, 7)) == 0:
        return None
    dims = [[] for _ in shape]
    for axis in draw(st.permutations([axis for axis in mesh.axis_names if axis not in avoid])):
        dim = draw(st.integers(-1, len(shape) - 1))
        if dim >= 0 and (uneven or shape[dim] % (math.prod(mesh.shape[a] for a in dims[dim]) * mesh.shape[axis]) == 0):
            dims[dim].append(axis)
    entries = []
    for axes in dims:
        if unconstrained and not axes and draw(st.booleans()):
            entries.append(P.UNCONSTRAINED)
        elif len(axes) == 1 and draw(st.booleans()):
            entries.append(axes[0])
        elif not axes and draw(st.booleans()):
            entries.append(None)
        else:
            entries.append(tuple(axes))
    while entries and entries[-1] in (None, ()) and draw(st.booleans()):
        entries.pop()
    return P(*entries)


def axes_of(spec, rank):
    """Per dimension the mesh axes that divide it, major to minor."""
    entries = () if spec is None else tuple(spec)
    axes = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries]
    return tuple(axes + [()] * (rank - len(axes)))


def pieces(mesh, spec, shape):
    """The index of the piece each device holds, from the definition: within a dimension the first axis is major."""
    found = {}
    for position in itertools.product(*map(range, mesh.devices.shape)):
        at = dict(zip(mesh.axis_names, position, strict=True))
        index = []
        for size, axes in zip(shape, axes_of(spec, len(shape)), strict=True):
            number, count = 0, 1
            for axis in axes:
                number, count = number * mesh.shape[axis] + at[axis], count * mesh.shape[axis]
            length = size // count
            index.append(slice(number * length, (number + 1) * length))
        found[mesh.devices[position]] = tuple(index)
    return found


# Bodies: programs of one value that keep its shape, as tuples of (operation, *parameters).

ELEMENTWISE = {
    "sin": jnp.sin,
    "tanh": jnp.tanh,
    "leaky": lambda x: jnp.where(x > 0.25, x, 0.1 * x + jnp.cos(x)),
    "constant": lambda x: x * jnp.linspace(0.5, 1.0, x.size, dtype=x.dtype).reshape(x.shape),
    "stop": lambda x: x * jax.lax.stop_gradient(jnp.cos(x)),
}
NESTED = ["pjit", "jit", "remat", "scan", "map", "fori", "while", "cond", "vmap", "custom_jvp", "grad", "jvp", "swap"]


@st.composite
def bodies(draw, mesh, shape, *, depth=2, avoid=(), max_size=2):
    """A body for values of `shape`; at every depth there are constraints and nested pjits with specs of their own."""
    smaller = functools.partial(bodies, mesh, depth=depth - 1, avoid=avoid, max_size=max_size)
    body = []
    for _ in range(draw(st.integers(1, max_size))):
        kinds = [*ELEMENTWISE, "constraint", "constraint"]
        if shape:
            kinds += ["softmax", "center", "flip", "roll", "cumsum", "take", "scatter", "ravel"]
        if len(shape) == 2:
            kinds += ["gram"]
        if depth:
            kinds += ["pjit"] * 6 + NESTED * 2
        kind = draw(st.sampled_from(kinds))
        if kind in ("map", "vmap", "swap") and not shape:
            kind = "pjit"
        axis = draw(st.integers(0, len(shape) - 1)) if shape else None
        if kind in ELEMENTWISE or kind in ("ravel", "gram"):
            body.append((kind,))
        elif kind == "constraint":
            spec = draw(specs(mesh, shape, avoid=avoid, uneven=True, unconstrained=True))
            body.append((kind, spec))
        elif kind in ("softmax", "center", "flip", "roll", "cumsum"):
            body.append((kind, axis))
        elif kind in ("take", "scatter"):
            size = shape[axis]
            index = draw(st.lists(st.integers(0, size - 1), min_size=size, max_size=size))
            body.append((kind, axis, tuple(index)))
        elif kind == "pjit":
            unspecified = draw(st.integers(0, 5)) == 0
            pair = (
                (partjit.UNSPECIFIED, partjit.UNSPECIFIED)
                if unspecified
                else tuple(draw(specs(mesh, shape, avoid=avoid)) for _ in range(2))
            )
            body.append((kind, *pair, draw(smaller(shape))))
        elif kind == "cond":
            body.append((kind, draw(smaller(shape)), draw(smaller(shape))))
        elif kind in ("map", "vmap"):
            spmd = None
            if kind == "vmap":
                free = [a for a in mesh.axis_names if a not in avoid and shape[axis] % mesh.shape[a] == 0]
                spmd = draw(st.sampled_from([None, *free]))
            axis = axis if kind == "vmap" else 0
            rest = shape[:axis] + shape[axis + 1 :]
            inner_avoid = (*avoid, spmd) if spmd else avoid
            body.append((kind, axis, spmd, draw(bodies(mesh, rest, depth=depth - 1, avoid=inner_avoid, max_size=2))))
        elif kind == "swap":
            perm = tuple(draw(st.permutations(range(len(shape)))))
            body.append((kind, perm, draw(smaller(tuple(shape[i] for i in perm)))))
        else:
            body.append((kind, draw(smaller(shape))))
    return tuple(body)


def run_body(body, x, partitioned):
    for kind, *parameters in body:
        x = _apply(kind, parameters, x, partitioned)
    return x


def _apply(kind, parameters, x, partitioned):
    if kind in ELEMENTWISE:
        return ELEMENTWISE[kind](x)
    match kind, parameters:
        case "constraint", (spec,):
            return partjit.with_sharding_constraint(x, spec) if partitioned else x
        case "softmax", (axis,):
            return jax.nn.softmax(x, axis=axis)
        case "center", (axis,):
            return x - x.mean(axis, keepdims=True)
        case "flip", (axis,):
            return jnp.flip(x, axis)
        case "roll", (axis,):
            return jnp.roll(x, 1, axis)
        case "cumsum", (axis,):
            return jnp.cumsum(x, axis) / x.shape[axis]
        case "take", (axis, index):
            return jnp.take(x, np.array(index, np.int32), axis=axis)
        case "scatter", (axis, index):
            rows = jnp.moveaxis(x, axis, 0)
            return jnp.moveaxis(rows.at[np.array(index, np.int32)].add(jnp.sin(rows)) / len(index), 0, axis)
        case "ravel", ():
            return jnp.cos(jnp.ravel(x)).reshape(x.shape)
        case "gram", ():
            return x @ (x.T @ x) / x.size
    *own, last = parameters
    inner = functools.partial(run_body, last, partitioned=partitioned)
    match kind, own:
        case "pjit", (in_spec, out_spec):
            return partjit.pjit(inner, in_spec, out_spec)(x) if partitioned else inner(x)
        case "jit", ():
            return jax.jit(inner)(x)
        case "remat", ():
            return jax.checkpoint(inner)(x)
        case "scan", ():
            return jax.lax.scan(lambda c, s: (inner(c) * s, c.sum()), x, np.array([0.5, 0.9], x.dtype))[0]
        case "map", (_, _):
            return jax.lax.map(inner, x)
        case "fori", ():
            return jax.lax.fori_loop(0, 2, lambda _, c: inner(c), x)
        case "while", ():  # it has no reverse mode, so nothing is differentiated through it
            state = (0, jax.lax.stop_gradient(x))
            return x * jax.lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, inner(s[1])), state)[1]
        case "cond", (other,):
            # XLA refuses branches whose first or last operations are constrained differently.
            others = functools.partial(run_body, other, partitioned=partitioned)
            branches = [lambda x, branch=branch: jnp.sin(branch(0.9 * x)) for branch in (inner, others)]
            return jax.lax.cond(jnp.ravel(x)[0] > 0.25, *branches, x)
        case "vmap", (axis, spmd):
            return jax.vmap(inner, axis, axis, spmd_axis_name=spmd if partitioned else None)(x)
        case "custom_jvp", ():
            custom = jax.custom_jvp(inner)
            custom.defjvp(lambda primals, tangents: jax.jvp(inner, primals, tangents))
            return custom(x)
        case "grad", ():
            return jnp.tanh(jax.grad(lambda v: inner(v).sum())(x))
        case "jvp", ():
            return jnp.tanh(jax.jvp(inner, (x,), (jnp.cos(x),))[1])
        case "swap", (perm,):
            return inner(x.transpose(perm)).transpose(np.argsort(perm))
    raise AssertionError(kind)


# Programs: several arguments and results, as steps that each append a value.


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of arrays.

    Attributes:
        shapes: of the float arguments; if `num_indices`, an int32 vector of that length follows them.
        num_indices: the length of the vector, or None.
        steps: (operation, operands, parameters), each of which appends one value to those there are.
        results: which values are returned.
    """

    shapes: tuple[tuple[int, ...], ...]
    num_indices: int | None
    steps: tuple[tuple, ...]
    results: tuple[int, ...]

    def __call__(self, *args, partitioned):
        values = list(args)
        for kind, operands, parameters in self.steps:
            values.append(_step(kind, [values[i] for i in operands], parameters, partitioned))
        return tuple(values[i] for i in self.results)

    @property
    def num_args(self):
        return len(self.shapes) + (self.num_indices is not None)

    def arg_shapes(self):
        return [*self.shapes, *([] if self.num_indices is None else [(self.num_indices,)])]

    def result_shapes(self):
        args = [jax.ShapeDtypeStruct(shape, np.float32) for shape in self.shapes]
        if self.num_indices is not None:
            args.append(jax.ShapeDtypeStruct((self.num_indices,), np.int32))
        return [out.shape for out in jax.eval_shape(functools.partial(self, partitioned=False), *args)]


def _step(kind, values, parameters, partitioned):
    match kind:
        case "body":
            return run_body(parameters[0], values[0], partitioned)
        case "add":
            return (values[0] + values[1]) / 2
        case "mul":
            return values[0] * values[1]
        case "tensordot":
            left, right = parameters
            return jnp.tensordot(values[0], values[1], axes=((left,), (right,))) / values[0].shape[left]
        case "mean" | "max":
            return getattr(jnp, kind)(values[0], axis=parameters[0])
        case "transpose":
            return values[0].transpose(parameters)
        case "reshape":
            return values[0].reshape(parameters)
        case "concatenate":
            return jnp.concatenate([values[0], jnp.sin(values[0])], parameters[0])
        case "gather":
            return jnp.take(values[0], values[1], axis=parameters[0], mode="clip")
        case "closure":  # a nested pjit that closes over a value of the outer trace
            in_spec, out_spec, body = parameters

            def closing(x):
                return run_body(body, x, partitioned) * values[1]

            return partjit.pjit(closing, in_spec, out_spec)(values[0]) if partitioned else closing(values[0])
        case "pair":  # a nested pjit of two arguments and two results, of which one is used
            in_specs, out_specs, used = parameters

            def both(x, y):
                return jnp.sin(x) * jnp.mean(y), jnp.cos(y)

            return (partjit.pjit(both, in_specs, out_specs) if partitioned else both)(*values)[used]
    raise AssertionError(kind)


@st.composite
def programs(draw, mesh, *, avoid=(), max_steps=4, depth=2, max_size=2):
    """Programs of one or two float arrays and perhaps a vector of indices, with specs over axes of `mesh` inside."""
    inputs = tuple(draw(st.lists(shapes(), min_size=1, max_size=2)))
    num_indices = draw(st.one_of(st.none(), st.sampled_from([2, 8])))
    known = list(enumerate(inputs))
    position = len(inputs)
    if num_indices is not None:
        position += 1
    steps = []
    some_spec = functools.partial(specs, mesh, avoid=avoid)
    for _ in range(draw(st.integers(1, max_steps))):
        i, shape = draw(st.sampled_from(known))
        same = [k for k, other in known if other == shape]
        kinds = ["body"] * 6 + ["add", "mul", "closure", "pair"]
        if shape:
            kinds += ["mean", "max", "transpose", "reshape", "concatenate", "tensordot"]
            kinds += ["gather"] * 2 if num_indices is not None else []
        kind = draw(st.sampled_from(kinds))
        operands, parameters, result = (i,), (), shape
        if kind == "body":
            parameters = (draw(bodies(mesh, shape, depth=depth, avoid=avoid, max_size=max_size)),)
        elif kind in ("add", "mul"):
            operands = (i, draw(st.sampled_from(same)))
        elif kind == "closure":
            operands = (i, draw(st.sampled_from(same)))
            body = draw(bodies(mesh, shape, depth=depth - 1, avoid=avoid, max_size=max_size))
            parameters = (draw(some_spec(shape)), draw(some_spec(shape)), body)
        elif kind == "pair":
            k, other = draw(st.sampled_from(known))
            operands, used = (i, k), draw(st.integers(0, 1))
            in_specs = (draw(some_spec(shape)), draw(some_spec(other)))
            parameters = (in_specs, (draw(some_spec(shape)), draw(some_spec(other))), used)
            result = (shape, other)[used]
        elif kind in ("mean", "max", "concatenate", "gather"):
            axis = draw(st.integers(0, len(shape) - 1))
            parameters = (axis,)
            rest = shape[:axis], shape[axis + 1 :]
            if kind in ("mean", "max"):
                result = rest[0] + rest[1]
            elif kind == "concatenate":
                result = (*rest[0], 2 * shape[axis], *rest[1])
            else:
                operands = (i, len(inputs))
                result = (*rest[0], num_indices, *rest[1])
        elif kind == "transpose":
            parameters = tuple(draw(st.permutations(range(len(shape)))))
            result = tuple(shape[p] for p in parameters)
        elif kind == "reshape":
            size = math.prod(shape)
            divisor = draw(st.sampled_from([d for d in (1, 2, 3, 4, 8) if size % d == 0]))
            parameters = result = draw(
                st.sampled_from([(size,), (divisor, size // divisor), (size // divisor, divisor)])
            )
        elif kind == "tensordot":
            matches = [
                (k, left, right)
                for k, other in known
                for left in range(len(shape))
                for right in range(len(other))
                if shape[left] == other[right] and len(shape) + len(other) <= 5
            ]
            if not matches:
                continue
            k, left, right = draw(st.sampled_from(matches))
            other = dict(known)[k]
            operands, parameters = (i, k), (left, right)
            result = shape[:left] + shape[left + 1 :] + other[:right] + other[right + 1 :]
        if math.prod(result) > 2 * MAX_ELEMENTS:
            continue
        steps.append((kind, operands, parameters))
        known.append((position, result))
        position += 1
    last = known[-1][0]
    others = draw(st.lists(st.sampled_from([k for k, _ in known]), max_size=1))
    return Program(inputs, num_indices, tuple(steps), (last, *others))


# Cases: a program, what it is called with, and how.

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
    program: Program
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
    program = draw(programs(mesh, avoid=avoid, max_steps=max_steps, depth=depth, max_size=max_size))
    arg_shapes = program.arg_shapes()
    ambience = draw(st.sampled_from(ambiences))
    in_specs = [draw(specs(mesh, shape, avoid=avoid)) for shape in arg_shapes]
    out_specs = [draw(specs(mesh, shape, avoid=avoid)) for shape in program.result_shapes()]
    places = [draw(st.sampled_from(PLACES)) for _ in arg_shapes]
    others = [draw(specs(mesh, shape)) for shape in arg_shapes]
    seed = draw(st.integers(0, 2**16))
    return Case(mesh, ambience, program, *map(tuple, (in_specs, out_specs, places, others)), seed, free)


def numpy_args(case):
    """The arguments: distinct floats in [-1, 1], and indices."""
    generator = np.random.default_rng(case.seed)
    args = [generator.uniform(-1, 1, shape).astype(np.float32) for shape in case.program.shapes]
    if case.program.num_indices is not None:
        args.append(generator.integers(0, 6, case.program.num_indices, dtype=np.int32))
    return args


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
    fun = fun or functools.partial(case.program, partitioned=True)
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
