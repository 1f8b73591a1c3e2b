"""What XLA's CPU backend sends besides: it computes in wider types than bf16 and f8, and sends these."""

import math
from collections.abc import Iterable, Iterator, Sequence

from jax.sharding import Mesh

from partjit.devices import platform_of
from partjit.inspect.collectives import Collective, UnknownMove

__all__ = ["widened", "widening"]


def widened(collectives: Sequence[Collective], mesh: Mesh) -> Iterator[UnknownMove]:
    """For each collective of such a type what CPUs may send besides."""
    for one in collectives:
        dtype = one.result.partition("[")[0]
        if widening((dtype,), mesh) > 1:
            yield UnknownMove(
                operation=f"cpu.{one.kind} of {dtype}, which CPUs send in a type twice as wide",
                bytes_at_most=math.ceil(one.bytes_moved),
                times=one.times,
                per=one.per,
                is_exact=one.is_exact,
                program=one.program,
            )


def widening(dtypes: Iterable[str], mesh: Mesh) -> int:
    """How many times as much the devices of a mesh send at most of arrays with dtypes of these names.

    Example:
        >>> import jax
        >>> widening(["f32", "bf16"], jax.make_mesh((1,), ("x",)))
        2
    """
    is_narrow = any(dtype == "bf16" or dtype.startswith("f8") for dtype in dtypes)
    return 2 if is_narrow and platform_of(mesh) == "cpu" else 1
