"""Programs that are not the same in all processes are refused in all, with what differs and where."""

import json
import pathlib
import re

import pytest

from tests.effort import sample
from tests.processes import outputs_of_processes

HERE = pathlib.Path(__file__).parent

PLANS = {
    "constant": ("fragment_1", "mul a 2.0", "mul a 3.0"),
    "constant_array": ("fragment_1", "constant float32[16] ", "constant float32[16] "),
    "constant_of_a_nested_program": ("fragment_0", "constant float32[16] ", "constant float32[16] "),
    "constant_keys": ("fragment_0", "constant key<fry>[16] ", "constant key<fry>[16] "),
    "order_of_calls": ("", "same(x1: float32[16]", "alike(x1: float32[16]"),
    "shape": ("", "step(x: float32[16]", "step(x: float32[8]"),
    "dtype": ("", "step(x: float32[16]", "step(x: int32[16]"),
    "agreement": ("", "agree = True", "agree = False"),
    "spec": ("", "out: float32[16] P('x',)", "out: float32[16] P()"),
    "order_of_devices": ("", "of devices [0, 1, ", "1, 0]"),
    "loop_count": ("", " 3 times", " 4 times"),
    "static_argument": ("fragment_1", "mul a 5.0", "mul a 6.0"),
    "branch": ("fragment_1", "sub a 1.0", "sub a 2.0"),
    "extra_call": ("", "out: float32[16]", "x3: float32[16]"),
    "other_function": ("", "same(x1: float32[16]", "alike(x1: float32[16]"),
    "donation": ("", "P('x',)", "P('x',), reuses the memory of x"),
    "precision": ("", "jax_default_matmul_precision = default", "jax_default_matmul_precision = highest"),
    "flags": ("", "XLA_FLAGS =", "--xla_cpu_enable_fast_math=true"),
    "stream": ("", "inline, the caller's stream", "on a thread, stream s"),
    "line": ("", "divergent.py:", "divergent.py:"),
    "other_program": ("", "step(x: float32[16]", "another(x: float32[16]"),
    "number_of_calls": ("", "after(x: float32[16]", "step(x: float32[16]"),
}
"""The node that the first different lines are of, if they are none themselves, and what these lines have."""

CHOICES = {
    "index_of_a_branch": "the result of the colocated call of 'is_first' made at ",
    "predicate": "the predicate of the while at ",
    "number_from_a_call": "the result of the colocated call of 'own_number' made at ",
    "array_from_a_call": "the result of the colocated call of 'own_weights' made at ",
    "returned_by_a_call": "the result of the colocated call of 'own_weights' made at ",
    "returned_later": "the result of the colocated call of 'own_weights' made at ",
    "parts_from_a_call": "the result of the colocated call of 'own_bias' made at ",
    "keys_from_a_call": "the result of the colocated call of 'own_keys' made at ",
}


@pytest.fixture(scope="module")
def raised():
    """What each process raised, by program: the type and the text."""
    names = [*sample([*PLANS], 3), *CHOICES]
    outputs = outputs_of_processes(HERE / "divergent.py", 2, ",".join(names), PARTJIT_AGREEMENT_TIMEOUT="60")
    found = [{name: said for name, *said in _lines_of(output)} for output in outputs]
    assert [[*of_one] for of_one in found] == [names] * 2
    return found


def _lines_of(output):
    return [json.loads(line) for line in output.splitlines() if line.startswith('["')]


@pytest.mark.soak
def test_plans_that_differ_are_refused_with_the_first_lines_that_do(raised):
    for name in PLANS.keys() & raised[0].keys():
        node, *parts = PLANS[name]
        lines = []
        for number, of_one in enumerate(raised):
            kind, text = of_one[name]
            assert kind == "ProgramsDifferError", (name, text)
            pattern = rf"their plans first differ in ?{node}\n  here: +(.*)\n  process {1 - number}: (.*)\n"
            match = re.search(pattern, text)
            assert match, (name, text)
            lines.append(match.groups())
        assert lines[0] == lines[1][::-1]
        assert lines[0][0] != lines[0][1]
        for part, line in zip(parts, lines[0], strict=True):
            assert part in line, (name, line)


@pytest.mark.soak
def test_processes_that_would_go_different_ways_are_stopped_with_what_each_has(raised):
    for name, what in CHOICES.items():
        kind, text = raised[0][name]
        assert kind == "ProgramsDifferError"
        first, *values = text.splitlines()[:3]
        assert first.startswith(f"the processes of step would go different ways: {what}")
        assert re.search(r"divergent.py:\d+ in [<\w]+", first)
        assert ("in its part [2:4], is" in first) == (name == "parts_from_a_call")
        assert len({*(value.split(": ")[1] for value in values)}) == 2
        assert raised[1][name] == [kind, text]
