"""Every axis of every value has an origin that names it, also where telling origins ends the process that does it."""

import dataclasses
import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from partjit import P, pjit, with_sharding_constraint
from partjit.inspect import explain
from partjit.inspect.why import origins as axis_origins
from partjit.inspect.why.origins import OriginsUnavailableError, ask_partitioner, origins
from partjit.inspect.why.script_process import ScriptFailedError, run_script
from partjit.inspect.why.why import why
from tests import strategies
from tests.census import saw, sees
from tests.effort import EVERYTHING
from tests.inspect import inspected
from tests.inspect.inspected import BATCH, axes_of, f32, partitioned, sgd

HAS_GROUPS = importlib.util.find_spec("jax.experimental.shard_alike") is not None
PROGRAMS = {}
# Each starts processes, so there are fewer than of other things.
few = settings(max_examples=10 if EVERYTHING else 5, suppress_health_check=[HealthCheck.too_slow], deadline=None)


def program(ins, outs, *args):
    """Keeps a function by its name, to be partitioned with these specs."""

    def keep(fun):
        PROGRAMS[fun.__name__] = functools.cache(lambda: partitioned(pjit(fun, ins, outs), *args))
        return fun

    return keep


def constrained(x, *spec):
    return with_sharding_constraint(x, P(*spec))


def mapped(fun, ins, outs, **how):
    return jax.shard_map(fun, mesh=inspected.mesh(), in_specs=ins, out_specs=outs, **how)


@program((P("data"), P(None, "model")), None, f32(8, 16), f32(16, 32))
def forward(x, w):
    return jax.nn.relu(x @ w)


@program(P("data"), P("model"), f32(16, 16))
def scan(x):
    a = constrained(jnp.sin(x), None, "data")
    return jax.lax.scan(lambda c, _: (c * 2, c.sum()), a, None, length=2)[0]


@program(P("data"), None, f32(16, 16))
def loops(x):
    y = jax.lax.cond(x[0, 0] > 0, lambda k: constrained(jnp.sin(k), "data", "model"), lambda k: k * 2, x)
    start = (0, jnp.zeros(16), y, jnp.float32(1), y.T)
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1], jnp.cos(c[2]), c[3], c[4] @ c[4]), start)


@program((P("data"), None), P(None, "model"), f32(16, 16), f32(16, 16))
def nested(x, w):
    @functools.partial(pjit, in_axis_resources=(P(None, "model"), None), out_axis_resources=P("data"))
    def inner(a, b):
        return jnp.sin(a) @ b

    @functools.partial(jax.jit, out_shardings=jax.NamedSharding(inspected.mesh(), P("model")))
    def other(a):
        return jnp.cos(a)

    return other(inner(x, w)) * 2


@program(P("data", "model"), None, f32(16, 16))
def derived(x):
    @jax.custom_vjp
    def f(x):
        return constrained(jnp.sin(x), "model", "data")

    f.defvjp(lambda x: (f(x), x), lambda x, g: (jnp.cos(x) * g,))
    return jax.grad(lambda x: jnp.sum(jax.checkpoint(lambda x: f(x) @ x)(x)))(x)


@program(P(("data", "model")), None, f32(8, 16))
def parts(x):
    return jnp.sin(x).reshape(4, 2, 16).sum(0), x.reshape(2, 4, 16) * 2, x.reshape(-1)


@program(P("data"), None, f32(16, 16))
def sharded(x):
    h = mapped(lambda g: jax.lax.psum(jnp.sin(g), "data"), P("data"), P())(x * 2)
    return jnp.tanh(mapped(lambda g: jnp.sin(g), P("data", "model"), P("data", "model"))(x * h[:1])) * 2


@program(P("data"), P("data", "model"), f32(16, 16))
def partly_manual(x):
    f = mapped(lambda g: g * 2, P("data"), P("data"), axis_names={"data"})
    return f(f(constrained(x, "data", "model"))).T


@program(P("data"), None, f32(16, 16))
def sharded_in_loop(x):
    f = mapped(lambda g: jax.lax.psum(jnp.sin(g), "data"), P("data"), P())
    step = jax.checkpoint(lambda c: (c + f(c)[:1], f(c).sum()))
    return jax.grad(lambda x: jax.lax.scan(lambda c, _: step(c), x, None, length=2)[0].sum())(x)


def model():
    params, specs = inspected.scanned_params()
    return partitioned(sgd(inspected.scanned_loss, specs), params, BATCH)


PROGRAMS["model"] = functools.cache(model)
every_program = pytest.mark.parametrize("name", PROGRAMS)


def assert_lawful(of):
    """Every axis of every value has one origin, and a spec that names it; returns how many are certain."""
    told = origins(of)
    count, certain = 0, 0
    for value in of.tree.values:
        if value.sharding is None:
            continue
        assert sorted(told[value.number]) == sorted(axes_of(value)), value
        for axis, origin in told[value.number].items():
            assert axis.partition(":")[0] in origin.request.axes, (str(value), str(origin))
            count += 1
            certain += origin.is_certain
    return certain, count


@every_program
def test_every_axis_of_every_value_has_an_origin_that_names_it(name):
    certain, count = assert_lawful(PROGRAMS[name]())
    assert certain >= 0.99 * count > 0
    assert origins(PROGRAMS[name]()).problem is None


def test_a_constraint_that_leaves_a_dimension_open_is_no_origin():
    @functools.partial(pjit, in_axis_resources=P("data"), out_axis_resources=P("data"))
    def inner(a):
        return constrained(a, P.UNCONSTRAINED, P.UNCONSTRAINED)

    left_open = pjit(lambda x: jnp.sin(inner(x)), P("data"), P("data"))
    assert_lawful(partitioned(left_open, f32(16, 16)))


@sees(
    "two mesh axes", "a partitioned argument", "a partitioned result", "a spec inside", "a value of several dimensions"
)
@few
@given(strategies.cases(ambiences=["with"]))
def test_every_axis_of_every_value_of_random_programs_has_an_origin_that_names_it(case):
    of = partitioned(strategies.to_pjit(case), *strategies.numpy_args(case), of=case.mesh)
    certain, count = assert_lawful(of)
    assert certain >= 0.9 * count


def has_axis(told, number, axis):
    return any(name.partition(":")[0] == axis for name in told[number])


@every_program
def test_the_way_leads_from_the_origin_to_the_value_through_values_with_the_axis(name):
    of = PROGRAMS[name]()
    told = origins(of)
    for value in of.tree.values:
        for axis, origin in told.get(value.number, {}).items():
            axis = axis.partition(":")[0]
            numbers = {origin.request.value, *(v.number for v in inputs_of(origin.request.equation))}
            for equation in origin.way:
                there = {v.number for v in met_in(equation) if v.number in told and has_axis(told, v.number, axis)}
                assert numbers & there, (str(value), str(origin), equation.primitive)
                numbers = there
            if value.number not in numbers:
                assert not origin.is_certain or value.number == origin.request.value


def inputs_of(equation):
    return (
        () if equation is None else (*equation.inputs, *(v for body in equation.bodies.values() for v in body.outputs))
    )


def met_in(equation):
    inside = [v for body in equation.bodies.values() for v in (*body.inputs, *body.outputs)]
    return [*equation.inputs, *equation.outputs, *inside]


@sees("an axis name", "different examples", "an axis from the argument that is left out")
@few
@given(st.data())
def test_without_the_argument_it_came_from_an_axis_is_gone_or_has_another_origin(data):
    shape = (16, 16)
    specs = [P("data"), P("model"), P(None, "data"), P("data", "model"), None]
    chosen = data.draw(st.integers(0, 1))
    ins = [data.draw(st.sampled_from(specs[:-1] if i == chosen else specs)) for i in range(2)]

    def fun(x, w):
        h = jnp.tanh(x @ w)
        h = jax.lax.scan(lambda c, _: (jnp.sin(c) + x, None), h, None, length=2)[0]
        return h * 2, w.T + 1

    before = partitioned(pjit(fun, tuple(ins), None), f32(*shape), f32(*shape))
    without = [None if i == chosen else spec for i, spec in enumerate(ins)]
    after = partitioned(pjit(fun, tuple(without), None), f32(*shape), f32(*shape))
    assume(before.text != after.text)
    for value, same in zip(before.tree.values, after.tree.values, strict=True):
        for axis, origin in origins(before)[value.number].items() if value.sharding else ():
            if origin.request.path == "xw"[chosen]:
                saw("an axis from the argument that is left out")
                left = origins(after)[same.number].get(axis)
                assert left is None or left.request.path != origin.request.path


def test_an_argument_a_constraint_and_a_result_tell_where_they_are_given():
    of = PROGRAMS["scan"]()
    told = origins(of)[of.tree.outputs[0].number]
    assert told["data"].request.kind == "constraint"
    assert told["data"].request.site[2] == "constrained"
    assert told["data"].request.spec == P(None, "data")
    assert told["model"].request.kind == "result"
    assert [equation.primitive for equation in told["data"].way] == ["scan"]


def test_the_specs_of_a_nested_program_are_origins():
    of = PROGRAMS["nested"]()
    kinds = {(o.request.kind, o.request.path, o.request.spec) for each in origins(of).values() for o in each.values()}
    assert ("nested argument", "a", P(None, "model")) in kinds
    assert {("nested result", "0", P("data")), ("nested result", "0", P("model"))} <= kinds


# What is said


def lines(text):
    """A text whose lines of code are told by their files alone."""
    return [part.replace(os.path.abspath(__file__), "here.py") for part in str(text).splitlines()]


def line_of(text):
    with open(__file__, encoding="utf-8") as file:
        return next(i for i, line in enumerate(file, 1) if text in line)


def test_the_reasons_for_a_value_read_well():
    def loss(x, w, v):
        h = constrained(jnp.tanh(x @ w), "data", "model")  # the constraint
        return jnp.sum((h @ v) ** 2)

    of = partitioned(pjit(loss, (P("data"), None, P(None, "model")), None), f32(8, 6), f32(6, 32), f32(32, 10))
    assert lines(why(of, "x")) == [
        "a:f32[8,6] P('data', None)   argument x",
        "  'data' shards dimension 0: from argument x with spec P('data')",
        "  dimension 1 is unsharded: its spec is P('data')",
    ]
    tanh = next(e for e in of.tree.walk() if e.primitive == "tanh").outputs[0]
    line = f"{os.path.basename(__file__)}:{line_of('return with_sharding')}"
    constraint = f"the constraint P('data', 'model') at {line} in constrained"
    assert lines(why(of, tanh)) == [
        f"{tanh}   here.py:{line_of('# the constraint')} in loss",
        f"  'data'  shards dimension 0: from {constraint}",
        f"  'model' shards dimension 1: from {constraint}",
    ]
    product = next(e for e in of.tree.walk() if e.primitive == "dot_general" and e.inputs[1].path == "v").outputs[0]
    told = lines(why(of, product))
    way = f"through dot_general ({os.path.basename(__file__)}:{line_of('(h @ v)')})"
    assert told[1].endswith(f"'data'  shards dimension 0: from {constraint}")
    assert told[2].strip() == way
    assert told[3].endswith("'model' shards dimension 1: from argument v with spec P(None, 'model')")
    assert told[4].strip() == way


def test_unsharded_dimensions_are_explained():
    def fun(x, y):
        return jnp.sin(x), jnp.cos(y)[:, None], constrained(jnp.tan(x), None, "model")

    of = partitioned(pjit(fun, (P(("data", "model")), None), None), f32(8, 16), f32(6))
    unsharded = {e.primitive: why(of, e.outputs[0]).unsharded for e in of.tree.walk()}
    assert unsharded["sin"] == {1: "'data' and 'model' shard other dimensions"}
    assert unsharded["cos"] == {0: "no spec propagates 'model' to it"}
    assert unsharded["broadcast_in_dim"][1] == "its size is 1"
    (dimension,) = unsharded["sharding_constraint"]
    assert dimension == 0
    assert unsharded["sharding_constraint"][0].startswith("the constraint P(None, 'model') at ")
    assert unsharded["sharding_constraint"][0].endswith(" requires it")

    of = partitioned(pjit(lambda x: x * 2, P("data"), None), f32(8, 3))
    assert why(of, of.tree.outputs[0]).unsharded == {1: "its size 3 is not divisible by 'model' (2)"}
    of = partitioned(pjit(lambda x: x * 2, None, None), f32(7))
    assert why(of, of.tree.outputs[0]).unsharded == {0: "its size 7 is not divisible by 'data' (4) or 'model' (2)"}
    of = partitioned(pjit(lambda x: jnp.sum(x), None, None), f32(7))
    assert lines(why(of, of.tree.outputs[0]))[1:] == ["  it has no dimensions to shard"]


def test_what_jax_fills_in_is_no_constraint():
    of = partitioned(pjit(lambda x: x + jax.nn.one_hot(jnp.arange(8), 16), P("data"), None), f32(8, 16))
    (filled,) = {e for e in of.tree.walk() if e.primitive == "iota" and e.params["sharding"] is not None}
    reasons = why(of, filled.outputs[0]).unsharded.values()
    assert not any("constraint" in reason for reason in reasons)


def test_values_in_a_shard_map_are_local():
    def fun(axes):
        own = functools.partial(jax.shard_map, mesh=of.unit.mesh, in_specs=P("data"), out_specs=P("data"))
        return lambda x: own(lambda x: jnp.sin(x), axis_names=axes)(x)  # mapped

    of = partitioned(pjit(jnp.sin), f32(4, 3))
    line = f"in the shard_map at {os.path.basename(__file__)}:{line_of('# mapped')}"
    for axes, along in ((frozenset(), "'data' and 'model' are"), ({"data"}, "'data' is")):
        of = partitioned(pjit(fun(axes)), f32(8, 4))
        inside = next(e for e in of.tree.walk() if e.primitive == "sin")
        reasons = why(of, inside.outputs[0]).unsharded
        if axes:
            assert reasons[1] == f"no spec propagates 'model' to it; {along} manual {line}"
        else:
            assert reasons == dict.fromkeys((0, 1), f"it is local to each device: {along} manual {line}")


def test_what_lies_otherwise_is_told_with_who_wants_it():
    def fun(x, y):
        return constrained(jnp.sin(x), "data") + constrained(jnp.cos(y), None, "data")  # they meet

    of = partitioned(pjit(fun, (None, None), P("data")), f32(16, 16), f32(16, 16))
    total = next(e for e in of.tree.walk() if e.primitive == "add")
    (conflict,) = why(of, total.outputs[0]).conflicts
    assert conflict.value is total.inputs[1]
    assert str(conflict.origins["data"]).startswith("the constraint P(None, 'data') at ")
    assert f"at add ({os.path.basename(__file__)}:{line_of('# they meet')}) is sharded differently" in str(conflict)


def test_why_is_shown_in_notebooks_with_what_users_wrote_escaped():
    of = partitioned(pjit(lambda x: {"<b>": jnp.sin(x["<i>"])}, P("data"), None), {"<i>": f32(8)})
    page = why(of, "x['<i>']")._repr_html_()
    assert "<i>" not in page
    assert "&lt;i&gt;" in page
    assert repr(why(of, "x['<i>']")) == str(why(of, "x['<i>']"))


def test_what_is_no_array_has_no_reasons():
    def fun(x):
        return jax.random.wrap_key_data(jnp.zeros(2, jnp.uint32)), x

    of = partitioned(pjit(fun, P("data"), None), f32(8))
    assert why(of, of.tree.outputs[1]).origins["data"].request.path == "x"


def test_origins_need_the_text_of_the_program():
    of = dataclasses.replace(PROGRAMS["forward"](), lowered=None)
    with pytest.raises(ValueError, match=r"origins need the text of the program: partition\(unit, keep_text=True\)"):
        origins(of)


def test_a_program_on_one_device_has_no_origins():
    of = partitioned(pjit(jnp.sin, None, None), f32(8), of=inspected.partjit.Mesh(np.array(jax.devices()[:1]), "x"))
    assert not any(origins(of).values())


def test_on_one_device_nothing_is_sharded_for_that_reason():
    def reasons(spec, shape, names):
        of_one = inspected.partjit.Mesh(np.array(jax.devices()[:1]).reshape(shape), names)
        of = partitioned(pjit(lambda x: jnp.sin(x).T, spec, None), f32(8, 4), of=of_one)
        return [why(of, value).unsharded for value in of.tree.values]

    of_one_device = dict.fromkeys((0, 1), "the mesh has one device")
    assert reasons(P("x", "y"), (1, 1), ("x", "y")) == [of_one_device] * 3
    assert reasons(P("x"), (1,), "x") == [of_one_device] * 3
    report = explain(jax.jit(jnp.sin), f32(3))
    assert [report.why(value).unsharded for value in report.values] == [{0: "there is no mesh"}] * 2


# The process apart


def test_the_partitioner_is_asked_once_for_each_program(monkeypatch):
    asked = []
    monkeypatch.setattr(axis_origins, "run_script", lambda *args: asked.append(args) or run_script(*args))
    of = partitioned(pjit(jnp.sin, P("data"), None), f32(8))
    assert origins(of) is origins(of)
    why(of, "x")
    assert len(asked) == 1


def script(tmp_path, text):
    path = tmp_path / "script.py"
    path.write_text(text, encoding="utf-8")
    return str(path)


ENDS = {
    "import os; os.abort()": f"the subprocess was killed by signal {int(signal.SIGABRT)}, SIGABRT",
    "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)": "the subprocess was killed by signal 11, SIGSEGV",
    "import os; os._exit(7)": "the subprocess failed with exit code 7: ",
    "raise ValueError('no such pass')": "the subprocess failed with exit code 1: ValueError: no such pass",
    "print('hello')": "the result of the subprocess is not JSON: ",
}


@pytest.fixture
def waited_for(monkeypatch):
    """Whether one process was started, and has been waited for; those that other tests have left do not count."""
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            started.append(self.pid)

    def is_waited_for():
        (pid,) = started
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return True
        return False

    monkeypatch.setattr(subprocess, "Popen", Popen)
    return is_waited_for


@pytest.mark.parametrize("text", ENDS)
def test_how_a_process_ended_is_told_and_nothing_is_written_to_the_terminal(text, tmp_path, capfd, waited_for):
    with pytest.raises(ScriptFailedError) as caught:
        run_script(script(tmp_path, text), {}, "x" * 1_000_000, 60.0)
    assert str(caught.value).startswith(ENDS[text])
    assert capfd.readouterr() == ("", "")
    assert waited_for()


def test_a_process_that_takes_too_long_is_ended(tmp_path, waited_for):
    started = time.monotonic()
    with pytest.raises(ScriptFailedError, match=r"the subprocess timed out after 0\.5 s"):
        run_script(script(tmp_path, "import time; time.sleep(60)"), {}, "", 0.5)
    assert time.monotonic() - started < 30
    assert waited_for()


def test_without_an_interpreter_there_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ScriptFailedError, match="the interpreter /nowhere/python could not be started"):
        run_script("x.py", {}, "", 1.0)
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(ScriptFailedError, match="no interpreter can be started"):
        run_script("x.py", {}, "", 1.0)


def test_an_application_that_brings_its_own_interpreter_is_not_started_a_second_time(monkeypatch):
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(ScriptFailedError, match="no interpreter can be started"):
        run_script("x.py", {}, "", 1.0)


def test_the_settings_of_this_process_do_not_reach_the_other(monkeypatch, tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit(3)", encoding="utf-8")
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit(3)", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONSTARTUP", str(tmp_path / "json.py"))
    monkeypatch.setenv("PYTHONHOME", str(tmp_path))
    monkeypatch.setenv("COVERAGE_PROCESS_START", str(tmp_path / "nothing"))
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert ask_partitioner(PROGRAMS["forward"]())["values"]


def test_the_other_process_imports_neither_jax_nor_this_package(tmp_path):
    path = importlib.util.find_spec("partjit.inspect.why.origins_script").origin
    with open(path, encoding="utf-8") as file:
        text = file.read()
    answer = 'json.dumps({"values": values, "names": names})'
    assert text.count(answer) == 1
    changed = text.replace(answer, "json.dumps(sorted({name.partition('.')[0] for name in sys.modules}))")
    question = {**axis_origins.MLIR_BINDINGS, "mark": "partjit.mark", "tag": "eqn:", "without": []}
    modules = run_script(script(tmp_path, changed), question, PROGRAMS["forward"]().text, 60.0)
    assert "numpy" in modules
    assert not {"jax", "partjit", "pytest"} & set(modules)


PLAIN = """
import jax
jax.config.update("jax_num_cpu_devices", 4)
import numpy as np
import partjit
from partjit.inspect.propagation import partition
from partjit.inspect.why.origins import origins
from partjit.inspect.tracing import trace_function
print("started")
mesh = partjit.Mesh(np.array(jax.devices()), "x")
fun = partjit.pjit(lambda x: x * 2, partjit.P("x"), None)
program = partition(trace_function(fun, (np.ones(8, np.float32),), {}, mesh).whole, keep_text=True)
print([str(o) for each in origins(program).values() for o in each.values()], origins(program).problem)
"""


@pytest.mark.system
def test_a_script_without_a_main_guard_runs_once(tmp_path):
    ran = subprocess.run([sys.executable, script(tmp_path, PLAIN)], capture_output=True, text=True, check=False)
    assert ran.stdout.splitlines() == [
        "started",
        "[\"argument x with spec P('x')\", \"argument x with spec P('x')\"] None",
    ], ran.stderr


# After a crash


@pytest.fixture
def aborting(monkeypatch, tmp_path):
    """The partitioner ends the process in which it is asked."""
    path = script(tmp_path, "import os; os.abort()")
    monkeypatch.setattr(axis_origins, "run_script", lambda _, *rest: run_script(path, *rest))


@pytest.mark.usefixtures("aborting")
@every_program
def test_after_a_crash_every_axis_has_the_nearest_spec_with_it_as_a_guess(name):
    of = dataclasses.replace(PROGRAMS[name]())  # the answer for this one is not known yet
    certain, count = assert_lawful(of)
    known = origins(PROGRAMS[name]())
    guessed = origins(of)
    pairs = [(known[n][axis], guess) for n, each in guessed.items() for axis, guess in each.items()]
    assert certain < count
    right = sum(str(origin) == str(guess) for origin, guess in pairs)
    assert right >= 0.6 * len(pairs), f"{right} of {len(pairs)}"


@pytest.mark.usefixtures("aborting")
def test_a_crash_is_a_message_that_says_what_is_left(capfd):
    of = dataclasses.replace(PROGRAMS["forward"]())
    with pytest.raises(OriginsUnavailableError) as caught:
        ask_partitioner(of)
    message = str(caught.value)
    assert message.startswith(
        "the partitioner could not report the origins of the shardings of 'forward': the subprocess was killed by"
    )
    assert "SIGABRT. It ran in a subprocess, so this process is unaffected" in message
    text = str(why(of, of.tree.outputs[0]))
    assert "probably from argument x with spec P('data')" in text
    assert "note: this is a guess from the nearest specs, because the partitioner could not report" in text
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(not HAS_GROUPS, reason="this jax has no shard_alike")
@pytest.mark.parametrize("crashes", [False, True])
def test_groups_that_crash_the_partitioner_are_left_out_of_the_question(crashes, monkeypatch):
    alike = importlib.import_module("jax.experimental.shard_alike").shard_alike

    def fun(x, y):
        a, b = alike(jnp.sin(x), jnp.cos(y))
        return a * 2, b @ y

    def run_or_crash(path, request, text, timeout):
        if not request["without"]:
            raise ScriptFailedError("the subprocess was killed by SIGSEGV")
        return run_script(path, request, text, timeout)

    if crashes:
        monkeypatch.setattr(axis_origins, "run_script", run_or_crash)
    of = partitioned(pjit(fun, (P("data"), None), None), f32(16, 16), f32(16, 16))
    assert_lawful(of)
    told = origins(of)
    assert (told.problem is not None) == crashes
    assert not crashes or "SIGSEGV" in told.problem
    product = next(e for e in of.tree.walk() if e.primitive == "dot_general").outputs[0]
    assert told[product.number]["data"].request.path == "x"
    assert not crashes or not told[product.number]["data"].is_certain


def test_the_answers_are_json():
    json.dumps(ask_partitioner(PROGRAMS["model"]()))
