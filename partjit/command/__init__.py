"""The command line: `partjit parse ...`, or `python -m partjit parse ...`."""

from partjit.command.main import main as main
