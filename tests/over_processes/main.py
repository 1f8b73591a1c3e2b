"""A process of several that check the same laws.

    python main.py NUMBER COUNT ADDRESS MODULE [MODULE ...]

runs every function `check_*` of the modules beside this one, in the same order in all processes.
"""

import importlib
import os
import sys
import traceback

import started

try:
    for name in sys.argv[4:]:
        module = importlib.import_module(name)
        for check in [value for key, value in vars(module).items() if key.startswith("check_")]:
            with started.mesh:
                check()
            print(f"{name}.{check.__name__}: done", flush=True)
except BaseException:
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)  # the others may be waiting for this process
