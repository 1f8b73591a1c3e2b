"""Whatever is passed where it does not belong is refused by partjit, in words that name the argument.

`PARTJIT_PROFILE=soak` tries every value for every argument, and `random` others each time.
"""

import collections
import os
import random

import pytest

from tests.bad_values import BAD_VALUES
from tests.effort import EVERYTHING
from tests.fuzz import Case, all_cases, cases, judge
from tests.surface import MADE_BY_PARTJIT, TARGETS, public_callables

PROFILE = os.environ.get("PARTJIT_PROFILE", "deterministic")
SEED = 0 if PROFILE == "deterministic" else random.randrange(2**32)
COUNT = 600


def named(target):
    """The public name that a target is about."""
    return target.name.partition(" ")[0]


@pytest.mark.soak
def test_what_does_not_belong_somewhere_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what takes the path of a file writes it
    refused, tried = collections.Counter(), collections.Counter()
    faults = []
    generator = random.Random(SEED)
    for case in all_cases(generator) if EVERYTHING else cases(generator, COUNT):
        verdict = judge(case)
        tried[case.target.name, case.argument] += 1
        refused[named(case.target)] += verdict.kind == "refused"
        if verdict.kind == "fault":
            faults.append(f"{case}: {verdict.why}")
    count = tried.total()
    assert not faults, f"{len(faults)} of {count} with seed {SEED}:\n" + "\n".join(sorted(faults)[:50])
    arguments = {(target.name, argument) for target in TARGETS for argument in target.base()}
    assert {*tried} == arguments, "every argument of every target was tried"
    lenient = {named(target) for target in TARGETS if all("everything" in said for said in target.takes.values())}
    assert {named(target) for target in TARGETS} - lenient <= {name for name, count in refused.items() if count}
    assert refused.total() > count / 2


def test_everything_public_is_a_target():
    tried = {name for target in TARGETS for name in (named(target), named(target).rpartition(".")[0])}
    assert public_callables() - MADE_BY_PARTJIT == (public_callables() & tried) - MADE_BY_PARTJIT
    assert public_callables() >= MADE_BY_PARTJIT


def test_valid_arguments_are_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for target in TARGETS:
        if target.name not in ("partjit.colocated.mesh_coordinates", "partjit.colocated.idempotency_key"):
            # which are for the functions that are called there
            target.call(**target.base())


def internal(x):
    return x.shape


def careless(size):
    if size is None:
        raise ValueError("that is wrong")


def careful(size):
    raise TypeError("size must be a number")


@pytest.mark.parametrize(
    ("call", "kind"),
    [(internal, "fault"), (careless, "fault"), (careful, "fault"), (lambda size: None, "fault")],
    ids=["an internal error", "an error that names nothing", "an error of somebody else", "nothing is raised"],
)
def test_the_judge_sees_what_is_no_refusal(call, kind):
    argument = call.__code__.co_varnames[0]
    target = type(TARGETS[0])("partjit.x", call, dict, {argument: ""})
    (none,) = (bad for bad in BAD_VALUES if bad.name == "None")
    assert judge(Case(target, argument, none)).kind == kind
