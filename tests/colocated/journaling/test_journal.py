"""`colocated.journal` and `partjit.replay`: what is recorded has run; a restart, wherever it is, changes nothing."""

import collections
import os
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

import partjit
from partjit import JournalError, P, colocated, pjit
from partjit.colocated import colocated_python, colocated_python_class
from partjit.colocated.journaling.processes import Group
from partjit.colocated.journaling.records import read_records
from tests.census import sees
from tests.colocated import rendezvous
from tests.colocated.journaling.calls import KINDS, Loader, Program, seen
from tests.effort import examples

pytestmark = pytest.mark.usefixtures("meeting")

EVERYTHING = ["loader", "threads", "loop", "shown", "eager on_thread", "loader", "streams", "nesting", "under jit"]
one = jnp.float32(1)


@pytest.fixture(autouse=True)
def _clean(mesh):
    seen.clear()
    with mesh:
        yield
    seen.clear()


def run(path, kinds, commits=(), **options):
    """Makes calls of these kinds from where the journal says; commits after the steps of `commits`."""
    program = Program()
    results = {}
    with colocated.journal(path, objects={"loader": program.loader}, **options) as journal:
        state = journal.restore({"step": 0, "x": one})
        for step in range(state["step"], len(kinds)):
            x = program.call(kinds[step], state["x"])
            state = {"step": step + 1, "x": x}
            results[step] = x
            if step in commits:
                journal.commit(state)
        colocated.wait()
        calls = journal.calls
    return {step: np.asarray(x) for step, x in results.items()}, calls


def plain(kinds):
    """The same without a journal."""
    program, x, results = Program(), one, {}
    for step, kind in enumerate(kinds):
        results[step] = x = program.call(kind, x)
    colocated.wait()
    return {step: np.asarray(x) for step, x in results.items()}


def calls_file(path):
    (found,) = (os.path.join(where, name) for where, _, names in os.walk(path) for name in names if "calls-" in name)
    return found


@sees("different examples", "several elements")
@given(st.lists(st.sampled_from(KINDS), max_size=6), st.sets(st.integers(0, 5)), st.booleans())
@examples(12)
def test_the_journal_has_the_calls_that_ran(tmp_path_factory, kinds, commits, keeps):
    expected = plain(kinds)
    seen.clear()
    program, x, recorded = Program(), one, []
    with colocated.journal(
        tmp_path_factory.mktemp("journal"), objects={"loader": program.loader}, results=keeps
    ) as journal:
        for step, kind in enumerate(kinds):
            x = program.call(kind, x)
            np.testing.assert_array_equal(x, expected[step])
            if step in commits:
                colocated.wait()
                recorded += journal.calls
                journal.commit()
                assert journal.calls == ()
        colocated.wait()
        assert len({call.path for call in journal.calls}) == len(journal.calls)
        recorded += journal.calls
    names = collections.Counter(call.name.removeprefix("Loader.") for call in recorded)
    names["each_shard"] *= 8  # one call
    ran = collections.Counter(name for name, _ in seen)
    taken = names.pop("following", 0)
    assert names.pop("in_worker", 0) == kinds.count("worker")  # where nobody sees it
    assert taken == kinds.count("loader") <= ran.pop("following", 0)
    assert names == ran


@sees("different examples", "several elements")
@given(st.data())
@examples(15)
def test_a_restart_at_any_byte_goes_on_as_if_there_had_been_none(tmp_path_factory, data):
    kinds = data.draw(st.permutations(EVERYTHING))
    commits = data.draw(st.sets(st.integers(0, len(kinds) - 1), max_size=1))
    path = tmp_path_factory.mktemp("journal")
    expected = plain(kinds)
    done, calls = run(path, kinds, commits, results=True)
    assert done == expected
    file = calls_file(path)
    size = os.path.getsize(file)
    with open(file, "rb") as recorded:
        ends = [0, *(end for end, _ in read_records(recorded.read()))]
    # What can be drawn must not depend on the record: threads end in any order.
    is_at_an_end, place = data.draw(st.booleans()), data.draw(st.integers(0, 2**20 - 1))
    cut = ends[place % len(ends)] if is_at_an_end else place % (size + 1)
    os.truncate(file, cut)
    kept = sum(end <= cut for end in ends) - 1
    seen.clear()
    again, calls_again = run(path, kinds, (), results=True)
    since = max(commits, default=-1) + 1
    assert again == {step: value for step, value in expected.items() if step >= since}
    assert sorted(call.path for call in calls_again) == sorted(call.path for call in calls)
    assert {call.path: call.digest for call in calls_again} == {call.path: call.digest for call in calls}
    if kept == len(ends) - 1:
        assert not seen


@sees("different examples", "several elements")
@given(st.lists(st.sampled_from(KINDS), max_size=6))
@examples(8)
def test_a_replay_is_the_run_and_calls_nothing(tmp_path_factory, kinds):
    path = tmp_path_factory.mktemp("journal")
    results, calls = run(path, kinds, results=True)
    seen.clear()
    program, x = Program(), one
    with partjit.replay(path) as replayed:
        assert replayed.calls == calls
        for step, kind in enumerate(kinds):
            x = program.call(kind, x)
            np.testing.assert_array_equal(x, results[step])
    assert not seen


@pytest.mark.parametrize("keeps", [False, True])
def test_from_a_commit_on_calls_are_made_again_or_not(tmp_path, keeps):
    expected = plain(EVERYTHING)
    run(tmp_path, EVERYTHING[:6], commits={2}, results=keeps)
    seen.clear()
    again, _ = run(tmp_path, EVERYTHING, results=keeps)
    assert again == {step: expected[step] for step in range(3, len(EVERYTHING))}
    assert ("shown" in [name for name, _ in seen]) == (not keeps)


def test_a_journal_of_a_shared_directory_is_opened_once(tmp_path):
    with colocated.journal(tmp_path), pytest.raises(JournalError, match="another journal is open in this process"):
        colocated.journal(tmp_path).__enter__()


def _various(x):
    rendezvous.logs["made"].append(float(jnp.sum(x)))
    return {"same": x, "key": jax.random.key(3, impl="rbg"), "weak": jnp.asarray(2.0), "number": (1, np.ones(2))}


@pytest.mark.parametrize("mode", ["auto", "stream", "inline"])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_results_that_nothing_specifies_come_back_as_they_were(tmp_path, meeting, axis_type, mode):
    def shown(result):
        leaves = jax.tree.leaves(result)
        data = [jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in leaves]
        kinds = [(x.aval.str_short(), x.sharding, x.committed, x.aval.weak_type) for x in leaves]
        return jax.tree.structure(result), kinds, [np.asarray(x).tolist() for x in data]

    mesh = jax.make_mesh((8,), ("z",), (axis_type,))
    x = jax.device_put(np.arange(8.0), jax.NamedSharding(mesh, P("z")))
    function = colocated_python(_various, mode=mode)
    with colocated.journal(tmp_path, results=True) as journal:
        function(x)
        journal.commit({})  # so that the first call is not recorded, which showed what results are
        expected = [shown(function(i * x)) for i in range(3)]
    meeting.logs["made"].clear()
    function = colocated_python(_various, mode=mode)
    with colocated.journal(tmp_path, results=True):
        assert [shown(function(i * x)) for i in range(3)] == expected
        assert not meeting.logs["made"]
        assert shown(function(2 * x)) == expected[2]
    assert meeting.logs["made"] == [56]


def test_results_that_are_left_to_the_dispatch_are_recorded(tmp_path):
    double = colocated_python(lambda x: 2 * np.asarray(x), out_specs_fn=lambda x: x, stream="double")
    program = pjit(lambda x: double(x) + 1)
    with partjit.Mesh(jax.devices()[:1], "one"):
        with colocated.journal(tmp_path, results=True):
            recorded = [program(i * one) for i in range(3)]
        with partjit.replay(tmp_path):
            assert [program(i * one) for i in range(3)] == recorded == [1, 3, 5]


@pytest.mark.parametrize("keeps", [False, True])
def test_a_transfer_guard_does_not_see_what_the_journal_reads(tmp_path, mesh, keeps):
    same = colocated_python(lambda x: x, out_specs_fn=lambda x: x)
    program = pjit(lambda x: same(x) * x)
    x = jax.device_put(np.arange(8.0), jax.NamedSharding(mesh, P("x")))
    with colocated.journal(tmp_path, results=keeps) as journal:
        with jax.transfer_guard("disallow"):
            results = same(x), program(x)
            colocated.wait()
            journal.commit({"results": results})
        np.testing.assert_array_equal(results[1], np.arange(8.0) ** 2)


def test_a_call_in_the_place_of_another_names_both(tmp_path):
    f = colocated_python(lambda x: x, mode="inline")
    with colocated.journal(tmp_path, results=True):
        f(jnp.zeros(2))
    with partjit.replay(tmp_path), pytest.raises(JournalError) as caught:
        f(jnp.zeros(3, jnp.int32))
    assert "recorded: <lambda>(float32[2]), outside of programs" in str(caught.value)
    assert "here:     <lambda>(int32[3]), outside of programs" in str(caught.value)


def test_a_call_that_is_not_recorded_names_what_is(tmp_path):
    f, g = colocated_python(lambda x: x, mode="inline"), colocated_python(abs, mode="inline")
    with colocated.journal(tmp_path, results=True):
        f(one)
    with partjit.replay(tmp_path), pytest.raises(JournalError) as caught:
        g(one)
    assert "the journal has no call abs:0: abs(float32[]), outside of programs is called here" in str(caught.value)
    assert "<lambda>(float32[]), outside of programs, number 0" in str(caught.value)


def test_a_call_after_the_last_recorded_one_is_an_error_that_says_so(tmp_path):
    f = colocated_python(lambda x: x, mode="inline")
    with colocated.journal(tmp_path, results=True):
        f(one)
    with partjit.replay(tmp_path), pytest.raises(JournalError) as caught:
        f(one), f(one)
    assert str(caught.value) == (
        "the journal has no call <lambda>:1: <lambda>(float32[]), outside of programs\n"
        "There it has nothing that is not played yet"
    )


def test_a_replay_of_what_is_no_journal_says_so(tmp_path):
    with colocated.journal(tmp_path / "journal", results=True):
        pass
    (tmp_path / "file").write_text("")
    for path, message in (
        (tmp_path, "there is no journal in "),
        (tmp_path / "file", "there is no journal in "),
        ("a" * 100_000, r"aaa\.\.\.a.*/manifest\.json', the manifest of a journal, cannot be read: File name too long"),
    ):
        with pytest.raises(JournalError, match=message) as caught:
            partjit.replay(path)
        assert len(str(caught.value)) < 500
    assert partjit.replay(tmp_path / "journal", process=0).calls == ()
    with pytest.raises(ValueError, match=r"process must be the number of a process that wrote .*, of 0 to 0, but is 1"):
        partjit.replay(tmp_path / "journal", process=1)


def test_a_call_that_had_raised_is_made_again_but_not_played(tmp_path):
    f = colocated_python(_failing, mode="inline")
    for _ in range(2):
        with colocated.journal(tmp_path, results=True), pytest.raises(LookupError):
            f(one)
    assert len(seen) == 2
    with partjit.replay(tmp_path) as replayed, pytest.raises(JournalError, match="raised LookupError: no such batch"):
        f(one)
    assert [call.error for call in replayed.calls] == ["LookupError: no such batch"]


def test_what_follows_a_failure_is_made_again_with_it(tmp_path):
    # The call fails the first time only, and then nothing is left of how the program went on after it.
    program = colocated_python(_fails_at_zero, mode="inline")
    with colocated.journal(tmp_path, results=True):
        with pytest.raises(LookupError):
            program(jnp.float32(0))
        assert float(program(jnp.float32(5))) == 5.0
    with colocated.journal(tmp_path, results=True) as journal:
        assert float(program(jnp.float32(1))) == 1.0
        assert float(program(jnp.float32(7))) == 7.0
        assert [call.path for call in journal.calls] == ["_fails_at_zero:0", "_fails_at_zero:1"]


def _fails_at_zero(x):
    if x == 0:
        raise LookupError("no such batch")
    return x


def test_before_the_first_commit_objects_go_back_to_what_they_were(tmp_path):
    with colocated.journal(tmp_path, objects={"position": _Position(3)}) as journal:
        assert journal.commits == 0
    position = _Position(8)
    with colocated.journal(tmp_path, objects={"position": position}) as journal:
        assert (position.value, journal.commits, journal.restore("initial")) == (3, 0, "initial")


class _Position:
    def __init__(self, value):
        self.value = value

    def save(self):
        return self.value

    def restore(self, value):
        self.value = value


@pytest.mark.parametrize("names", [{}, {"place"}], ids=["no object", "another name"])
def test_the_state_of_an_object_that_is_not_named_after_a_restart_is_not_lost(tmp_path, names):
    with colocated.journal(tmp_path, objects={"position": _Position(3)}) as journal:
        journal.commit(1)
    with colocated.journal(tmp_path, objects={name: _Position(0) for name in names}) as journal:
        with pytest.raises(JournalError, match="the journal has the state of an object named 'position', and"):
            journal.commit(2)
        assert journal.restore(0) == 1
        journal.register("position", position := _Position(0))
        journal.commit(2)
    assert position.value == 3
    objects = {name: _Position(0) for name in {"position", "more", *names}}
    with colocated.journal(tmp_path, objects=objects) as journal:
        assert (objects["position"].value, journal.restore(0)) == (3, 2)
        journal.commit(3)  # there may be more objects


def _failing(x):
    seen.append(("fail", ""))
    raise LookupError("no such batch")


def test_an_object_with_a_state_has_to_be_named(tmp_path):
    loader = colocated_python_class(Loader, state=("save", "restore"))()
    with (
        colocated.journal(tmp_path),
        pytest.raises(JournalError, match=r"Loader\.shown is a method of an object"),
    ):
        loader.shown.specialize(mode="inline")(one)


def test_an_object_without_a_state_cannot_be_named(tmp_path):
    loader = colocated_python_class(Loader)()
    with pytest.raises(ValueError, match=r"objects\['loader'\] is a Loader without a state to be committed"):
        colocated.journal(tmp_path, objects={"loader": loader}).__enter__()
    with pytest.raises(TypeError, match=r"objects\['x'\] must be a colocated object of a class with a state, or an ob"):
        colocated.journal(tmp_path, objects={"x": 3}).__enter__()
    with colocated.journal(tmp_path):  # what was opened in vain is closed
        pass


def test_nothing_is_committed_where_a_call_has_failed(tmp_path):
    f = colocated_python(_failing, out_specs_fn=lambda x: None)
    with colocated.journal(tmp_path) as journal:
        journal.commit({"step": 1})
        f(one)
        with pytest.raises(LookupError):
            journal.commit({"step": 2})
        assert journal.commits == 1
        assert journal.restore({"step": 0}) == {"step": 1}
        journal.commit({"step": 3})
    with colocated.journal(tmp_path) as journal:
        assert journal.restore({"step": 0}) == {"step": 3}


def _across(x):
    rendezvous.logs["made"].append(float(x))
    if x == 1:
        rendezvous.say("it runs")
        rendezvous.hear("it is committed")
    return x + 1


_twice = colocated_python(_across, out_specs_fn=lambda x: x)


class Calling:
    """Its state is saved while another thread begins to make calls."""

    def __init__(self, function):
        self.thread = threading.Thread(target=lambda: rendezvous.logs["there"].append(float(function(one))))

    def save(self):
        if not self.thread.is_alive():
            self.thread.start()
            rendezvous.hear("it runs")

    def restore(self, state):
        pass


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("function", [lambda x: _twice(_twice(x)), pjit(lambda x: _twice(_twice(x)))])
def test_what_another_thread_began_before_a_commit_is_no_part_of_what_follows(tmp_path, function, keeps):
    calling = Calling(function)
    with colocated.journal(tmp_path, results=keeps) as journal:
        function(np.float32(7)).block_until_ready()
        journal.register("calling", calling)
        journal.commit({"step": 1})
        rendezvous.say("it is committed")
        calling.thread.join()
        assert rendezvous.logs["there"] == [3]
        assert not journal.calls
        assert function(np.float32(5)) == 7
        assert [call.iteration + call.execution for call in journal.calls] in ([0, 0], [0, 1])
    rendezvous.logs["made"].clear()
    with colocated.journal(tmp_path, results=keeps) as journal:
        assert journal.restore({"step": 0}) == {"step": 1}
        assert function(np.float32(5)) == 7
    assert rendezvous.logs["made"] == ([] if keeps else [5, 6])


def test_executions_on_named_streams_are_told_apart_whichever_is_first(tmp_path):
    program = pjit(lambda x: _twice(x))
    with colocated.journal(tmp_path, results=True):
        for name, x in [("a", 2), ("b", 3)]:
            with colocated.stream(name):
                assert program(np.float32(x)) == x + 1
    with partjit.replay(tmp_path):
        for name, x in [("b", 3), ("a", 2)]:
            with colocated.stream(name):
                assert program(np.float32(x)) == x + 1


_raised, _waited = threading.Event(), list[bool]()


def _wait(x):
    _waited.append(_raised.wait(20))


def test_a_block_that_ends_by_the_end_of_a_process_does_not_wait_for_calls_that_wait_for_its_devices(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(Group, "gone", lambda self: "process 1: it has ended")
    waits = colocated_python(_wait, out_specs_fn=lambda x: None, stream="waits")

    def ends_by_it():
        with colocated.journal(tmp_path):
            waits(np.float32(1))
            raise partjit.OtherProcessError("process 1: it has ended")

    with pytest.raises(partjit.OtherProcessError, match="it has ended"):
        ends_by_it()
    _raised.set()
    with pytest.raises(OSError, match="no call can be recorded any more"):  # so it counts as not made
        colocated.wait()
    assert _waited == [True]


def test_a_commit_inside_of_a_call_is_refused(tmp_path):
    with colocated.journal(tmp_path), pytest.raises(JournalError, match="inside of a program or call"):
        colocated_python(_committing, mode="inline")(one)


def _committing(x):
    colocated.journal("/nowhere").commit()


@pytest.mark.parametrize("name", ["state-0", "objects-0"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_commit_is_refused(tmp_path, name, damage):
    with colocated.journal(tmp_path) as journal:
        journal.commit({"x": jnp.arange(4.0)})
    (file,) = tmp_path.glob(f"0*/{name}")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(content if damage == "flip" else content[:-1])
    refused = pytest.raises(JournalError, match=f"{name}, a file of a commit, (is damaged|cannot be read)")
    with refused, colocated.journal(tmp_path) as journal:
        journal.restore({"x": jnp.zeros(4)})


def test_states_come_back_on_another_mesh(tmp_path, mesh):
    other = partjit.Mesh(np.array(jax.devices())[:4], "z")
    values = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    shardings = [P("x", "y"), P(None, ("x", "y")), P()]
    with jax.enable_x64(True):  # here, and not where it is restored
        wide = [jnp.int64(2**40), jax.device_put(np.arange(8.0) / 3, jax.NamedSharding(mesh, P("x")))]
    state = {
        "sharded": [jax.device_put(values + i, jax.NamedSharding(mesh, spec)) for i, spec in enumerate(shardings)],
        "half": jnp.arange(3, dtype=jnp.bfloat16),
        "keys": jax.random.split(jax.random.key(3), 2),
        "numpy": np.arange(3),
        "empty": jnp.zeros((0, 2)),
        "numbers": (1, 2.5, True, np.int64(2**40), np.float32(0.1)),
        "weak": [jnp.asarray(2.0), jax.device_put(1j, jax.NamedSharding(mesh, P()))],
        "wide": wide,
    }
    with colocated.journal(tmp_path) as journal:
        journal.commit(state)
    like = {
        **state,
        "sharded": [jax.ShapeDtypeStruct((8, 8), np.float32, sharding=jax.NamedSharding(other, P("z")))] * 3,
    }
    with colocated.journal(tmp_path) as journal:
        found = journal.restore(like)
        with pytest.raises(JournalError, match=r"\['half'\] is bfloat16\[3\] in the journal, and float32\[4\] here"):
            journal.restore({**like, "half": jnp.zeros(4)})
        with pytest.raises(JournalError, match=r"\['more'\] is not in the journal"):
            journal.restore({**like, "more": 1})
    assert all(array.sharding.mesh == other for array in found["sharded"])
    flat, tree = jax.tree.flatten(found)
    assert tree == jax.tree.structure(state)
    for one_of_them, expected in zip(flat, jax.tree.leaves(state), strict=True):
        if jax.dtypes.issubdtype(getattr(expected, "dtype", None), jax.dtypes.prng_key):
            one_of_them, expected = map(jax.random.key_data, (one_of_them, expected))
        np.testing.assert_array_equal(one_of_them, expected)
        assert type(one_of_them) is type(expected)
        assert not isinstance(expected, jax.Array) or one_of_them.weak_type == expected.weak_type


def test_keys_come_back_as_those_that_were_committed(tmp_path):
    kinds = {impl: jax.random.key(3, impl=impl) for impl in ("rbg", "unsafe_rbg")}
    kinds["data"] = jax.random.key_data(kinds["rbg"])  # of the same type as the data of all of these
    for name, committed in kinds.items():
        with colocated.journal(tmp_path / name) as journal:
            journal.commit({"key": committed})
            for other, like in kinds.items():
                if other == name:
                    assert journal.restore({"key": like})["key"].dtype == committed.dtype
                    continue
                with pytest.raises(JournalError, match=rf"\['key'\] is {committed.dtype} in .*, and {like.dtype} here"):
                    journal.restore({"key": like})


INTEGERS = [0, *(sign * 2**bits + more for sign in (-1, 1) for bits in (7, 63, 64, 100) for more in (-1, 0, 1))]


def test_integers_of_any_size_come_back_whatever_stands_for_them(tmp_path):
    with colocated.journal(tmp_path) as journal:
        journal.commit(INTEGERS)
    with colocated.journal(tmp_path) as journal:
        for like in (INTEGERS, INTEGERS[::-1]):
            assert journal.restore(like) == INTEGERS
        with pytest.raises(JournalError, match=r"\[1\] is int64\[\] in the journal, and bool\[\] here"):
            journal.restore([0, True, *INTEGERS[2:]])


@pytest.mark.parametrize(
    "leaf", ["run 7", b"run 7", jnp.sin, np.array(["run 7", None])], ids=lambda x: type(x).__name__
)
def test_what_is_neither_an_array_nor_a_number_is_refused_by_its_path(tmp_path, leaf):
    refused = pytest.raises(
        TypeError, match=r"^Journal\.commit: state\['a'\]\[1\] is .*, which is neither an array nor a num"
    )
    with colocated.journal(tmp_path) as journal, refused:
        journal.commit({"a": [1, leaf]})


class Key:
    """A key of a dict with no text of its own."""

    def __init__(self, position):
        self.position = position

    def __lt__(self, other):
        return self.position < other.position

    def __repr__(self):
        return "key"


def test_leaves_of_one_path_are_refused(tmp_path):
    with (
        colocated.journal(tmp_path) as journal,
        pytest.raises(ValueError, match=r"two leaves of the state have the path state\['a'\]\[key\]"),
    ):
        journal.commit({"a": {Key(1): 1, Key(2): 2}})


def test_idempotency_keys_stay_and_differ(tmp_path):
    keys = _keys_of_a_run(tmp_path, results=False)
    assert len({*keys}) == len(keys) == 6
    assert _keys_of_a_run(tmp_path, results=False) == keys
    shutil.rmtree(tmp_path)
    assert {*_keys_of_a_run(tmp_path, results=False)}.isdisjoint(keys)
    with pytest.raises(RuntimeError, match="where no colocated call runs that a journal records"):
        colocated.idempotency_key()


def _keys_of_a_run(path, **options):
    seen.clear()
    program = partjit.pjit(lambda x: jax.lax.scan(lambda c, _: (_paying(c), None), x, None, length=2)[0])
    with colocated.journal(path, **options):
        for _ in range(2):
            program(one)
            _paying(one)
    return [key for _, key in seen]


def _pay(x):
    seen.append(("pay", colocated.idempotency_key()))
    return x


_paying = colocated_python(_pay, out_specs_fn=lambda x: x, mode="inline")


def test_examples_of_a_batch_have_keys_of_their_own(tmp_path):
    """Though the batch is one call, which is recorded when all of its examples are."""
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    batched = jax.vmap(jax.vmap(_paying))
    keys = []
    for run in (batched, partjit.pjit(batched)):
        for _ in range(2):
            seen.clear()
            with colocated.journal(tmp_path, results=True):
                np.testing.assert_array_equal(run(x), x)
            keys.append([key for _, key in seen])
            with partjit.replay(tmp_path) as replayed:
                np.testing.assert_array_equal(run(x), x)
                assert len(replayed.calls) == 1
        shutil.rmtree(tmp_path)
    assert [[key.split("/")[-2:] for key in of_run] for of_run in (keys[0], keys[2])] == [
        [[f"example-{i}", f"example-{j}"] for i in range(2) for j in range(3)]
    ] * 2
    assert keys[1] == keys[3] == [], "what the record has is not made again"


def test_a_call_that_runs_ahead_has_no_key(tmp_path):
    spec = jax.ShapeDtypeStruct((), jnp.float32)
    ahead = colocated_python(_key_ahead, out_specs=spec, run_ahead=1, devices=jax.devices())
    with colocated.journal(tmp_path):
        assert float(ahead()) == 1.0
        ahead.discard_ahead()


def _key_ahead():
    with pytest.raises(RuntimeError, match="which execution will take it is not known yet"):
        colocated.idempotency_key()
    return np.float32(1)
