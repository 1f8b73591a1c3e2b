"""`main`: runs a subcommand, and reports its errors.

A subcommand is a module: its docstring is its help and `EXAMPLES` the end of that; `add_arguments(parser)` adds its
arguments, and `run(args)` runs it and returns the exit code. It raises `Mistake` for what it cannot do. With `--json`,
if it has that option, these are JSON as well.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Protocol

from partjit import lazy
from partjit.command import diff, explain, launch, parse, search
from partjit.command.mistakes import Mistake

if TYPE_CHECKING:
    from partjit import checks
else:
    checks = lazy.module("partjit.checks")

__all__ = ["main"]


class Subcommand(Protocol):
    """The module of a subcommand."""

    EXAMPLES: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds its arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Runs it, and returns the exit code."""
        ...


_EPILOG = """\
start with:
  partjit explain model.py:train_step --mesh data=4,model=2 --args make_args

`partjit COMMAND --help` has examples, the exit codes, and the keys of JSON.
"""
_SUBCOMMANDS: Mapping[str, Subcommand] = {
    "explain": explain,
    "search": search,
    "diff": diff,
    "parse": parse,
    "launch": launch,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line.

    Args:
        argv: the arguments, without the name of the program; those of the process by default.

    Returns:
        The exit code: 0 for success, 1 for what cannot be done, 2 for malformed arguments, 3 for an exceeded limit.

    Raises:
        TypeError: `argv` is no list of str.

    Example:
        >>> from partjit.command import main
        >>> main(["parse", "{devices=[2,4]<=[8]}", "--mesh", "x=2,y=4"])
        P('x', 'y')
        <BLANKLINE>
        sharding  {devices=[2,4]<=[8]}
        mesh      x=2, y=4: 8 devices
        dim 0     2 tiles over x=2
        dim 1     4 tiles over y=4
        0
    """
    if argv is not None:
        given = checks.items_of("main", "argv", argv, "the arguments, a list of str, or None for those of the process")
        argv = [
            checks.require("main", f"argv[{i}]", argument, str, "an argument, a str")
            for i, argument in enumerate(given)
        ]
    try:
        args = _parser().parse_args(argv)
    except SystemExit as end:  # argparse has printed why
        return end.code if isinstance(end.code, int) else 2
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except Mistake as mistake:
        print(f"partjit {args.command}: error: {mistake}", file=sys.stderr)
        if getattr(args, "json", False):
            fields = {name: vars(mistake)[name] for name in ("message", "argument", "text", "span")}
            print(json.dumps({"error": fields}))
        return mistake.code
    except BrokenPipeError:
        # The reader of the output has closed it; Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="partjit",
        description="Explains partitioned programs without running them, and starts scripts in several processes.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"partjit {version('partjit')}, jax {version('jax')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in _SUBCOMMANDS.items():
        text = (module.__doc__ or "").strip()
        command = commands.add_parser(
            name,
            help=text.partition("\n")[0],
            description=text,
            epilog=module.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser
