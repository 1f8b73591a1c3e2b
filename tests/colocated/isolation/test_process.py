"""Worker processes: what they write, and that none is left behind, however their parent ends."""

import os
import time

import numpy as np
import pytest

from partjit.colocated.isolation import messages, process
from tests.colocated.isolation.test_objects import eventually, is_alive
from tests.colocated.runtime.test_errors import run

PROGRAM = """
import signal, numpy as np
def pid(x):
    print("pid", os.getpid(), flush=True)
    return np.int32(os.getpid())
f = colocated.colocated_python(pid, isolate="process", mode="inline")
"""


def pids(out):
    return [int(line.split()[1]) for line in out.splitlines() if line.startswith("pid")]


@pytest.mark.system
@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(3)"])
def test_workers_end_with_their_parent(end):
    code, out, err = run(PROGRAM + f"f(one)\nwith colocated.stream():\n    f(one)\n{end}\n")
    assert code == {"": 0, "sys.exit(3)": 3}.get(end, -9)
    assert err == ""
    found = pids(out)
    assert len({*found}) == 2
    eventually(lambda: not any(map(is_alive, found)))


@pytest.mark.system
def test_a_worker_in_a_call_without_end_ends_with_its_parent():
    code, out, _ = run(
        PROGRAM
        + """
def run_for_ever(x):
    print("pid", os.getpid(), flush=True)
    while True:
        pass
threading.Timer(2, os.kill, (os.getpid(), signal.SIGKILL)).start()
colocated.colocated_python(run_for_ever, isolate="process", mode="inline")(one)
"""
    )
    assert code == -9
    (pid,) = pids(out)
    eventually(lambda: not is_alive(pid))


@pytest.mark.system
def test_at_exit_calls_under_way_are_finished_and_objects_destroyed():
    code, out, err = run(
        PROGRAM
        + """
class Last:
    def __init__(self):
        self.name = "last"
    def get(self, x):
        return x
    def __del__(self):
        print("destroyed", flush=True)
last = colocated.colocated_python_class(Last, isolate="process")()
last.get(one)
slow = colocated.colocated_python(
    lambda x: time.sleep(0.5) or print("ran", x), isolate="process", out_specs_fn=lambda x: None
)
slow(one)
"""
    )
    assert (code, err) == (0, "")
    assert out.split() == ["ran", "1.0", "destroyed"]


@pytest.mark.system
def test_at_exit_a_call_without_end_does_not_keep_the_process():
    code, out, err = run(
        PROGRAM
        + """
f(one)
options = {"isolate": "process", "mode": "stream", "out_specs_fn": lambda x: None}
colocated.colocated_python(lambda x: time.sleep(1000), **options)(one)
""",
        PARTJIT_EXIT_TIMEOUT="0.5",
    )
    assert code == 0
    assert "after 0.5 s there still run or wait '<lambda>'" in err
    eventually(lambda: not any(map(is_alive, pids(out))))


@pytest.mark.system
def test_what_a_worker_writes_goes_where_its_parent_writes():
    code, out, err = run(
        """
def work(x):
    print("to stdout")
    print("to stderr", file=sys.stderr)
    return x
colocated.colocated_python(work, isolate="process")(one)
print("after", flush=True)
"""
    )
    assert code == 0
    assert out.split("\n") == ["to stdout", "after", ""]
    assert err == "to stderr\n"


@pytest.mark.system
def test_a_forked_child_has_workers_of_its_own():
    code, out, err = run(
        PROGRAM
        + """
import warnings
warnings.simplefilter("ignore")
f(one)
child = os.fork()
if child == 0:
    f(one)
    sys.stdout.flush()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
f(one)
""",
        PYTHONWARNINGS="ignore",
    )
    assert code == 0, err
    first, in_child, last = pids(out)
    assert first == last != in_child


def test_segments_are_gone_with_what_uses_them():
    worker = process.WorkerProcess(is_disposable=True)

    def ask(body, pieces, **options):
        return worker.ask("call", body, pieces, key=1, **options)

    def mapped():
        with open("/proc/self/maps", encoding="utf-8") as maps:
            return sum("memfd:partjit" in line for line in maps)

    def same(x):
        return x

    before = mapped()
    definition = messages.definition_of(same)
    x = np.arange(1_000_000)
    arguments = messages.pack(*messages.dumps((definition, [], ((x,), {}))))
    y = ask(*arguments, definition=True)
    assert np.array_equal(x, y)
    z = ask(*messages.pack(*messages.dumps(((2 * x,), {}))))
    assert np.array_equal(x, y)  # it is not overwritten
    assert np.array_equal(2 * x, z)
    assert mapped() > before
    worker.end()
    eventually(lambda: worker not in process._all)
    del y, z
    assert mapped() == before
    assert not is_alive(worker.pid)


def test_no_worker_starts_where_messages_are_not_kept_apart(monkeypatch):
    monkeypatch.delattr("socket.SOCK_SEQPACKET")
    worker = process.WorkerProcess(is_disposable=True)
    for _ in range(2):
        with pytest.raises(OSError, match="isolate='process' needs sockets that keep messages apart"):
            worker.ask("call", b"", [])
    worker.end()


def test_a_call_costs_less_than_starting_a_process():
    worker = process.WorkerProcess(is_disposable=True)
    definition = messages.definition_of(lambda: None)
    worker.ask("call", *messages.pack(*messages.dumps((definition, [], ((), {})))), key=1, definition=True)
    packed = messages.pack(*messages.dumps(((), {})))
    start = time.monotonic()
    for _ in range(20):
        worker.ask("call", *packed, key=1)
    assert time.monotonic() - start < 5
    assert os.getpid() != worker.pid
    worker.end()


@pytest.mark.usefixtures("silent_collector")
@pytest.mark.system
def test_interrupts_anywhere_leave_nothing_out_of_step():
    code, out, err = run(
        """
import random, signal, numpy as np

class Alarm(Exception):
    pass

def handle(*_):
    raise Alarm

def interrupted(call, *args):
    try:
        signal.setitimer(signal.ITIMER_REAL, chance.random() * chance.choice([0.0005, 0.005, 0.02]) + 1e-6)
        return call(*args)
    except Alarm:
        return None
    finally:
        while True:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0)
                break
            except Alarm:
                pass

class Log:
    def __init__(self):
        self.seen = []
    def add(self, i, x):
        self.seen.append(int(i))
        return np.int32(i), x + 1
    def all(self, x):
        return np.int32(self.seen)

chance = random.Random(0)
signal.signal(signal.SIGALRM, handle)
options = {"isolate": "process", "mode": "inline"}
double = colocated.colocated_python(lambda i, x: (i, 2 * x), out_specs_fn=lambda i, x: (i, x), **options)
log = colocated.colocated_python_class(Log, **options)()
xs = [jnp.ones(4), jnp.ones(100_000)]
begun, ended = [-1], [-1]
log.add(np.int32(-1), xs[0])
for i in range(150):
    begun.append(i)
    for call, expected in ((double, 2), (log.add, 2)):
        result = interrupted(call, np.int32(i), chance.choice(xs))
        if result is not None:
            number, value = result
            assert int(number) == i and float(value[-1]) == expected, (result, i)
            if call is not double:
                ended.append(i)
seen = log.all(1).tolist()
assert seen == sorted({*seen}) and {*ended} <= {*seen} <= {*begun}, (seen, ended)
assert float(double(np.int32(0), xs[1])[1][-1]) == 2
print(len(ended) < len(begun))
"""
    )
    assert code == 0, err
    assert out.split() == ["True"]
