"""Processes that are launched together write with their numbers in front, and end together, whatever happens."""

import os
import pathlib
import pty
import signal
import subprocess
import sys
import time

import pytest

from partjit.command import main

pytestmark = pytest.mark.system

SECONDS = 60
LAUNCH = (sys.executable, "-m", "partjit.launch")
PREFACE = """
import os, signal, subprocess, sys, time
number = int(os.environ["OMPI_COMM_WORLD_RANK"])
"""
# Its own process group is told to it by the system; a test looks into it afterwards.
SLEEP_AND_BE_FOUND = """
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def script(tmp_path):
    """Writes a script."""

    def write(text):
        path = tmp_path / "script.py"
        path.write_text(PREFACE + text)
        return str(path)

    return write


@pytest.fixture(autouse=True)
def interruptible():
    """A suite that was started in the background ignores Ctrl-C, and so would what it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def start():
    """Starts a launcher; one that is still there when the test has failed is killed, with what it has started."""
    started = []

    def start_launcher(*args):
        launcher = subprocess.Popen([*LAUNCH, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(launcher)
        return launcher

    yield start_launcher
    for launcher in started:
        launcher.kill()
        for pipe in (launcher.stdout, launcher.stderr):
            if pipe is not None:
                pipe.close()
        launcher.wait()


def run(*args, **options):
    return subprocess.run([*LAUNCH, *args], capture_output=True, text=True, timeout=SECONDS, check=False, **options)


def processes_of(launcher, count):
    """The processes that say so in their first lines, and their children."""
    lines = [launcher.stdout.readline() for _ in range(count)]
    return [int(word) for line in lines for word in line.split()[1:]]


def is_running(process):
    try:
        state = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"  # nobody waits for the children of the killed


def assert_gone(processes):
    deadline = time.monotonic() + SECONDS
    while any(map(is_running, processes)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_lines_come_with_the_number_of_their_process_and_none_is_lost(script):
    text = script(
        """
for i in range(200):
    print("out", number, i)
    print("err", number, i, file=sys.stderr)
sys.stdout.write("bar 50%\\rbar 100%\\r\\n")
sys.stdout.write("the last one does not end")
"""
    )
    result = run("-n", "3", text)
    assert result.returncode == 0
    for stream, kind in ((result.stdout, "out"), (result.stderr, "err")):
        for number in range(3):
            mine = [line for line in stream.splitlines() if line.startswith(f"[{number}] ")]
            assert mine[:200] == [f"[{number}] {kind} {number} {i}" for i in range(200)]
            last = [f"[{number}] bar 50%", f"[{number}] bar 100%", f"[{number}] the last one does not end"]
            assert mine[200:] == (last if kind == "out" else [])
        assert stream.count("\n") == 3 * (203 if kind == "out" else 200)


def test_numbers_are_colored_on_a_terminal_unless_that_is_not_wanted(script):
    text = script("print('hello')")
    for wanted, expected in (({}, b"\x1b[33m[1]\x1b[0m hello\r\n"), ({"NO_COLOR": "1"}, b"[1] hello\r\n")):
        leader, follower = pty.openpty()
        env = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm"} | wanted
        subprocess.run([*LAUNCH, "-n", "2", text], stdout=follower, env=env, timeout=SECONDS, check=True)
        os.close(follower)
        assert expected in os.read(leader, 1 << 16)
        os.close(leader)


def test_arguments_after_the_script_are_its_own(script):
    result = run(
        "-n", "1", "--env", "COLOR=a=b", script("print(sys.argv[1:], os.environ['COLOR'])"), "-n", "5", "--", "-m"
    )
    assert result.stdout == "[0] ['-n', '5', '--', '-m'] a=b\n"
    result = run("-n", "1", "--", script("print(sys.argv[1:])"), "--help")
    assert result.stdout == "[0] ['--help']\n"


def test_a_module_is_found_as_python_finds_it(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text("import sys; print(__name__, __spec__.name, sys.argv[1:])")
    result = run("-n", "1", "-m", "package.train", "--steps", "3", cwd=tmp_path)
    assert result.stdout == "[0] __main__ package.train ['--steps', '3']\n"


def test_the_first_that_fails_ends_the_others_and_gives_the_exit_code(script):
    text = script(
        """
if number == 1:
    sys.exit(3)
signal.signal(signal.SIGTERM, lambda *_: (print("ended", flush=True), sys.exit(5)))
time.sleep(600)
"""
    )
    result = run("-n", "3", "--grace", "30", text)
    assert result.returncode == 3
    assert result.stderr == "partjit launch: process 1 ended with exit code 3; ending processes 0, 2\n"


def test_a_process_that_does_not_end_is_killed_after_the_grace(script):
    text = script(
        """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), flush=True)
if number == 0:
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""
    )
    result = run("-n", "2", "--grace", "0.3", text)
    assert result.returncode == 128 + signal.SIGKILL
    assert result.stderr == (
        "partjit launch: process 0 was ended by SIGKILL; ending process 1\n"
        "partjit launch: process 1 did not end within 0.3 s and will be killed\n"
    )
    assert_gone([int(line.split()[1]) for line in result.stdout.splitlines()])


def test_children_that_processes_leave_behind_are_ended(script):
    result = run("-n", "2", script(SLEEP_AND_BE_FOUND.rpartition("time.sleep")[0]))
    assert result.returncode == 0
    found = [int(word) for line in result.stdout.splitlines() for word in line.split()[1:]]
    assert len(found) == 4
    assert_gone(found)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_on(script, start, number):
    launcher = start("-n", "2", "--grace", "30", script(SLEEP_AND_BE_FOUND))
    found = processes_of(launcher, 2)
    launcher.send_signal(number)
    _, errors = launcher.communicate(timeout=SECONDS)
    assert launcher.returncode == 128 + number
    assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)
    assert_gone(found)


def test_the_second_interrupt_kills(script, start):
    ignored = "signal.signal(signal.SIGINT, lambda *_: print('no', flush=True))\n"
    launcher = start(
        "-n", "1", "--grace", "600", script(ignored + "print(os.getpid(), flush=True)\nwhile True: time.sleep(1)")
    )
    found = processes_of(launcher, 1)
    launcher.send_signal(signal.SIGINT)
    assert launcher.stdout.readline() == "[0] no\n"
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=SECONDS)
    assert launcher.returncode == 128 + signal.SIGKILL
    assert_gone(found)


@pytest.mark.parametrize("stubborn", [False, True])
def test_nothing_outlives_a_launcher_that_is_killed(script, start, stubborn):
    ignores = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if stubborn else ""
    launcher = start("-n", "2", "--grace", "0.3", script(ignores + SLEEP_AND_BE_FOUND))
    found = processes_of(launcher, 2)
    assert len(found) == 4
    assert all(map(is_running, found))
    launcher.kill()
    launcher.communicate(timeout=SECONDS)
    assert_gone(found)


def test_all_end_when_nobody_reads_what_they_write(script, start):
    launcher = start("-n", "2", script("while True: print('y' * 1000)"))
    launcher.stdout.close()
    launcher.stdout = None
    launcher.communicate(timeout=SECONDS)
    assert launcher.returncode == 128 + signal.SIGPIPE


def test_each_process_knows_its_devices_whatever_the_launcher_was_told(script):
    text = script(
        "print(*(os.environ[name] for name in ('JAX_LOCAL_DEVICE_IDS', 'JAX_NUM_CPU_DEVICES', 'NPROC', 'XLA_FLAGS')))"
    )
    env = {name: value for name, value in os.environ.items() if name != "NPROC"}
    env["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_dump_to=x"
    result = run("-n", "2", "--devices-per-process", "16", text, env=env)
    ids = ",".join(map(str, range(16, 32)))
    assert f"[1] {ids} 16 64  --xla_dump_to=x\n" in result.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-n", "0", "script.py"], "expected a whole number, 1 or more\n  -n 0\n     ^\n"),
        (["-n", "two", "script.py"], "expected a whole number, 1 or more\n  -n two\n     ^^^\n"),
        (
            ["-n", "2", "--devices-per-process", "-1", "script.py"],
            "expected a whole number, 1 or more\n  --devices-per-process -1\n                        ^^\n",
        ),
        (["-n", "2", "--grace", "soon", "script.py"], "expected a number of seconds, 0 or more\n  --grace soon\n"),
        (["-n", "2", "--env", "=3", "script.py"], "a variable is written as NAME=VALUE\n  --env =3\n        ^^\n"),
        (["-n", "2"], "there is no script; name one after the options: partjit launch -n 2 train.py\n"),
        (["-n", "2", "--"], "there is no script; name one after the options: partjit launch -n 2 train.py\n"),
        (["-n", "2", "missing.py"], "there is no file 'missing.py'; -m is for the name of a module\n"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_launched_is_an_error(args, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("")
    assert main(["launch", *args]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"partjit launch: error: {message}")


def test_the_processes_are_one_group_of_jax(script):
    text = script(
        """
import jax
jax.distributed.initialize()
from jax.experimental import multihost_utils
import numpy as np
sums = multihost_utils.process_allgather(np.float32([number + 1]))
found = jax.process_index() == number, jax.process_count(), jax.local_device_count(), jax.device_count(), sums.sum()
print(" ".join(map(str, found)), flush=True)  # in one piece: another thread writes as well
os._exit(0)  # a device may still connect to those of the other process, for which XLA waits at exit
"""
    )
    allocation = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "n", "SLURM_NTASKS": "8", "SLURM_PROCID": "5"}
    env = os.environ | allocation | {"SLURM_LOCALID": "5", "JAX_PLATFORMS": "cpu"}
    result = run("-n", "2", "--devices-per-process", "2", text, env=env)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("True 2 2 4 3.0") == 2, result.stdout
