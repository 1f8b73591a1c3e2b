"""Calls of other threads that come in between two calls that an executable waits for."""

import os
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding

from partjit import Mesh, P, colocated, pjit
from partjit.colocated import colocated_python, colocated_python_class
from partjit.colocated.runtime import answering, small_arguments
from partjit.colocated.runtime.call import Call, Lane
from partjit.colocated.runtime.giving_way import is_there
from partjit.colocated.runtime.moved_by_calls import MovedByCall
from partjit.colocated.runtime.pending import PendingArray
from partjit.colocated.runtime.pins import Pins, copied, pin, unpinned
from partjit.plan.ir.nodes import Loop
from tests.colocated import rendezvous

pytestmark = pytest.mark.usefixtures("meeting")

NUMBER = jax.ShapeDtypeStruct((), jnp.float32)
TRUTH = jax.ShapeDtypeStruct((), jnp.bool_)
MOST = 30_000  # where a loop ends that nothing has ended: a failure, not a hang


def has_executable_that_waits(plan):
    """Instead of a loop that the host drives; the first call of a predicate is before it."""
    assert any(call.is_answered for call in plan.calls) != any(isinstance(node, Loop) for node in plan.nodes)
    return any(call.is_answered for call in plan.calls)


class Rounds:
    """Goes on until it is stopped, and notes what its calls find."""

    def __init__(self):
        self.count, self.is_stopped, self.is_busy = 0, False, False

    def _alone(self):
        assert not self.is_busy
        self.is_busy = True
        time.sleep(1e-5)
        self.is_busy = False

    def goes_on(self):
        self._alone()
        self.count += 1
        if self.count == 3:
            rendezvous.say("running")
        return np.bool_(not self.is_stopped and self.count < MOST)

    def add(self, x):
        self._alone()
        return np.float32(x + 1)

    def stop(self) -> None:
        self._alone()
        self.is_stopped = True

    def stop_by(self, x):
        self._alone()
        self.is_stopped = bool(x > 0)
        return np.float32(self.count)

    def fail(self) -> None:
        raise ValueError("no")

    def say_how_many(self):
        self._alone()
        self.is_stopped = True
        return np.float32(self.count)

    def as_they_are(self):
        return np.float32(self.count)


ROUNDS = colocated_python_class(Rounds, uses_jax=False, devices=jax.devices()[0])
for name, spec in {"goes_on": TRUTH, "add": NUMBER, "stop_by": NUMBER, "as_they_are": NUMBER}.items():
    setattr(ROUNDS, name, getattr(ROUNDS, name).specialize(out_specs=spec))


def loop_over(rounds, other=None):
    body = (other or rounds).add
    return pjit(
        lambda x: lax.while_loop(lambda _: rounds.goes_on(), body, x),
        in_shardings=None,
        out_shardings=None,
    )


def meanwhile(function):
    """Runs a function in another thread once the loop is running; what it has returned or raised, when joined."""
    found = []

    def run():
        rendezvous.hear("running")
        try:
            found.append(function())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def run_with(program, function, mesh=None):
    thread, found = meanwhile(function)
    if mesh is None:
        result = float(program(np.float32(0)))
    else:
        with mesh:
            result = float(program(np.float32(0)))
    thread.join(timeout=60)
    assert not thread.is_alive()
    return result, found[0]


def stop(rounds):
    rounds.stop()


def stop_inline(rounds):
    rounds.stop.specialize(mode="inline")()


def stop_on_a_stream(rounds):
    with colocated.stream("elsewhere"):
        rounds.stop()


def stop_without_known_specs(rounds):
    assert float(rounds.say_how_many()) > 0


def stop_by_a_number(rounds):
    assert float(rounds.stop_by(1.0)) > 0


def stop_by_an_array(rounds):
    assert float(rounds.stop_by(jax.block_until_ready(jnp.cos(jnp.float32(0))))) > 0


def stop_by_a_computation(rounds):
    assert float(rounds.stop_by(jnp.sort(jnp.ones(200_000))[-1])) > 0


def stop_by_a_pending_array(rounds):
    slow = colocated_python(
        lambda: time.sleep(0.05) or np.float32(1), out_specs=NUMBER, mode="stream", devices=jax.devices()[0]
    )
    assert float(rounds.stop_by(slow())) > 0


def stop_in_a_call(rounds):
    outer = colocated_python(lambda: rounds.stop(), out_specs_fn=lambda: None, stream="outer", devices=jax.devices()[0])
    outer()


def stop_in_a_program(rounds):
    pjit(lambda x: (rounds.stop(), x + 1)[1])(jnp.float32(0))


WAYS = [
    stop,
    stop_inline,
    stop_on_a_stream,
    stop_without_known_specs,
    stop_by_a_number,
    stop_by_an_array,
    stop_by_a_computation,
    stop_by_a_pending_array,
    stop_in_a_call,
    stop_in_a_program,
]


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_another_threads_call_ends_a_loop(way, devices):
    rounds = ROUNDS()
    mesh = Mesh(np.array(jax.devices()[:devices]), ("x",))
    program = loop_over(rounds)
    with mesh:
        assert has_executable_that_waits(program.plan(np.float32(0)))
    iterations, outcome = run_with(program, lambda: way(rounds), mesh)
    assert outcome is None
    colocated.wait(timeout=60)
    assert 2 <= iterations < MOST - 1
    assert float(rounds.as_they_are()) == iterations + 1


FORMS = {
    "pinned": pin,
    "copied": copied,
    "as it is": unpinned,
    "by a function": lambda array: Pins(1).pin_all([array])[0],
    "moved": lambda array: MovedByCall(pin(array), array.sharding, []),
}


def assert_gets_there(take):
    end = time.monotonic() + rendezvous.SECONDS
    while not is_there(take):  # a copy of an array that is computed takes a moment
        assert time.monotonic() < end, take


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("devices", [1, 8])
def test_an_argument_is_there_once_it_has_come_in_whatever_form_a_call_has_it(monkeypatch, form, devices):
    monkeypatch.setattr(small_arguments, "_PINS_OF_A_PROGRAM", 0)
    monkeypatch.setattr(small_arguments, "_PINS_OF_AN_ARGUMENT", 0)
    take_of = FORMS[form]
    mesh = Mesh(np.array(jax.devices()[:devices]), ("x",))
    values = {
        "number": (np.float32(1), P()),
        "small": (np.ones(8, np.float32), P()),
        "sharded": (np.ones(8, bool), P("x")),
        "large": (np.ones((8, 5000), np.float32), P("x")),
        "keys": (jax.random.key(0), P()),
    }
    for name, (value, spec) in values.items():
        array = jax.block_until_ready(jax.device_put(value, NamedSharding(mesh, spec)))
        assert_gets_there(take_of(array))
        pending = PendingArray(Call("f", ("", 0, ""), Lane(), [], None), array.aval, array.sharding, True)
        if form == "by a function":
            continue  # which has those that are pending pinned one by one
        take = take_of(pending)
        assert not is_there(take), name
        pending.receive(array)
        assert_gets_there(take)
        assert (take() == array).all(), name


def test_a_loop_over_several_objects_is_ended_by_a_call_of_one():
    rounds, other = ROUNDS(), ROUNDS()
    program = loop_over(rounds, other)
    assert has_executable_that_waits(program.plan(np.float32(0)))
    iterations, outcome = run_with(program, lambda: rounds.stop())
    assert outcome is None
    assert iterations < MOST - 1


class UsingJax(Rounds):
    def stop(self):
        self._alone()
        self.is_stopped = bool(jnp.sort(-jnp.arange(100_000))[-1] == 0)
        return self.is_stopped


class UntilManyRounds(UsingJax):
    def goes_on(self):
        return super().goes_on() and np.bool_(self.count < 3000)


def without_promise(cls):
    plain = colocated_python_class(cls, devices=jax.devices()[0])
    plain.goes_on = plain.goes_on.specialize(out_specs=TRUTH, uses_jax=False)
    plain.add = plain.add.specialize(out_specs=NUMBER, uses_jax=False)
    return plain


@pytest.mark.parametrize(("devices", "objects"), [(1, 1), (1, 2), (8, 2)])
def test_a_call_that_uses_jax_ends_a_loop_which_is_left_to_the_host_on_several_devices(devices, objects):
    """Such a call could wait for the devices, which would wait for it; a single one runs other programs meanwhile."""
    plain = without_promise(UsingJax)
    rounds, *others = [plain() for _ in range(objects)]
    mesh = Mesh(np.array(jax.devices()[:devices]), ("x",))
    program = loop_over(rounds, *others)
    with mesh:
        assert any(isinstance(node, Loop) for node in program.plan(np.float32(0)).nodes) == (devices == 8)
    iterations, outcome = run_with(program, lambda: bool(rounds.stop()), mesh)
    assert outcome is True
    assert iterations < MOST - 1


def test_a_call_that_waits_for_the_end_of_a_loop_as_it_may_use_jax_is_named(monkeypatch, caplog):
    """The devices could wait for the end of a loop over one object, whose class does not promise anything, for ever."""
    monkeypatch.setattr(answering, "_SECONDS_UNTIL_WARNING", 0.05)
    rounds = without_promise(UntilManyRounds)()
    mesh = Mesh(np.array(jax.devices()), ("x",))
    program = loop_over(rounds)
    with mesh:
        assert has_executable_that_waits(program.plan(np.float32(0)))
    iterations, outcome = run_with(program, lambda: bool(rounds.stop()), mesh)
    assert outcome is True
    assert iterations == 2999
    (warning,) = (record.getMessage() for record in caplog.records)
    assert "the colocated call of 'UntilManyRounds.stop' made at" in warning
    assert "test_giving_way.py" in warning
    assert "waits until a program has ended whose devices wait for calls of 'UntilManyRounds." in warning
    assert "say uses_jax=False of its class" in warning


def test_calls_come_in_between_those_of_a_counted_loop_one_at_a_time_and_in_order():
    rounds = ROUNDS()

    def body(i, x):
        rounds.goes_on()
        return rounds.add(x)

    program = pjit(lambda x: lax.fori_loop(0, 3000, body, x))
    rounds_seen = []

    def ask():
        while not rounds_seen or rounds_seen[-1] < 1000:
            rounds_seen.append(float(rounds.as_they_are()))

    result, outcome = run_with(program, ask)
    assert outcome is None
    assert result == 3000
    assert rounds_seen == sorted(rounds_seen)
    assert len({*rounds_seen}) > 10
    assert float(rounds.as_they_are()) == 3000


def test_several_threads_come_in_between_and_the_loop_goes_on():
    rounds = ROUNDS()
    program = loop_over(rounds)
    asked = [meanwhile(lambda: [float(rounds.as_they_are()) for _ in range(50)]) for _ in range(3)]
    iterations, outcome = run_with(program, lambda: (time.sleep(0.1), rounds.stop()))
    assert outcome == (None, None)
    for thread, found in asked:
        thread.join(timeout=60)
        assert found[0] == sorted(found[0])
    assert 0 < iterations < MOST - 1


def test_a_call_that_fails_in_between_fails_alone():
    rounds = ROUNDS()
    failing = rounds.fail.specialize(mode="inline")

    def fail_and_stop():
        with pytest.raises(ValueError, match="no"):
            failing()
        rounds.stop()

    iterations, outcome = run_with(loop_over(rounds), fail_and_stop)
    assert outcome is None
    assert iterations < MOST - 1


def test_a_call_that_may_use_jax_or_waits_for_an_argument_waits_for_the_loop():
    """It could wait for the devices, which would wait for it."""
    rounds = ROUNDS()
    slow = colocated_python(
        lambda: rendezvous.hear("go") or np.float32(1), out_specs=NUMBER, mode="stream", devices=jax.devices()[0]
    )
    counted = pjit(lambda x: lax.fori_loop(0, 500, lambda i, x: (rounds.goes_on(), rounds.add(x))[1], x))

    def pass_what_is_not_there():
        pending = slow()
        asked = rounds.stop_by(pending)
        threading.Timer(0.05, rendezvous.say, ["go"]).start()
        return float(asked)

    result, found = run_with(counted, pass_what_is_not_there)
    assert result == 500
    assert 3 <= found <= 500


def test_an_object_is_closed_when_the_loop_has_ended():
    rounds = ROUNDS()
    counted = pjit(lambda x: lax.fori_loop(0, 500, lambda i, x: (rounds.goes_on(), rounds.add(x))[1], x))
    result, found = run_with(counted, rounds.close)
    assert (result, found) == (500, None)


def test_calls_made_ahead_stay_where_they_are():
    """They are made again when the program asks for more, from the state that it has consumed."""

    @colocated_python_class(state=("position", "seek"), uses_jax=False, devices=jax.devices()[0])
    class Numbers:
        def __init__(self):
            self.at = 0.0

        def next(self):
            self.at += 1
            return np.float32(self.at)

        def peek(self, x):
            if x == 3:
                rendezvous.say("running")
            return np.float32(x + 1)

        def position(self):
            return np.float32(self.at)

        def seek(self, position):
            self.at = float(position)

    numbers = Numbers()
    ahead = numbers.next.specialize(out_specs=NUMBER, run_ahead=3)
    peek, position = (getattr(numbers, name).specialize(out_specs=NUMBER) for name in ("peek", "position"))
    program = pjit(lambda x: lax.fori_loop(0, 500, lambda i, x: peek(x) + 0 * position(), x))
    assert float(ahead()) == 1
    result, found = run_with(program, lambda: (float(ahead()), float(position()), float(ahead())))
    assert result == 500
    assert found == (2, 2, 3)


def test_nobody_comes_in_between_the_calls_of_a_program_that_is_part_of_a_call():
    rounds = ROUNDS()
    counted = pjit(lambda x: lax.fori_loop(0, 300, lambda i, x: (rounds.goes_on(), rounds.add(x))[1], x))
    outer = colocated_python(counted, out_specs_fn=lambda x: x, stream="own", mode="stream")
    thread, found = meanwhile(lambda: float(rounds.as_they_are()))
    x = outer(jnp.float32(0))
    thread.join(timeout=60)
    assert float(x) == 300
    assert 3 <= found[0] <= 300


def test_an_interrupt_while_another_threads_call_is_in_between_leaves_the_object_to_others():
    @colocated_python_class(uses_jax=False, devices=jax.devices()[0])
    class Slow:
        def __init__(self):
            self.count = 0

        def step(self, x):
            self.count += 1
            if self.count == 3:
                rendezvous.say("running")
            return np.float32(x + 1)

        def take_long(self) -> None:
            rendezvous.say("in between")
            rendezvous.hear("interrupted")
            self.count = 100

        def counted(self):
            return np.float32(self.count)

    slow = Slow()
    step, counted = (getattr(slow, name).specialize(out_specs=NUMBER) for name in ("step", "counted"))
    program = pjit(lambda x: lax.while_loop(lambda x: x >= 0, step, x))

    def interrupt():
        rendezvous.hear("in between")
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread, _ = meanwhile(slow.take_long)
    other = threading.Thread(target=interrupt)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        program(np.float32(0))
    rendezvous.say("interrupted")
    thread.join(timeout=60)
    other.join(timeout=60)
    assert float(counted()) == 100
    assert float(pjit(lambda x: lax.fori_loop(0, 3, lambda i, x: step(x), x))(np.float32(0))) == 3
    assert float(counted()) == 103
