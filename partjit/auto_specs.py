"""`AUTO`: the spec of what is to be searched."""

import enum
from typing import Final

__all__ = ["AUTO", "Auto"]


class Auto(enum.Enum):
    """The type of `AUTO`. An enumeration member stays the same object through pickling and copying."""

    AUTO = "AUTO"

    def __repr__(self) -> str:
        return self.value


AUTO: Final = Auto.AUTO
"""A spec that is chosen by a search; see `partjit.search_specs`."""
