"""The call that a command is about: its arguments, which a function of the user's makes."""

import contextlib
import inspect
from collections.abc import Callable
from typing import Any, cast

from jax.sharding import AbstractMesh

from partjit._jax.meshes import under_mesh
from partjit.command.mistakes import CANNOT, USAGE, Mistake
from partjit.command.target import users_code
from partjit.mesh import Mesh

__all__ = ["arguments_of", "require_no_parameters"]


def require_no_parameters(function: object, text: str) -> None:
    """Raises a `Mistake` if a function that is called without arguments has parameters that need some."""
    try:
        parameters = inspect.signature(cast(Any, function)).parameters.values()
    except (TypeError, ValueError):  # it is no function, or has no signature
        return
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in optional]
    if needed:
        raise Mistake(
            f"{text} takes {', '.join(needed)}: say with --args which function returns the arguments, like --args "
            "make_args with\n"
            "  def make_args():\n"
            f"      return ({' '.join(f'{name},' for name in needed)})  # arrays, or such as "
            "jax.ShapeDtypeStruct((8, 16), jnp.float32)",
            code=USAGE,
        )


def arguments_of(
    make_args: Callable[[], object], text: str, mesh: Mesh | AbstractMesh | None
) -> tuple[tuple[object, ...], dict[str, Any]]:
    """The positional arguments and those by name that a function makes, which `--args` names.

    Raises:
        Mistake: it fails, or returns no tuple.
    """
    entered = under_mesh(mesh) if isinstance(mesh, AbstractMesh) else mesh or contextlib.nullcontext()
    with users_code(f"--args {text}"), entered:
        made = make_args()
    if not isinstance(made, tuple):
        raise Mistake(
            f"--args {text} should return a tuple of arguments, but returned {type(made).__name__}: for a single "
            "argument, return (argument,)",
            code=CANNOT,
        )
    match made:
        case (tuple() as positional, dict() as named) if all(isinstance(name, str) for name in named):
            return positional, named
    return made, {}
