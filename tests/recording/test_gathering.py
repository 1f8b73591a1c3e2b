"""Processes that give each other what they recorded, over connections."""

import json
import multiprocessing
import pathlib
import re
import threading
import time

import pytest

from partjit import merge_timelines
from partjit.recording import gathering
from partjit.recording.clocks import bounds_of_offset
from partjit.recording.gathering import answer_questions, exchanges
from tests.processes import outputs_of_processes

HERE = pathlib.Path(__file__).parent


def test_the_bounds_of_a_clock_compared_with_itself_contain_zero():
    here, there = multiprocessing.Pipe()
    asked = []
    answering = threading.Thread(target=lambda: asked.append(answer_questions(there, time.monotonic() + 60)))
    answering.start()
    least, most = bounds_of_offset(exchanges(here, 20, time.monotonic() + 60))
    here.send_bytes(b"else")
    answering.join(60)
    assert least <= 0 <= most
    assert asked == [b"else"]


def test_who_does_not_answer_is_not_waited_for_and_who_ended_is_not_either():
    here, there = multiprocessing.Pipe()
    for wait in (lambda: exchanges(here, 1, time.monotonic()), lambda: answer_questions(here, time.monotonic())):
        with pytest.raises(TimeoutError, match="another process does not answer any more"):
            wait()
    there.close()
    for wait in (lambda: exchanges(here, 1, time.monotonic() + 60), lambda: answer_questions(here, time.monotonic())):
        with pytest.raises((EOFError, ConnectionError)):
            wait()


def test_the_process_that_ended_is_named():
    here, there = multiprocessing.Pipe()
    there.close()
    with pytest.raises(ConnectionError, match="process 3 has ended"):
        gathering._asked({3: here}, b"", time.monotonic() + 60)


def test_two_processes_gather_the_same_timeline_and_their_files_merge_to_it(tmp_path):
    outputs = outputs_of_processes(HERE / "recording_process.py", 2, tmp_path, seconds=100)
    assert re.search(r"process 0 waited for process 1 in \d fragments?, ", outputs[0])
    assert "process 1 did not call it within 0.2 s; all processes have to" in outputs[0]
    first, second = (json.loads((tmp_path / f"gathered_{number}.json").read_text()) for number in range(2))
    assert first == second
    gathered = merge_timelines([tmp_path / "gathered_0.json"])
    merged = merge_timelines([tmp_path / f"process_{number}.json" for number in range(2)])
    assert gathered.spans == merged.spans
    executions = sorted((span.process, span.execution) for span in gathered.spans if span.kind == "program")
    assert executions == [(process, number) for process in (0, 1) for number in (1, 2, 3)]
    assert not gathered.unfinished
    slow = [span for span in gathered.critical_path() if span.name == "load"]
    assert 1 < len(slow) <= 3  # all of them, unless the system has other things to do
    assert {span.process for span in slow} == {1}
