"""Where the options of a call meet: what it gets, where it is, how it runs, what is donated, and what it returns.

The law goes through all combinations, of which `make test` takes a sample.
"""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import partjit
from partjit import P, colocated, pjit
from partjit.colocated import colocated_python
from tests.colocated import rendezvous
from tests.effort import sample

lax = jax.lax

pytestmark = pytest.mark.usefixtures("meeting")

X = np.arange(32, dtype=np.float32).reshape(8, 4)
number = jax.ShapeDtypeStruct((), jnp.float32)
nothing = jax.ShapeDtypeStruct((0,), jnp.float32)
ONE = np.float32(1)

RESULTS = {  # by kind: of a spec its results, of a part its results, and what a program makes of them, as NumPy does
    "an array": (lambda x: x, lambda x: 2 * x + ONE, lambda x, y: y),
    "a tree": (
        lambda x: {"y": x, "n": number, "empty": [nothing, None]},
        lambda x: {"y": 2 * x, "n": 3.0, "empty": [np.zeros(0, np.float32), None]},
        lambda x, y: y["y"] + y["n"] + y["empty"][0].sum(),
    ),
    "a number": (lambda x: number, lambda x: 3, lambda x, y: x + y),
    "a truth": (
        lambda x: jax.ShapeDtypeStruct((), bool),
        lambda x: np.bool_(True),
        lambda x, y: x + 2 * y.astype(x.dtype),
    ),
    "nothing": (lambda x: None, lambda x: None, lambda x, y: x + 1),
}
MODES = {
    "inline": {"mode": "inline", "arrays": "numpy"},
    "stream": {"mode": "stream", "arrays": "numpy"},
    "auto": {"arrays": "numpy"},
    "answered": {"uses_jax": False},
}


def scanned(g, x):
    return lax.scan(lambda x, _: (y := g(x), y), x, length=3)


def nested(g, x):
    return lax.fori_loop(0, 2, lambda i, x: lax.fori_loop(0, i, lambda _, x: g(x), g(x)), x)


def awaited(g, x):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, g(c[1])), (0, x))[1]


def switched(g, x):
    ways = [g, lambda x: x * 1, lambda x: g(x) * 1]
    return lax.scan(lambda x, i: (lax.switch(i % 3, ways, x), None), x, jnp.arange(4))[0]


PLACES = {  # by place: the program, and how often it makes the call
    "straight": (lambda g, x: g(g(x)), 2),
    "scan": (scanned, 3),
    "while": (awaited, 3),
    "loop in a loop": (nested, 3),
    "cond": (lambda g, x: lax.cond(jnp.sum(x) > -1, g, lambda x: 0 * x, x), 1),
    "switch in a scan": (switched, 3),
}
LAYOUTS = ["global", "per_shard"]
AXES = [None, AxisType.Auto, AxisType.Explicit]
SPECS = [P(), P("x"), P(None, "y"), P(("y", "x"))]


def by_hand(kind, place):
    """What a program returns, made by NumPy."""
    of_part, use = RESULTS[kind][1:]
    x, stack = X, []
    for _ in range(PLACES[place][1]):
        x = np.asarray(use(x, of_part(x)), np.float32)
        stack.append(x)
    return (x, np.stack(stack)) if place == "scan" else x


@pytest.mark.soak
def test_a_call_is_made_as_its_options_say_wherever_it_is(mesh):
    explicit = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * 2)
    cases = itertools.product(LAYOUTS, PLACES, MODES, [False, True], AXES, RESULTS, SPECS)
    for layout, place, mode, donates, axes, kind, spec in sample([*cases], 157):
        if layout == "per_shard" and (axes is None or mode == "answered"):
            continue
        on = explicit if axes == AxisType.Explicit else mesh
        sharding = jax.devices()[0] if axes is None else NamedSharding(on, spec)
        of_spec, of_part, use = RESULTS[kind]
        options = {**MODES[mode], "out_specs_fn": of_spec}
        if layout == "per_shard":
            stated = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=sharding)
            options = {**options, "arrays": "jax", "layout": layout, "in_specs": ((stated,), {})}

        def part(x, of_part=of_part, layout=layout):
            rendezvous.logs["calls"].append(None)
            return of_part(np.asarray(x.data if layout == "per_shard" else x))

        call = colocated_python(part, **options)
        program = pjit(
            lambda x, call=call, use=use, place=place: PLACES[place][0](lambda x: use(x, call(x)), x),
            donate_argnums=0 if donates else (),
        )
        case = (layout, place, mode, donates, axes, kind, spec)
        for _ in range(2):
            rendezvous.clear()
            with contextlib.nullcontext() if axes is None else partjit.set_mesh(on):
                x = jax.device_put(X, sharding)
                results = program(x)
            colocated.wait(timeout=60)
            for result, expected in zip(jax.tree.leaves(results), jax.tree.leaves(by_hand(kind, place)), strict=True):
                for shard in result.addressable_shards:
                    np.testing.assert_array_equal(shard.data, expected[shard.index], err_msg=str(case))
            times = PLACES[place][1] * (mesh.size if layout == "per_shard" else 1)
            assert len(rendezvous.logs["calls"]) == times, case
            if not donates:
                np.testing.assert_array_equal(x, X, err_msg=str(case))


def counted(function):
    """A decorator as users write them, whose wrapper refers to what it wraps."""

    @functools.wraps(function)
    def wrapper(*args):
        rendezvous.logs["decorated"].append(1)
        return function(*args)

    return wrapper


def test_a_decorated_function_is_called_with_its_decorations_wherever_it_is():
    ways = itertools.product(MODES, ["straight", "scan", "loop in a loop"], ["a number", "nothing"])
    for mode, place, kind in ways:
        specs, results, used = RESULTS[kind]
        call = colocated_python(counted(results), out_specs_fn=specs, **MODES[mode])
        program, count = PLACES[place]
        rendezvous.clear()
        jax.block_until_ready(pjit(lambda x: program(lambda x: used(x, call(x)), x))(jnp.asarray(X)))  # noqa: B023
        colocated.wait()
        assert len(rendezvous.logs["decorated"]) == count, (mode, place, kind)
