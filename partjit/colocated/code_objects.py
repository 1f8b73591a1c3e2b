"""Code objects in pickles, with the names of their files.

Cloudpickle names the file of every code object `<dynamic-code>` since 3.1.3, so that its pickles are the same wherever
a function is defined. A traceback through a copied function would then show neither a file nor its lines.

A worker process loads this module without its package: it may import nothing but the standard library.
"""

import types
from typing import Any

__all__ = ["reduced_code"]


def reduced_code(pickler: Any, code: types.CodeType) -> tuple[Any, ...]:
    """What a pickler of cloudpickle writes for a code object, under the name of its own file."""
    make, arguments = pickler.dispatch_table[types.CodeType](code)
    return make, tuple(code.co_filename if argument == "<dynamic-code>" else argument for argument in arguments)
