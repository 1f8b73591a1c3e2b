"""Calls of several streams that one executable makes: those of each stream run on a thread of their own.

Whichever thread of a device hands over what was missing passes on, in the order of the program, the calls that now have
all they need: each to the thread of its stream.

The executable may make others besides that it waits for. One of these may wait for a call that came to one of the
streams since, and is behind all of the executable: now and then such calls are let in.
"""

import itertools
import queue
import time
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from partjit.colocated.runtime.call import Call
from partjit.colocated.runtime.emission import PATIENCE, Emitted, Execution
from partjit.colocated.runtime.gathered import GatheredCalls
from partjit.colocated.runtime.giving_way import give_way
from partjit.colocated.runtime.interrupts import Flag
from partjit.colocated.runtime.streams import Stream

__all__ = ["ExecutionOnStreams"]

_MOMENT = 1e-3
"""Seconds that a thread waits for more calls before it has to be woken for the next one."""
_SECONDS_UNTIL_OTHERS = 0.02
"""After which calls of others are let in."""

_Following: TypeAlias = tuple[int, int, Mapping[int, Sequence[np.ndarray]]] | set[Call] | None
"""To the thread of a stream: the number of a call in the execution, which it is, and what was handed over; calls of
others that are to run in between; None at the end."""


class ExecutionOnStreams(Execution):
    """One execution of an executable that makes calls of several streams.

    Args:
        calls: the calls of the executable.
        gathered: those of them that are handed over for several iterations at once.
        number: what that gets to know the execution by.
        streams: the stream of each of these calls; None if it does not run here.
        parent: the call that the program is a part of.
    """

    def __init__(
        self,
        calls: Sequence[Emitted],
        gathered: Sequence[GatheredCalls],
        number: int,
        streams: Sequence[Stream | None],
        parent: Call | None,
    ) -> None:
        own = [stream for stream in streams if stream is not None]
        super().__init__(calls, gathered, number, own[0], parent)
        self._streams = streams
        self._passed_on: dict[Stream, queue.SimpleQueue[_Following]] = {stream: queue.SimpleQueue() for stream in own}
        self._ended = itertools.count(1)
        self._has_ended = Flag()

    def receive(self, which: int, number: int, position: int, shards: Sequence[np.ndarray]) -> None:
        """Takes what a device hands over, and passes on what is complete; a second time changes nothing."""
        if self._is_of_one_device and number == self._following and 0 <= which < len(self._calls):
            self._pass_on(which, {0: shards})  # it hands over one call after another
            return
        self._arrived.put((which, number, position, shards))
        self._run_arrived()

    def run_calls_of(self, stream: Stream, place: Call | None = None) -> bool:
        """Runs the calls of one stream as they come, until the executable has made all of them.

        Args:
            stream: the stream.
            place: the call that they are in the place of, if others may come in between.

        Returns:
            Whether all calls of all streams have run; once, to the thread of one stream.
        """
        passed_on, latest, looked = self._passed_on[stream], -1, time.monotonic()
        while True:
            if place is not None and time.monotonic() > looked + _SECONDS_UNTIL_OTHERS:
                self._note_others(stream, place)
                looked = time.monotonic()
            if place is not None and passed_on.empty():
                self._has_ended.wait(time.monotonic() + _MOMENT)  # several may come: to wake it costs the devices
            try:
                following = passed_on.get(timeout=PATIENCE if place is None else _SECONDS_UNTIL_OTHERS)
            except queue.Empty:
                if self._has_failed():
                    return False
                continue
            if following is None:
                return next(self._ended) == len(self._passed_on) and self.is_complete
            if isinstance(following, set):
                assert place is not None, "it is what is behind this"
                give_way(place, to_users_of_jax=True, among=following)
                continue
            number, which, found = following
            if number > latest:  # an interrupted thread passes it on again
                latest = number
                self._calls[which].run(stream, self._parent, found)

    def _note_others(self, stream: Stream, place: Call) -> None:
        """Has the calls that are behind all of the executable run when what has been handed over so far has run."""
        behind = {other for lane in place.lanes for other in [*lane.calls][1:]}
        # Looked at afterwards: what the program is followed by is behind its end.
        if behind and not self._waiting and self._arrived.empty():
            self._passed_on[stream].put(behind)

    def _take(self, which: int, number: int, position: int, shards: Sequence[np.ndarray]) -> None:
        super()._take(which, number, position, shards)
        if self._following >= self._total:
            for passed_on in self._passed_on.values():
                passed_on.put(None)
            self._has_ended.set()

    def _run(self, which: int, found: Mapping[int, Sequence[np.ndarray]]) -> None:
        del self._waiting[self._following]
        self._pass_on(which, found)

    def _pass_on(self, which: int, found: Mapping[int, Sequence[np.ndarray]]) -> None:
        stream = self._streams[which]
        assert stream is not None, "such a call is not handed over here"
        self._passed_on[stream].put((self._following, which, found))
        self._following += 1
