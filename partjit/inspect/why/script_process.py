"""Asking a script, in a process of its own, for what may end the process that does it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["ScriptFailedError", "run_script"]


class ScriptFailedError(RuntimeError):
    """A process that was asked for something ended without an answer; the message says how."""


def run_script(script: str, question: Mapping[str, Any], text: str, timeout: float) -> Any:
    """Has another interpreter run a script, and returns what it answers.

    That interpreter sees neither the environment variables of Python nor what is set up for this one: no main module,
    no start-up files, no measuring of coverage. Its modules are found where this one finds them. It does not outlive
    this call, and what it writes to its standard error is not shown.

    Args:
        script: the file. It reads a line of JSON, and a text after it, from its standard input, and writes JSON.
        question: what is said on that line; `path` is added, where modules are found.
        text: what follows it.
        timeout: the seconds that it may take.

    Raises:
        ScriptFailedError: it could not be started, took longer, was ended by a signal, or failed.
    """
    if getattr(sys, "frozen", False) or not sys.executable:
        raise ScriptFailedError(
            "there is no interpreter that could be started (sys.executable is that of an application)"
        )
    path = [os.path.abspath(entry) for entry in sys.path]
    said = json.dumps({**question, "path": path}) + "\n" + text
    # numpy, which the bindings of MLIR import, starts threads otherwise.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    try:
        ran = subprocess.run(
            [sys.executable, "-I", "-S", script],
            input=said.encode(),
            capture_output=True,
            env=environment,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ScriptFailedError(f"the process was ended because it took longer than {timeout:g} s") from None
    except OSError as error:
        raise ScriptFailedError(f"the interpreter {sys.executable} could not be started: {error}") from error
    if ran.returncode < 0:
        raise ScriptFailedError(f"the process was ended by {_signal(-ran.returncode)}")
    if ran.returncode:
        last = ran.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise ScriptFailedError(f"the process failed with exit code {ran.returncode}: {last}")
    try:
        return json.loads(ran.stdout)
    except ValueError as error:
        raise ScriptFailedError(f"the process answered what is no JSON: {error}") from error


def _signal(number: int) -> str:
    try:
        return f"signal {number}, {signal.Signals(number).name}"
    except ValueError:
        return f"signal {number}"
