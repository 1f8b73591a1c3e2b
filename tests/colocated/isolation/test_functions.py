"""Functions in worker processes: they do what they do on a thread, and a worker's death is the failure of one call."""

import contextlib
import functools
import os
import re
import signal
import sys
import threading
import time
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from jax.sharding import NamedSharding

import partjit
from partjit import P, WorkerDiedError, colocated, pjit
from partjit.colocated import colocated_python
from partjit.colocated.isolation import functions
from tests.census import saw, sees
from tests.effort import EVERYTHING

pytestmark = pytest.mark.usefixtures("meeting")

isolated: Any = functools.partial(colocated_python, isolate="process")
one = jnp.float32(1)
DTYPES = [np.bool_, np.int8, np.uint32, np.float16, np.float32, np.complex64, ml_dtypes.bfloat16]


def test_a_function_of_a_worker_has_what_decorators_of_the_standard_library_make():
    @functools.cache
    def fibonacci(n):
        return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

    class Table:
        @functools.cached_property
        def rows(self):
            return 100

    @functools.singledispatch
    def kind(x):
        return 1000

    @contextlib.contextmanager
    def entered():
        yield

    @isolated(out_specs_fn=lambda x: x)
    @entered()
    def total(x):
        return x + np.float32(fibonacci(10) + table.rows + kind(x))

    table = Table()
    fibonacci(3), kind(1.0)
    assert float(total(one)) == 1156


def pid():
    return isolated(lambda: np.int32(os.getpid()), devices=jax.devices()[0])


@st.composite
def trees(draw):
    """Arguments: arrays of any dtype and shape, some large, in containers."""

    def array(dtype, shape, seed):
        rng = np.random.default_rng(seed)
        return rng.integers(0, 2 if dtype == np.bool_ else 100, shape).astype(dtype)

    shapes = st.one_of(npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5), st.just((200, 300)))
    leaves = st.builds(array, st.sampled_from(DTYPES), shapes, st.integers(0, 99))
    inner = st.recursive(
        leaves | st.none(),
        lambda x: st.lists(x, max_size=3) | st.tuples(x, x) | st.dictionaries(st.text(), x),
        max_leaves=6,
    )
    return draw(inner)


@sees("a value of several dimensions", "several elements", "a large array", "mode inline", "mode stream")
@settings(max_examples=200 if EVERYTHING else 15, deadline=None)
@given(trees(), st.sampled_from(["inline", "stream"]))
def test_the_values_are_those_of_a_thread(tree, mode):
    def seen(tree):
        def look(node):
            if isinstance(node, np.ndarray):
                assert type(node) is np.ndarray
                assert not node.flags.writeable
            for inner in node.values() if isinstance(node, dict) else node if isinstance(node, list | tuple) else ():
                look(inner)

        look(tree)
        return {"tree": tree, "again": [tree, tree]}

    def described(result):
        return jax.tree.map(lambda x: (x.aval.str_short(), x.sharding, x.committed, np.asarray(x).tobytes()), result)

    saw(f"mode {mode}")
    saw("a large array", when=any(leaf.nbytes > 50_000 for leaf in jax.tree.leaves(tree)))
    thread: Any = colocated_python(seen, arrays="numpy", mode=mode)
    process = isolated(seen, mode=mode)
    tree = [tree, one]
    expected = described(thread(tree))
    assert described(process(tree)) == described(process(tree)) == expected


def test_a_worker_has_neither_jax_nor_partjit(monkeypatch):
    monkeypatch.setattr(functions, "_idle", [])  # those of other functions have what these import

    def modules():
        return {name: name in sys.modules for name in ("jax", "jaxlib", "partjit", "numpy")}

    with colocated.stream():  # which has no worker yet
        found = isolated(modules, devices=jax.devices()[0])()
    assert {name: bool(there) for name, there in found.items()} == {
        "jax": False,
        "jaxlib": False,
        "partjit": False,
        "numpy": True,
    }


def test_it_may_import_jax_and_return_its_arrays_which_are_on_cpu_devices():
    def compute(x):
        import jax.numpy as jnp

        return jnp.sin(jnp.asarray(x)) + 0 * len(jnp.zeros(1).devices())

    assert np.allclose(isolated(compute)(jnp.ones(3)), np.sin(1))


def test_it_may_use_partjit_and_workers_of_its_own():
    inner = isolated(lambda x: (x * 2, np.int32(os.getpid())), mode="inline")
    outer = isolated(lambda x: (*inner(x), np.int32(os.getpid())), mode="inline")
    doubled, *workers = outer(one)
    assert float(doubled) == 2
    assert len({os.getpid(), *map(int, workers)}) == 3


def test_what_it_captures_is_copied_once_for_each_kind_of_arguments():
    array = jnp.arange(3.0)
    table, seen = np.zeros(3), []

    def count(x):
        seen.append(x)
        table[0] += 1  # it owns what it captures
        assert type(array) is np.ndarray
        return np.float32(len(seen) + table[0] + array.sum())

    f = isolated(count)
    assert [float(f(one)) for _ in range(3)] == [5.0, 7.0, 9.0]
    assert float(f(jnp.ones(2))) == 5.0
    assert seen == []
    assert table[0] == 0
    f._cache.clear()
    assert float(f(one)) == 5.0


def test_the_calls_of_a_stream_run_in_order_in_one_process_and_those_of_others_at_the_same_time():
    f = pid().specialize(out_specs=jax.ShapeDtypeStruct((), np.int32))
    own = {int(f()) for _ in range(3)}
    with colocated.stream("left"):
        left = {int(x) for x in [f() for _ in range(5)]}
        with colocated.stream("right"):
            right = {int(f())}
    assert [len(own), len(left), len(right)] == [1, 1, 1]
    assert len(own | left | right) == 3
    assert os.getpid() not in own | left | right

    def meet(x):
        time.sleep(0.3)
        return x

    slow = isolated(meet, out_specs_fn=lambda x: x)
    for _ in range(2):  # the workers start the first time
        start = time.monotonic()
        with colocated.stream(), colocated.stream() as inner:
            slow(one)
            slow.specialize(stream=inner)(one)
            colocated.wait()
    assert time.monotonic() - start < 5


def test_threads_call_at_the_same_time_each_in_its_worker():
    f = isolated(lambda x: (x + 1, np.int32(os.getpid())), mode="inline")
    found, together = {}, threading.Barrier(4)  # the worker of a thread that has ended is another one's

    def call(i):
        together.wait(60)
        f(np.float32(i))
        together.wait(60)
        found[i] = [f(np.float32(i)) for _ in range(20)]

    threads = [threading.Thread(target=call, args=[i]) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [{float(x) for x, _ in found[i]} for i in range(4)] == [{1.0}, {2.0}, {3.0}, {4.0}]
    assert [len({int(worker) for _, worker in found[i]}) for i in range(4)] == [1] * 4
    assert len({int(worker) for results in found.values() for _, worker in results}) == 4


def test_a_new_stream_finds_nothing_that_an_earlier_one_left():
    seen = []

    def count():
        seen.append(0)
        return np.int32([len(seen), os.getpid()])

    f = isolated(count, devices=jax.devices()[0])
    for g in (f, f.specialize(out_specs=jax.ShapeDtypeStruct((2,), np.int32), mode="stream")):
        found = []
        for _ in range(3):
            with colocated.stream():
                found.append([g().tolist(), g().tolist()])
        assert [[count for count, _ in calls] for calls in found] == [[1, 2]] * 3
        assert len({worker for calls in found for _, worker in calls}) == 1  # it is used again


def test_in_programs_loops_and_transformations(mesh):
    f = isolated(lambda x: x + 1, out_specs_fn=lambda x: x)
    x = jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(mesh, P("x")))
    with mesh:
        assert partjit.pjit(lambda x: f(x) * 2)(x).tolist() == [2 * (i + 1) for i in range(8)]
        looped = partjit.pjit(lambda x: jax.lax.scan(lambda c, _: (f(c), c), x, length=4)[0])
        assert looped(x).tolist() == [i + 4 for i in range(8)]
        branch = partjit.pjit(lambda p, x: jax.lax.cond(p, f, lambda x: x, x))
        assert branch(True, x).tolist() == [i + 1 for i in range(8)]
        donated = partjit.pjit(lambda x: (f(x), x * 0), donate_argnums=0)
        assert donated(jnp.copy(x))[0].tolist() == [i + 1 for i in range(8)]
    assert jax.vmap(f)(x).tolist() == [i + 1 for i in range(8)]
    f.defjvp(lambda primals, tangents: (f(*primals), 3 * tangents[0]))
    assert float(jax.grad(f)(one)) == 3
    assert "isolate=process" in str(jax.make_jaxpr(f)(one))


def test_a_loop_whose_calls_return_nothing_makes_each_call_once(tmp_path):
    path = str(tmp_path / "log")

    def log(i):
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{int(i)}\n")

    f = isolated(log, out_specs_fn=lambda i: None)
    program = partjit.pjit(lambda n: jax.lax.fori_loop(0, n, lambda i, c: (f(i), c + 1)[1], 0))
    assert int(program(20)) == 20
    colocated.wait()
    with open(path, encoding="utf-8") as file:
        assert [*map(int, file)] == [*range(20)]


def test_a_call_made_in_another_function_and_a_pickled_function_use_the_worker_of_the_stream():
    f = pid().specialize(out_specs=jax.ShapeDtypeStruct((), np.int32))
    outer: Any = colocated_python(lambda x: f() + 0 * x, mode="stream", out_specs_fn=lambda x: f.options.out_specs)
    again = cloudpickle.loads(cloudpickle.dumps(f))
    assert {int(f()), int(again()), int(outer(jnp.int32(1)))} == {int(f())}
    with partjit.record() as timeline:
        f()
    assert "1 call" in str(timeline)


def test_more_arrays_than_pieces_of_a_message():
    f = isolated(lambda *xs: np.float32([x.sum() for x in xs]))
    assert f(*[np.ones(4200, np.float32)] * 1100).tolist() == [4200] * 1100


def test_per_shard_it_gets_shards_with_numpy_arrays(mesh):
    x = jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(mesh, P("x")))

    def work(shard):
        assert type(shard.data) is np.ndarray
        assert not shard.data.flags.writeable
        assert shard.device.platform == "cpu"
        return shard.data + shard.index[0].start + 0 * shard.device.id

    f = isolated(work, layout="per_shard", out_specs_fn=lambda x: x)
    assert f(x).tolist() == [0, 1, 4, 5, 8, 9, 12, 13]
    assert f(x).sharding == x.sharding
    with mesh:
        assert partjit.pjit(f)(x).tolist() == f(x).tolist()


def test_in_a_shard_map_it_gets_numpy_arrays(mesh):
    f = isolated(lambda x: x + len(x), out_specs_fn=lambda x: x)
    mapped = jax.shard_map(f, mesh=mesh, in_specs=P(("x", "y")), out_specs=P(("x", "y")))
    with mesh:
        assert partjit.pjit(mapped)(jnp.zeros(16)).tolist() == [2.0] * 16


def test_large_arguments_that_it_keeps_stay_as_they_were_and_so_do_results():
    kept = []

    def keep(x):
        kept.append(x)
        return x * 2, np.float32([k[0] for k in kept[-5:]] + [-1] * (5 - len(kept)))

    f = isolated(keep)
    results = [f(jnp.full(100_000, i, jnp.float32)) for i in range(5)]
    assert results[-1][1].tolist() == [0, 1, 2, 3, 4]
    assert [float(doubled[-1]) for doubled, _ in results] == [0, 2, 4, 6, 8]


def test_other_arguments_are_pickled():
    class Config:
        def __init__(self):
            self.scale = np.full(3, 2.0, np.float32)

    def scaled(x, config, name):
        config.scale[0] = 1  # its own copy
        return x * config.scale[: len(name)]

    config = Config()
    assert isolated(scaled)(jnp.ones(3), config, "abc").tolist() == [1, 2, 2]
    assert config.scale.tolist() == [2, 2, 2]


@pytest.mark.parametrize("mode", ["inline", "stream"])
def test_an_argument_that_cannot_be_pickled_is_named(mode):
    f = isolated(lambda x, config: x, mode=mode)
    text = "config['lock'] of <lambda>, of type lock, cannot be pickled for its worker process: cannot pickle"
    with pytest.raises(TypeError, match=re.escape(text)):
        jax.block_until_ready(f(one, config={"name": "a", "lock": threading.Lock()}))
    assert float(f(one, {})) == 1


class ReadOnlyWhere:
    """What can be pickled, and read where a file exists."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return eval, ("open(path) and 1", {"path": self.path})


@pytest.mark.parametrize("is_captured", [False, True], ids=["argument", "captured"])
def test_what_a_worker_fails_to_read_fails_that_call_alone(is_captured, tmp_path):
    odd = ReadOnlyWhere(str(tmp_path / "file"))
    f = isolated(lambda x, y: x + 1 if odd else x) if is_captured else isolated(lambda x, y: x + 1)
    y = None if is_captured else odd
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            jax.block_until_ready(f(one, y))
    (tmp_path / "file").touch()
    assert float(f(one, y)) == 2


def test_what_cannot_be_copied_or_returned_is_named():
    lock = threading.Lock()
    with pytest.raises(TypeError, match="cannot pickle") as caught:
        isolated(lambda x: lock and x)(one)
    assert "this cannot be copied: lock (a lock)" in "".join(caught.value.__notes__)
    with pytest.raises(TypeError, match="cannot pickle") as caught:
        isolated(lambda x: threading.Lock())(one)
    assert "the result, of type lock, cannot be pickled" in caught.value.__notes__
    with pytest.raises(ValueError, match="<class 'str'> at result of <lambda>"):
        isolated(lambda x: "text")(one)


@pytest.mark.parametrize("mode", ["inline", "stream"])
def test_an_exception_is_itself_with_the_traceback_in_the_worker(mode):
    class OwnError(Exception):
        def __init__(self, code):
            super().__init__(f"code {code}")
            self.code = code

        def __reduce__(self):
            return OwnError, (self.code,)

    def fail(x):
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise OwnError(7) from error

    f = isolated(fail, out_specs_fn=lambda x: x, mode=mode)
    with pytest.raises(OwnError, match="code 7") as caught:
        jax.block_until_ready(f(one))
    assert caught.value.code == 7
    note = next(note for note in caught.value.__notes__ if note.startswith("In its worker process:"))
    assert "KeyError: 'inner'" in note
    assert f'File "{__file__}"' in note
    assert "worker.py" not in note


class WordedError(Exception):
    def __init__(self, first, second="that"):
        super().__init__(f"{first} and {second}")
        self.first = first


class KeywordError(KeyError):
    def __init__(self, *, key):
        self.key = key


class NoFileError(FileNotFoundError):
    def __init__(self, path):
        super().__init__(2, "there is none", path)


class SlottedError(Exception):
    __slots__ = ("code",)

    def __init__(self, code):
        super().__init__(code)
        self.code = code


@pytest.mark.parametrize(
    "error",
    [
        WordedError("this"),
        WordedError("this", "those"),
        KeywordError(key=1),
        NoFileError("here"),
        SlottedError(2),
        UnicodeDecodeError("utf8", b"\xff", 0, 1, "why"),
        ExceptionGroup("several", [WordedError("this", "those"), ValueError(1)]),
    ],
    ids=repr,
)
def test_an_exception_is_not_made_again_by_its_init(error):
    def fail(x):
        raise error

    with pytest.raises(type(error)) as caught:
        isolated(fail, mode="inline")(one)
    assert str(caught.value) == str(error)
    assert repr(caught.value) == repr(error)
    assert {**vars(caught.value), "__notes__": 0} == {**vars(error), "__notes__": 0}
    assert getattr(caught.value, "code", None) == getattr(error, "code", None)


def test_an_exception_that_cannot_be_pickled_is_described():
    def fail(x):
        class Odd(Exception):
            def __init__(self, first, second):
                super().__init__(f"{first} and {second}")
                self.lock = threading.Lock()

        raise Odd("this", "that")

    with pytest.raises(RuntimeError, match=r"cannot be pickled: .*Odd: this and that"):
        isolated(fail, mode="inline")(one)

    def stop(x):
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        isolated(stop, mode="inline")(one)


@pytest.mark.parametrize(
    ("mode", "end", "text"),
    [
        ("inline", lambda: os._exit(3), "exited with code 3"),
        ("stream", lambda: os.kill(os.getpid(), signal.SIGKILL), r"was killed by signal 9 \(Killed\)"),
    ],
)
def test_the_death_of_a_worker_is_the_failure_of_its_call(mode, end, text):
    def work(x):
        if x < 0:
            end()
        return x

    f = isolated(work, out_specs_fn=lambda x: x, mode=mode)
    for _ in range(2):
        assert float(f(one)) == 1
        with pytest.raises(
            WorkerDiedError, match=rf"the worker process of .*work \(pid \d+\) {text} in the call"
        ) as died:
            jax.block_until_ready(f(-one))
        assert f"made at {__file__}:" in str(died.value)
    assert float(f(one)) == 1
    with pytest.raises(WorkerDiedError) as died:
        jax.block_until_ready(pjit(lambda x: f(x) + 1)(-one))
    assert f"made at {__file__}:" in str(died.value)


@pytest.mark.soak
def test_every_killed_worker_is_one_error():
    def die(x):
        os.kill(os.getpid(), signal.SIGKILL)

    f = isolated(die, out_specs_fn=lambda x: x)
    results = [f(one) for _ in range(100 if EVERYTHING else 4)]
    for result in results:
        with pytest.raises(WorkerDiedError):
            jax.block_until_ready(result)


def test_a_worker_that_dies_between_calls_is_replaced():
    f = pid()
    first = int(f())
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    assert int(f()) != first


def test_a_worker_whose_own_child_keeps_the_connection_open_is_found_dead():
    def fork_and_die(x):
        if os.fork() == 0:
            time.sleep(2)
            os._exit(0)
        os._exit(5)

    with pytest.raises(WorkerDiedError, match="exited with code 5"):
        isolated(fork_and_die, mode="inline")(one)


def test_ctrl_c_ends_the_function_that_its_caller_waits_for(ctrl_c):
    f = isolated(lambda x: time.sleep(60) or x, mode="inline")
    g = pid()
    before = int(g())
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        f(one)
    assert int(g()) != before


def test_a_signal_handler_may_not_call_in_the_middle_of_a_call():
    f = isolated(lambda x: time.sleep(0.6) or x, mode="inline")
    g = pid()
    errors = []

    def handle(*_):
        try:
            g.specialize(mode="inline")()
        except RuntimeError as error:
            errors.append(str(error))

    g()
    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        assert float(f(one)) == 1
    finally:
        signal.signal(signal.SIGALRM, before)
    assert errors == ["a signal handler or finalizer calls, in the middle of another call of the same worker"]


def test_options_that_exclude_it():
    with pytest.raises(ValueError, match="colocated_python: isolate must be 'process' or None, but is 'thread'"):
        isolated(lambda x: x, isolate="thread")
    with pytest.raises(ValueError, match="isolate='process' and arrays='jax' exclude each other"):
        isolated(lambda x: x, arrays="jax")
    with pytest.raises(TypeError, match="unexpected keyword argument 'isolate'"):
        colocated_python(lambda x: x).specialize(isolate="process")
