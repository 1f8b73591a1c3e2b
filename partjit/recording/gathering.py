"""All processes give each other what they recorded, and measure how far their clocks are apart.

They meet at process 0, which they find over the service of `jax.distributed`. Their messages go over a connection of
their own: a round trip there is much shorter than one of the service, and messages may be long.
"""

import contextlib
import itertools
import json
import queue
import secrets
import socket
import struct
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge

from partjit._jax.processes import (
    DistributedRuntimeClient,
    distributed_client,
    group_size,
    own_host,
    own_process,
    published,
)
from partjit.checks import require, require_number, wrong_value
from partjit.recording.clocks import Exchange, bounds_of_offset
from partjit.recording.merging import MergedTimeline, merged
from partjit.recording.stored import Recording, packed, unpacked
from partjit.recording.timeline import Timeline

__all__ = ["answer_questions", "exchanges", "gather_timelines"]

_LEADER = 0
_ROUND_TRIPS = 64
_ASK, _SEND, _ALL, _LATE, _ENDED = b"?", b"<", b"=", b"#", b"!"
_TIMES = struct.Struct("!dd")
_ENDED_TEXT = f"gather_timelines: process {_LEADER} has ended, or failed"
_numbers = itertools.count()


def gather_timelines(timeline: Timeline, *, timeout: float = 300.0) -> MergedTimeline:
    """One timeline of what all processes recorded, in each of them. All of them have to call it.

    How far their clocks are apart is measured when this is called, by round trips between the processes and process 0;
    half of the shortest one is how uncertain the result is, or less. Clocks that drift apart during a recording are as
    wrong at its beginning as they have drifted. Processes of one machine share its clock.

    A single process gets its own recording, merged with nothing.

    Args:
        timeline: what this process recorded.
        timeout: for how many seconds it waits for the other processes.

    Raises:
        TimeoutError: a process has not called it in this time.
        ConnectionError: a process ended, or cannot be reached; `merge_timelines` needs no connections.
        ValueError: `timeline` is merged already, or `timeout` is no number of seconds.

    Example:
        >>> from partjit import events
        >>> from partjit.recording import gather_timelines, record
        >>> with record() as timeline:
        ...     events.emit(events.CallStarted(0, "load", "io", time=1.0))
        ...     events.emit(events.CallFinished(0, "load", "io", time=1.5))
        >>> gathered = gather_timelines(timeline)
        >>> [(span.process, span.name) for span in gathered.spans]
        [(0, 'load')]
    """
    require("gather_timelines", "timeline", timeline, Timeline, "a timeline that `record` gave")
    seconds = require_number("gather_timelines", "timeout", timeout, "a number of seconds")
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        raise wrong_value("gather_timelines", "timeout", timeout, "a positive number of seconds")
    recordings, offsets = timeline._own_recordings()
    if offsets:
        raise ValueError(
            "gather_timelines: timeline is merged already; give the one that `record` gave in this process"
        )
    client = distributed_client()
    if client is None or group_size() == 1:
        return merged(recordings)
    deadline = time.monotonic() + seconds
    key = f"partjit/timelines/{next(_numbers)}"
    own = _bytes(recordings)
    try:
        if own_process() == _LEADER:
            text = _collected(client, key, own, deadline, seconds)
        else:
            text = _given(client, key, own, deadline, seconds)
    except EOFError as error:
        raise ConnectionError(f"{_ENDED_TEXT}: {error!r}") from error
    together = json.loads(zlib.decompress(text))
    found = [recording for each in together["recordings"] for recording in unpacked(each)[0]]
    return merged(found, {int(process): (low, high) for process, (low, high) in together["measured"].items()})


def _bytes(recordings: Sequence[Recording]) -> bytes:
    return zlib.compress(json.dumps(packed(recordings)).encode(), 1)


def exchanges(connection: Connection, count: int, deadline: float) -> list[Exchange]:
    """Asks the process at the other end, which runs `answer_questions`, what time it is, so many times.

    Raises:
        TimeoutError: it has not answered at `deadline`, in seconds of `time.monotonic()`.
        EOFError: the other process has ended.
    """
    found = []
    for _ in range(count):
        sent = time.perf_counter()
        connection.send_bytes(_ASK)
        received, answered = _TIMES.unpack(_received(connection, deadline))
        found.append((sent, received, answered, time.perf_counter()))
    return found


def answer_questions(connection: Connection, deadline: float) -> bytes:
    """Says what time it is until something else is asked, which is returned.

    Raises:
        TimeoutError: nothing was asked until `deadline`, in seconds of `time.monotonic()`.
        EOFError: the other process has ended.
    """
    while True:
        message = _received(connection, deadline)
        received = time.perf_counter()
        if message != _ASK:
            return message
        connection.send_bytes(_TIMES.pack(received, time.perf_counter()))


def _received(connection: Connection, deadline: float) -> bytes:
    if not connection.poll(max(0.0, deadline - time.monotonic())):
        raise TimeoutError("gather_timelines: another process does not answer any more")
    return connection.recv_bytes()


def _given(client: DistributedRuntimeClient, key: str, own: bytes, deadline: float, seconds: float) -> bytes:
    """What process 0 collected."""
    host, port, secret = _published(client, key, deadline, seconds).split()
    with Client((host, int(port)), authkey=secret.encode()) as connection:
        connection.send_bytes(_TIMES.pack(own_process(), 0.0))
        while True:
            message = answer_questions(connection, deadline + 2.0)  # process 0 gives up first, and says for whom
            if message == _SEND:
                connection.send_bytes(own)
            elif message.startswith(_ALL):
                return message[1:]
            else:
                raise (TimeoutError if message.startswith(_LATE) else ConnectionError)(message[1:].decode())


def _published(client: DistributedRuntimeClient, key: str, deadline: float, seconds: float) -> str:
    try:
        return published(client, key, deadline)
    except TimeoutError:
        raise TimeoutError(_late([_LEADER], seconds)) from None


def _late(processes: Sequence[int], seconds: float) -> str:
    which = ", ".join(map(str, processes))
    return (
        f"gather_timelines: {'process' if len(processes) == 1 else 'processes'} {which} did not call it within "
        f"{seconds:g} s; all processes have to"
    )


def _collected(client: DistributedRuntimeClient, key: str, own: bytes, deadline: float, seconds: float) -> bytes:
    """What all processes give; they get it as well."""
    secret, host = secrets.token_hex(16), own_host()
    connections: dict[int, Connection] = {}
    with contextlib.ExitStack() as stack:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = stack.enter_context(socket.create_server((host, 0), family=family, backlog=1024))
        stack.callback(_wake, listening)
        arrived: queue.SimpleQueue[tuple[int, Connection]] = queue.SimpleQueue()
        threading.Thread(target=_accept, args=(listening, secret.encode(), arrived), daemon=True).start()
        client.key_value_set(key, f"{host} {listening.getsockname()[1]} {secret}")
        try:
            while missing := sorted({*range(group_size())} - {_LEADER, *connections}):
                try:
                    process, connection = arrived.get(timeout=max(0.0, deadline - time.monotonic()))
                except queue.Empty:
                    raise TimeoutError(_late(missing, seconds)) from None
                connections[process] = stack.enter_context(connection)
            text = _asked(connections, own, deadline)
        except BaseException as error:
            how = _LATE if isinstance(error, TimeoutError) else _ENDED
            for connection in connections.values():
                with contextlib.suppress(OSError):
                    connection.send_bytes(how + (str(error) or f"{_ENDED_TEXT}: {error!r}").encode())
            raise
        for connection in connections.values():
            with contextlib.suppress(OSError):  # it has ended; the others get theirs
                connection.send_bytes(_ALL + text)
        return text


def _asked(connections: Mapping[int, Connection], own: bytes, deadline: float) -> bytes:
    """The recordings of all processes, and between what the clock of this one is ahead of the others'."""
    measured, recordings = {}, [own]
    for process, connection in connections.items():
        try:
            measured[process] = bounds_of_offset(exchanges(connection, _ROUND_TRIPS, deadline))
            connection.send_bytes(_SEND)
            recordings.append(_received(connection, deadline))
        except (EOFError, ConnectionError) as error:
            raise ConnectionError(f"gather_timelines: process {process} has ended: {error!r}") from error
    each = [json.loads(zlib.decompress(recording)) for recording in recordings]
    return zlib.compress(json.dumps({"measured": measured, "recordings": each}).encode(), 1)


def _accept(listening: socket.socket, key: bytes, arrived: "queue.SimpleQueue[tuple[int, Connection]]") -> None:
    while True:
        try:
            accepted, _ = listening.accept()
        except OSError:  # it is closed
            return
        threading.Thread(target=_greet, args=(Connection(accepted.detach()), key, arrived), daemon=True).start()


def _wake(listening: socket.socket) -> None:
    """Ends the thread that accepts: on Linux, closing alone would leave it waiting."""
    with contextlib.suppress(OSError):
        listening.shutdown(socket.SHUT_RDWR)


def _greet(connection: Connection, key: bytes, arrived: "queue.SimpleQueue[tuple[int, Connection]]") -> None:
    # In a thread of its own: one that is silent would keep others out.
    try:
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        process, _ = _TIMES.unpack(connection.recv_bytes())
    except (AuthenticationError, EOFError, OSError, struct.error):  # not one of ours
        connection.close()
        return
    arrived.put((int(process), connection))
