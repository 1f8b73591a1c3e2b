"""The messages for processes that are not at the same point of the same program: where they differ."""

import hashlib
import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from partjit._jax.arrays import data_of
from partjit._jax.types import Device
from partjit.colocated.agreement.votes import Choice, Point

__all__ = ["different_choices", "different_part", "different_points", "parts_of", "value_text"]

_SHOWN = 4
"""Elements of an array that its text shows."""
_NODE = re.compile(r"\s*([^\W\d]\w*)\(.*\) -> ")


def value_text(value: Any) -> str:
    """A value as a text that is the same in two processes if the value is: of an array its first elements and a digest.

    Args:
        value: a number of Python, or an array that a process has all of, of numbers or typed keys.

    Example:
        >>> value_text(np.float32(0.5)), value_text(True)
        ('0.5', 'True')
        >>> value_text(np.arange(5))
        'int64[5] 0, 1, 2, 3, ... of digest 3cd3db3e820c'
    """
    if isinstance(value, bool | int | float | complex):
        return repr(value)
    array = np.asarray(data_of(value))
    if array.ndim == 0:
        return repr(array.item())
    shown = [*map(repr, array.ravel()[:_SHOWN].tolist()), *["..."] * (array.size > _SHOWN)]
    digest = hashlib.blake2b(array.tobytes(), digest_size=6).hexdigest()
    return f"{array.dtype}[{','.join(map(str, array.shape))}] {', '.join(shown)} of digest {digest}"


def parts_of(value: Any, shared: Sequence[tuple[Device, str]] | None) -> tuple[tuple[str, str], ...]:
    """What a process has of a value that others have as well, as text, by which part it is.

    Args:
        value: a value as in `value_text`, or an array of which this process has parts.
        shared: the parts that other processes have as well, and a device of this one that has each; None if every
            process has all of it.
    """
    if shared is None:
        return (("", value_text(value)),)
    on_device = {shard.device: shard.data for shard in data_of(value).addressable_shards}
    return tuple((which, value_text(on_device[device])) for device, which in shared)


def different_part(choices: Sequence[Choice]) -> str | None:
    """Of which part of a value processes that have it have something else; None if of none.

    Example:
        >>> left, right = Choice("x", (("0:4", "1"),)), Choice("x", (("4:8", "2"),))
        >>> different_part([left, right, left]), different_part([left, right, Choice("x", (("4:8", "3"),))])
        (None, '4:8')
    """
    if len({*choices}) == 1:
        return None
    if len({choice.name for choice in choices}) > 1:
        return ""
    found: dict[str, str] = {}
    parts = itertools.chain.from_iterable(choice.parts for choice in choices)
    return next((part for part, text in parts if found.setdefault(part, text) != text), None)


def different_points(own: Point, text: str, others: Sequence[tuple[int, Point, str]]) -> str:
    """Where processes are, and the first line in which their plans differ.

    Args:
        own: where this process is.
        text: its plan, in lines.
        others: the other processes that are somewhere else: number, point, and plan if it is known.
    """
    where = "".join(f"\n  process {process}: {point}" for process, point, _ in others)
    lines = [f"the processes are not at the same point of the same program: here it is {own}, elsewhere{where}"]
    differences = [_first_difference(text, plan, process) for process, _, plan in others if plan]
    lines += [difference for difference in differences if difference][:1]
    hint = "every process has to call the same programs, in the same order and with arguments of the same types"
    return "\n".join([*lines, hint])


def different_choices(program: str, what: str, choices: Sequence[tuple[int, Choice]]) -> str:
    """What processes have of a value that decides how a program goes on."""
    part = different_part([choice for _, choice in choices])
    texts = {process: dict(choice.parts).get(part or "") for process, choice in choices}
    values = "".join(f"\n  process {process}: {text}" for process, text in texts.items() if text is not None)
    where = f", in its part [{part}]," if part else ""
    return (
        f"the processes of {program} would go different ways: {what}{where} is{values}\n"
        "It has to be the same in every process: return it as an array sharded over the processes, and let the "
        "program reduce that, for example by jnp.any or jnp.max"
    )


def _first_difference(own: str, other: str, process: int) -> str:
    """The first line in which two plans differ, and the node that it is a line of; empty if none does."""
    node = ""
    for mine, theirs in itertools.zip_longest(own.splitlines(), other.splitlines(), fillvalue="(nothing)"):
        if mine != theirs:
            where = "" if _NODE.match(mine) or _NODE.match(theirs) else node
            here = f"their plans first differ in{where}\n  here:      {mine.strip()}"
            return f"{here}\n  process {process}: {theirs.strip()}"
        if found := _NODE.match(mine):
            node = f" {found[1]}"
    return ""
