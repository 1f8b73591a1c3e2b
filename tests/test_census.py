"""The census of what laws draw: it finds what a law never saw, and every law of the tests is in it."""

import ast
import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding

import partjit
from partjit import P
from partjit.testing import meshes
from tests import strategies as ours
from tests.census import saw, sees

TESTS = Path(__file__).parent
few = settings(max_examples=2)


def fails_for(law, *missing):
    """Asserts that a law fails, and for these features alone."""
    with pytest.raises(AssertionError) as caught:
        law()
    (line,) = [line for line in str(caught.value).splitlines() if "examples had" in line]
    named = line.partition(" examples had ")[2].partition(", which it is about")[0]
    assert named == ", ".join(map(repr, missing)), line


def without_specs(case):
    """The case as it is drawn where partjit drops every spec."""

    def dropped(step):
        if isinstance(step, P):
            return P()
        return tuple(map(dropped, step)) if isinstance(step, tuple) else step

    bare = dataclasses.replace(case.program, steps=dropped(case.program.steps))
    return dataclasses.replace(
        case, program=bare, in_specs=(None,) * len(case.in_specs), out_specs=(P(),) * len(case.out_specs)
    )


SPECS = ("a partitioned argument", "a partitioned result", "a spec inside")


def test_one_example_of_a_case_is_a_real_one():
    @sees("two mesh axes", "a value of several dimensions", "an axis name", *SPECS)
    @settings(max_examples=1)
    @given(ours.cases())
    def law(case):
        pass

    law()


def test_a_law_whose_specs_are_all_dropped_fails():
    @sees("two mesh axes", *SPECS)
    @few
    @given(ours.cases().map(without_specs))
    def law(case):
        pass

    fails_for(law, *SPECS)


def test_a_law_of_scalars_fails():
    @sees("a value of several dimensions", "several mesh devices")
    @few
    @given(st.data())
    def law(data):
        data.draw(meshes(mesh_shapes=[(2,)]))
        data.draw(st.builds(np.float32))

    fails_for(law, "a value of several dimensions")


def test_what_is_reported_counts_and_what_is_rejected_does_not():
    @sees("a large number", "a small number")
    @settings(max_examples=20)
    @given(st.integers(0, 9))
    def law(number):
        saw("a large number", when=number > 5)
        saw("a small number", when=number <= 5)

    law()

    @sees("a large number", "a small number")
    @settings(max_examples=20)
    @given(st.integers(0, 9))
    def rejects(number):
        saw("a large number", when=number > 5)
        saw("a small number", when=number <= 5)
        assume(number <= 5)

    fails_for(rejects, "a large number")


def test_each_run_of_a_law_is_counted_anew():
    seen = iter([True, True, False, False])

    @sees("something")
    @few
    @given(st.booleans())
    def law(flag):
        saw("something", when=next(seen))

    law()
    fails_for(law, "something")


def test_the_error_of_a_law_comes_before_what_it_did_not_see():
    @sees("something")
    @given(st.integers())
    def law(number):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        law()


def test_a_law_declares_something():
    with pytest.raises(TypeError, match="needs what the law is about"):
        sees()


MESH = {"two mesh axes", "several mesh devices"}


def drawn_values():
    """Values, and what they show by the definitions of `GENERAL`."""
    devices = np.array(jax.devices())
    mesh, line = partjit.Mesh(devices.reshape(4, 2), ("x", "y")), partjit.Mesh(devices[:2], "x")
    array = jax.device_put(np.zeros((8, 2)), NamedSharding(mesh, P("x")))
    yield [mesh], MESH
    yield [partjit.Mesh(devices[::-1].reshape(8, 1), ("x", "y"))], {"several mesh devices", "permuted devices"}
    yield [partjit.Mesh(devices[:1].reshape(1, 1), ("x", "y"))], set()
    yield [P(None, ())], set()
    yield [P(None, ("y", "x"))], {"an axis name", "two axes in one dimension"}
    yield [P(P.UNCONSTRAINED, "x")], {"an axis name"}
    yield [np.zeros((8, 1))], set()
    yield [array], {"a value of several dimensions", "a partitioned value", "an axis name", *MESH}
    yield [line, P("x")], {"several mesh devices", "an axis name", "a partitioned value"}
    yield [mesh, line], {"two meshes", *MESH}
    yield [partjit.Mesh(devices[:1], "x"), P("x")], {"an axis name"}
    yield [(1, {"a": [P("x")]})], {"an axis name", "several elements", "text"}


def law_of(values):
    """A law that draws these values."""

    @sees("another value")
    @given(st.data())
    def law(data):
        for value in values:
            data.draw(st.just(value))

    return law


def test_values_show_what_they_are_made_of():
    for values, expected in drawn_values():
        law = law_of(values)
        fails_for(law, "another value")
        assert {feature for feature, count in law.census.counts.items() if count} - {"different examples"} == expected


def named(decorator):
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return called.id if isinstance(called, ast.Name) else getattr(called, "attr", None)


def laws_of(path):
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)) if "@given" in text else ():
        if isinstance(node, ast.FunctionDef):
            decorators = [named(decorator) for decorator in node.decorator_list]
            if "given" in decorators:
                yield node, decorators


def test_every_law_says_what_it_must_see():
    laws = [(path, *law) for path in sorted(TESTS.rglob("test_*.py")) for law in laws_of(path)]
    silent = [
        f"{path.relative_to(TESTS)}:{node.lineno} {node.name}"
        for path, node, decorators in laws
        if "sees" not in decorators or decorators.index("sees") > decorators.index("given")
    ]
    assert silent == [], "these laws draw examples without @sees(...) above: see tests/census.py"
    assert len(laws) > 100
