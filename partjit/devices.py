"""The error for values of one program that are on different devices."""

from collections.abc import Sequence

from jax.core import AbstractValue
from jax.extend.core import ClosedJaxpr
from jax.sharding import Sharding

from partjit._jax.compiling import mismatches_inside
from partjit._jax.shardings import MaybeSharding, UnspecifiedValue, device_list
from partjit.arguments import known_paths
from partjit.errors import ShardingError

__all__ = ["ids_of", "incompatible_devices"]


def ids_of(sharding: Sharding) -> list[int]:
    """The ids of the devices of a sharding, in their order."""
    return [device.id for device in device_list(sharding)]


def incompatible_devices(
    error: Exception,
    name: str,
    jaxpr: ClosedJaxpr,
    in_shardings: Sequence[MaybeSharding],
    out_shardings: Sequence[MaybeSharding],
) -> ShardingError:
    """The error for a program whose arguments, constraints and results are not all on the same devices.

    Args:
        error: what jax raised, which names neither arguments nor results.
        name: the name of the program.
        jaxpr: the program.
        in_shardings, out_shardings: the shardings of its arguments and results, UNSPECIFIED where nothing is known.
    """
    info = jaxpr.jaxpr.debug_info
    placed = [
        *_placed("argument", info.arg_names, jaxpr.in_avals, in_shardings),
        *_placed("result", info.result_paths, jaxpr.out_avals, out_shardings),
        *mismatches_inside(error),
    ]
    first = placed[0][1] if placed else []
    others = [f"{what} on {ids}" for what, ids in placed[1:] if ids != first]
    return ShardingError(
        f"Received incompatible devices for pjitted computation {name}: {placed[0][0]} is on the devices {first}, but "
        f"{'; '.join(others)}. Put all arguments, results and constraints on the devices of one mesh, in one order: "
        "jax.device_put(value, NamedSharding(mesh, spec))"
    )


def _placed(
    kind: str, paths: object, avals: Sequence[AbstractValue], shardings: Sequence[MaybeSharding]
) -> list[tuple[str, list[int]]]:
    return [
        (f"{kind} {path} ({aval.str_short()})", ids_of(sharding))
        for path, aval, sharding in zip(known_paths(paths, len(avals), "{}"), avals, shardings, strict=True)
        if not isinstance(sharding, UnspecifiedValue)
    ]
