"""Running a script in several processes that belong together."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time

# A process that has read a result from one of its devices may exit while another still connects to those of another
# process; if that one has exited, XLA waits for it for ever. So they end without waiting. Process 0 is the last:
# with it goes the service by which the others know of each other, and jax ends who is still at work then.
_RUN = """
import os, runpy, sys
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
sys.stdout.flush()
if sys.argv[1] == "0":
    sys.stdin.read()
os._exit(0)
"""


def outputs_of_processes(
    script: pathlib.Path, count: int, *args: object, seconds: float = 120, **env: str
) -> list[str]:
    """What each of the processes wrote; all of them have to end well.

    A process is called with its number, how many there are, and where they meet, before the other arguments.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    with contextlib.ExitStack() as files:
        written = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(count)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", _RUN, str(script), str(number), str(count), address, *map(str, args)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "JAX_PLATFORMS": "cpu", **env},
            )
            for number, output in enumerate(written)
        ]
        deadline = time.monotonic() + seconds
        try:
            for process in reversed(processes):  # the first one waits for the end of its input
                process.communicate(timeout=deadline - time.monotonic())
        finally:
            for process in processes:
                process.kill()
        outputs = []
        for output in written:
            output.seek(0)
            outputs.append(output.read())
    assert not any(process.returncode for process in processes), "\n".join(outputs)
    return outputs
