"""Reading partitioned programs: what was partitioned, why, and what it costs.

`explain` makes a report of a function and its arguments without running or compiling it; `draw_array` and `draw_mesh`
make pictures of where data is.
"""

from partjit.inspect.arrays import ArrayPicture, draw_array, draw_mesh
from partjit.inspect.collectives import Collective
from partjit.inspect.explain import explain
from partjit.inspect.report import Report

__all__ = ["ArrayPicture", "Collective", "Report", "draw_array", "draw_mesh", "explain"]
