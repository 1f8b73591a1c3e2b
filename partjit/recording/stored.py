"""Recordings as data for files and other processes: the events of a process, with its clock.

Trace viewers ignore what they do not know, so a recording is written into the file for them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from partjit import events
from partjit.events import Event
from partjit.recording.clocks import Clock, ClockOffset

__all__ = ["FORMAT", "Recording", "packed", "unpacked"]

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Recording:
    """What one process recorded.

    Attributes:
        events: in the order in which they were recorded.
        recorder: the thread that recorded.
        clock: what the times are by.
    """

    events: Sequence[Event]
    recorder: int
    clock: Clock


_TYPES: Mapping[str, type[Event]] = {
    name: value
    for name, value in vars(events).items()
    if name in events.__all__ and isinstance(value, type) and issubclass(value, Event)
}
_FIELDS: Mapping[str, Sequence[str]] = {
    name: [each.name for each in dataclasses.fields(kind)] for name, kind in _TYPES.items()
}


def packed(recordings: Sequence[Recording], offsets: Sequence[ClockOffset] = ()) -> dict[str, Any]:
    """Recordings as what JSON has, with the offsets of merged ones.

    Example:
        >>> waited = events.WaitStarted("step", 3, "load", time=0.25, thread=1)
        >>> data = packed([Recording([waited], 1, Clock(0, "a", None, 0.0))])
        >>> data["recordings"][0]["events"]
        [['WaitStarted', 0.25, 1, 'step', 3, 'load']]
    """
    return {
        "format": FORMAT,
        "offsets": [dataclasses.astuple(offset) for offset in offsets],
        "recordings": [
            {
                "clock": dataclasses.astuple(each.clock),
                "recorder": each.recorder,
                "events": [_event(event) for event in each.events if type(event).__name__ in _TYPES],
            }
            for each in recordings
        ],
    }


def unpacked(data: Any) -> tuple[tuple[Recording, ...], tuple[ClockOffset, ...]]:
    """The recordings in what `packed` returned, and the offsets.

    Raises:
        ValueError: it returned something else, maybe in another version of partjit.

    Example:
        >>> waited = events.WaitStarted("step", 3, "load", time=0.25, thread=1)
        >>> recording = Recording((waited,), 1, Clock(0, "a", None, 0.0))
        >>> unpacked(packed([recording])) == ((recording,), ())
        True
    """
    try:
        if data["format"] != FORMAT:
            raise ValueError(f"it has format {data['format']}, and this partjit reads format {FORMAT}")
        recordings = tuple(
            Recording(tuple(map(_read, each["events"])), each["recorder"], Clock(*each["clock"]))
            for each in data["recordings"]
        )
        return recordings, tuple(ClockOffset(*offset) for offset in data["offsets"])
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"it is no recording of this version of partjit ({error!r})") from error


def _event(event: Event) -> list[object]:
    name = type(event).__name__
    return [name, *(getattr(event, field) for field in _FIELDS[name])]


def _read(stored: Sequence[Any]) -> Event:
    name, *values = stored
    fields: dict[str, Any] = dict(zip(_FIELDS[name], values, strict=True))
    for field, value in fields.items():
        if isinstance(value, list):
            fields[field] = tuple(value)
    return _TYPES[name](**fields)
