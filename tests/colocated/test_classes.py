"""`colocated_python_class`: when an object is made and destroyed, and in which order its methods run."""

import collections
import contextlib
import dataclasses
import functools
import gc
import inspect
import os
import re
import threading
import time
import traceback
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding

from partjit import Mesh, P, colocated, pjit
from partjit.colocated import cheapness, colocated_python, colocated_python_class
from partjit.colocated.runtime import failures
from tests.census import saw, sees
from tests.colocated import rendezvous
from tests.effort import examples

pytestmark = pytest.mark.usefixtures("meeting")

one = jnp.int32(1)


class Base:
    """The class before."""

    shared = "data"

    def inherited(self, x):
        return x + 100


class Counter(Base):
    """Counts what it is given."""

    def __init__(self, start=0, *, log="log"):
        self.log = rendezvous.logs[log]  # of this test, also when it is destroyed in the next one
        self.log.append("made")
        self.count = start
        self.data = [start]

    def add(self, x):
        """Adds."""
        self.count += int(x.sum())
        return jnp.asarray(self.count)

    def twice(self, x):
        self.add(x)
        return self.add(x)

    def history(self):
        return jnp.asarray(self.count)

    def fail(self, x):
        raise LookupError(self.count)

    @staticmethod
    def square(x):
        return x * x

    @property
    def prop(self):
        return 3

    @classmethod
    def make(cls):
        return cls()

    def __call__(self, x):
        return x - 1

    def __del__(self):
        self.log.append("gone")


Colocated = colocated_python_class(Counter)


def log():
    return rendezvous.logs["log"]


def wait_for(condition):
    deadline = time.monotonic() + rendezvous.SECONDS
    while not condition():
        assert time.monotonic() < deadline
        gc.collect()
        time.sleep(0.005)


# Construction and destruction


def test_an_object_is_made_by_its_first_call():
    counter = Colocated(5)
    assert log() == []
    assert int(counter.add(one)) == 6
    assert int(counter.add(one)) == 7
    assert log() == ["made"]


def test_an_object_is_made_once_even_by_concurrent_first_calls():
    for concurrent in (False, True):
        rendezvous.clear()
        counter = colocated_python_class(Counter, concurrent=concurrent)(5)
        threads = [threading.Thread(target=counter.add, args=(one,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        colocated.wait()
        assert log() == ["made"]
        if not concurrent:
            assert int(counter.add(one)) == 14


def test_an_object_without_calls_is_never_made():
    counter = Colocated(5)
    del counter
    gc.collect()
    time.sleep(0.05)
    assert log() == []


def test_an_object_that_is_dropped_is_destroyed_once_on_another_thread():
    counter = Colocated(5)
    counter.add(one)
    del counter
    wait_for(lambda: log() == ["made", "gone"])
    time.sleep(0.02)
    assert log() == ["made", "gone"]


def test_many_objects_that_are_dropped_at_once_are_destroyed_by_a_few_threads():
    @colocated_python_class
    class Slow:
        def touch(self, x) -> None:
            pass

        def __del__(self):
            time.sleep(0.002)
            rendezvous.logs["destroyed by"].append(threading.get_ident())

    objects = [Slow() for _ in range(50)]
    for each in objects:
        each.touch(one)
    colocated.wait()
    each = None
    objects.clear()
    destroyers = rendezvous.logs["destroyed by"]
    wait_for(lambda: len(destroyers) == 50)
    assert len({*destroyers}) <= 10


@pytest.mark.parametrize(
    "program",
    [
        lambda call: pjit(lambda x: call(x) + 1),
        lambda call: pjit(lambda x: call(x) + 1, in_shardings=NamedSharding(Mesh(jax.devices(), "x"), P())),
        lambda call: pjit(lambda x: jax.lax.fori_loop(0, 2, lambda _, x: call(x), x)),
        lambda call: pjit(jax.vmap(call)),
        lambda call: pjit(jax.shard_map(call, mesh=Mesh(jax.devices()[:1], "x"), in_specs=P(), out_specs=P("x"))),
        lambda call: jax.jit(lambda x: call.specialize(uses_jax=False)(x) + 1),
    ],
    ids=["program", "on eight devices", "loop", "vmap", "shard_map", "jit"],
)
def test_an_object_is_destroyed_with_the_last_program_that_calls_it(program):
    counter = colocated_python_class(Counter)()
    step = program(counter.square.specialize(out_specs_fn=lambda x: x))
    step(jnp.ones(3, jnp.int32)).block_until_ready()
    assert log() == ["made"]
    del counter, step
    for _ in range(2):  # what a cache drops is collected in the next round
        gc.collect()
    wait_for(lambda: log() == ["made", "gone"])


def test_an_object_is_destroyed_after_its_last_call():
    class Slow(Counter):
        def add(self, x):
            rendezvous.hear("go")
            log().append("called")
            return super().add(x)

    counter = colocated_python_class(Slow)(1)
    add = counter.add.specialize(out_specs_fn=lambda x: x)
    results = [add(one), add(one)]
    del counter, add
    gc.collect()
    rendezvous.say("go")
    assert [int(y) for y in results] == [2, 3]
    wait_for(lambda: log() == ["made", "called", "called", "gone"])


def test_a_method_keeps_its_object():
    add = Colocated(1).add
    assert int(add(one)) == 2
    gc.collect()
    assert int(add(one)) == 3
    del add
    wait_for(lambda: log() == ["made", "gone"])


@pytest.mark.parametrize("error", [OSError, SystemExit])
def test_a_constructor_that_raises_is_tried_once(error):
    class Broken:
        def __init__(self):
            log().append("tried")
            raise error("no disk")

        def read(self, x):
            return x

        def write(self, x):
            return x

    broken = colocated_python_class(Broken)()
    for method in (broken.read, broken.write, broken.read, broken.read.specialize(out_specs_fn=lambda x: x)):
        with pytest.raises(error, match="no disk"):
            jax.block_until_ready(method(one))
    assert log() == ["tried"]
    other = colocated_python_class(Broken)()
    with pytest.raises(error, match="no disk"):
        other.read(one)
    assert log() == ["tried", "tried"]


class WithoutDisk:
    def __init__(self):
        raise OSError("no disk")

    def note(self, x) -> None:
        pass

    def read(self, x):
        return x


def test_a_failed_constructor_is_one_failure_however_many_calls_it_fails(caplog):
    one_call = colocated_python_class(WithoutDisk)()
    held = [one_call.read.specialize(out_specs_fn=lambda x: x)(one) for _ in range(2)]
    for _ in range(3):
        one_call.note(one)
    with pytest.raises(OSError, match="no disk") as caught:
        colocated.wait()
    where = "test_a_failed_constructor_is_one_failure_however_many_calls_it_fails"
    made, called = caught.value.__notes__
    assert re.fullmatch(rf"It is from the constructor of WithoutDisk, called at .*test_classes.py:\d+ in {where}", made)
    assert called.startswith("This happened in the colocated call of 'WithoutDisk.")
    colocated.wait()
    del held
    gc.collect()
    one_call.note(one)  # once it has been seen, another call fails anew
    with pytest.raises(OSError, match="no disk"):
        colocated.wait()
    assert len([record for record in caplog.records if where in record.getMessage()]) <= 2


def test_a_failed_constructor_is_raised_at_the_end_of_every_stream_that_called_the_object():
    sink = colocated_python_class(WithoutDisk)()
    for name in ("left", "right"):
        sink.note.specialize(stream=name)(one)
    for name in ("left", "right"):
        with pytest.raises(OSError, match="no disk") as caught:
            colocated.wait(name)
        lines = traceback.extract_tb(caught.value.__traceback__)
        assert [line.name for line in lines if line.filename == __file__][1:] == ["__init__"]
    colocated.wait()


class FullDisk:
    def note(self, x) -> None:
        raise OSError("no disk")


@pytest.mark.parametrize("where", ["eager", "pjit", "jit"])
@pytest.mark.parametrize("kind", [WithoutDisk, FullDisk])
def test_a_failed_constructor_or_method_is_raised_at_the_end_of_the_block(where, kind):
    def note_twice(then=None):
        with colocated_python_class(kind)() as sink:
            call = {"eager": sink.note, "pjit": pjit(sink.note), "jit": jax.jit(sink.note)}[where]
            call(one)
            call(one)
            if then is not None:
                raise then

    with pytest.raises(OSError, match="no disk"):
        note_twice()
    colocated.wait()
    with pytest.raises(ZeroDivisionError):
        note_twice(ZeroDivisionError())
    with pytest.raises(OSError, match="no disk"):
        colocated.wait()
    with colocated_python_class(kind)() as sink:
        sink.note(one)
        with pytest.raises(OSError, match="no disk"):
            colocated.wait()
    other = colocated_python_class(FullDisk)()
    other.note(one)
    with Colocated(1) as counter:  # which has nothing to do with it
        counter.add(one)
    with pytest.raises(OSError, match="no disk"):
        colocated.wait()


@pytest.mark.parametrize("mode", ["inline", "auto"])
def test_which_line_calls_a_quick_method_is_found_out_when_somebody_asks(mode, monkeypatch):
    monkeypatch.setattr(cheapness, "_CHEAP_IN_A_ROW", 0)
    add = Colocated(1).add.specialize(mode=mode, out_specs=jax.ShapeDtypeStruct((), jnp.int32))
    assert int(add(one)) == 2
    monkeypatch.setattr(failures, "site_of", None)
    assert int(add(one)) == 3


@pytest.mark.parametrize("runs", ["on a thread", "in its caller"])
def test_what_a_quick_method_raises_is_raised_at_the_end_of_the_block_wherever_it_runs(runs):
    class Log:
        def note(self, x) -> None:
            if float(x) < 0:
                raise OSError("no disk")

    def note_many():
        with colocated_python_class(Log)() as sink:
            for _ in range(100 if runs == "in its caller" else 1):
                sink.note(one)
                colocated.wait()
            sink.note(-one)

    with pytest.raises(OSError, match="no disk"):
        note_many()
    colocated.wait()


class Chosen(type):
    def __call__(cls, *args, **kwargs):
        return super().__call__(1, *args, **kwargs)


class ByMetaclass(metaclass=Chosen):
    def __init__(self, given, x):
        pass


class New:
    def __new__(cls, a):
        return super().__new__(cls)


@dataclasses.dataclass
class Settings:
    rate: float
    steps: int = 10

    def scaled(self, x):
        return x * self.steps


def injected(function):
    """Makes a constructor give its last argument itself."""

    @functools.wraps(function)
    def wrapper(self):
        function(self, 3)

    return wrapper


class Injected:
    @injected
    def __init__(self, x):
        self.x = x

    def get(self, x):
        return x + self.x


class Unknown(collections.deque):
    def longest(self, x):
        return x + self.maxlen


@pytest.mark.parametrize("isolate", [None, "process"])
@pytest.mark.parametrize(
    ("cls", "args", "kwargs", "problem"),
    [
        (Settings, (), {}, "Settings() missing a required argument: 'rate'"),
        (Settings, (1, 2, 3), {}, "Settings() takes 2 positional arguments but 3 were given"),
        (Settings, (1,), {"step": 2}, "Settings() got an unexpected keyword argument 'step'"),
        (Counter, (1,), {"start": 2}, "Counter() multiple values for argument 'start'"),
        (New, (), {}, "New() missing a required argument: 'a'"),
        (Base, (1,), {}, "Base() takes 0 positional arguments but 1 was given"),
    ],
)
def test_arguments_that_a_constructor_does_not_take_are_refused_at_once(cls, args, kwargs, problem, isolate):
    with pytest.raises(TypeError) as error:
        colocated_python_class(cls, isolate=isolate)(*args, **kwargs)
    assert str(error.value) == problem


def test_constructors_that_take_other_arguments_than_it_seems_are_called_with_them():
    assert int(colocated_python_class(Settings)(0.1).scaled(one)) == 10
    assert int(colocated_python_class(Injected)().get(one)) == 4
    assert int(colocated_python_class(Unknown)((1, 2), 5).longest(one)) == 6
    colocated_python_class(ByMetaclass)(2)
    colocated_python_class(ByMetaclass)(x=2)
    colocated_python_class(New)(2)


def test_constructor_arguments_are_copied():
    items = [1, 2]

    class Keeper:
        def __init__(self, items, *, more):
            items.append(3)
            self.items, self.more = items, more

        def look(self, x):
            self.items.append(4)
            return jnp.asarray([*self.items, len(self.more)])

    keeper = colocated_python_class(Keeper)(items, more={"a": items})
    assert keeper.look(one).tolist() == [1, 2, 3, 4, 1]
    assert items == [1, 2]
    items.append(9)
    assert keeper.look(one[None]).tolist() == [1, 2, 3, 4, 4, 1]


def test_constructor_arguments_are_as_they_were_passed():
    class Keeper:
        def __init__(self, array, items, *, named):
            self.seen = [array, items[0], named["a"][0], named["items"][0]]
            self.is_same = items is named["items"] and items[1] is items

        def look(self, x):
            return jnp.asarray([*(float(value.sum()) for value in self.seen), float(self.is_same)])

    array, inner, name = np.ones((2, 3), order="F"), np.ones(3), np.ones(1)
    items = [inner]
    items.append(items)  # a list may be in itself
    keeper = colocated_python_class(Keeper)(array, items, named={"a": (name,), "items": items})
    array[:], inner[:], name[:] = 7, 7, 7
    items.clear()
    assert keeper.look(one).tolist() == [6, 3, 1, 3, 1]


@pytest.mark.parametrize("fails", [False, True])
def test_constructor_arguments_are_dropped_once_it_has_run(fails):
    class Weights:
        total = 3

    class Keeper:
        def __init__(self, weights):
            self.total = weights.count if fails else weights.total

        def look(self, x):
            return x + self.total

    weights = Weights()
    keeper, dropped = colocated_python_class(Keeper)(weights), weakref.ref(weights)
    del weights
    assert dropped() is not None
    with pytest.raises(AttributeError, match="count") if fails else contextlib.nullcontext():
        keeper.look(one)
    gc.collect()
    assert dropped() is None


# Closing


def test_close_waits_for_calls_before_it_and_destroys():
    counter = Colocated(1)
    pending = colocated_python(lambda x: rendezvous.hear("go") or x, stream="p", out_specs_fn=lambda x: x)(one)
    y = counter.add.specialize(out_specs_fn=lambda x: x)(pending)
    threading.Timer(0.05, rendezvous.say, ["go"]).start()
    counter.close()
    assert int(y) == 2
    assert log() == ["made", "gone"]
    with pytest.raises(RuntimeError, match="this Counter was closed"):
        counter.add(one).block_until_ready()
    counter.close()


def test_a_with_block_closes():
    with Colocated(1) as counter:
        assert int(counter.add(one)) == 2
    assert log() == ["made", "gone"]
    with pytest.raises(LookupError), Colocated(1) as counter:
        counter.fail(one)
    assert log() == ["made", "gone"] * 2


def test_an_object_without_calls_is_closed_without_being_made():
    with Colocated(1):
        pass
    assert log() == []


def test_close_calls_the_objects_own_close():
    class File:
        def write(self, x):
            log().append("write")

        def close(self):
            log().append("close")
            if len(log()) > 3:
                raise OSError("full")

    File = colocated_python_class(File)
    with File() as file:
        file.write(one)
    assert log() == ["write", "close"]
    file = File()
    file.write(one)
    with pytest.raises(OSError, match="full"):
        file.close()


class Transaction:
    """Says in a file what is called, also from another process."""

    def __init__(self, path):
        self.path = path

    def say(self, *said):
        with open(self.path, "a") as file:
            print(*said, file=file)

    def __enter__(self):
        self.say("enter")
        return self

    def __exit__(self, kind, error, _):
        self.say("exit", kind and kind.__name__, error)

    def close(self):
        self.say("close")

    def write(self, x):
        self.say("write", int(x))
        return x


@pytest.mark.parametrize("isolate", [None, "process"])
@pytest.mark.parametrize("is_used", [False, True], ids=["", "used before"])
@pytest.mark.parametrize("error", [None, LookupError("no such key")])
def test_a_with_block_of_an_object_that_has_its_own_is_that_block(tmp_path, isolate, is_used, error):
    seen = []
    for cls in (Transaction, colocated_python_class(Transaction, isolate=isolate)):
        path = tmp_path / f"{cls is Transaction}"
        transaction = cls(str(path))
        if is_used:
            transaction.write(one)
        with pytest.raises(LookupError) if error else contextlib.nullcontext(), transaction as entered:
            for i in range(3):
                entered.write(one * i)
            if error:
                raise error
        seen.append(path.read_text())
    assert seen[0] == seen[1]


def test_a_with_block_in_which_nothing_is_called_makes_no_object(tmp_path):
    with colocated_python_class(Transaction)(str(tmp_path / "log")):
        pass
    assert not (tmp_path / "log").exists()


def test_what_the_begin_and_the_end_of_a_with_block_raise_is_raised():
    class Locked(Transaction):
        def __enter__(self):
            raise OSError("locked")

    class Full(Transaction):
        def __exit__(self, *_):
            raise OSError("full")

    with pytest.raises(OSError, match="locked"), colocated_python_class(Locked)(os.devnull) as locked:
        locked.write(one)
    with pytest.raises(OSError, match="full"), colocated_python_class(Full)(os.devnull) as full:
        full.write(one)


def test_an_object_is_closed_whatever_its_methods_are_called():
    class Private(Counter):
        def _close(self, x):
            return self.add(x)

    with colocated_python_class(Private)() as private:
        assert int(private._close(one)) == 1
    assert log() == ["made", "gone"]
    with pytest.raises(RuntimeError, match="this Private was closed"):
        private.add(one)


@pytest.mark.system
def test_objects_left_at_exit_are_destroyed():
    from tests.colocated.runtime.test_errors import run

    code, out, err = run("""
        @colocated.colocated_python_class
        class C:
            def f(self, x):
                time.sleep(0.2)
                return x
            def __del__(self):
                print("gone", sys.is_finalizing(), flush=True)
        c = C()
        c.f(one)
        c.f(one)
        print("end", flush=True)
    """)
    assert (code, out.split(), err) == (0, ["end", "gone", "False"], "")


# State


def test_state_is_shared_by_the_methods_of_an_object_and_by_no_other():
    a, b = Colocated(0), Colocated(10)
    assert [int(a.add(one)), int(b.add(one)), int(a.twice(one)), int(a.add(one[None])), int(b.add(one))] == [
        1,
        11,
        3,
        4,
        12,
    ]
    assert log() == ["made", "made"]


def test_clearing_the_caches_of_jax_keeps_state():
    counter = Colocated(0)
    counter.add(one)
    jax.clear_caches()
    assert int(counter.add(one)) == 2
    assert log() == ["made"]


def test_a_failed_method_leaves_the_object():
    counter = Colocated(0)
    counter.add(one)
    with pytest.raises(LookupError, match="1"):
        counter.fail(one)
    assert int(counter.add(one)) == 2


def test_an_object_captured_by_a_function_is_the_same_object():
    counter = Colocated(0)
    f = colocated_python(lambda x: counter.add(counter.add(x)))
    assert int(f(one)) == 2
    assert int(counter.add(one)) == 3
    assert colocated.deserialize(colocated.serialize(counter)) is counter
    data = colocated.serialize(counter)
    counter = f = None
    jax.clear_caches()
    gc.collect()
    with pytest.raises(ValueError, match="this colocated Counter object is not one of this process, or is gone"):
        colocated.deserialize(data)


@pytest.mark.system
def test_an_object_of_another_process_is_none_of_this_one():
    from tests.colocated.runtime.test_errors import run

    program = """
        class C:
            def f(self, x):
                return x
        c = colocated.colocated_python_class(C)()
    """
    _, data, _ = run(f"{program}    print(colocated.serialize(c).hex())")
    code, _, err = run(f"{program}    colocated.deserialize(bytes.fromhex('{data.strip()}'), authenticate=False)")
    assert code == 1
    assert "ValueError: this colocated C object is not one of this process, or is gone" in err


def test_a_method_captured_by_a_function_is_that_of_its_object():
    counter = Colocated(0)
    add = counter.add
    f = colocated_python(lambda x: add(add(x)))
    assert int(f(one)) == 2
    assert int(counter.add(one)) == 3
    assert int(colocated.deserialize(colocated.serialize(counter.add.specialize(mode="inline")))(one)) == 4


def test_a_colocated_class_is_derived_from_the_plain_one():
    class Derived(Colocated):
        pass

    with pytest.raises(TypeError, match="Derived is, or inherits from, a colocated class"):
        colocated_python_class(Derived)


# What is exposed


def test_what_is_read_or_set_on_a_reference_and_is_no_method_is_named():
    counter = Colocated(1)
    for name in ("count", "prop", "shared", "mistyped"):
        with pytest.raises(AttributeError, match=f"'Counter' object has no attribute '{name}': .* return them in a"):
            getattr(counter, name)
    with pytest.raises(AttributeError, match=r"Counter.count cannot be set: a colocated object has .* set them in a"):
        counter.count = 5  # the object would not see it
    counter.quick = counter.add.specialize(out_specs_fn=lambda x: x)
    assert int(counter.quick(one)) == 2
    assert not hasattr(counter, "__array__")


@pytest.mark.parametrize(("name", "meant"), [("ad", "add"), ("Twice", "twice"), ("squares", "square"), ("mak", "make")])
def test_a_method_that_was_probably_meant_is_named(name, meant):
    with pytest.raises(AttributeError) as error:
        getattr(Colocated(1), name)
    assert str(error.value).startswith(
        f"'Counter' object has no attribute {name!r}: did you mean {meant!r}? A colocated"
    )
    (shown,) = traceback.format_exception_only(error.value)
    assert shown.casefold().count("did you mean") == 1


def test_class_methods_are_methods():
    class Counted:
        made = 0

        def __init__(self, start=0):
            type(self).made += 1
            self.start = start

        @classmethod
        def count(cls, x, *, times=1):
            return x * (10 * cls.made + times)

        @classmethod
        def another(cls, x):
            return cls()

    counted = colocated_python_class(Counted)(3)
    assert [int(counted.count(one, times=2)) for _ in range(3)] == [12] * 3
    assert (counted.count.__name__, repr(counted.count)) == ("count", "<colocated Counted.count>")
    assert [*inspect.signature(counted.count).parameters] == ["x", "times"]
    with pytest.raises(ValueError, match=r"in_specs do not fit|x is int32"):
        counted.count.specialize(in_specs=((jax.ShapeDtypeStruct((3,), np.int32),), {}))(one)
    with pytest.raises(ValueError, match=r"only supports jax.Array.* at result of Counted.another"):
        counted.another(one)


@pytest.mark.parametrize("name", ["make", "square", "add"])
def test_methods_are_called_on_objects(name):
    message = (
        rf"Counter.{name} is a method of a colocated class: call it on one of its objects, Counter\(...\).{name}\("
    )
    with pytest.raises(TypeError, match=message):
        getattr(Colocated, name)()
    with pytest.raises(TypeError, match=message):
        getattr(Colocated, name)(one)
    with pytest.raises(TypeError, match=message):
        getattr(Colocated, name)(Counter(), one)


def test_plain_functions_are_exposed_and_data_is_not():
    counter = Colocated(0)
    assert int(counter.inherited(one)) == 101
    assert int(counter.square(one * 3)) == 9
    assert int(counter(one)) == 0
    for name in ("data", "count", "prop", "shared", "absent"):
        with pytest.raises(AttributeError):
            getattr(counter, name)
    assert Colocated.__name__ == "Counter"
    assert Colocated.__doc__ == "Counts what it is given."
    assert Colocated.__module__ == __name__
    assert (counter.add.__name__, counter.add.__doc__) == ("add", "Adds.")
    assert repr(counter) == "<colocated Counter object>"
    assert repr(Colocated.add) == "<colocated method Counter.add>"
    assert repr(counter.add) == "<colocated Counter.add>"
    assert isinstance(counter, Colocated)


def test_arguments_of_methods_are_named_as_parameters():
    with pytest.raises(ValueError, match=r"only supports jax.Array.* at x\['deep'\] of Counter.add"):
        Colocated(0).add({"deep": jax.ShapeDtypeStruct((), np.int32)})


@pytest.mark.parametrize("isolate", [None, "process"])
@pytest.mark.parametrize("name", ["of_object", "of_nothing", "of_class"])
def test_arguments_are_named_whatever_the_first_parameter_is_called(name, isolate):
    class Named:
        def of_object(this, first, second):
            return first

        @staticmethod
        def of_nothing(self, second):
            return self

        @classmethod
        def of_class(kind, first, second):
            return first

    names = [*inspect.signature(getattr(Named(), name)).parameters]
    method = getattr(colocated_python_class(Named, isolate=isolate)(), name)
    for i in range(2):
        args = [one, one]
        args[i] = threading.Lock() if isolate else jax.ShapeDtypeStruct((), np.int32)
        with pytest.raises((ValueError, TypeError), match=rf"{names[i]} of Named.{name}\b"):
            method(*args)


def test_a_method_that_returns_before_it_has_run_is_refused_when_it_is_used():
    class Later:
        def now(self, x):
            return x

        async def later(self, x):
            return x

    handle = colocated_python_class(Later)()
    assert float(handle.now(1.0)) == 1.0
    with pytest.raises(TypeError, match=r"but Later\.later is a coroutine function: its calls return before"):
        handle.later(1.0)


@pytest.mark.parametrize("cls", [3, len, Counter(log="other")])
def test_what_is_no_class_is_refused(cls):
    with pytest.raises(TypeError, match="colocated_python_class: cls must be a class, but is"):
        colocated_python_class(cls)


# Specialization


def test_methods_without_arguments_need_devices():
    counter = Colocated(7)
    with pytest.raises(ValueError, match="No devices found"):
        counter.history()
    counter.history = counter.history.specialize(devices=jax.devices()[:1])
    assert int(counter.history()) == 7
    with pytest.raises(ValueError, match="No devices found"):
        Colocated(7).history()


def test_methods_are_specialized_for_a_class():
    Own = colocated_python_class(Counter)
    devices = jax.devices()[:1]
    history = Own.history.specialize(devices=devices)
    assert int(history(Own(3))) == 3
    with pytest.raises(ValueError, match="No devices found"):
        Own(3).history()
    Own.history = history
    a, b = Own(1), Own(2)
    assert [int(a.history()), int(b.history())] == [1, 2]
    with pytest.raises(ValueError, match="devices already specified"):
        a.history.specialize(devices=devices)
    with pytest.raises(ValueError, match="devices already specified"):
        Own.history.specialize(devices=devices)
    a.history = a.history.specialize(mode="stream", out_specs=jax.ShapeDtypeStruct((), np.int32))
    assert isinstance(a.history(), colocated.PendingArray)
    assert int(Own.add(a, one)) == 2
    assert int(Own.__call__(a, one)) == 0


def test_items_of_a_class_hold_for_all_methods():
    Own = colocated_python_class(devices=jax.devices()[:1], mode="inline", stream="own")(Counter)
    counter = Own(4)
    assert int(counter.history()) == 4
    assert counter.add.options.mode == "inline"
    with pytest.raises(ValueError, match="stream already specified"):
        counter.add.specialize(stream="other")


def test_results_are_known_after_the_first_call_of_each_object():
    a, b = Colocated(0), Colocated(0)
    assert not isinstance(a.add(one), colocated.PendingArray)
    assert isinstance(a.add(one), colocated.PendingArray)
    assert not isinstance(b.add(one), colocated.PendingArray)


# Order


def test_methods_of_an_object_run_one_at_a_time_across_threads_and_streams():
    class Alone:
        def __init__(self):
            self.inside, self.order = 0, []

        def work(self, x):
            self.inside += 1
            assert self.inside == 1
            time.sleep(0.0005)
            self.order.append(int(x))
            self.inside -= 1

        def order_so_far(self, x):
            return jnp.asarray(self.order)

    alone = colocated_python_class(Alone)()
    alone.work(jnp.int32(-1))
    works = [alone.work, alone.work.specialize(mode="inline"), alone.work.specialize(stream="s")]

    def run(k):
        for i in range(15):
            works[k % 3 if k < 3 else i % 3](jnp.int32(100 * k + i))

    threads = [threading.Thread(target=run, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    colocated.wait()
    order = alone.order_so_far(one).tolist()[1:]
    assert sorted(order) == [100 * k + i for k in range(3) for i in range(15)]
    for k in range(3):
        assert [i for i in order if i // 100 == k] == [100 * k + i for i in range(15)]


def test_methods_of_different_objects_and_of_concurrent_ones_overlap():
    class Meets:
        def meet(self, x):
            rendezvous.meet("two", 2)
            return x

    a, b = colocated_python_class(Meets)(), colocated_python_class(Meets)()
    c = colocated_python_class(Meets, concurrent=True)()
    for first, second in ((a, b), (c, c)):
        rendezvous.clear()
        results = [
            instance.meet.specialize(stream=name, out_specs_fn=lambda x: x)(one)
            for name, instance in (("x", first), ("y", second))
        ]
        assert [int(y) for y in results] == [1, 1]


def test_a_function_and_a_method_of_the_same_thread_keep_their_order():
    counter = Colocated(0)
    counter.add(one)
    add = counter.add.specialize(out_specs_fn=lambda x: x)
    slow = colocated_python(lambda x: time.sleep(0.002) or log().append("f"), out_specs_fn=lambda x: None)

    class Logger:
        def log(self, x):
            rendezvous.logs["log"].append("m")

    logger = colocated_python_class(Logger)()
    logger.log(one)
    rendezvous.clear()
    for _ in range(20):
        slow(one)
        logger.log(one)
        add(one)
    colocated.wait()
    assert log() == ["f", "m"] * 20
    assert int(add(one)) == 22


def test_methods_may_call_methods_of_other_objects_and_of_their_own():
    class Chain:
        def __init__(self, following):
            self.following = following

        def work(self, x):
            return x + 1 if self.following is None else self.following.work(x) + 1

    Chain = colocated_python_class(Chain)
    last = Chain(None)
    first = Chain(Chain(last))
    for _ in range(3):
        assert int(first.work(one)) == 4


@pytest.mark.parametrize("is_waited_for", [False, True])
@pytest.mark.parametrize("behind", ["a call", "an inline call", "a program", "a loop"])
def test_what_a_function_calls_comes_before_calls_behind_the_function(behind, is_waited_for):
    counter = Colocated(0)
    add = counter.add.specialize(out_specs_fn=lambda x: x)

    def outer(x):
        wait_for(lambda: counter._colocated_instance.lane.calls)
        added = add(x)
        return added + 0 if is_waited_for else x

    first = colocated_python(outer, mode="stream", out_specs_fn=lambda x: x)(one)
    ways = {
        "a call": add,
        "an inline call": counter.add.specialize(mode="inline"),
        "a program": pjit(lambda x: add(x) + 0),
        "a loop": pjit(lambda x: jax.lax.fori_loop(0, 2, lambda _, x: add(x), x)),
    }
    assert int(ways[behind](one * 10)) == (22 if behind == "a loop" else 11)
    assert int(first) == 1


def test_what_a_function_calls_comes_before_calls_on_other_streams_that_wait_for_it():
    a, b = Colocated(0), Colocated(0)
    add, add_b = (counter.add.specialize(out_specs_fn=lambda x: x) for counter in (a, b))

    def outer(x):
        wait_for(lambda: b._colocated_instance.lane.calls)
        return add_b(x) + 0

    first = colocated_python(outer, mode="stream", out_specs_fn=lambda x: x)(one)
    add(one)
    add.specialize(stream="s")(one)  # waits for the one before, which waits for the function
    second = add_b.specialize(stream="s")(one * 10)
    assert [int(first), int(second)] == [1, 11]


def test_the_calls_of_an_object_are_as_if_the_functions_that_make_them_were_inlined():
    class Order:
        def __init__(self):
            self.noted = []

        def note(self, x):
            self.noted.append(int(x))

        def all(self, x):
            return np.int32(self.noted)

    order = colocated_python_class(Order)()
    note = order.note.specialize(out_specs_fn=lambda x: None)

    def outer(x):
        for i in range(3):
            note(10 * x + i)
            time.sleep(0.0005)  # in which calls behind this one are made

    f = colocated_python(outer, out_specs_fn=lambda x: None)
    for i in range(20):
        f(jnp.int32(i))
        note(jnp.int32(10 * i + 3))
    assert order.all(one).tolist() == [10 * i + j for i in range(20) for j in range(4)]


@sees("several threads", "two modes")
@examples(30)
@given(st.data())
def test_an_object_is_a_sequential_one_to_every_thread(data):
    """Each thread adds its own digit; what it reads back always has exactly its own additions so far, and is final."""
    rendezvous.clear()
    count = data.draw(st.integers(1, 3))
    modes = st.sampled_from(["inline", "stream", "auto"])
    programs = [data.draw(st.lists(modes, max_size=6)) for _ in range(count)]
    saw("several threads", when=sum(map(bool, programs)) > 1)
    saw("two modes", when=len({mode for program in programs for mode in program}) > 1)
    counter = Colocated(0)
    spec = jax.ShapeDtypeStruct((), np.int32)
    methods = {mode: counter.add.specialize(mode=mode, out_specs=spec) for mode in ("inline", "stream", "auto")}
    seen = [[] for _ in programs]

    def run(k):
        seen[k] += [methods[mode](jnp.int32(10 ** (2 * k))) for mode in programs[k]]

    threads = [threading.Thread(target=run, args=(k,)) for k in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k, results in enumerate(seen):
        assert [int(y) // 10 ** (2 * k) % 100 for y in results] == [*range(1, len(programs[k]) + 1)]
    assert int(counter.add(jnp.int32(0))) == sum(len(p) * 10 ** (2 * k) for k, p in enumerate(programs))
    values = [int(y) for results in seen for y in results]
    assert len({*values}) == len(values)


def test_an_object_is_of_a_copy_of_its_class_and_shares_the_other_classes():
    seen = []

    class Config:
        def __init__(self, number):
            self.number = number

    class Parent:
        def note(self, x):
            seen.append("parent")
            return np.int32(len(seen))

    class Child(Parent):
        made = 0

        def __init__(self, config):
            self.config = config
            Child.made += 1

        def note(self, x, given=None):
            seen.append("child")
            assert type(self) is Child
            assert isinstance(self, Parent)
            assert isinstance(self.config, Config)
            assert given is None or type(given) is Config
            return np.int32(100 * Child.made + 10 * self.config.number + super().note(x))

    before = Child.note, Parent.note, Config.__init__
    config = Config(3)
    objects = [colocated_python_class(Child)(config) for _ in range(2)]
    assert [int(obj.note(one)) for obj in objects] == [132, 132], "each has a copy, as if it were on another host"
    assert int(objects[0].note(one, config)) == 134
    assert (Child.note, Parent.note, Config.__init__) == before
    assert (Child.made, seen) == (0, [])
    assert Child(config).note(one) == 132
