"""The demo runs from start to end, and tells in one line what is wrong with an option."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[1] / "examples" / "train_char_lm.py"
TEXT = "the quick brown fox jumps over the lazy dog; " * 40


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "fox.txt"
    path.write_text(TEXT)
    return path


def run(*options):
    # The demo chooses its own number of virtual devices, whatever this environment says.
    env = {name: value for name, value in os.environ.items() if name not in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS")}
    # The plain output, eighty columns wide, also where the caller's environment asks for colours or another width.
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
        env.pop(name, None)
    env |= {"COLUMNS": "80", "PYTHONIOENCODING": "utf-8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", str(DEMO), *map(str, options)]
    return subprocess.run(command, env=env, capture_output=True, encoding="utf-8", timeout=300, check=False)


def test_prints_every_part(text):
    result = run("--steps", 12, "--text", text)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    shown = result.stdout

    assert "data=4, model=2 of 8 devices" in shown
    assert re.search(r"1,620 characters to train on, 180 held back", shown)

    # A matrix that is split over 'model' has half of its bytes on a device, and a replicated one all of them.
    assert re.search(r"blocks\.0\.up +│ \(128, 512\) +│ P\(None, 'model'\) +│ +131,072 of 262,144 │", shown)
    assert re.search(r"embed +│ \(256, 128\) +│ P\(.*\) +│ +131,072 of 131,072 │", shown)
    assert re.search(r"Each device holds 1,376,256 of 2,621,440 bytes", shown)

    assert re.search(r"^step +10/12  loss \d\.\d{3} +[\d,]+ tokens/s$", shown, re.MULTILINE)
    assert re.search(r"^step +12/12  loss \d\.\d{3} +[\d,]+ tokens/s$", shown, re.MULTILINE)

    model, unigram = (float(re.search(rf"{name} model +(\d+\.\d+)", shown)[1]) for name in ("this", "unigram"))
    assert 0 < model < 6
    assert 2 < unigram < 3.5

    _, sample = re.split(r"^─+ Sample: .* ─+$", shown, flags=re.MULTILINE)
    assert len(sample) > 64 + 40


def test_other_mesh_and_one_step(text):
    result = run("--steps", 1, "--text", text.parent, "--mesh", "model=1,data=2", "--seed", 7)
    assert result.returncode == 0, result.stderr
    assert "data=2, model=1 of 2 devices" in result.stdout
    assert re.search(r"step +1/1  loss", result.stdout)
    assert "Each device holds 2,621,440 of 2,621,440 bytes" in result.stdout


@pytest.mark.parametrize(
    ("options", "expected"),
    [
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
        (["--epochs", "3"], "unrecognized arguments: --epochs 3"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_option_is_one_line(options, expected):
    result = run(*options)
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("train_char_lm.py: error: ")
    assert expected in line


@pytest.mark.parametrize("size", [0, 649])
def test_short_text_is_one_line(tmp_path, size):
    path = tmp_path / "short.txt"
    path.write_text("x" * size)
    result = run("--text", path)
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
