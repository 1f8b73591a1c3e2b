"""What a journal cannot write or read is an error that says so; what it commits is on the disk before it counts."""

import json
import os
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partjit
from partjit import JournalError, colocated
from partjit.colocated import colocated_python
from partjit.colocated.journaling import directory, records
from partjit.colocated.journaling.contents import Contents
from partjit.colocated.journaling.objects import own_state

pytestmark = pytest.mark.usefixtures("meeting")
one = jnp.float32(1)


class Kept:
    """An object whose state is whatever it was given."""

    def __init__(self, value=None):
        self.value = value

    def save(self):
        return self.value

    def restore(self, value):
        self.value = value


class Forgotten:
    """Its pickled objects need a class that a later version of the program does not have."""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "the manifest of a journal, is damaged"),
        ("[]", "the manifest of the journal is damaged"),
        ('{"format": 1}', "the manifest of the journal is damaged: KeyError"),
        ('{"format": 9}', "the journal has format 9, and this partjit reads 1"),
    ],
)
def test_a_damaged_manifest_is_refused(tmp_path, text, message):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(JournalError, match=message):
        partjit.replay(tmp_path)
    with pytest.raises(JournalError, match=message):
        colocated.journal(tmp_path).__enter__()
    (tmp_path / "manifest.json").unlink()
    with colocated.journal(tmp_path):  # what was opened in vain is closed
        pass


def test_a_journal_that_another_process_has_open_is_refused(tmp_path):
    held = directory.lock(str(tmp_path), 0)
    with pytest.raises(JournalError, match="is open already, in this process or in another one"):
        colocated.journal(tmp_path).__enter__()
    os.close(held)
    with colocated.journal(tmp_path) as journal:
        assert repr(journal) == f"<journal {tmp_path}, open>"
    assert repr(journal) == f"<journal {tmp_path}, closed>"
    with pytest.raises(JournalError, match="is not open: use it in its with block"):
        journal.commit()


def test_a_record_without_results_cannot_be_played(tmp_path):
    with colocated.journal(tmp_path):
        pass
    with pytest.raises(JournalError, match="has no results: open it with results=True"):
        partjit.replay(tmp_path)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (lambda x: (x, x), r"1 results where there should be 2"),
        (lambda x: jax.ShapeDtypeStruct((3,), x.dtype), r"float32\[\] where there should be float32\[3\]"),
    ],
)
def test_results_of_another_form_are_refused(tmp_path, specs, message):
    with colocated.journal(tmp_path, results=True):
        _same(out_specs_fn=lambda x: x)(one)
    with partjit.replay(tmp_path), pytest.raises(JournalError, match=f"the journal has other results of .*: {message}"):
        _same(out_specs_fn=specs)(one)


def _same(**options):
    return colocated_python(lambda x: x, mode="inline", **options)


def test_nothing_is_committed_that_cannot_be_written(tmp_path):
    kept = Kept(1)
    with colocated.journal(tmp_path, objects={"kept": kept}) as journal:
        journal.commit()
        with pytest.raises(JournalError, match=r"Journal\.restore: the last commit has no state of the program"):
            journal.restore(0)
        kept.value = lambda: None
        with pytest.raises(JournalError, match=r"the state of 'kept' cannot be written to the journal: .*pickle"):
            journal.commit(1)
        kept.value = 2
        with pytest.raises(TypeError, match=r"state is <object object .*neither an array nor a number"):
            journal.commit(object())
        assert journal.commits == 1
        with pytest.raises(ValueError, match="there is an object of the name 'kept' already"):
            journal.register("kept", Kept())
        journal.commit(7)
        assert (journal.commits, journal.restore(0)) == (2, 7)
    with colocated.journal(tmp_path, objects={"kept": (again := Kept())}):
        assert again.value == 2


def test_a_state_of_a_class_that_is_gone_is_refused(tmp_path, monkeypatch):
    with colocated.journal(tmp_path, objects={"kept": Kept(Forgotten())}):
        pass
    monkeypatch.delitem(globals(), "Forgotten")
    with pytest.raises(JournalError, match="the state of 'kept' cannot be read from the journal: AttributeError"):
        colocated.journal(tmp_path, objects={"kept": Kept()}).__enter__()


def test_states_of_other_numbers_of_processes():
    equal, different = [pickle.dumps("a")] * 3, [pickle.dumps(text) for text in "abc"]
    assert [own_state("x", different, process, 3, None) for process in range(3)] == ["a", "b", "c"]
    assert own_state("x", equal, 1, 2, None) == "a"
    with pytest.raises(JournalError, match="not the same in the 3 processes that committed, and now there are 2"):
        own_state("x", different, 1, 2, None)
    assert own_state("x", different, 1, 2, lambda name, states: (name, states)) == ("x", ["a", "b", "c"])


def test_a_commit_is_on_the_disk_before_the_manifest_names_it(tmp_path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (done.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda old, new: (done.append("renamed"), replace(old, new)))
    with colocated.journal(tmp_path, objects={"kept": Kept(1)}) as journal:
        done.clear()
        journal.commit({"x": jnp.ones(3)})
        named = json.loads((tmp_path / "manifest.json").read_text())["directory"]
    there = tmp_path / named
    assert {file.name.partition("-")[0] for file in there.iterdir()} == {"calls", "objects", "state"}
    at = done.index("renamed")
    assert {str(path) for path in (there, *there.iterdir(), tmp_path / "manifest.json.new")} <= {*done[:at]}
    assert str(tmp_path) in done[:at]  # the directory of the commit has its name there
    assert str(tmp_path) in done[at:]  # and so has the manifest


def test_what_no_manifest_names_is_removed(tmp_path):
    with colocated.journal(tmp_path) as journal:
        journal.commit(1)
        first = {path.name for path in tmp_path.iterdir()}
        (tmp_path / "00000009-left").mkdir()
        (tmp_path / "notes").mkdir()
        journal.commit(2)
    names = {path.name for path in tmp_path.iterdir()}
    assert names - first == {"notes", json.loads((tmp_path / "manifest.json").read_text())["directory"]}
    assert len(names) == len(first) + 1
    with colocated.journal(tmp_path):  # its calls are those of another epoch
        assert len([*tmp_path.glob("*/calls-*")]) == 1


def test_behind_a_hole_or_a_fault_there_is_nothing(tmp_path, monkeypatch):
    def failing(descriptor, data):
        raise OSError(28, "No space left on device")

    file = records.RecordFile(str(tmp_path / "calls"), b"title")
    file.append(b"first")
    monkeypatch.setattr(os, "write", failing)
    with pytest.raises(OSError, match="No space left"):
        file.append(b"second")
    monkeypatch.undo()
    with pytest.raises(OSError, match="no call can be recorded any more"):
        file.append(b"third")
    file.close()
    with open(tmp_path / "calls", "ab") as raw:
        raw.write(bytes(64))
    again = records.RecordFile(str(tmp_path / "calls"), b"title")
    again.append(b"fourth")
    again.close()
    found = [body for _, body in records.read_records((tmp_path / "calls").read_bytes())]
    assert found == [b"title", b"first", b"fourth"]


@pytest.mark.parametrize("record", [b"x" + bytes(16), b"c", b"p{"])
def test_records_of_another_version_are_refused(record):
    with pytest.raises(JournalError, match="a record of the journal is of another version of partjit"):
        Contents([record])


def test_leaves_of_numpy_and_python_come_back_as_they_were(tmp_path):
    state = {"flag": True, "int": 3, "complex": 1j, "numpy": np.arange(3)[::-1], "text": np.array(["a"])}
    with colocated.journal(tmp_path) as journal:
        journal.commit(state)
        found = journal.restore(jax.tree.map(lambda leaf: leaf, state))
    assert {name: type(leaf) for name, leaf in found.items()} == {name: type(leaf) for name, leaf in state.items()}
    for name, leaf in state.items():
        np.testing.assert_array_equal(found[name], leaf)
