"""The demo runs from start to end, goes on after a kill, and tells in one line what is wrong with an option."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

DEMO = Path(__file__).parents[2] / "examples" / "train_char_lm.py"
TEXT = "the quick brown fox jumps over the lazy dog; " * 40
STEPS = 12
LIMIT = 300


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "fox.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text):
    """A run that nothing interrupted: its folder, and the process that was it."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, run(*options_of(text, folder), cwd=text.parent)


def options_of(text, folder):
    return "--steps", STEPS, "--save-every", 5, "--text", text, "--out", folder


def run(*options, cwd):
    process = start(*options, cwd=cwd)
    stdout, stderr = process.communicate(timeout=LIMIT)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def environment():
    # The demo chooses its own number of virtual devices, whatever this environment says.
    env = {name: value for name, value in os.environ.items() if name not in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS")}
    # The plain output, eighty columns wide, also where the caller's environment asks for colours or another width.
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
        env.pop(name, None)
    return env | {"COLUMNS": "80", "PYTHONIOENCODING": "utf-8", "JAX_PLATFORMS": "cpu"}


def start(*options, cwd):
    command = [sys.executable, "-W", "error", str(DEMO), *map(str, options)]
    return subprocess.Popen(
        command, cwd=cwd, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8"
    )


def metrics_in(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def checkpoints_in(folder):
    """The arrays of each checkpoint, by the step in its name."""
    paths = sorted(folder.glob("checkpoint-*.npz"))
    return {int(path.stem[-8:]): dict(np.load(path)) for path in paths}


def test_prints_every_part(finished):
    folder, result = finished
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    shown = result.stdout

    assert "data=4, model=2 of 8 devices" in shown
    assert re.search(r"1,620 characters to train on, 180 held back", shown)
    assert f"out   {folder}\n" in shown

    # A matrix that is split over 'model' has half of its bytes on a device, and a replicated one all of them.
    assert re.search(r"blocks\.0\.up +│ \(128, 512\) +│ P\(None, 'model'\) +│ +131,072 of 262,144 │", shown)
    assert re.search(r"embed +│ \(256, 128\) +│ P\(.*\) +│ +131,072 of 131,072 │", shown)
    assert re.search(r"Each device holds 1,376,256 of 2,621,440 bytes", shown)

    (plan,) = re.findall(r"^def train_step\(.*\n(?:    .*\n)+", shown, re.MULTILINE)
    assert re.findall(r"(\w+)\(.*\)  # .*stream (\w+)$", plan, re.MULTILINE) == [
        ("next_batch", "load"),
        ("log_metrics", "log"),
        ("save_if_due", "checkpoint"),
        ("sample_if_due", "sample"),
    ]

    assert re.search(r"^step +10/12  loss \d\.\d{3} +[\d,]+ tokens/s$", shown, re.MULTILINE)
    assert re.search(r"^step +12/12  loss \d\.\d{3} +[\d,]+ tokens/s$", shown, re.MULTILINE)

    assert re.search(r"^call Batches\.next_batch: 14 calls, ", shown, re.MULTILINE)  # two of them ahead
    assert re.search(r"^call Records\.log_metrics: 12 calls, ", shown, re.MULTILINE)
    hidden = re.search(r"^\d+\.\d\d m?s of host time, (\d+)% hidden$", shown, re.MULTILINE)
    assert hidden
    assert 50 < int(hidden[1]) <= 100

    model, unigram = (float(re.search(rf"{name} model +(\d+\.\d+)", shown)[1]) for name in ("this", "unigram"))
    assert 0 < model < 6
    assert 2 < unigram < 3.5

    _, sample = re.split(r"^─+ Sample: .* ─+$", shown, flags=re.MULTILINE)
    assert len(sample) > 64 + 40


def test_writes_metrics_checkpoints_and_samples(finished):
    folder, _ = finished
    metrics = metrics_in(folder)
    assert [line["step"] for line in metrics] == [*range(1, STEPS + 1)]
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert metrics[0]["rate"] == pytest.approx(6e-3 / 40)

    # Every fifth step and the last one, of which the newest two are kept.
    names = {"metrics.jsonl", *(f"checkpoint-{step:08}.npz" for step in (10, STEPS))}
    assert {path.name for path in folder.iterdir()} == names | {f"sample-{step:08}.txt" for step in (6, STEPS)}
    for arrays in checkpoints_in(folder).values():
        assert arrays["params.blocks.0.up"].shape == arrays["mean.blocks.0.up"].shape == (128, 512)
        assert all(np.isfinite(array).all() for array in arrays.values())


def test_goes_on_after_a_kill_as_if_nothing_had_happened(finished, text, tmp_path):
    whole, _ = finished
    options = options_of(text, tmp_path)
    process = start(*options, cwd=tmp_path)
    deadline = time.monotonic() + LIMIT
    while not (tmp_path / "checkpoint-00000005.npz").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.communicate()

    done = len(metrics_in(tmp_path))
    assert metrics_in(tmp_path) == metrics_in(whole)[:done]
    saved = checkpoints_in(tmp_path)
    assert 5 in saved
    assert max(saved) <= done

    result = run(*options, "--resume", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert f"out   {tmp_path}, from step {max(saved)} on\n" in result.stdout
    assert metrics_in(tmp_path) == metrics_in(whole)
    last, expected = checkpoints_in(tmp_path)[STEPS], checkpoints_in(whole)[STEPS]
    assert last.keys() == expected.keys()
    assert all(np.array_equal(last[name], expected[name]) for name in last)
    assert [path.name for path in tmp_path.glob("*.partial")] == []


def test_other_mesh_and_one_step(text, tmp_path):
    folder = tmp_path / "train_char_lm"  # the default
    folder.mkdir()
    for name in ("checkpoint-00000900.npz", "sample-00000900.txt", "metrics.jsonl", "notes.txt"):
        (folder / name).write_text("of an earlier run\n")
    result = run("--steps", 1, "--text", text.parent, "--mesh", "model=1,data=2", "--seed", 7, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "data=2, model=1 of 2 devices" in result.stdout
    assert re.search(r"step +1/1  loss", result.stdout)
    assert "Each device holds 2,621,440 of 2,621,440 bytes" in result.stdout

    assert [line["step"] for line in metrics_in(folder)] == [1]
    names = {"checkpoint-00000001.npz", "sample-00000001.txt", "metrics.jsonl", "notes.txt"}
    assert {path.name for path in folder.iterdir()} == names


BAD_OPTIONS = [
    (["--mesh", "4x2"], "--mesh: expected a size for each of two axes, like data=4,model=2, got '4x2'"),
    (["--mesh", "data=4,heads=2"], "--mesh: expected a size for each of two axes, like data=4,model=2"),
    (["--mesh", "data=0,model=2"], "--mesh: expected a size for each of two axes, like data=4,model=2"),
    (["--mesh", "data=8,model=2"], "--mesh: 8 x 2 devices are more than the 8 there are; use smaller sizes"),
    (["--mesh", "data=3,model=2"], "--mesh: data=3 does not divide the 32 rows of a batch; use a power of two"),
    (["--mesh", "data=1,model=8"], "--mesh: model=8 does not divide the 4 attention heads; use a power of two"),
    (["--steps", "0"], "--steps: expected a whole number, 1 or more, got '0'"),
    (["--steps", "many"], "--steps: expected a whole number, 1 or more, got 'many'"),
    (["--steps"], "--steps: expected one argument"),
    (
        ["--text", "no-such-file"],
        "--text: cannot read 'no-such-file' (No such file or directory); give a text file",
    ),
    (["--save-every", "0"], "--save-every: expected a whole number, 1 or more, got '0'"),
    (["--resume"], "--resume: there is no checkpoint in 'train_char_lm'; start without it"),
    (["--out", str(DEMO)], f"--out: cannot write to {str(DEMO)!r} (File exists); give another folder"),
    (["--epochs", "3"], "unrecognized arguments: --epochs 3"),
]

# The imports take most of the time of a process that ends at once, so one does them for all.
FORKED = """
import os, runpy, sys, warnings
warnings.simplefilter("ignore")
os.environ |= {"NPROC": "32", "JAX_NUM_CPU_DEVICES": "8"}  # as the demo does
import rich.console, rich.progress, rich.table, partjit.colocated
demo, *folders = sys.argv[1:]
for folder in folders:
    if (pid := os.fork()):
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status))
        continue
    warnings.simplefilter("error")
    with open(folder + ".options") as options:
        sys.argv = [demo, *options.read().splitlines()]
    os.chdir(folder)
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(f"{folder}.{name}", os.O_WRONLY | os.O_CREAT), number)
    try:
        runpy.run_path(demo, run_name="__main__")
    except SystemExit as end:
        code = end.code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
"""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """What the demo says to each of the bad options: its exit code, output and errors, and the folder it ran in."""
    base = tmp_path_factory.mktemp("refusals")
    folders = [base / str(i) for i in range(len(BAD_OPTIONS))]
    for folder, (options, _) in zip(folders, BAD_OPTIONS, strict=True):
        folder.mkdir()
        folder.with_suffix(".options").write_text("\n".join(options))
    command = [sys.executable, "-c", FORKED, str(DEMO), *map(str, folders)]
    codes = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT, check=True).stdout
    return [
        (int(code), folder.with_suffix(".out").read_text(), folder.with_suffix(".err").read_text(), folder)
        for code, folder in zip(codes.splitlines(), folders, strict=True)
    ]


@pytest.mark.parametrize("number", range(len(BAD_OPTIONS)), ids=[" ".join(options) for options, _ in BAD_OPTIONS])
def test_bad_option_is_one_line(number, refusals):
    code, stdout, stderr, folder = refusals[number]
    assert code == 2
    assert stdout == ""
    (line,) = stderr.splitlines()
    assert line.startswith("train_char_lm.py: error: ")
    assert BAD_OPTIONS[number][1] in line
    assert [*folder.iterdir()] == []


@pytest.mark.parametrize("size", [0, 649])
def test_short_text_is_one_line(tmp_path, size):
    path = tmp_path / "short.txt"
    path.write_text("x" * size)
    result = run("--text", path, cwd=tmp_path)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert f"{size} characters in {str(path)!r} are too few; give a file or a folder with 650 or more" in line


def test_missing_rich_is_one_line(tmp_path):
    (tmp_path / "rich.py").write_text("raise ModuleNotFoundError('No module named rich', name='rich')\n")
    # What lies in PYTHONPATH is found before what is installed.
    command = [sys.executable, str(DEMO)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    result = subprocess.run(command, env=env, capture_output=True, encoding="utf-8", timeout=300, check=False)
    assert result.returncode == 1
    assert result.stderr == 'train_char_lm.py: error: rich is missing; run: pip install "partjit[viz]"\n'


PRINT_PICTURE = """
from pathlib import Path
import numpy as np
import train_char_lm as demo

objects = demo.Batches(None, 1, 0), demo.Records(Path(), 10, 20), demo.Sampler(Path(), None, 1, 20)
mesh = demo.make_mesh(4, 2)
with mesh:
    step = demo.make_train_step(mesh, *objects)
    print(step.plan(demo.init_state(demo.init_params(np.random.default_rng(0))), 1, 0.1).to_mermaid())
"""


def test_the_picture_in_the_documents_is_the_plan_of_the_demo():
    # A process of its own: the model is written for jax's settings, not for the strict ones of the tests.
    path = os.pathsep.join([str(DEMO.parent), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    env.pop("XLA_FLAGS", None)  # which may say another number
    command = [sys.executable, "-c", PRINT_PICTURE]
    result = subprocess.run(command, env=env, capture_output=True, encoding="utf-8", timeout=LIMIT, check=False)
    assert result.returncode == 0, result.stderr
    picture = re.search(r"```mermaid\n(.*?)\n```", (DEMO.parents[1] / "docs" / "programs.md").read_text(), re.DOTALL)[1]
    assert re.sub(r"\d+ equations", "", result.stdout.rstrip()) == re.sub(r"\d+ equations", "", picture)
