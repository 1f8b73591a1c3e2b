"""What compiles a program in which a call cannot be made: the wrapper that the user wrote, and where it was called.

Nothing of this is known to jax, which sees one program of `jax.jit` whoever made it. The stack knows it: a program is
lowered when it is first called, so the innermost function of the user's is the one that called the wrapper.
"""

import sys
from types import FrameType

import jax

from partjit._jax.sources import is_user_file

__all__ = ["compiled_by"]

_WRAPPERS = {
    "equinox._jit": "eqx.filter_jit",
    "equinox._vmap_pmap": "eqx.filter_pmap",
    "flax.nnx.transforms.compilation": "nnx.jit",
    "haliax.partitioning": "hax.named_jit",
    "jax._src.pmap": "jax.pmap",
    "jax._src.pjit": "jax.jit",
    "jax._src.stages": "jax.jit",
}
"""Modules of functions that compile what they wrap, by the beginning of their names."""
_LIBRARIES = ("equinox", "flax", "haliax")


def compiled_by() -> tuple[str, str]:
    """The wrapper that compiles the program being lowered, and the user's line that called it.

    Returns:
        Its name as users write it, such as "jax.jit" or "jax.lax.scan", and "file:line in function", empty if unknown.
    """
    frame: FrameType | None = sys._getframe(1)
    wrapper = "jax.jit"
    while frame is not None and _is_inside(frame):
        wrapper = _public_name(frame) or wrapper  # the outermost one
        frame = frame.f_back
    where = "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    return wrapper, where


def _is_inside(frame: FrameType) -> bool:
    library = _module_of(frame).partition(".")[0]
    return library in _LIBRARIES or not is_user_file(frame.f_code.co_filename)


def _public_name(frame: FrameType) -> str | None:
    """The name under which users know a function, if it is one that compiles what it is given."""
    module, name = _module_of(frame), frame.f_code.co_name
    for beginning, wrapper in _WRAPPERS.items():
        if module.startswith(beginning):
            return wrapper
    if module.startswith("jax._src.scipy.") and not name.startswith("_"):
        return f"{module.replace('_src.', '')}.{name}"
    if module.startswith("jax._src.lax.") and callable(getattr(jax.lax, name, None)):
        return f"jax.lax.{name}"
    return "jax.vmap" if module == "jax._src.api" and name == "vmap_f" else None


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))
