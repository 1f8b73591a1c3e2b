"""Names in the source of a plan."""

import collections
import itertools
import keyword
import re
import unicodedata

__all__ = ["Names", "spelled"]

_FRAGMENT = re.compile(r"fragment_\d+")


def spelled(text: str) -> str:
    """A text as Python reads it in a name, underscores in the place of other characters.

    Python takes names that are the same after NFKC normalization for one, and not all letters and digits for a part
    of a name.
    """
    return "".join(c if f"x{c}".isidentifier() else "_" for c in unicodedata.normalize("NFKC", text))


class Names:
    """Gives each name once.

    Args:
        taken: names that are not given.
    """

    def __init__(self, *taken: str) -> None:
        self._taken = {*taken}
        self._repeats: collections.Counter[str] = collections.Counter()
        self._fragments = itertools.count()
        self._fresh = itertools.count(1)

    def take(self, wanted: str) -> str:
        """A name like the one wanted, a key path maybe, that Python knows as a name and nobody has."""
        base = spelled(re.sub(r"\W+", "_", wanted)).strip("_") or "x"
        if not base.isidentifier() or keyword.iskeyword(base):
            base = f"x_{base}"
        name = base
        while name in self._taken or _FRAGMENT.fullmatch(name):
            self._repeats[base] += 1
            name = f"{base}_{self._repeats[base] + 1}"
        self._taken.add(name)
        return name

    def fragment(self) -> str:
        """A name for the next fragment; nothing else has such a name."""
        return f"fragment_{next(self._fragments)}"

    def fresh(self) -> str:
        """A name for a value that has none."""
        return self.take(f"x{next(self._fresh)}")
