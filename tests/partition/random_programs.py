"""Random programs of device operations and colocated calls, as data, and two ways to run them.

A program is a list of steps over a growing list of values. `evaluate` runs it on whatever `call` makes of the calls:
colocated functions inside of a pjit, or the plain functions by hand, one after another.
"""

import collections
import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding

import partjit
from partjit import P, colocated, with_sharding_constraint

SHAPE = (8, 4)
# Each is compiled, so there are fewer than of other things; the soak profile draws as many as it says.
EXAMPLES = 25 if settings().max_examples <= 100 else settings().max_examples
_lock = threading.Lock()
trace = []  # (stream or object, call, sum of its arguments), in the order in which the functions began
failing = set()  # the calls that raise
work = {"meshes": None}  # what functions that run programs of their own run them on


@dataclasses.dataclass(frozen=True)
class Device:
    """An operation on the devices: `op` of the values at `args`."""

    op: str
    args: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Call:
    """A colocated call.

    Attributes:
        number: tells it apart.
        args: the values it gets.
        result: "matrix", "scalar", "none", or "both" for a matrix and a scalar.
        stream: a name, or None for the caller's.
        of: the object whose method it is, or None for a function.
        pure: whether it has no effect.
        does: what the function does besides: "nothing", "sleep", "jit" or "pjit" over all devices.
        mode: as in `specialize`.
        in_spec: where its first argument is wanted, if that is said.
        out_spec: where its first result is, if that is said.
    """

    number: int
    args: tuple[int, ...]
    result: str
    stream: str | None
    of: int | None
    pure: bool
    does: str
    mode: str | None
    in_spec: object
    out_spec: object


@dataclasses.dataclass(frozen=True)
class Nested:
    """A nested function over all values so far, whose last value it adds."""

    wrapper: str
    steps: tuple


@dataclasses.dataclass(frozen=True)
class RandomProgram:
    """Steps over two matrices and a scalar; `results` are the values that it returns."""

    steps: tuple
    results: tuple[int, ...]
    out_specs: tuple
    donated: bool
    worth_a_dispatch: float


MATRIX_OPS = ["add", "double", "matmul", "constrain", "relu"]
SPECS = [P(), P("x"), P("x", "y"), P(None, "y"), P("y", "x")]


@st.composite
def _steps(draw, kinds, numbers, depth, most):
    """Steps, which extend `kinds` (of the values so far: "m" or "s") as they go."""
    steps = []
    for _ in range(draw(st.integers(1, most))):
        matrices = [i for i, kind in enumerate(kinds) if kind == "m"]
        pick = st.sampled_from(matrices[-4:] + matrices[:1])
        what = draw(st.sampled_from(["device", "device", "call", "call", *(["nested"] if depth else [])]))
        if what == "device":
            op = draw(st.sampled_from([*MATRIX_OPS, "sum", "scale"]))
            if op == "scale":
                scalars = [i for i, kind in enumerate(kinds) if kind == "s"]
                args = (draw(pick), draw(st.sampled_from(scalars)))
            else:
                args = (draw(pick), draw(pick)) if op in ("add", "matmul") else (draw(pick),)
            steps.append(Device(op, args))
            kinds.append("s" if op == "sum" else "m")
        elif what == "call":
            args = tuple(draw(st.lists(st.sampled_from(range(len(kinds))), max_size=2)))
            result = draw(st.sampled_from(["matrix", "matrix", "scalar", "none", "both"]))
            steps.append(
                Call(
                    next(numbers),
                    args,
                    result,
                    draw(st.sampled_from([None, None, "a", "b"])),
                    draw(st.sampled_from([None, None, 0, 1])),
                    draw(st.sampled_from([False, False, False, True])),
                    draw(st.sampled_from(["nothing", "nothing", "sleep", "jit", "pjit"])),
                    draw(st.sampled_from([None, None, None, "stream", "inline"])),
                    draw(st.sampled_from([None, None, *SPECS])) if args and kinds[args[0]] == "m" else None,
                    draw(st.sampled_from([None, None, *SPECS])) if result in ("matrix", "both") else None,
                )
            )
            kinds += {"matrix": ["m"], "scalar": ["s"], "none": [], "both": ["m", "s"]}[result]
        else:
            inner = [*kinds]
            nested = draw(_steps(inner, numbers, depth - 1, 3))
            wrapper = draw(st.sampled_from(["pjit", "jit", "checkpoint", "custom_jvp"]))
            steps.append(Nested(wrapper, nested))
            kinds.append(inner[-1])
    return tuple(steps)


@st.composite
def random_programs(draw, most=8):
    """Programs as data."""
    kinds = ["m", "m", "s"]
    steps = draw(_steps(kinds, iter(range(1000)), 1, most))
    results = tuple(draw(st.lists(st.sampled_from(range(len(kinds))), min_size=1, max_size=4)))
    specs = tuple(
        draw(st.sampled_from(SPECS)) if kinds[i] == "m" else draw(st.sampled_from([None, P()])) for i in results
    )
    return RandomProgram(steps, results, specs, draw(st.booleans()), draw(st.sampled_from([0.0, 100.0, 1e6])))


def evaluate(steps, values, call, wrappers=None):
    """The values after the steps; `wrappers` are what nested functions are put into."""
    values = [*values]
    for step in steps:
        if isinstance(step, Device):
            values.append(_operate(step.op, [values[i] for i in step.args]))
        elif isinstance(step, Call):
            values += call(step, [values[i] for i in step.args])
        else:

            def body(*given, step=step):
                return evaluate(step.steps, given, call, wrappers)[-1]

            values.append(wrappers[step.wrapper](body)(*values) if wrappers else body(*values))
    return values


def _custom_jvp(fun):
    wrapped = jax.custom_jvp(fun)
    wrapped.defjvp(lambda primals, tangents: (fun(*primals), primals[0]))
    return wrapped


WRAPPERS = {"pjit": partjit.pjit, "jit": jax.jit, "checkpoint": jax.checkpoint, "custom_jvp": _custom_jvp}


def _operate(op, args):
    x = args[0]
    if op == "add":
        return x + args[1]
    if op == "double":
        return 2 * x
    if op == "matmul":
        return (x @ args[1].T) @ x / 64
    if op == "constrain":
        return with_sharding_constraint(x, P("y", "x"))
    if op == "relu":
        return jax.nn.relu(x)
    if op == "sum":
        return jnp.sum(x) / 32
    return x * args[1]


def host(step, args):
    """What a call does, on the host: its trace, its work and its results."""
    values = [np.asarray(arg) for arg in args]
    with _lock:
        trace.append((step.stream, step.of, step.number, tuple(float(value.sum()) for value in values)))
    if step.number in failing:
        raise ValueError(f"call {step.number} fails")
    if step.does == "sleep":
        time.sleep(0.001 * (step.number % 3))
    matrix = np.full(SHAPE, 0.5 + step.number % 5, np.float32)
    for value in values:
        matrix = matrix + value
    matrix = np.tanh(matrix)
    if step.does in ("jit", "pjit"):
        matrix = np.asarray(_on_all_devices(step.does, matrix))
    scalar = np.float32(matrix.sum() / 32)
    results = {"matrix": [matrix], "scalar": [scalar], "none": [], "both": [matrix, scalar]}[step.result]
    return tuple(map(jnp.asarray, results))


_programs = {}


def _on_all_devices(how, matrix):
    mesh = work["mesh"]
    if how not in _programs:

        def body(x):
            return x + jnp.sum(x) / 64

        _programs[how] = (
            jax.jit(body, in_shardings=NamedSharding(mesh, P("x")))
            if how == "jit"
            else partjit.pjit(body, in_axis_resources=P("x"), out_axis_resources=P("x"))
        )
    with mesh:
        return _programs[how](matrix)


class Objects:
    """The plain class of the objects whose methods are called."""

    def make(self, step, args):
        return host(step, args)


def colocated_calls(mesh):
    """A `call` for `evaluate` that makes colocated calls."""
    objects = {}

    def call(step, args):
        with_shape = {"m": SHAPE, "s": ()}
        kinds = {"matrix": "m", "scalar": "s", "none": "", "both": "ms"}[step.result]
        out_specs = tuple(
            jax.ShapeDtypeStruct(
                with_shape[kind],
                jnp.float32,
                sharding=NamedSharding(mesh, step.out_spec) if kind == "m" and step.out_spec is not None else None,
            )
            for kind in kinds
        )
        said = {"out_specs_fn": lambda *_: out_specs, "stream": step.stream, "mode": step.mode}
        if step.pure:
            said["pure"] = True
        if step.in_spec is not None:
            first = jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=NamedSharding(mesh, step.in_spec))
            rest = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args[1:]]
            said["in_specs"] = ((first, *rest), {})
        if step.of is None:
            function = colocated.colocated_python(lambda *xs: host(step, xs), **said)
        else:
            if step.of not in objects:
                objects[step.of] = _object()
            function = getattr(objects[step.of], f"m{step.number}").specialize(**said)
        return [*function(*args)]

    return call, objects


def _object():
    """A colocated object with a method for each number."""
    members = {}
    for number in range(40):

        def method(self, *xs, number=number):
            return host(steps_by_number[number], xs)

        members[f"m{number}"] = method
    return colocated.colocated_python_class(type("Object", (), members))()


steps_by_number = {}


def calls_of(steps):
    """All calls of a program, in program order."""
    found = []
    for step in steps:
        if isinstance(step, Call):
            found.append(step)
        elif isinstance(step, Nested):
            found += calls_of(step.steps)
    return found


def by_lane(recorded):
    """What was recorded of the calls of each stream and of each object."""
    lanes = collections.defaultdict(list)
    for stream, of, number, sums in recorded:
        lanes["stream", stream].append((number, sums))
        if of is not None:
            lanes["object", of].append((number, sums))
    return lanes
