"""Arguments of a program that are not known yet, as calls still compute them: they fail in all processes or in none."""

from collections.abc import Sequence

from jax.sharding import Mesh

from partjit.colocated.agreement.setup import agreement_of
from partjit.colocated.runtime.pending import PendingArray, values_of

__all__ = ["agreed_values"]


def agreed_values(values: Sequence[object], mesh: Mesh, name: str) -> Sequence[object]:
    """The arguments of a program, each pending one replaced by its value; waits for them.

    Over several processes it then waits until all have theirs: the devices of those whose calls succeeded would wait
    for those of one whose call failed.

    Args:
        values: the arguments.
        mesh: that of the program; empty if it has none.
        name: the name of the program.

    Raises:
        OtherProcessError: the call of one failed in another process.
        Exception: what the call of one raised here.
    """
    pending = {i: value for i, value in enumerate(values) if isinstance(value, PendingArray)}
    devices = {device for array in pending.values() for device in array.devices()}
    if not mesh.empty:
        devices.update(mesh.devices.flat)
    text = f"the pending arguments of {name}"
    agreement = agreement_of(devices, name, lambda: text)

    def wait() -> Sequence[object]:
        return values_of([*pending.values()])

    found = dict(zip(pending, wait() if agreement is None else agreement.run(wait, ()), strict=True))
    return [found.get(i, value) for i, value in enumerate(values)]
