"""A search that asks other processes: the same result, whatever ends them; and they end with it."""

import os
import signal
import threading
import time
import zlib

import jax
import pytest

from partjit.inspect import asked_process
from partjit.inspect.asked_process import WhatIfError
from partjit.search import program, search_specs
from partjit.search.asked import AskedStep
from tests.search.models import MACHINE, MESH, arguments, train_step

OPTIONS = {"mesh": MESH, "machine": MACHINE, "donate_argnums": (0, 1), "questions": 24}

CHILD = """
import os, sys, time, zlib
sys.path[:] = {path!r}
from partjit.inspect import asked_process
from partjit.search.asked import AskedStep
real = AskedStep.answer
def answer(self, lowered, wanted, known):
    CONDITION
    return real(self, lowered, wanted, known)
AskedStep.answer = answer
asked_process.serve({program!r})
"""


def searched(**options):
    return search_specs(train_step, *arguments(layers=1), **{**OPTIONS, **options})


def same(found, other):
    for one in ("in_specs", "out_specs"):
        assert jax.tree.leaves(getattr(found, one)) == jax.tree.leaves(getattr(other, one))
    for one in ("constraints", "seconds", "peak", "starts", "runners_up", "questions", "unanswered", "method"):
        assert str(getattr(found, one)) == str(getattr(other, one))


def is_bad(wanted):
    return zlib.crc32(repr(wanted).encode()) % 11 == 0


@pytest.fixture
def pools(monkeypatch):
    made = []

    class Pool(program.AskedPool):
        def __init__(self, *args):
            super().__init__(*args)
            made.append((self, self.pids))

    monkeypatch.setattr(program, "AskedPool", Pool)
    return made


def is_there(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_what_ends_a_process_is_no_answer_and_the_rest_is_as_without(monkeypatch, pools):
    real = AskedStep.answer

    def answer(self, lowered, wanted, known):
        if is_bad(wanted):
            raise WhatIfError("as if")
        return real(self, lowered, wanted, known)

    monkeypatch.setattr(AskedStep, "answer", answer)
    here = searched(isolated=False)
    assert 0 < here.unanswered < 6
    assert f"{here.unanswered} could not be answered" in here.to_text()
    monkeypatch.undo()
    condition = "if zlib.crc32(repr(wanted).encode()) % 11 == 0: os.abort()"
    monkeypatch.setattr(asked_process, "_PROGRAM", CHILD.replace("CONDITION", condition))
    same(searched(workers=2), here)


def test_other_processes_find_what_this_one_finds_and_are_gone_then(pools):
    same(searched(workers=2), searched(isolated=False))
    ((_, pids),) = pools
    assert len(pids) == 2
    assert not any(map(is_there, pids))


def test_if_every_start_ends_its_process_the_error_says_how(monkeypatch):
    abort = "print('Check failed: on purpose', file=sys.stderr, flush=True); os.abort()"
    monkeypatch.setattr(asked_process, "_PROGRAM", CHILD.replace("CONDITION", abort))
    text = r"search_specs: none of 2 specs to start from could be tried: .* signal 6, .* Check failed: on purpose"
    with pytest.raises(WhatIfError, match=f"(?s){text}"):
        searched(workers=2, questions=4)


@pytest.mark.usefixtures("silent_collector")
def test_an_interrupt_ends_a_search_that_waits_and_its_processes(monkeypatch, pools, tmp_path):
    asked = tmp_path / "asked"
    condition = f"open({str(asked)!r}, 'w').close(); time.sleep(600)"
    monkeypatch.setattr(asked_process, "_PROGRAM", CHILD.replace("CONDITION", condition))
    main, begun = threading.main_thread().ident, time.monotonic()

    def interrupt():
        while not asked.exists():
            time.sleep(0.1)
        time.sleep(0.5)  # while jax traces, an interrupt may leave this thread without a trace
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        searched(workers=2)
    assert time.monotonic() - begun < 120
    ((_, pids),) = pools
    assert len(pids) == 2
    assert not any(map(is_there, pids))
