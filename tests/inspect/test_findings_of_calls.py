"""What `explain` finds about calls: each in a program that has it, and not in one that is written as it says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import partjit
from partjit import pjit
from partjit.colocated import colocated_python, colocated_python_class
from partjit.inspect import explain

X = np.arange(8, dtype=np.float32)
like = {"out_specs_fn": lambda x: x}


def table(x):
    return x


def note(x):
    return x


def batch():
    return jnp.ones(8)


pure = colocated_python(table, pure=True, **like)
effect = colocated_python(table, **like)
quiet = colocated_python(note, out_specs_fn=lambda x: None)
apart = quiet.specialize(stream="log")
of_numbers = colocated_python(note, out_specs_fn=lambda x: None, uses_jax=False)
noted = colocated_python(note, **like)
batches = {"out_specs": jax.ShapeDtypeStruct((8,), np.float32)}
load = colocated_python(batch, **batches)
both = colocated_python(lambda a, b: a, pure=True, out_specs_fn=lambda a, b: a)
at_once = colocated_python(table, vmap_method="expand_dims", **like)


of_numpy = colocated_python(table, arrays="numpy", **like)
without_jax = colocated_python(table, uses_jax=False, **like)


def repeated(body):
    return lambda x: jax.lax.fori_loop(0, 10, lambda _, c: body(c, x), x)


def invariant_before(x):
    found = pure(x)
    return jax.lax.fori_loop(0, 10, lambda _, c: c + found, x)


WITH = {
    "invariant call": (
        repeated(lambda c, x: c + pure(x)),
        "table is pure and called in every iteration (10 times) with the same arguments",
        "call it before the loop",
    ),
    "unused result": (
        lambda x: (noted(x.sum()), x + 1)[1],
        "note returns what nothing uses, which is put to the devices nevertheless",
        "let it return None, with out_specs_fn=lambda *args: None, or say pure=True if it is to be left out",
    ),
    "waited for": (
        lambda x: load() + x,
        "the devices wait for batch, which has no arguments and could be called earlier",
        "let it run ahead: specialize(run_ahead=2)",
    ),
    "one by one": (
        lambda x: jax.lax.map(effect, x) + 1,
        "table is called for one slice after the other (8 times), and the loop does nothing else",
        "call it once with all slices: vmap_method='expand_dims' under jax.vmap, or without the loop",
    ),
    "taking turns": (
        repeated(lambda c, x: of_numpy(c) + x),
        "the host calls table in every iteration (10 times), and the devices wait meanwhile",
        "say uses_jax=False if it neither runs jax nor waits for arrays: then the loop is one executable",
    ),
    "shared stream": (
        repeated(lambda c, x: (quiet(c), without_jax(c) + x)[1]),
        "the host makes note and a call on its stream, for which the devices could wait (10 times)",
        "put it on a stream of its own, stream='log', or say uses_jax=False of it: then the loop is one executable",
    ),
}

WITHOUT = {
    "a pure call before the loop": invariant_before,
    "a pure call with what changes": repeated(lambda c, x: pure(c) + x),
    "a pure call with both": repeated(both),
    "an effect in each iteration": repeated(lambda c, x: c + effect(x)),
    "a log": lambda x: (quiet(x.sum()), x + 1)[1],
    "a log in a loop": repeated(lambda c, _: (quiet(c.sum()), c + 1)[1]),
    "a log whose result is returned": lambda x: (noted(x.sum()), x + 1),
    "a pure call that is left out": lambda x: (pure(x.sum()), x + 1)[1],
    "a loader ahead": lambda x: colocated_python(batch, run_ahead=2, **batches)() + x,
    "a loader that has to be inline": lambda x: colocated_python(batch, mode="inline", **batches)() + x,
    "a loader that the devices do not wait for": lambda x: (load(), x + 1),
    "a call with arguments": lambda x: effect(x) + 1,
    "a function that may use jax": repeated(lambda c, _: effect(c)),
    "a function that does not use jax": repeated(lambda c, _: without_jax(c)),
    "a log on a stream of its own": repeated(lambda c, x: (apart(c), without_jax(c) + x)[1]),
    "a log that does not use jax": repeated(lambda c, x: (of_numbers(c), without_jax(c) + x)[1]),
    "a log beside a function that may use jax": repeated(lambda c, x: (quiet(c), effect(c) + x)[1]),
    "a call that is not in a loop": lambda x: of_numpy(x) + 1,
    "a batch at once": lambda x: jax.vmap(at_once)(x) + 1,
    "a loop that does something else too": lambda x: jax.lax.map(lambda s: effect(s) + 1, x),
    "a predicate": lambda x: jax.lax.while_loop(lambda c: effect(c.sum()) < 100, lambda c: c + 1, x),
}


@pytest.mark.parametrize("kind", WITH)
@pytest.mark.parametrize("size", [1, 8])
def test_a_call_that_costs_more_than_it_needs_is_found(kind, size):
    function, text, suggestion = WITH[kind]
    mesh = partjit.Mesh(np.array(jax.devices()[:size]), "x")
    for program in (pjit(function), pjit(function, in_axis_resources=P("x"))):
        report = explain(program, X, mesh=mesh)
        (finding,) = report.findings
        assert (finding.kind, finding.text, finding.suggestion) == (kind, text, suggestion)
        assert finding.site is not None
        assert finding.site[0] == __file__
        assert finding.nbytes > 0
        assert text in str(report)


def test_a_result_is_unused_in_a_loop_that_makes_the_calls_itself_too(mesh):
    (finding,) = explain(pjit(repeated(lambda c, _: (noted(c.sum()), c + 1)[1])), X, mesh=mesh).findings
    assert finding.kind == "unused result"
    assert explain(pjit(repeated(lambda c, _: (quiet(c.sum()), c + 1)[1])), X, mesh=mesh).findings == ()


class Judge:
    def goes_on(self, x):
        return bool(x < 100)

    def report(self):
        return 0


@pytest.mark.parametrize("of_class", [None, False])
def test_a_loop_that_another_method_may_end_is_found(mesh, of_class):
    judges = [colocated_python_class(Judge, uses_jax=of_class)() for _ in range(2)]
    methods = [one.goes_on if of_class is False else one.goes_on.specialize(uses_jax=False) for one in judges]
    goes_on, other = (one.specialize(out_specs=jax.ShapeDtypeStruct((), np.bool_)) for one in methods)

    def program(x):
        return jax.lax.while_loop(lambda c: goes_on(c.sum()) & other(c.sum()), lambda c: c + 1, x)

    found = explain(pjit(program), X, mesh=mesh).findings
    assert {finding.kind for finding in found} == ({"taking turns"} if of_class is None else set())
    assert all("other methods of the objects may use jax" in finding.text for finding in found)
    assert all("say uses_jax=False of their classes" in finding.suggestion for finding in found)


@pytest.mark.parametrize("case", WITHOUT)
def test_what_is_written_as_it_should_be_is_no_finding(mesh, case):
    assert explain(pjit(WITHOUT[case]), X, mesh=mesh).findings == ()
