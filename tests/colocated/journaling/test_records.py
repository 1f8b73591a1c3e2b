"""The file of a journal: what is torn is cut off, and nothing else."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partjit import JournalError
from partjit.colocated.journaling.records import RecordFile, framed, read_records
from tests.census import sees

BODIES = st.lists(st.binary(min_size=1, max_size=20), max_size=6)


def written(path, bodies):
    file = RecordFile(str(path), b"title")
    for body in bodies:
        file.append(body)
    file.close()


def found(path):
    file = RecordFile(str(path), b"title")
    file.close()
    return file.found


@sees("different examples", "several elements")
@given(BODIES, st.data())
def test_a_file_that_is_cut_has_the_records_before(tmp_path_factory, bodies, data):
    path = tmp_path_factory.mktemp("records") / "calls"
    written(path, bodies)
    ends = [end for end, _ in read_records(path.read_bytes())]
    cut = data.draw(st.integers(0, os.path.getsize(path)))
    os.truncate(path, cut)
    kept = bodies[: max(sum(end <= cut for end in ends) - 1, 0)]
    assert found(path) == kept
    written(path, [b"more"])
    assert found(path) == [*kept, b"more"]


@sees("different examples", "several elements")
@given(BODIES, st.data())
def test_a_byte_that_is_changed_ends_the_records(tmp_path_factory, bodies, data):
    path = tmp_path_factory.mktemp("records") / "calls"
    written(path, bodies)
    content = bytearray(path.read_bytes())
    ends = [end for end, _ in read_records(bytes(content))]
    changed = data.draw(st.integers(len(framed(b"title")), max(len(content) - 1, len(framed(b"title")))))
    if changed < len(content):
        content[changed] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(content)
    assert found(path) == bodies[: sum(end <= changed for end in ends) - 1]


def test_the_file_of_another_journal_is_refused(tmp_path):
    written(tmp_path / "calls", [])
    with pytest.raises(JournalError, match="belongs to another journal"):
        RecordFile(str(tmp_path / "calls"), b"other title")


def test_behind_a_record_that_could_not_be_written_there_is_none(tmp_path, monkeypatch):
    file = RecordFile(str(tmp_path / "calls"), b"title")
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:5]))
    with pytest.raises(OSError, match="the disk is full"):
        file.append(b"torn")
    monkeypatch.undo()
    with pytest.raises(OSError, match="no call can be recorded any more"):
        file.append(b"whole")
    file.close()
    assert found(tmp_path / "calls") == []
