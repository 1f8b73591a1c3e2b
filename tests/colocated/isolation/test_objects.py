"""Objects in worker processes: they are used as others are, and what they hold is lost with their worker."""

import functools
import os
import re
import signal
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partjit
from partjit import WorkerDiedError, colocated
from partjit.colocated import colocated_python_class
from partjit.colocated.isolation import process

pytestmark = pytest.mark.usefixtures("meeting")

isolated: Any = functools.partial(colocated_python_class, isolate="process", devices=jax.devices()[0])
one = jnp.float32(1)


def is_alive(pid):
    return os.path.exists(f"/proc/{pid}")


def eventually(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def counter(**options):
    @isolated(**options)
    class Counter:
        def __init__(self, start=0):
            self.count = np.asarray(start, np.int32)

        def add(self, x):
            self.count = self.count + np.int32(x)
            return self.count

        def pid(self):
            return np.int32(os.getpid())

        def die(self):
            os.kill(os.getpid(), signal.SIGKILL)

        def _ask(self):
            return np.int32(7)

        @classmethod
        def scaled(cls, x, *, by=2):
            return x * np.int32(by)

    return Counter


def test_an_object_lives_in_a_process_of_its_own():
    Counter = counter()
    first, second = Counter(jnp.int32(10)), Counter()
    assert [int(first.add(1)), int(first.add(x=2)), int(second.add(5))] == [11, 13, 5]
    assert len({os.getpid(), int(first.pid()), int(second.pid())}) == 3
    assert int(first._ask()) == 7
    assert int(first.scaled(3, by=jnp.int32(4))) == 12


def test_its_methods_run_once_each_in_program_order_across_threads_and_in_programs():
    @isolated
    class Log:
        def __init__(self):
            self.seen = []

        def write(self, x):
            self.seen.append(int(x))

        def read(self):
            return np.int32(self.seen)

    Log.write = Log.write.specialize(out_specs_fn=lambda x: None)
    log = Log()
    for i in range(10):
        log.write(i)
    thread = threading.Thread(target=lambda: [log.write(i) for i in range(10, 20)])
    thread.start()
    thread.join()
    assert int(partjit.pjit(lambda n: jax.lax.fori_loop(20, n, lambda i, c: (log.write(i), c)[1], 0))(30)) == 0
    colocated.wait()
    assert log.read().tolist() == [*range(30)]


def test_the_state_is_lost_with_the_worker_and_another_object_works():
    Counter = counter()
    lost = Counter()
    assert int(lost.add(1)) == 1
    text = r"the worker process of Counter.die \(pid \d+\) was killed by signal 9 \(Killed\) in the call made at "
    with pytest.raises(WorkerDiedError, match=text + re.escape(__file__)):
        lost.die()
    for _ in range(2):
        with pytest.raises(WorkerDiedError, match="the state of the object is lost with it"):
            jax.block_until_ready(lost.add(1))
    assert int(Counter().add(1)) == 1
    idle = Counter()
    os.kill(int(idle.pid()), signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=r"was killed by signal 9 .*the state of the object is lost"):
        jax.block_until_ready(idle.add(1))
    colocated.wait()


def test_a_constructor_that_fails_or_dies_is_attempted_once():
    @isolated
    class Bad:
        def __init__(self, how):
            if how == "raise":
                raise FileNotFoundError("data")
            os._exit(4)

        def get(self, x):
            return x

    raising, dying = Bad("raise"), Bad("exit")
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match="data"):
            raising.get(one)
        with pytest.raises(WorkerDiedError, match=r"of Bad.__init__ \(pid \d+\) exited with code 4 in the call"):
            dying.get(one)


def test_it_is_closed_and_its_process_ends(tmp_path):
    @isolated
    class File:
        def __init__(self, path):
            self.path = path

        def pid(self):
            return np.int32(os.getpid())

        def close(self):
            with open(self.path, "w", encoding="utf-8") as file:
                file.write("closed")

    with File(str(tmp_path / "file")) as file:
        pid = int(file.pid())
    assert (tmp_path / "file").read_text(encoding="utf-8") == "closed"
    with pytest.raises(RuntimeError, match="this File was closed"):
        int(file.pid())
    eventually(lambda: not is_alive(pid))


def test_its_process_ends_when_it_is_not_referenced_any_more():
    own = counter()()
    pid = int(own.pid())
    del own
    eventually(lambda: not is_alive(pid))
    eventually(lambda: all(worker.pid != pid for worker in process._all))


def test_calls_made_ahead_with_a_state():
    @isolated(state=("position", "seek"))
    class Numbers:
        def __init__(self):
            self.at = 0

        def next(self):
            self.at += 1
            return np.int32(self.at)

        def position(self):
            return np.int32(self.at)

        def seek(self, position):
            self.at = int(position)

    numbers = Numbers()
    following = numbers.next.specialize(out_specs=jax.ShapeDtypeStruct((), jnp.int32), run_ahead=3)
    assert [int(following()) for _ in range(2)] == [1, 2]
    assert int(numbers.position()) == 2
    assert int(following()) == 3


def test_ctrl_c_ends_the_wait_and_the_method_goes_on(ctrl_c):
    @isolated(mode="inline")
    class Slow:
        def __init__(self):
            self.ran = []

        def run(self, x):
            self.ran.append(int(x[0]))
            time.sleep(0.5)
            self.ran.append(-int(x[0]))
            return np.zeros(100_000, np.float32)

        def log(self):
            return np.int32(self.ran)

    slow = Slow()
    slow.run(np.ones(1))
    for _ in range(2):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            slow.run(np.full(100_000, 2))
    assert slow.log().tolist() == [1, -1, 2, -2]


def test_options_that_exclude_it():
    with pytest.raises(ValueError, match="the methods of an object in a worker process cannot be concurrent"):
        counter(concurrent=True)
    with pytest.raises(ValueError, match="isolate='process' and arrays='jax' exclude each other"):
        counter(arrays="jax")
