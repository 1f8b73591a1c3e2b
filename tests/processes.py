"""Running a script in several processes that belong together."""

import os
import pathlib
import socket
import subprocess
import sys

# A process that has read a result from one of its devices may exit while another still connects to those of another
# process; if that one has exited, XLA waits for it for ever. So they end without waiting.
_RUN = """
import os, runpy, sys
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
sys.stdout.flush()
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
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _RUN, str(script), str(number), str(count), address, *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu", **env},
        )
        for number in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=seconds)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(outputs)
    return outputs
