"""Whether arguments are sharded as their specs say, and resharding those that are not.

NumPy arrays, scalars and uncommitted arrays are placed silently. Resharding a committed array costs a transfer the user
may not expect: `reshard_policy` says whether it warns.
"""

import sys
import warnings
from collections.abc import Sequence
from typing import ClassVar, Literal, get_args

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, Sharding

from partjit._jax.arrays import device_put
from partjit._jax.shardings import MaybeSharding, UnspecifiedValue
from partjit.checks import require_choice
from partjit.devices import ids_of
from partjit.errors import ReshardWarning, ShardingError
from partjit.mesh import describe_mesh
from partjit.paths import folded_texts

__all__ = ["Misplaced", "is_placed", "misplaced", "reshard", "reshard_policy"]

Policy = Literal["allow", "warn", "error"]


class reshard_policy:
    """What happens to a committed array whose sharding is not that of its spec (on the same devices).

    Sets the policy of the process when called; when used with `with`, until the end of the block.

    Args:
        policy: `"allow"` moves it silently, `"warn"` (the default) moves it with one `ReshardWarning` per call site,
            `"error"` raises `ShardingError`.

    Raises:
        TypeError, ValueError: `policy` is none of these.

    Example:
        >>> with reshard_policy("allow"):
        ...     pass
    """

    current: ClassVar[Policy] = "warn"

    def __init__(self, policy: Policy) -> None:
        require_choice("reshard_policy", "policy", policy, get_args(Policy))
        self._previous: Policy = reshard_policy.current
        reshard_policy.current = policy

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        reshard_policy.current = self._previous


def is_placed(arg: object, sharding: MaybeSharding) -> bool:
    """Whether the C++ dispatch may take `arg` for an input with `sharding` as it is, or places it correctly itself.

    It places NumPy arrays, scalars and arrays on one device. An array over several devices it takes for what the
    executable expects whatever its layout, so there the layout must be right.
    """
    if not isinstance(arg, jax.Array) or isinstance(sharding, UnspecifiedValue):
        return True
    if not arg.committed and len(arg.sharding.device_set) == 1:
        return True
    return arg.sharding.is_equivalent_to(sharding, arg.ndim)


def misplaced(args: Sequence[object], shardings: Sequence[MaybeSharding]) -> list[int]:
    """The indices of the arguments that must be moved."""
    return [i for i, (arg, sharding) in enumerate(zip(args, shardings, strict=True)) if not is_placed(arg, sharding)]


class Misplaced:
    """Reports resharded arguments, once per call site of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._seen: set[tuple[str, int]] = set()

    def report(
        self,
        args: Sequence[object],
        shardings: Sequence[MaybeSharding],
        paths: Sequence[str],
        indices: Sequence[int],
    ) -> None:
        """Warns, raises or does nothing, as the policy says.

        Raises:
            ShardingError: the policy is `"error"`.
        """
        if reshard_policy.current == "warn":
            indices = [i for i in indices if not _is_replicated_by_jax(args[i])]
        if not indices or reshard_policy.current == "allow":
            return
        texts = [
            (paths[i], f"{paths[i]} ({array.aval.str_short()}) {_describe_move(array, sharding)}")
            for i in indices
            if isinstance(array := args[i], jax.Array) and isinstance(sharding := shardings[i], Sharding)
        ]
        moves = "; ".join(folded_texts(texts))
        if reshard_policy.current == "error":
            raise ShardingError(
                f"Sharding passed to pjit does not match the sharding on the respective arg of {self._name}: {moves}. "
                "Move it with jax.device_put, change the spec, or set partjit.reshard_policy('warn')"
            )
        stacklevel, site = _call_site()
        if site in self._seen:
            return
        warnings.warn(
            f"{self._name} is called with committed arrays that are not sharded as their specs say, so each call "
            f"reshards them: {moves}. Move them once with jax.device_put, change the specs, or silence this with "
            "partjit.reshard_policy('allow')",
            ReshardWarning,
            stacklevel=stacklevel,
        )
        self._seen.add(site)  # after the warning: where that is an error, the next call is refused as well


def reshard(args: Sequence[object], shardings: Sequence[MaybeSharding], indices: Sequence[int]) -> list[object]:
    """The arguments with those at `indices` moved to their shardings, all at once."""
    moved = list(args)
    if not indices:
        return moved
    values = device_put([args[i] for i in indices], [shardings[i] for i in indices])
    for i, value in zip(indices, values, strict=True):
        moved[i] = value
    return moved


def _is_replicated_by_jax(array: object) -> bool:
    """Whether it is sharded as `jnp.ones` and others shard under a mesh with Explicit axes: nobody chose it."""
    sharding = getattr(array, "sharding", None)
    return (
        isinstance(sharding, NamedSharding)
        and sharding.is_fully_replicated
        and (AxisType.Explicit in sharding.mesh.axis_types)
    )


def _describe_move(array: jax.Array, new: Sharding) -> str:
    """From which spec to which, with meshes and memories where the specs are equal, and how many bytes move."""
    old = array.sharding
    before, after = (getattr(sharding, "spec", sharding) for sharding in (old, new))
    if isinstance(old, NamedSharding) and isinstance(new, NamedSharding) and str(old.spec) == str(new.spec):
        before, after = _describe_sharding(old), _describe_sharding(new)
    return f"from {before} to {after}, moving {_bytes_moved(array, new):,} bytes"


def _describe_sharding(sharding: NamedSharding) -> str:
    mesh = f"the mesh ({describe_mesh(sharding.mesh)}) of devices {ids_of(sharding)}"
    return f"{sharding.spec} on {mesh} in {sharding.memory_kind} memory"


def _bytes_moved(array: jax.Array, sharding: Sharding) -> int:
    """The bytes of the new shards that their devices do not have yet, over all devices."""
    held = array.sharding.devices_indices_map(array.shape)
    wanted = sharding.devices_indices_map(array.shape)
    elements = sum(
        _size(index, array.shape) - _overlap(index, held[device], array.shape) for device, index in wanted.items()
    )
    return elements * array.dtype.itemsize


def _size(index: tuple[slice, ...], shape: tuple[int, ...]) -> int:
    return int(
        np.prod([len(range(*part.indices(size))) for part, size in zip(index, shape, strict=True)], dtype=np.int64)
    )


def _overlap(index: tuple[slice, ...], held: tuple[slice, ...], shape: tuple[int, ...]) -> int:
    elements = 1
    for part, other, size in zip(index, held, shape, strict=True):
        (start, stop, _), (other_start, other_stop, _) = part.indices(size), other.indices(size)
        elements *= max(0, min(stop, other_stop) - max(start, other_start))
    return elements


_LIBRARIES = tuple(
    module.__file__.rpartition("/")[0] + "/" for module in (jax, sys.modules["partjit"]) if module.__file__
)


def _call_site() -> tuple[int, tuple[str, int]]:
    """How far up the stack the user's call is (as `stacklevel` counts), and its file and line."""
    stacklevel, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        stacklevel, frame = stacklevel + 1, frame.f_back
    return stacklevel, (frame.f_code.co_filename, frame.f_lineno)
