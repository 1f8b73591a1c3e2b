"""Which agreement a program has with other processes, if any."""

import os
from collections.abc import Callable, Iterable, Mapping

import jax

from partjit._jax.types import Device
from partjit.colocated.agreement.participant import participant
from partjit.colocated.agreement.plan_alone import PlanAgreement
from partjit.colocated.agreement.program import Agreement, Decider
from partjit.colocated.runtime.timeouts import seconds_of

__all__ = ["agreement_of", "timeout_seconds"]

_TIMEOUT_SECONDS = 300.0


def agreement_of(
    devices: Iterable[Device],
    name: str,
    text: Callable[[], str],
    last_node: str | None = None,
    deciders: Callable[[], Mapping[str, Decider]] = dict,
    is_on_plan_alone: bool = False,
) -> "Agreement | None":
    """What a program agrees on; None where all its devices are of this process, or its processes share no service.

    PARTJIT_AGREEMENT=off, which has to be the same in all processes, is for those that cannot connect to each other.

    Args:
        devices: its devices.
        name: its name.
        text: what has to be equal in all processes, in lines.
        last_node: the fragment after which nothing is left; None if an execution has to agree on its end.
        deciders: by the names of its loops and branches that the hosts drive, and of results of calls.
        is_on_plan_alone: whether it is agreed that all run the same plan, before the first execution, and nothing else.

    Raises:
        ValueError: PARTJIT_AGREEMENT is neither "on" nor "off", or PARTJIT_AGREEMENT_TIMEOUT no number of seconds.
    """
    here = jax.process_index()
    group = tuple(sorted({device.process_index for device in devices}))
    if here not in group or len(group) == 1:
        return None
    if not _is_on():
        return None
    timeout = timeout_seconds()
    own = participant(min(group), timeout)
    if own is None:
        return None
    kind = PlanAgreement if is_on_plan_alone else Agreement
    return kind(own, group, name, text(), last_node, timeout, deciders())


def _is_on() -> bool:
    text = os.environ.get("PARTJIT_AGREEMENT", "") or "on"
    if text not in ("on", "off"):
        raise ValueError(f"PARTJIT_AGREEMENT must be 'on' or 'off', but is {text!r}")
    return text == "on"


def timeout_seconds() -> float:
    """Seconds after which a process is late; ValueError if PARTJIT_AGREEMENT_TIMEOUT is no number of them."""
    return seconds_of("PARTJIT_AGREEMENT_TIMEOUT", _TIMEOUT_SECONDS, is_positive=True)
