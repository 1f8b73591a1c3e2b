"""What the processes of a journal tell each other: each says how it went, and all learn what was decided."""

import hashlib
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import jax

from partjit._jax.processes import distributed_client, published
from partjit.colocated.agreement.participant import gone
from partjit.colocated.agreement.setup import timeout_seconds
from partjit.errors import JournalError, OtherProcessError

__all__ = ["Group", "UndecidedError"]

_openings = itertools.count()


class UndecidedError(OtherProcessError):
    """It is not known what the first process has decided."""


class Group:
    """The processes that have a journal open; they do the same with it, in the same order.

    Args:
        path: where the journal is.

    Attributes:
        process: the number of this one.
        count: how many there are.

    Raises:
        JournalError: there are several, which share no service.
    """

    def __init__(self, path: str) -> None:
        self.process, self.count = jax.process_index(), jax.process_count()
        self._client = distributed_client() if self.count > 1 else None
        if self.count > 1 and self._client is None:
            raise JournalError("a journal of several processes needs jax.distributed.initialize")
        name = hashlib.sha256(path.encode()).hexdigest()[:16]
        self._key = f"partjit/journal/{next(_openings)}/{name}"
        self._rounds = itertools.count()

    def gone(self) -> str | None:
        """Which process is gone, as far as is known; None if none is."""
        return gone(range(self.count))

    def decide(self, own: Callable[[], Any], decision: Callable[[list[Any]], Any], what: str) -> Any:
        """Does something in every process, and then decides in the first one.

        Args:
            own: what is done in each; it returns what JSON can have.
            decision: called in the first process, once all have done theirs, with what they returned.
            what: what this is, for errors.

        Returns:
            What `decision` returned, everywhere.

        Raises:
            Exception: what `own` or `decision` raised here.
            OtherProcessError: it was raised in another process, or that has ended or is late.
        """
        if self._client is None:
            return decision([own()])
        key, error, said = f"{self._key}/{next(self._rounds)}", None, ""
        try:
            said = json.dumps({"value": own()})
        except BaseException as raised:
            error, said = raised, json.dumps({"error": _text(raised)})
        self._client.key_value_set(f"{key}/{self.process}", said)
        decided = f"{key}/decided"
        if self.process == 0:
            text, failed = self._decided(key, decision, what)
            self._client.key_value_set(decided, text)
            error = error or failed
        if error is not None:
            raise error
        answer = json.loads(self._published(decided, what, 0))
        if "error" in answer:
            raise OtherProcessError(answer["error"])
        return answer["value"]

    def _decided(self, key: str, decision: Callable[[list[Any]], Any], what: str) -> tuple[str, BaseException | None]:
        try:
            found = [json.loads(self._published(f"{key}/{k}", what, k)) for k in range(self.count)]
            for k, each in enumerate(found):
                if "error" in each:
                    return json.dumps({"error": f"{what} failed: process {k}: {each['error']}"}), None
            return json.dumps({"value": decision([each["value"] for each in found])}), None
        except BaseException as error:
            return json.dumps({"error": f"{what} failed: process 0: {_text(error)}"}), error

    def _published(self, key: str, what: str, process: int) -> str:
        assert self._client is not None
        seconds = timeout_seconds()
        try:
            return published(self._client, key, time.monotonic() + seconds)
        except TimeoutError:
            text = f"{what} failed: process {process} has ended, or is late by {seconds:g} s"
            raise UndecidedError(text) from None


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
