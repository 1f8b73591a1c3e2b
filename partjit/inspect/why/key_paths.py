"""Key paths in the spellings that users write: `params['w']`, `params["w"]`, `params.w`, with spaces or without."""

import functools
import re
from collections.abc import Sequence

__all__ = ["common_end", "keys_of"]

_KEY = re.compile(r"""\s*(?:\.\s*(\w+)|\[\s*(?:"([^"]*)"|'([^']*)'|([^\]'"]+?))\s*\]|^(\w+))\s*""")


@functools.lru_cache(maxsize=4096)  # a parameter, its new value and its gradient have one path
def keys_of(path: str) -> tuple[str, ...] | None:
    """The keys of a path, its name first; None if the text is no path.

    Example:
        >>> keys_of("params['layers'][0].w")
        ('params', 'layers', '0', 'w')
        >>> keys_of('params [ "layers" ] [0]["w"]') == keys_of("params['layers'][0].w")
        True
        >>> keys_of("model.py:12") is None
        True
    """
    keys, at = [], 0
    while at < len(path):
        match = _KEY.match(path, at) if at or not path[:1].isspace() else None
        if match is None or match.end() == at:
            return None
        keys.append(next(group for group in match.groups() if group is not None))
        at = match.end()
    return tuple(keys)


def common_end(keys: Sequence[str], others: Sequence[str]) -> int:
    """The length of the common suffix of two paths.

    Example:
        >>> common_end(("params", "0", "w"), ("result", "1", "0", "w"))
        2
    """
    count = 0
    while count < min(len(keys), len(others)) and keys[-1 - count] == others[-1 - count]:
        count += 1
    return count
