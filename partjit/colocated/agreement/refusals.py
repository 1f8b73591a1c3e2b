"""What a call raised here before it was known what it agrees on, for processes that wait for this one.

It is the call of a program, or of a colocated function outside of programs. What it raised is kept in the service of
`jax.distributed` until this process makes another call. So it ends nothing in processes that do not wait for that
program or function, as they do not if it makes no calls.
"""

import contextlib
import json

import jax

from partjit._jax.processes import DistributedRuntimeClient, distributed_client, own_process
from partjit.colocated.agreement.votes import Refusal, Report, report_of

__all__ = ["refusal_of", "say", "take_back"]

_KEY = "partjit/refused/{}"
_last = Refusal()


def say(program: str, error: BaseException) -> None:
    """Lets others know what a call of a program raised."""
    _publish(Refusal(_last.number + 1, program, report_of(error, own_process())))


def take_back() -> None:
    """Lets others know that this process goes on, if it has refused something."""
    if _last.failure is not None:
        _publish(_last._replace(failure=None))


def _publish(refusal: Refusal) -> None:
    global _last
    _last = refusal
    client = distributed_client()
    if client is not None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the service has ended
            client.key_value_set(_KEY.format(own_process()), json.dumps(refusal), allow_overwrite=True)


def refusal_of(client: DistributedRuntimeClient, process: int) -> Refusal:
    """What a call raised last in a process."""
    try:
        number, program, failure = json.loads(client.key_value_try_get(_KEY.format(process)))
    except jax.errors.JaxRuntimeError:  # it is not there
        return Refusal()
    return Refusal(number, program, failure and Report(*failure))
