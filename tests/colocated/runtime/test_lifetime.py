"""The end of the process: nothing that was called is lost, however long it takes and whoever calls."""

import math
import threading
import time

import jax.numpy as jnp
import pytest

from partjit import colocated
from partjit.colocated import colocated_python
from tests.colocated import rendezvous
from tests.colocated.runtime.test_errors import run

pytestmark = pytest.mark.usefixtures("meeting")

one = jnp.float32(1)


@pytest.mark.system
@pytest.mark.parametrize("timeout", ["inf", "1e300"])
def test_an_exit_timeout_without_end_waits_for_all_calls(timeout):
    code, out, err = run(
        """
        def work(x):
            time.sleep(0.1)
            print("ran", flush=True)
        f = colocated.colocated_python(work, out_specs_fn=lambda x: None)
        for _ in range(3):
            f(one)
        print("end", flush=True)
        """,
        PARTJIT_EXIT_TIMEOUT=timeout,
    )
    assert (code, out.split(), err) == (0, ["end", "ran", "ran", "ran"], "")


@pytest.mark.system
def test_a_negative_exit_timeout_does_not_wait():
    code, _, err = run(
        """
        f = colocated.colocated_python(lambda x: threading.Event().wait(), mode="stream", out_specs_fn=lambda x: None)
        f(one)
        """,
        PARTJIT_EXIT_TIMEOUT="-1",
    )
    assert code == 0
    assert "after -1.0 s there still run or wait '<lambda>'" in err


@pytest.mark.parametrize("timeout", [math.inf, 1e300, 10**400, threading.TIMEOUT_MAX * 2, None])
def test_wait_without_end_waits(timeout):
    y = colocated_python(
        lambda x: rendezvous.hear("go") or time.sleep(0.01) or x, stream="endless", out_specs_fn=lambda x: x
    )(one)
    threading.Timer(0.01, rendezvous.say, ["go"]).start()
    for stream in ("endless", None):
        colocated.wait(stream, timeout=timeout)
    assert y.is_ready()


@pytest.mark.parametrize("timeout", [0, -1, -math.inf])
def test_wait_without_time_looks_once(timeout):
    colocated_python(lambda x: rendezvous.hear("go"), stream="endless", out_specs_fn=lambda x: None)(one)
    with pytest.raises(TimeoutError, match="still run or wait"):
        colocated.wait(timeout=timeout)
    rendezvous.say("go")


def test_wait_refuses_what_is_not_a_number_of_seconds():
    with pytest.raises(ValueError, match=r"colocated.wait: timeout .*a number of seconds.*nan"):
        colocated.wait(timeout=math.nan)


LATE = """
    import gc
    def inner(x):
        sys.stdout.write(f"inner {int(x)}\\n")  # at once, for others write as well
        return x + 1
    def outer(x):
        nested = colocated.colocated_python(inner, mode="stream", out_specs_fn=lambda x: x)
        first, second = nested(x), nested(x + 10)
        return second + first
    def late():
        threading.main_thread().join()
        f = colocated.colocated_python(inner, mode="stream", out_specs_fn=lambda x: x)
        g = colocated.colocated_python(outer, stream="other", out_specs_fn=lambda x: x)
        values = [f(one), g(f(one * 2)), f(one * 3)]
        print("late", *map(float, values), flush=True)
        with colocated.stream("scope", size=1):
            for i in range(4, 7):
                f(one * i)
        bad = colocated.colocated_python(lambda x: {}[0], mode="stream", out_specs_fn=lambda x: x)(one)
        try:
            bad.block_until_ready()
        except KeyError:
            print("failed", flush=True)
        @colocated.colocated_python_class
        class Counter:
            def __init__(self):
                self.count = 0
            def add(self, x):
                self.count += int(x)
                return jnp.float32(self.count)
        counter = Counter()
        add = counter.add.specialize(out_specs_fn=lambda x: x, mode="stream")
        print("counted", *[float(add(one)) for _ in range(3)], flush=True)
        f(one * 7)
    threading.Thread(target=late).start()
"""
LATE_OUTPUT = """\
inner 1
inner 2
inner 3
inner 13
inner 3
late 2.0 18.0 4.0
inner 4
inner 5
inner 6
failed
counted 1.0 2.0 3.0
inner 7
"""


@pytest.mark.system
@pytest.mark.parametrize("before", ["", "colocated.colocated_python(lambda x: x, mode='stream')(one)"])
def test_a_thread_makes_its_first_calls_after_the_main_thread_has_returned(before):
    code, out, err = run(before + LATE.replace("\n    ", "\n"))
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == sorted(LATE_OUTPUT.splitlines())
    assert [line for line in out.splitlines() if line.startswith("inner")][-4:] == [f"inner {i}" for i in range(4, 8)]


@pytest.mark.system
@pytest.mark.parametrize("devices", [1, 8])
def test_a_thread_runs_executables_that_make_calls_after_the_main_thread_has_returned(devices):
    """Their calls are made beside the devices, and no thread can be started for them since Python 3.12."""
    code, out, err = run(
        """
        import numpy as np
        from partjit import Mesh, pjit
        def log_on(stream):
            def log(i) -> None:
                sys.stdout.write(f"{stream} {int(i)}\\n")  # at once, for the other one writes as well
            return colocated.colocated_python(log, stream=stream)
        first, second = log_on("first"), log_on("second")
        add = colocated.colocated_python(lambda x: x + np.float32(1), uses_jax=False, out_specs_fn=lambda x: x)
        def loop(wrapper, *calls):
            def turn(carry):
                i, x = carry
                for call in calls:
                    x = call(x) if call is add else call(i) or x
                return i + 1, x
            return wrapper(lambda x: jax.lax.while_loop(lambda carry: carry[0] < 3, turn, (0, x))[1])
        def late():
            threading.main_thread().join()
            with Mesh(np.array(jax.devices()), "x"):
                for calls in [(first,), (first, second), (add, first), (first, add, second)]:
                    result = loop(pjit, *calls)(np.float32(0))
                    colocated.wait()
                    print(float(result), flush=True)
                for _ in range(2):
                    loop(jax.jit, first, second)(np.float32(0))
                    colocated.wait()
                loop(jax.jit, first)(np.float32(0))
        threading.Thread(target=late).start()
        """,
        JAX_NUM_CPU_DEVICES=str(devices),
    )
    assert (code, err) == (0, "")
    numbers = [f" {i}" for i in range(3)]
    lines = out.splitlines()
    assert [line for line in lines if line.endswith(".0")] == ["0.0", "0.0", "3.0", "3.0"]
    for stream, times in (("first", 7), ("second", 4)):
        assert [line for line in lines if line.startswith(stream)] == [stream + number for number in numbers] * times
