"""Runs `partjit search`."""

import argparse
import json
import sys

import jax
from jax.sharding import AbstractMesh, AxisType

from partjit.command.call import arguments_of
from partjit.command.limits import size_of
from partjit.command.mistakes import CANNOT, Mistake, mesh_of
from partjit.command.target import find, users_code
from partjit.inspect.annotated import shown_spec
from partjit.search import FoundSpecs, Machine, h100, search_specs, tpu_v5p, tpu_v6e

__all__ = ["run"]

_TPUS = {"tpu-v5p": tpu_v5p, "tpu-v6e": tpu_v6e}


def run(args: argparse.Namespace) -> int:
    """Searches, and prints or writes the result.

    Raises:
        Mistake: an argument is malformed, or nothing was found for what it names.
    """
    sizes = mesh_of(args.mesh)
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    memory = None if args.memory is None else size_of(args.memory, "--memory")
    machine = _machine(args, mesh)
    function = find(args.function, "FUNCTION")
    make_args = find(args.args, "--args", args.function.rpartition(":")[0])
    if not callable(make_args):
        message = f"--args should name a function that returns the arguments, but it is {type(make_args).__name__}"
        raise Mistake(message, "--args", args.args, (0, len(args.args)), CANNOT)
    positional, named = arguments_of(make_args, args.args, mesh)
    if named:
        raise Mistake(f"--args {args.args} should return positional arguments only: the specs of others have no place")
    if args.out is not None:
        _open(args.out, "a")
    with users_code(f"searching specs for {args.function}"):
        found = search_specs(
            function,
            *positional,
            mesh=mesh,
            memory=memory,
            machine=machine,
            overlap=args.overlap,
            questions=args.questions,
            time_limit=args.time_limit,
        )
    if args.out is not None:
        _write(args.out, found)
    print(json.dumps(_as_data(found), allow_nan=False) if args.json else found.to_text())
    return 0


def _machine(args: argparse.Namespace, mesh: AbstractMesh) -> Machine:
    text = str(args.dcn or "")
    dcn = [axis.strip() for axis in text.split(",")] if text else []
    for axis in dcn:
        if axis not in mesh.axis_names:
            there = ", ".join(map(str, mesh.axis_names))
            raise Mistake(f"{axis!r} is no axis of the mesh, which has {there}", "--dcn", text, (0, len(text)))
    if args.machine in _TPUS:
        return _TPUS[args.machine](mesh, dcn=dcn)
    if dcn:
        raise Mistake("--dcn is about slices of TPUs: say --machine tpu-v5p or tpu-v6e", "--dcn", text)
    return h100(mesh)


def _write(path: str, found: FoundSpecs) -> None:
    _open(path, "w", f"{found.to_python()}\n")
    print(f"partjit search: wrote {path}", file=sys.stderr)


def _open(path: str, mode: str, text: str = "") -> None:
    """Writes a text to a file; of an empty one it is seen before a long search that the file can be written."""
    try:
        with open(path, mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        message = f"--out: {path!r} cannot be written: {error.strerror or error}"
        raise Mistake(message, "--out", path, (0, len(path)), CANNOT) from None


def _as_data(found: FoundSpecs) -> dict[str, object]:
    def by_path(specs: object) -> dict[str, str]:
        leaves = jax.tree_util.tree_leaves_with_path(specs)
        return {jax.tree_util.keystr(path): shown_spec(spec) for path, spec in leaves}

    return {
        "seconds": found.seconds,
        "peak_memory": found.peak,
        "memory": found.memory,
        "in_specs": by_path(found.in_specs),
        "out_specs": by_path(found.out_specs),
        "constraints": [str(constraint) for constraint in found.constraints],
        "starts": [{"name": s.name, "seconds": s.seconds, "peak_memory": s.peak, "fits": s.fits} for s in found.starts],
        "questions": found.questions,
        "python": found.to_python(),
    }
