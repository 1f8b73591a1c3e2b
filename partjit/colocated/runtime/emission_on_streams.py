"""Calls of several streams that one executable makes: those of each stream run on a thread of their own.

Whichever thread of a device hands over what was missing passes on, in the order of the program, the calls that now have
all they need: each to the thread of its stream.
"""

import queue
from collections.abc import Mapping, Sequence

import numpy as np

from partjit.colocated.runtime.call import Call
from partjit.colocated.runtime.emission import PATIENCE, Emitted, Execution
from partjit.colocated.runtime.gathered import GatheredCalls
from partjit.colocated.runtime.streams import Stream

__all__ = ["ExecutionOnStreams"]


class ExecutionOnStreams(Execution):
    """One execution of an executable that makes calls of several streams.

    Args:
        calls: the calls of the executable.
        gathered: those of them that are handed over for several iterations at once.
        number: what that gets to know the execution by.
        streams: the stream of each of these calls.
        parent: the call that the program is a part of.
    """

    def __init__(
        self,
        calls: Sequence[Emitted],
        gathered: Sequence[GatheredCalls],
        number: int,
        streams: Sequence[Stream],
        parent: Call | None,
    ) -> None:
        super().__init__(calls, gathered, number, streams[0], parent)
        self._streams = streams
        # To the thread of each stream: the number of a call in the execution, which it is, and what was handed over;
        # None at the end.
        self._passed_on: dict[Stream, queue.SimpleQueue[tuple[int, int, Mapping[int, Sequence[np.ndarray]]] | None]] = {
            stream: queue.SimpleQueue() for stream in streams
        }
        self._ended: set[Stream] = set()

    @property
    def is_complete(self) -> bool:
        """Whether the executable has made all of its calls, and they have run."""
        return super().is_complete and len(self._ended) == len(self._passed_on)

    def receive(self, which: int, number: int, position: int, shards: Sequence[np.ndarray]) -> None:
        """Takes what a device hands over, and passes on what is complete; a second time changes nothing."""
        self._arrived.put((which, number, position, shards))
        self._run_arrived()

    def run_calls_of(self, stream: Stream) -> None:
        """Runs the calls of one stream as they come, until the executable has made all of them."""
        passed_on, latest = self._passed_on[stream], -1
        while True:
            try:
                following = passed_on.get(timeout=PATIENCE)
            except queue.Empty:
                if self._has_failed():
                    return
                continue
            if following is None:
                self._ended.add(stream)
                return
            number, which, found = following
            if number > latest:  # an interrupted thread passes it on again
                latest = number
                self._calls[which].run(stream, self._parent, found)

    def _take(self, which: int, number: int, position: int, shards: Sequence[np.ndarray]) -> None:
        super()._take(which, number, position, shards)
        if self._following >= self._total:
            for passed_on in self._passed_on.values():
                passed_on.put(None)

    def _run(self, which: int, found: Mapping[int, Sequence[np.ndarray]]) -> None:
        self._passed_on[self._streams[which]].put((self._following, which, found))
        del self._waiting[self._following]
        self._following += 1
