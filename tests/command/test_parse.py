"""The command line: what it prints, how it points at mistakes, and that it needs no devices."""

import json
import os
import shlex
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh

import partjit
from partjit import P
from partjit.command import main
from partjit.command.mistakes import Mistake, mesh_of, shape_of
from partjit.command.spec_text import spec_of
from partjit.opsharding.text import from_text
from partjit.opsharding.tiling import MalformedShardingError
from partjit.opsharding.wire import from_proto
from partjit.testing import strategies
from tests.census import sees

MESH = ["--mesh", "data=4,model=2"]
COPIES = "{devices=[4,1,2]<=[8] last_tile_dim_replicate}"


@pytest.fixture
def run(capsys):
    """Runs a command line: the exit code, what it printed, and what it complained of."""

    def run_(*arguments):
        code = main([*arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run_


# What it says


def test_parse_says_the_spec_and_the_tiles(run):
    code, out, err = run("parse", COPIES, *MESH)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "P('data', None)",
        "",
        "sharding  {devices=[4,1,2]<=[8] last_tile_dim_replicate}",
        "mesh      data=4, model=2: 8 devices",
        "dim 0     4 tiles over data=4",
        "dim 1     unsharded",
        "copies    2 of each tile, over model=2",
    ]


def test_parse_with_a_shape_shows_the_picture(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run("parse", COPIES, *MESH, "--shape", "16,32")
    assert code == 0
    assert "[16,32] as P('data', None) on (data=4, model=2)" in out
    assert "12:16 │ 6,7  │" in out


def test_parse_gives_the_sharding_of_a_spec(run):
    code, out, _ = run("parse", "P(('model', 'data'), None)", *MESH)
    assert code == 0
    assert "sharding  {devices=[8,1]<=[4,2]T(1,0)}" in out


def test_parse_reads_each_element_of_a_tuple(run):
    text = "{{replicated}, {devices=[2,4]<=[4,2]T(1,0)}, {{devices=[8]<=[8]}}}"
    code, out, _ = run("parse", text, *MESH)
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("P(")] == [
        "P()",
        "P('model', 'data')",
        "P(('data', 'model'))",
    ]


def test_a_mesh_of_many_devices_needs_none(run):
    code, out, _ = run("parse", "P('a', 'b')", "--mesh", "a=32,b=16", "--shape", "64,64", "--json")
    assert code == 0
    (value,) = json.loads(out)["values"]
    assert len(value["pieces"]) == 512
    assert value["pieces"][17] == {"index": [[2, 4], [4, 8]], "devices": [17]}


def test_json_has_everything(run):
    code, out, err = run("parse", COPIES, *MESH, "--shape", "8,3", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "mesh": {"data": 4, "model": 2},
        "values": [
            {
                "spec": "P('data', None)",
                "partitions": [["data"], []],
                "sharding": COPIES,
                "tiles": [4, 1],
                "copies": 2,
                "shape": [8, 3],
                "pieces": [{"index": [[2 * k, 2 * k + 2], [0, 3]], "devices": [2 * k, 2 * k + 1]} for k in range(4)],
            }
        ],
    }
    _, out, _ = run("parse", COPIES, *MESH, "--json")
    (value,) = json.loads(out)["values"]
    assert value["shape"] is value["pieces"] is None


@sees("an axis name", "two axes in one dimension")
@given(st.data())
def test_a_sharding_and_its_spec_say_the_same(data):
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    mesh = AbstractMesh(tuple(sizes), tuple("xyz"[: len(sizes)]))
    spec = data.draw(strategies.partition_specs(mesh=mesh, ndim=3)) or P()
    text = str(from_proto(partjit.to_op_sharding(spec, mesh, 3)))
    read = partjit.parse_op_sharding(text, mesh)
    # As it is read back, axes of size 1 are not in it.
    shown = f"P({', '.join(map(repr, read.partition_spec))})"
    assert spec_of(shown, mesh.shape) == read.partition_spec
    assert str(from_proto(partjit.to_op_sharding(spec_of(shown, mesh.shape), mesh, 3))) == text


# What is not well written


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["P('data', 'modle')", *MESH],
            (
                "'modle' is no axis of the mesh (data=4, model=2); did you mean 'model'?\n"
                "  SHARDING P('data', 'modle')\n"
                "                     ^^^^^^^"
            ),
        ),
        (
            ["P('data', ('model', 'data'))", *MESH],
            (
                "the axis 'data' is used twice, and it can shard only one dimension\n"
                "  SHARDING P('data', ('model', 'data'))\n"
                "                               ^^^^^^"
            ),
        ),
        (
            ["  P('data', 3)", *MESH],
            (
                "a spec is written as P('data', None, ('x', 'y')): an axis, several, or None for each dimension\n"
                "  SHARDING   P('data', 3)\n"
                "                       ^"
            ),
        ),
        (
            ["Q('data')", *MESH],
            (
                "a spec is written as P('data', None, ('x', 'y')): an axis, several, or None for each dimension\n"
                "  SHARDING Q('data')\n"
                "           ^"
            ),
        ),
        (
            ["P('data' 'model'", *MESH],
            (
                "a spec is written as P('data', None, ('x', 'y')): an axis, several, or None for each dimension\n"
                "  SHARDING P('data' 'model'\n"
                "            ^"
            ),
        ),
        (
            ["{devices=[4,2]<=[8}", *MESH],
            (
                "this is no sharding: here should be a closing bracket ]\n"
                "  SHARDING {devices=[4,2]<=[8}\n"
                "                             ^"
            ),
        ),
        (
            ["{devises=[8]}", *MESH],
            (
                "this is no sharding: here should be devices=[...], replicated, maximal, manual, unknown or unreduced\n"
                "  SHARDING {devises=[8]}\n"
                "            ^"
            ),
        ),
        (
            ["{devices=[4,2]<=[6]}", *MESH],
            (
                "this is no sharding: here should be sizes whose product is 8, the number of tiles\n"
                "  SHARDING {devices=[4,2]<=[6]}\n"
                "                            ^"
            ),
        ),
        (
            ["{{replicated}, {devices=[4,2]<=[4,2]T(1,1)}}", *MESH],
            (
                "this is no sharding: here should be each of the numbers from 0 to 1 once\n"
                "  SHARDING {{replicated}, {devices=[4,2]<=[4,2]T(1,1)}}\n"
                "                                                 ^^^"
            ),
        ),
        (
            ["{devices=[2,2]0,1,2}", *MESH],
            (
                "this is no sharding: here should be 4 devices, one for each tile\n"
                "  SHARDING {devices=[2,2]0,1,2}\n"
                "                         ^^^^^"
            ),
        ),
        (
            ["{devices=[0]<=[0]}", *MESH],
            (
                "this is no sharding: here should be numbers of at least 1\n"
                "  SHARDING {devices=[0]<=[0]}\n"
                "                     ^"
            ),
        ),
        (
            [COPIES, "--mesh", "data=4,model"],
            (
                "an axis of a mesh is written as its name and size: data=4,model=2\n"
                "  --mesh data=4,model\n"
                "                ^^^^^"
            ),
        ),
        (
            [COPIES, "--mesh", "data=4, model=two"],
            (
                "the size of the axis 'model' should be a number of devices, but is 'two'\n"
                "  --mesh data=4, model=two\n"
                "                       ^^^"
            ),
        ),
        (
            [COPIES, "--mesh", "data=4,data=2"],
            "the axis 'data' is used twice\n  --mesh data=4,data=2\n                ^^^^^^",
        ),
        (
            [COPIES, *MESH, "--shape", "(16, x)"],
            (
                "a shape is written as sizes with commas between: 16,32; 'x' is no size\n"
                "  --shape (16, x)\n"
                "               ^"
            ),
        ),
    ],
)
def test_a_caret_shows_what_is_not_well_written(run, arguments, message):
    code, out, err = run("parse", *arguments)
    assert (code, out) == (2, "")
    assert err == f"partjit parse: error: {message}\n"


@pytest.mark.parametrize(
    ("arguments", "message", "span"),
    [
        (["{devices=[2,2]<=[4]}", *MESH], "is for 4 devices, but the mesh (data=4, model=2) has 8", [10, 13]),
        (["{devices=[8,1]<=[2,2,2]T(0,2,1)}", *MESH], "shards dimension 0 over a factor of 2 of the axis 'data'", None),
        (["{maximal device=0}", *MESH], "the whole value is on one device of the mesh", None),
        (["P(P.UNCONSTRAINED)", *MESH], "UNCONSTRAINED leaves a dimension to the partitioner", [2, 17]),
        (["P('data', unreduced={'model'})", *MESH], "unreduced= says what no sharding of XLA's does", [10, 29]),
        ([COPIES, *MESH, "--shape", "8"], "the sharding is for rank 2, but the shape has 1 dimensions", [0, 1]),
        (["{{replicated}}", *MESH, "--shape", "8"], "the sharding is that of a tuple", None),
        (["P('x')", "--mesh", "x=999999", "--shape", "8"], "and 999999 are too many: leave it out", [0, 8]),
    ],
)
def test_what_cannot_be_done_is_told_as_text_and_as_json(run, arguments, message, span):
    code, out, err = run("parse", *arguments)
    assert (code, out) == (1, "")
    assert message in err
    code, out, _ = run("parse", *arguments, "--json")
    assert code == 1
    error = json.loads(out)["error"]
    assert message in error["message"]
    assert error["span"] == span
    assert {*error} == {"message", "argument", "text", "span"}


def test_a_long_argument_is_shown_around_the_mistake():
    text = f"{{devices=[300]{','.join(map(str, range(150)))},x,{','.join(map(str, range(150)))}}}"
    start = text.index("x")
    shown, caret = str(Mistake("wrong", "SHARDING", text, (start, start + 1))).splitlines()[1:]
    assert len(shown) < 120
    assert shown[caret.index("^")] == "x"
    assert shown.startswith("  SHARDING …")
    assert shown.endswith("…")


SHARDINGS = [
    COPIES,
    "{devices=[2,4]<=[4,2]T(1,0)}",
    "{devices=[2,2,2]0,1,2,3,4,5,6,7 last_tile_dims={manual}}",
    "{replicated}",
    "{maximal device=3}",
    "{{replicated}, {devices=[8]<=[8]}}",
    "{}",
    "{devices=[8]<=[8] shard_as 1}",
    '{replicated metadata={op_name="a{b}"}}',
]


@sees("different examples", "text")
@given(st.sampled_from(SHARDINGS), st.data())
@settings(max_examples=300)
def test_a_place_is_found_in_every_text_that_is_no_sharding(text, data):
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(len(text), start + 3)))
    changed = (
        text[:start] + data.draw(st.sampled_from(["", "x", "}", "{", ",", "[", "]", "0", " ", "T("])) + text[stop:]
    )
    error = None
    try:
        from_text(changed)
    except MalformedShardingError as caught:
        error = caught
    if error is not None:
        assert changed != text
        assert error.expected
        assert 0 <= error.span[0] < error.span[1] <= len(changed) + 1


@sees("different examples", "several elements")
@given(st.dictionaries(st.text("abcxyz_é", min_size=1), st.integers(1, 9999), min_size=1), st.booleans())
def test_a_mesh_reads_back(axes, spaced):
    assert mesh_of((", " if spaced else ",").join(f"{name}={size}" for name, size in axes.items())) == axes


@sees("different examples", "several elements")
@given(st.lists(st.integers(0, 9999)).map(tuple))
def test_a_shape_reads_back(shape):
    assert shape_of(str(shape)) == shape_of(str([*shape])) == shape_of(",".join(map(str, shape))) == shape


def mistake_of(read, text):
    """What is wrong with a text, or None if it is read."""
    try:
        read(text)
    except Mistake as mistake:
        return mistake
    return None


@sees("different examples")
@given(st.text() | st.text("x=,1 ()'P[]é\t"))
@example("\0")
@example("(" * 10_000)
def test_any_text_is_read_or_is_a_mistake_with_a_place(text):
    for read in (mesh_of, shape_of, lambda text: spec_of(text, {"x": 2})):
        mistake = mistake_of(read, text)
        if mistake is not None:
            start, stop = mistake.span
            assert 0 <= start <= stop <= len(text) + 1
            assert len(str(mistake).splitlines()) == 3


@pytest.mark.parametrize(
    "spelled", ["P('data', None)", "PartitionSpec('data', None)", "jax.sharding.PartitionSpec('data',None,)"]
)
def test_specs_may_be_spelled_as_python_prints_them(spelled):
    assert spec_of(spelled, {"data": 4}) == P("data", None)


@pytest.mark.parametrize(
    ("spelled", "spec"),
    [
        ("data,None", P("data", None)),
        ("(data, model), None", P(("data", "model"), None)),
        ("data", P("data")),
        ("P()", P()),
        ("()", P()),
        ("P(['data'], ())", P(("data",), ())),
    ],
)
def test_specs_may_be_spelled_short(spelled, spec):
    assert spec_of(spelled, {"data": 4, "model": 2}) == spec


# The command itself


def test_help_has_examples_that_work(run):
    code, out, _ = run("parse", "--help")
    assert code == 0
    examples = [shlex.split(line) for line in out.splitlines() if line.startswith("  partjit ")]
    assert len(examples) == 3
    for _, *arguments in examples:
        assert run(*arguments)[0] == 0


@pytest.mark.parametrize("arguments", [[], ["prase"], ["parse", COPIES], ["parse", COPIES, *MESH, "--no-such-option"]])
def test_arguments_that_are_missing_or_too_many_are_a_mistake_of_usage(run, arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("usage: partjit")


def test_help_and_mistakes_of_usage_import_no_jax():
    code = "import sys; from partjit.command import main; main(); assert 'jax' not in sys.modules"
    for arguments in (["--help"], ["explain", "--help"], ["explain"]):
        ran = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr


def test_the_version_is_told(run):
    code, out, _ = run("--version")
    assert code == 0
    assert out.startswith(f"partjit {partjit.__version__}, jax ")


@pytest.mark.system
def test_the_module_runs_without_devices_and_stops_when_nobody_reads():
    # A platform that there is not: any use of a device would fail.
    env = {**os.environ, "JAX_PLATFORMS": "cuda,tpu"}
    arguments = ["-W", "error", "-m", "partjit", "parse", "P('x')", "--mesh", "x=512", "--shape", "512"]
    ran = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "[512] as P('x') on (x=512)" in ran.stdout
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run(
        [sys.executable, *arguments], stdout=writer, stderr=subprocess.PIPE, text=True, env=env, check=False
    )
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (0, "")
