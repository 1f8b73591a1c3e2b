"""Running a script in a subprocess, for work that may crash the process that does it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["ScriptFailedError", "run_script"]


class ScriptFailedError(RuntimeError):
    """A subprocess ended without a result; the message says how."""


def run_script(script: str, request: Mapping[str, object], text: str, timeout: float) -> Any:
    """Runs a script in another interpreter, and returns its result.

    The interpreter ignores the environment variables of Python, and has no main module of ours, no start-up files and
    no coverage measurement. It searches this process's `sys.path` for modules. It does not outlive this call, and its
    standard error is not shown.

    Args:
        script: the file. It reads a line of JSON, followed by a text, from standard input, and writes JSON.
        request: the object on that line; its key `path` is set to the search path for modules.
        text: the text that follows.
        timeout: in seconds.

    Raises:
        ScriptFailedError: it could not be started, timed out, was killed by a signal, or failed.
    """
    if getattr(sys, "frozen", False) or not sys.executable:
        raise ScriptFailedError("no interpreter can be started (sys.executable is that of an application)")
    path = [os.path.abspath(entry) for entry in sys.path]
    stdin = json.dumps({**request, "path": path}) + "\n" + text
    # numpy, which the bindings of MLIR import, starts threads otherwise.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    try:
        ran = subprocess.run(
            [sys.executable, "-I", "-S", script],
            input=stdin.encode(),
            capture_output=True,
            env=environment,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ScriptFailedError(f"the subprocess timed out after {timeout:g} s") from None
    except OSError as error:
        raise ScriptFailedError(f"the interpreter {sys.executable} could not be started: {error}") from error
    if ran.returncode < 0:
        raise ScriptFailedError(f"the subprocess was killed by {_signal(-ran.returncode)}")
    if ran.returncode:
        last = ran.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise ScriptFailedError(f"the subprocess failed with exit code {ran.returncode}: {last}")
    try:
        return json.loads(ran.stdout)
    except ValueError as error:
        raise ScriptFailedError(f"the result of the subprocess is not JSON: {error}") from error


def _signal(number: int) -> str:
    try:
        return f"signal {number}, {signal.Signals(number).name}"
    except ValueError:
        return f"signal {number}"
