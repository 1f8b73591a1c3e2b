"""What the partitioner complains about: caught while compiling and read, and a way that it does not complain about."""

import itertools
import math
import os
import signal
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding

import partjit
from partjit import P, pjit, with_sharding_constraint
from partjit.inspect import explain
from partjit.inspect.hlo import captured_stderr
from partjit.inspect.hlo.captured_stderr import take_lines
from partjit.inspect.hlo.rematerialization import catch_rematerializations, parse_rematerialization, with_sites
from partjit.inspect.hlo.resharding import resharding_path
from tests.census import saw, sees

SHAPE = (16, 8)


def mesh_of(shape):
    return partjit.Mesh(np.array(jax.devices()).reshape(shape), tuple("abc"[: len(shape)]))


def compiled(mesh, *specs, shape=SHAPE):
    """A program that takes an array from spec to spec."""

    def fun(x):
        x = jnp.sin(x)
        for k, spec in enumerate(specs):
            with jax.named_scope(f"eqn:{k}"):
                x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
        return x * 2

    return jax.jit(fun).lower(jax.ShapeDtypeStruct(shape, "float32")).compile()


# What XLA warns of, on both versions of jax.
HARD = [
    ((2, 4), P(("b", "a"), None), P(None, "b")),
    ((2, 4), P(None, ("b", "a")), P("a", None)),
    ((2, 4), P(None, "a"), P("b", None)),
    ((2, 2, 2), P(None, ("a", "c", "b")), P("c", "b")),
    ((2, 2, 2), P(("b", "a"), None), P(None, "c")),
    ((2, 2, 2), P(None, ("a", "c")), P("b", None)),
]


@pytest.mark.parametrize(("shape", "source", "target"), HARD)
def test_what_xla_warns_of_is_caught_and_the_way_around_it_is_none_of_it(shape, source, target, capfd):
    mesh = mesh_of(shape)
    with catch_rematerializations(mesh) as found:
        program = compiled(mesh, source, target)
    (one,) = with_sites(found, program.as_text())
    assert one.source_spec.partition_spec == source
    assert one.target_spec.partition_spec == target
    assert one.total_bytes == math.prod(SHAPE) * 4
    assert one.tags == (0,)
    line = compiled.__code__.co_firstlineno + 7
    assert one.site == (__file__, line, "fun")
    assert "rematerialization" not in capfd.readouterr().err
    assert one.between
    with catch_rematerializations(mesh) as again:
        compiled(mesh, source, *one.between, target)
    assert again == []


def test_it_says_what_happens_and_what_to_do():
    mesh = mesh_of((2, 4))
    with catch_rematerializations(mesh) as found:
        compiled(mesh, P(("b", "a"), None), P(None, "b"))
    assert found[0].suggestion == (
        "sharding_constraint.0 is replicated in full on every device (512 bytes) to be resharded from P(('b', 'a'), "
        "None) to P(None, 'b'). Constrain it to P('b', None) in between: no shard is then larger than before or after."
    )


def test_what_compiles_without_a_warning_gives_none():
    mesh = mesh_of((2, 4))
    with catch_rematerializations(mesh) as found:
        compiled(mesh, P("a", "b"), P("a", None))
    assert found == []


def test_each_warning_is_told_once():
    mesh = mesh_of((2, 4))
    with catch_rematerializations(mesh) as found:
        compiled(mesh, P(("b", "a"), None), P(None, "b"))
        compiled(mesh, P(("b", "a"), None), P(None, "b"))
        compiled(mesh, P(("b", "a"), None), P(None, "b"), shape=(32, 8))
    assert [one.shape for one in found] == ["f32[2,8]", "f32[4,8]"]


# What XLA says, as jax 0.12 and 0.10 have it.
LINE = (
    "W1121 17:59:05.710071    5865 spmd_partitioner.cc:666] [SPMD] Involuntary full rematerialization. The compiler "
    "cannot go from sharding {source} to {target} efficiently for HLO operation %copy.1 = bf16[2,8]{{1,0}} copy(%sin), "
    'sharding={source}, metadata={{op_name="jit(f)/eqn:3/jvp(eqn:12)/copy" {where}}}. As the last resort, SPMD will '
    "replicate the tensor and then partition it to obtain the target sharding, which is inefficient. This issue will "
    "be fixed by Shardy partitioner in the future, which is tracked in b/433785288. Contact Shardy or XLA team for "
    "help."
)
MESH = AbstractMesh((2, 4), ("a", "b"))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("{mesh['a'=2,'b'=4], [{'b', 'a'}, {}]}", "{mesh['a'=2,'b'=4], [{}, {'b'}]}"),
        ("{devices=[8,1]<=[2,4]T(1,0)}", "{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}"),
    ],
)
def test_both_forms_of_shardings_are_read(source, target):
    one = parse_rematerialization(LINE.format(source=source, target=target, where="stack_frame_id=3"), MESH)
    assert (one.name, one.shape, one.source, one.target) == ("copy.1", "bf16[2,8]", source, target)
    assert (str(one.source_spec), str(one.target_spec)) == ("P(('b', 'a'), None)", "P(None, 'b')")
    assert (one.op_name, one.tags, one.frame_id, one.site) == ("jit(f)/eqn:3/jvp(eqn:12)/copy", (3, 12), 3, None)
    assert one.total_bytes == 2 * 8 * 2 * 8
    assert one.between == (P("b", None),)
    assert one.message.startswith("Involuntary full rematerialization. The compiler cannot go from")


def test_what_no_spec_says_is_shown_as_it_is():
    where = 'source_file="a.py" source_line=7'
    line = LINE.format(source="{maximal device=0}", target="{devices=[8,1]<=[8]}", where=where)
    one = parse_rematerialization(line, MESH)
    assert (one.source_spec, one.total_bytes, one.between, one.site) == (None, None, (), ("a.py", 7, ""))
    assert one.suggestion == (
        "copy.1 is replicated in full on every device to be resharded from {maximal device=0} to P(('a', 'b'), None). "
        "Use one sharding before and after, or keep axes on the dimensions they shard."
    )
    assert with_sites([one], "HloModule f") == [one]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "W1121 17:59:05.710071    5865 spmd_partitioner.cc:666] something else",
        "Involuntary full rematerialization. It is said in other words.",
        LINE.replace("%copy.1 = ", "").format(source="{replicated}", target="{replicated}", where=""),
    ],
)
def test_what_is_not_understood_is_none(line):
    assert parse_rematerialization(line, MESH) is None


# The way from one sharding to another

sizes = {"a": 2, "b": 4, "c": 3}


@st.composite
def shardings(draw, rank):
    axes = draw(st.permutations(sorted(sizes)))[: draw(st.integers(0, 3))]
    dims = [[] for _ in range(rank)]
    for axis in axes:
        dims[draw(st.integers(0, rank - 1))].append(axis)
    return tuple(map(tuple, dims))


def holds(dims):
    return 1 / math.prod(sizes[axis] for axes in dims for axis in axes)


def is_one_step(before, after):
    """Cuts only, gathers only, one axis handed over, or one dimension renumbered: said without a search."""
    if all(b[: len(a)] == a for a, b in zip(before, after, strict=True)):
        return True
    if all(a[: len(b)] == b for a, b in zip(before, after, strict=True)):
        return True
    changed = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    if len(changed) == 1:
        return sorted(changed[0][0]) == sorted(changed[0][1])
    if len(changed) != 2:
        return False
    return any(a and (a[:-1], (*c, a[-1])) == (b, d) for (a, b), (c, d) in (changed, changed[::-1]))


def dims_of(spec, rank):
    entries = [*spec, *[None] * (rank - len(spec))]
    return tuple(() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in entries)


@sees("a way of several steps")
@given(st.data())
def test_each_step_of_a_way_is_one_and_no_device_holds_more_than_at_an_end(data):
    rank = data.draw(st.integers(1, 3))
    source, target = data.draw(shardings(rank)), data.draw(shardings(rank))
    way = [dims_of(spec, rank) for spec in resharding_path(source, target, sizes)]
    assert source not in way
    assert target not in way
    steps = [source, *way, target]
    if way:
        saw("a way of several steps")
        assert all(is_one_step(before, after) for before, after in itertools.pairwise(steps))
        assert all(holds(dims) <= max(holds(source), holds(target)) for dims in way)


@sees("one step")
@given(st.data())
def test_what_is_one_step_has_nothing_in_between(data):
    rank = data.draw(st.integers(1, 3))
    source, target = data.draw(shardings(rank)), data.draw(shardings(rank))
    if is_one_step(source, target):
        saw("one step")
        assert resharding_path(source, target, sizes) == ()


def test_specs_of_different_lengths_are_of_one_rank():
    assert resharding_path([], [("a",)], sizes) == ()
    assert resharding_path([("a",)], [(), ("b",)], sizes) == (P("a", "b"),)


# What else is written to the standard error


@sees("different examples", "several elements")
@given(st.lists(st.tuples(st.text(st.characters(codec="utf-8", exclude_characters="\r\n")), st.booleans())))
def test_what_is_taken_and_what_is_written_on_is_everything(lines):
    # One stream for all examples: what comes out of the inner block goes into the outer one.
    outer, taken = [], []
    wanted = iter([flag for _, flag in lines])

    def take(line):
        keep = next(wanted)
        if keep:
            taken.append(line)
        return keep

    with take_lines(lambda line: outer.append(line) is None), take_lines(take):
        for text, _ in lines:
            os.write(2, f"{text}\n".encode())
    # Lines end where bytes say so: at a line feed, nowhere else.
    assert taken == [text for text, flag in lines if flag]
    assert outer == [text for text, flag in lines if not flag]


def test_nothing_is_lost_if_the_block_raises(capfd):
    def block():
        with take_lines(lambda line: line == "ours"):
            os.write(2, b"before\nours\nwithout an end")
            raise KeyError

    with pytest.raises(KeyError):
        block()
    assert capfd.readouterr().err == "before\nwithout an end"
    os.write(2, b"after")
    assert capfd.readouterr().err == "after"


def test_what_python_writes_stays_in_order(capfd):
    def say(text):
        print(text, file=sys.stderr)

    say("first")
    with take_lines(lambda line: line == "ours"):
        say("second")
        os.write(2, b"ours\n")
        say("third")
    say("fourth")
    assert capfd.readouterr().err.split() == ["first", "second", "third", "fourth"]


def test_what_fails_to_be_read_does_not_keep_the_stream(capfd):
    def take(line):
        raise RuntimeError(line)

    with pytest.raises(RuntimeError, match="one"), take_lines(take):
        os.write(2, b"one\n")
    os.write(2, b"after")
    assert capfd.readouterr().err == "one\nafter"


DIES = """
import os, runpy, sys
take_lines = runpy.run_path(sys.argv[1])["take_lines"]  # alone: importing partjit takes longer than the rest
with take_lines(lambda line: True):
    os.write(2, b"taken\\n")
with take_lines(lambda line: True):
    os.write(2, b"outer\\n")
    with take_lines(lambda line: True):
        os.write(2, b"F0000 00:00:00.1 a.cc:1] Check failed: size == 8\\n")
        os.abort()
"""


def test_what_is_written_last_is_shown_if_the_process_dies(tmp_path):
    command = [sys.executable, "-c", DIES, captured_stderr.__file__]
    done = subprocess.run(command, env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGABRT
    assert sorted(done.stderr.splitlines()) == [b"F0000 00:00:00.1 a.cc:1] Check failed: size == 8", b"outer"]
    assert not [*tmp_path.iterdir()]


def test_one_block_at_a_time():
    inside, most = 0, 0
    lock = threading.Lock()

    def block(number):
        nonlocal inside, most
        lines = []
        for _ in range(5):
            with take_lines(lambda line: lines.append(line) is None):
                with lock:
                    inside, most = inside + 1, max(most, inside + 1)
                os.write(2, f"{number}\n".encode())
                with lock:
                    inside -= 1
        assert lines == [str(number)] * 5

    failures = []

    def run(number):
        try:
            block(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert most == 1


IN_A_PROCESS = """
import os, sys
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 8)
from jax.sharding import NamedSharding
from partjit import Mesh, P
from partjit.inspect.hlo.rematerialization import catch_rematerializations
if "close" in sys.argv:
    os.close(2)
if "none" in sys.argv:
    sys.stderr = None
mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
def fun(a):
    a = jax.lax.with_sharding_constraint(jax.numpy.sin(a), NamedSharding(mesh, P(("y", "x"))))
    return jax.lax.with_sharding_constraint(a, NamedSharding(mesh, P(None, "y"))) * 2
a = jax.ShapeDtypeStruct((16, 8), "float32")
lowered, other = jax.jit(fun).lower(a), jax.jit(lambda a: fun(a) + 1).lower(a)
if len(sys.argv) == 1:
    sys.stderr = open(2, "w", closefd=False)  # which holds back what is written
    sys.stderr.write("held back until the line ends, ")
with catch_rematerializations(mesh) as found:
    lowered.compile()
    os.write(2, b"W0101 00:00:00.1 a.cc:1] a warning\\nE0101 00:00:00.1 a.cc:1] an error\\nplain\\n")
print(len(found), flush=True)
if "close" in sys.argv:
    try:
        os.write(2, b"x")
    except OSError:
        print("closed")
else:
    other.compile()
"""


def in_a_process(*arguments, level=None):
    environment = {**os.environ, "NPROC": "32"}
    environment.pop("TF_CPP_MIN_LOG_LEVEL", None)
    if level is not None:
        environment["TF_CPP_MIN_LOG_LEVEL"] = level
    command = [sys.executable, "-c", IN_A_PROCESS, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), done.stderr


def test_warnings_that_are_turned_off_are_caught_and_stay_off():
    out, err = in_a_process(level="2")
    assert out == ["1"]
    first, second = err.splitlines()
    assert first == "held back until the line ends, E0101 00:00:00.1 a.cc:1] an error"
    assert second == "plain"


def test_warnings_that_are_on_stay_on():
    out, err = in_a_process("none")
    assert out == ["1"]
    first, second, third, *others = err.splitlines()
    assert [first, second, third] == [
        "W0101 00:00:00.1 a.cc:1] a warning",
        "E0101 00:00:00.1 a.cc:1] an error",
        "plain",
    ]
    # That of the compilation after the block.
    assert sum("Involuntary full rematerialization" in line for line in others) == 1


def test_it_works_where_there_is_no_standard_error():
    out, _ = in_a_process("close")
    assert out == ["1", "closed"]


@pytest.mark.parametrize("of", ["an argument", "a result"])
def test_a_finding_has_a_line_also_where_xla_names_none(of):
    mesh = mesh_of((2, 4))
    hard, easy = P(("b", "a")), P(None, "b")

    def reads(x):
        return with_sharding_constraint(x, easy) * 2  # reads

    def makes(x):
        return with_sharding_constraint(jnp.sin(x), hard)  # makes

    made = pjit(reads, in_shardings=hard) if of == "an argument" else pjit(makes, P("a"), out_shardings=easy)
    report = explain(made, jax.ShapeDtypeStruct(SHAPE, "float32"), mesh=mesh, compiled=True)
    (finding,) = (found for found in report.findings if found.kind == "rematerialization")
    fun = reads if of == "an argument" else makes
    assert finding.site == (__file__, fun.__code__.co_firstlineno + 1, fun.__name__)
    assert finding.text.startswith("x is replicated" if of == "an argument" else "result is replicated")
    assert str(report.why(finding.value)).startswith(f"{finding.value}:f32[16,8] P(('b', 'a'), None)")
