"""Calls from programs on accelerators, which CPU devices play: functions run on the hosts."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import partjit
from partjit import P, colocated, pjit, results_so_far
from partjit._jax import moves
from partjit.colocated import colocated_python, devices, prepared
from partjit.colocated.runtime import moved_by_calls, pins
from partjit.mesh import ambient_mesh
from partjit.plan.run import moving
from tests.colocated import rendezvous

pytestmark = pytest.mark.usefixtures("meeting")


def note(*xs):
    rendezvous.logs["noted"].append([*map(np.asarray, xs)])


AMBIENT = {
    "jax.set_mesh, Auto": lambda mesh: jax.set_mesh(mesh),
    "jax.set_mesh, Explicit": lambda mesh: jax.set_mesh(with_axes(mesh, AxisType.Explicit)),
    "partjit.set_mesh": lambda mesh: partjit.set_mesh(mesh),
    "with a mesh": lambda mesh: mesh,
}


def with_axes(mesh, kind):
    return jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(kind,) * mesh.devices.ndim)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("mode", ["inline", "stream"])
@pytest.mark.parametrize("ambient", AMBIENT)
def test_on_accelerators_functions_see_the_mesh_of_their_caller_as_one_of_the_hosts(
    accelerators, monkeypatch, ambient, mode, shared
):
    if shared:  # by all devices of a process
        monkeypatch.setattr(devices, "colocated_cpu_devices", lambda of: [jax.devices()[0] for _ in of])
        devices.colocated_sharding.cache_clear()
    mesh = partjit.Mesh(accelerators, "x")
    seen = rendezvous.logs["meshes"]

    def function(x):
        mesh = ambient_mesh()
        rendezvous.logs["meshes"].append([] if mesh.empty else [*mesh.devices.flat])
        return x * 2 + jnp.sum(x)

    f = colocated_python(function, out_specs_fn=lambda x: x, mode=mode)
    programs = {
        "eager": f,
        "straight": pjit(f),
        "in a loop": pjit(lambda x: jax.lax.fori_loop(0, 1, lambda i, x: f(x), x)),
    }
    with AMBIENT[ambient](mesh):
        current = ambient_mesh()
        x = jax.device_put(np.arange(8, dtype=np.float32), NamedSharding(current, P("x")))
        for program in programs.values():
            y = program(x)
            np.testing.assert_array_equal(y, np.arange(8) * 2 + 28)
            assert y.sharding.device_set == {*accelerators}
            assert ambient_mesh() == current
    assert seen == [[] if shared else jax.devices()[:4]] * 3


@pytest.mark.parametrize("mode", ["inline", "stream", None])
def test_on_accelerators_calls_in_loops_get_constants_of_the_program(accelerators, meeting, mode):
    constant = jnp.arange(3.0)
    log = colocated_python(note, out_specs_fn=lambda *_: None, mode=mode)
    double = colocated_python(lambda x: x * 2, out_specs_fn=lambda x: x)

    def turn(x, _):
        log(constant)
        jax.lax.scan(lambda c, _: (log(constant), (c, None))[1], None, None, 2)
        return double(x), None

    with partjit.Mesh(accelerators, "x"):
        y, _ = pjit(lambda x: jax.lax.scan(turn, x, None, 4))(jnp.ones(4))
    np.testing.assert_array_equal(y, np.full(4, 16))
    colocated.wait()
    assert len(meeting.logs["noted"]) == 12
    assert all(np.array_equal(seen, constant) for (seen,) in meeting.logs["noted"])


@pytest.mark.parametrize("mode", ["inline", "stream"])
def test_on_accelerators_what_only_a_call_reads_is_left_when_it_fails(accelerators, mode):
    def check(x):
        rendezvous.logs["checked"].append(1)
        if len(rendezvous.logs["checked"]) == 4:
            raise ValueError("enough")
        return np.float32(1)

    check = colocated_python(
        check, arrays="numpy", out_specs_fn=lambda x: jax.ShapeDtypeStruct((), np.float32), mode=mode
    )
    kept = colocated_python(lambda x: x + 0, out_specs_fn=lambda x: x, mode="inline")
    bodies = {
        "in front": (lambda c: jnp.full(4, check(c)) + 1, [2]),
        "between": (lambda c: kept(jnp.full(4, check(c)) + 1), [2]),
        "twice": (lambda c: kept(kept(c) + check(c)) - 1 / 2, [3 / 2]),
    }
    for body, expected in bodies.values():
        rendezvous.logs["checked"].clear()
        step = pjit(lambda c, body=body: jax.lax.fori_loop(0, 10, lambda _, c: body(c), c), donate_argnums=0)
        with pytest.raises(ValueError, match="enough") as caught:
            jax.block_until_ready(step(jax.device_put(jnp.zeros(4), accelerators[1])))
        assert results_so_far(caught.value).tolist() == expected * 4


@pytest.mark.parametrize("kind", ["array", "key", "pending"])
@pytest.mark.parametrize("sharded", [False, True])
def test_on_accelerators_the_thread_of_a_call_moves_its_arguments(accelerators, monkeypatch, kind, sharded):
    """On a GPU to move an array to the host waits until it is computed."""
    threads = []

    def moved_to(array, sharding):
        threads.append(threading.get_ident())
        return moves.moved_to(array, sharding)

    monkeypatch.setattr(moved_by_calls, "moved_to", moved_to)
    mesh = partjit.Mesh(accelerators, "x")
    where = NamedSharding(mesh, P("x")) if sharded else accelerators[1]
    values = jax.random.split(jax.random.key(0), 4) if kind == "key" else jnp.arange(4.0)
    seen = rendezvous.logs["seen"]

    def look(x):
        data = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        rendezvous.logs["seen"].append((np.array(data), x.sharding.device_set))

    look = colocated_python(look, out_specs_fn=lambda x: None, mode="stream")
    double = colocated_python(lambda x: x * 1, out_specs_fn=lambda x: x, mode="stream")
    donating = jax.jit(lambda x: x, donate_argnums=0)
    expected = np.array(jax.random.key_data(values) if kind == "key" else values)
    for _ in range(3):
        x = jax.device_put(values, where)
        if kind == "pending":
            x = double(x)
        look(x)
        if kind == "array":
            donating(x)
        elif kind == "key":
            x.delete()
    colocated.wait()
    assert len(threads) >= 3
    assert threading.get_ident() not in threads
    hosts = {*jax.devices()[:4]} if sharded else {jax.devices()[1]}
    assert all(np.array_equal(data, expected) and devices == hosts for data, devices in seen)
    assert len(seen) == 3


def test_on_accelerators_a_large_argument_is_moved_by_its_caller_and_not_copied_there(accelerators, monkeypatch):
    monkeypatch.setattr(prepared, "MOST_BYTES_COPIED_THERE", 15)
    monkeypatch.setattr(pins, "copy_of", lambda _: pytest.fail("it was copied"))
    seen = rendezvous.logs["noted"]
    x = jax.device_put(jnp.arange(4.0), accelerators[1])
    colocated_python(note, out_specs_fn=lambda x: None, mode="stream")(x)
    x.delete()
    colocated.wait()
    assert [array.tolist() for (array,) in seen] == [[0, 1, 2, 3]]


ONE = jax.ShapeDtypeStruct((), np.float32)
draw = colocated_python(lambda: np.float32(1), out_specs=ONE, stream="draw")  # awaited, so the host drives what has it


def step_of(log, x):
    y = x * 2
    log(y)
    return x + 1


def with_the_result(log, x):
    y = x * 2
    log(y)
    return y


def with_an_argument(log, x):
    log(x)
    return x + 1


def in_turns(log, x):
    return jax.lax.fori_loop(0, 1, lambda _, c: (log(c * 2), c + draw())[1], x)


def with_what_is_carried(log, x):
    return jax.lax.fori_loop(0, 1, lambda _, c: (log(c), c * draw())[1], x * 2)


def in_a_branch(log, x):
    return jax.lax.cond(x[0] < 5, lambda x: (log(x * 2), x + draw())[1], lambda x: x, x)


LEFT_TO_CALLS = {
    "what is computed": (step_of, [0, 2, 4, 6], 0),
    "a result": (with_the_result, [0, 2, 4, 6], 0),
    "an argument": (with_an_argument, [0, 1, 2, 3], 1),
    "in a loop": (in_turns, [0, 2, 4, 6], 0),
    "what is carried": (with_what_is_carried, [0, 2, 4, 6], 1),
    "in a branch": (in_a_branch, [0, 2, 4, 6], 0),
}


@pytest.fixture
def slow_moves(monkeypatch):
    """Moves to hosts wait until "computed" is said, as those from a GPU do; these are the threads that make them."""
    threads = []

    def slow(move, values, shardings):
        leaves = jax.tree.leaves(shardings)
        if {d.id for s in leaves for d in s.device_set} <= {0, 1, 2, 3}:
            rendezvous.hear("computed")
            threads.append(threading.get_ident())
        return move(values, shardings)

    for where, name in ((moving, "moved"), (moved_by_calls, "moved_to")):
        monkeypatch.setattr(where, name, functools.partial(slow, getattr(where, name)))
    return threads


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("case", LEFT_TO_CALLS)
def test_on_accelerators_a_program_goes_on_while_its_calls_wait_for_their_arguments(
    accelerators, monkeypatch, slow_moves, case, sharded
):
    program, expected, count = LEFT_TO_CALLS[case]
    copies = []
    copy_of = pins.copy_of
    monkeypatch.setattr(pins, "copy_of", lambda array: (copies.append(array), copy_of(array))[1])
    log = colocated_python(note, out_specs_fn=lambda x: None, mode="stream")
    where = NamedSharding(partjit.Mesh(accelerators, "x"), P("x")) if sharded else accelerators[1]
    step = pjit(lambda x: program(log, x))
    seen = rendezvous.logs["noted"]
    x = jax.device_put(jnp.arange(4.0), where)
    plan = step.plan(x)
    assert any(move.is_left_to_calls for move in plan.transfers)
    result = step(x)
    x.delete()
    jax.jit(lambda x: x, donate_argnums=0)(result)  # the next step takes it over
    assert not seen
    assert len(copies) == count
    rendezvous.say("computed")
    colocated.wait()
    assert [array.tolist() for (array,) in seen] == [expected]
    assert len(slow_moves) == 1
    assert threading.get_ident() not in slow_moves


def test_on_accelerators_calls_share_a_move_and_their_thread_does_not_make_what_the_caller_needs(
    accelerators, slow_moves
):
    logs = [colocated_python(note, out_specs_fn=lambda *_: None, stream=name) for name in "ab"]
    double = colocated_python(lambda x: x * 2, out_specs_fn=lambda x: x, mode="inline")

    @pjit
    def program(x):
        y = x * 2
        for log in logs:
            log(y)
        logs[0](x)
        return double(x) + 1

    rendezvous.say("computed")
    x = jax.device_put(jnp.arange(4.0), accelerators[1])
    moves = [move for move in program.plan(x).transfers if "hosts" in move.name]
    assert sorted((len(move.inputs), move.is_left_to_calls) for move in moves) == [(1, False), (1, True)]
    np.testing.assert_array_equal(program(x), [1, 3, 5, 7])
    colocated.wait()
    seen = rendezvous.logs["noted"]
    assert sorted(array.tolist() for (array,) in seen) == [[0, 1, 2, 3], [0, 2, 4, 6], [0, 2, 4, 6]]
    assert len(slow_moves) == 2
    assert slow_moves.count(threading.get_ident()) == 1


@pytest.mark.parametrize("are_computed", [True, False])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("where", ["eager", "program"])
def test_on_accelerators_the_arguments_of_a_call_are_read_beside_each_other(
    accelerators, monkeypatch, where, sharded, are_computed
):
    done = []
    for name in ("begun", "moved_to"):
        own = getattr(moved_by_calls, name)
        monkeypatch.setattr(moved_by_calls, name, lambda *args, name=name, own=own: (done.append(name), own(*args))[1])
    monkeypatch.setattr(moved_by_calls, "is_computed", lambda _: are_computed)  # which on a busy machine comes late
    log = colocated_python(note, out_specs_fn=lambda *_: None, mode="stream")
    call = log if where == "eager" else pjit(lambda *xs: log(*(x * 1 for x in xs)))
    there = NamedSharding(partjit.Mesh(accelerators, "x"), P("x")) if sharded else accelerators[1]
    values = [np.arange(4, dtype=np.float32) + k for k in range(3)]
    call(*(jax.device_put(value, there) for value in values))
    colocated.wait()
    assert done == (["begun"] * 2 + ["moved_to"] if are_computed else ["moved_to"] * 3)
    np.testing.assert_array_equal(rendezvous.logs["noted"], [values])


def test_on_accelerators_a_large_argument_is_moved_by_the_program(accelerators, monkeypatch, slow_moves):
    monkeypatch.setattr(moving, "MOST_BYTES_COPIED_THERE", 15)
    monkeypatch.setattr(pins, "copy_of", lambda _: pytest.fail("it was copied"))
    log = colocated_python(note, out_specs_fn=lambda x: None, mode="stream")
    rendezvous.say("computed")
    x = jax.device_put(jnp.arange(4.0), accelerators[1])
    pjit(lambda x: with_an_argument(log, x), donate_argnums=0)(x)
    colocated.wait()
    assert [array.tolist() for (array,) in rendezvous.logs["noted"]] == [[0, 1, 2, 3]]
    assert slow_moves == [threading.get_ident()]


def test_on_accelerators_moves_left_to_calls_are_recorded_where_they_are_made(accelerators, slow_moves):
    log = colocated_python(note, out_specs_fn=lambda *_: None, mode="stream")
    step = pjit(lambda x: (log(x, x * 2), x + 1)[1])
    x = jax.device_put(jnp.arange(4.0), accelerators[1])
    moves = []
    with partjit.events.subscribe(lambda e: moves.append(e) if "Transfer" in type(e).__name__ else None):
        step(x)
        assert not any(isinstance(event, partjit.events.TransferFinished) for event in moves)
        rendezvous.say("computed")
        colocated.wait()
    assert [type(event).__name__ for event in moves] == ["TransferStarted", "TransferFinished"] * 2
    assert [event.nbytes for event in moves[::2]] == [16, 16]
    assert threading.get_ident() not in {event.thread for event in moves}
    assert {(event.program, event.node) for event in moves} == {("<lambda>", "to_hosts")}


@pytest.mark.parametrize("mode", ["stream", "nested"])
def test_on_accelerators_a_call_with_the_result_of_one_that_failed_is_not_made(accelerators, mode):
    def fail(x):
        raise ValueError("enough")

    fail = colocated_python(fail, out_specs_fn=lambda x: x, stream="other")
    log = colocated_python(note, out_specs_fn=lambda x: None, mode="stream")
    step = pjit(lambda x: log(x))
    rendezvous.programs.update(step=step, fail=fail)

    def outer(x):
        rendezvous.programs["step"](rendezvous.programs["fail"](jax.device_put(x, jax.devices()[5])))

    x = jax.device_put(jnp.arange(4.0), accelerators[1])
    if mode == "stream":
        step(fail(x))
    else:  # which has to wait: it is a part of the call that makes it
        colocated_python(outer, out_specs_fn=lambda x: None, mode="stream")(x)
    with pytest.raises(ValueError, match="enough") as caught:
        colocated.wait()
    assert "fail" in "".join(caught.value.__notes__)
    assert not rendezvous.logs["noted"]
    colocated.wait()


def test_on_accelerators_a_deleted_argument_is_refused_in_the_caller(accelerators):
    log = colocated_python(note, out_specs_fn=lambda x: None, mode="stream")
    step = pjit(lambda x: log(x))
    for _ in range(2):
        x = jax.device_put(jnp.arange(4.0), accelerators[1])
        x.delete()
        with pytest.raises(RuntimeError, match="deleted"):
            step(x)


# To lower a callback jax asks for a device of the platform, of which there is none here: so far it gets.
LET_THROUGH = "the specified backend cpu is different from the lowering platform"


@pytest.mark.parametrize(
    ("platform", "said"),
    [("cuda", LET_THROUGH), ("rocm", LET_THROUGH), ("tpu", "is compiled for tpu, where it cannot call Python")],
)
def test_under_jit_calls_without_results_are_lowered_for_gpus(platform, said):
    log = colocated_python(note, out_specs_fn=lambda x: None)

    @jax.jit
    def program(x):
        return jax.lax.scan(lambda c, _: (log(c), (c + 1, None))[1], x, None, 3)[0]

    with pytest.raises(ValueError, match=said):
        program.trace(jnp.float32(0)).lower(lowering_platforms=(platform,))


HELD = {
    "a loop starts from it": lambda f, x, k: jax.lax.fori_loop(0, k, lambda i, c: f(c) + i, f(x)),
    "a loop gives it": lambda f, x, k: (lambda y: jax.lax.fori_loop(0, k, lambda i, c: (f(c[0]), y), (x, x)))(f(x)),
    "a branch gives it": lambda f, x, k: (lambda y: jax.lax.cond(k > 1, lambda: f(x), lambda: y))(f(x)),
    "a branch of a loop gives it": lambda f, x, k: (
        lambda y: jax.lax.fori_loop(0, 2, lambda i, c: jax.lax.cond(i == k, lambda: f(c), lambda: y), x)
    )(f(x)),
    "branches give it or an argument": lambda f, x, k: (
        lambda y: (jax.lax.cond(k > 1, lambda: (f(x), x)[1], lambda: (f(x), y)[1]), f(y))
    )(f(x)),
}


@pytest.mark.parametrize("mode", ["inline", "stream", None])
@pytest.mark.parametrize("held", HELD)
def test_on_accelerators_loops_and_branches_get_results_of_calls_around_them(accelerators, held, mode):
    mesh = partjit.Mesh(accelerators, "x")
    f = colocated_python(lambda x: np.asarray(x) * 2 + 1, out_specs_fn=lambda x: x, mode=mode)
    program = pjit(lambda x, k: HELD[held](f, x, k), out_shardings=P("x"))
    x = np.arange(8, dtype=np.float32)
    with mesh:
        for k in (0, 1, 2):
            results = program(jax.device_put(x, NamedSharding(mesh, P("x"))), k)
            expected = HELD[held](lambda x: x * 2 + 1, x, k)
            for result, value in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
                np.testing.assert_array_equal(result, value)
                assert result.sharding.device_set == {*accelerators}
