"""Runs a notebook from top to bottom in a kernel of its own, and writes it with its outputs.

    python run_notebook.py 01_name.py executed.ipynb

It is a process of its own, because what Jupyter's packages leave behind is not for the tests to judge.
"""

import os
import pathlib
import sys

import jupytext
import nbclient
import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager

# Warnings of what is ours, or about the cells, are errors; what Jupyter and hypothesis say to each other is not.
STRICT = "import warnings; warnings.filterwarnings('error', module='__main__|partjit|jax')"


def run(text, executed):
    notebook = jupytext.read(text)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(STRICT))
    # Without folders to look in, there is no kernel but that of this interpreter, which nobody has to register.
    kernel = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
    # What the tests have set up must not do the work of a notebook's first cell.
    ours = ("JAX_", "NPROC", "PARTJIT_", "PYTEST_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    where = {"metadata": {"path": str(pathlib.Path(executed).parent)}}
    nbclient.NotebookClient(notebook, km=kernel, timeout=300, resources=where).execute(env=env)
    del notebook.cells[0]
    nbformat.write(notebook, executed)


if __name__ == "__main__":
    run(*sys.argv[1:])
