"""Where in the user's program an equation comes from."""

import contextlib
import os
from collections.abc import Callable, Iterator

from jax._src import source_info_util
from jax.extend.source_info_util import SourceInfo, register_exclusion, user_context
from jax.interpreters.mlir import LoweringRuleContext

# Lines of the user's code are named, not those of this package.
register_exclusion(os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep)

is_user_file: Callable[[str], bool] = source_info_util.is_user_filename
"""Whether the code of a file is the user's, neither jax's nor of this package nor of another that is excluded."""


def source_site(source_info: SourceInfo | LoweringRuleContext) -> tuple[str, int, str] | None:
    """File, line and function of the user's code that an equation comes from, if that is known."""
    frame = source_info_util.user_frame(source_info.traceback)
    return None if frame is None else (frame.file_name, frame.start_line, frame.function_name.rpartition(".")[2])


def source_sites(source_info: SourceInfo) -> Iterator[tuple[str, int, str]]:
    """The frames outside of jax and this package that an equation comes from, innermost first.

    jax notes what called an equation only up to the nested jaxpr that it is in.
    """
    frames = source_info_util.user_frames(source_info.traceback)
    return ((frame.file_name, frame.start_line, frame.function_name.rpartition(".")[2]) for frame in frames)


def at_site(source_info: SourceInfo | LoweringRuleContext) -> str:
    """The user's line that an equation comes from, as " at file:line in function" for messages; empty if unknown."""
    site = source_site(source_info)
    return "" if site is None else " at {}:{} in {}".format(*site)


def traced_at(source_info: SourceInfo) -> contextlib.AbstractContextManager[None]:
    """Lets equations that are traced in the block come from there.

    jax notes what called it only up to the loop whose body is traced, so that a body of our own comes from nowhere.
    """
    return user_context(source_info.traceback)


def nested_source_info(source_info: SourceInfo, outer: SourceInfo) -> SourceInfo:
    """The source information of an equation taken out of a nested jaxpr, where names are relative to `outer`.

    What jax itself calls, as in `jax.jit(call)(x)`, has no line of its own, for jax notes what called an equation only
    up to the nested jaxpr that it is in. It gets the line of `outer`.
    """
    is_users = source_info_util.user_frame(source_info.traceback) is not None
    traceback = source_info.traceback if is_users else outer.traceback
    return source_info.replace(name_stack=outer.name_stack + source_info.name_stack, traceback=traceback)
