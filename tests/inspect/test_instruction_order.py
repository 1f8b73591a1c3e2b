"""The order in which XLA runs instructions, and which sums it combines: laws of random programs, and one by hand."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from partjit.inspect.instruction_order import InstructionOrder, Preparation, Sums, combined_sums
from partjit.inspect.skeleton import Body, Equation, Variable
from tests.census import saw, sees


def variable():
    return Variable(None, (8,), 4, 32)


def equation(*operands):
    return Equation(
        "dot_general", None, operands, (variable(),), False, None, False, None, (), 0, 0, (), (), (), True, 0
    )


def body_of(arguments, equations):
    users, makers = {}, {var: eqn for eqn in equations for var in eqn.outvars}
    for eqn in equations:
        for var in dict.fromkeys(eqn.invars):
            users.setdefault(var, []).append(eqn)
    waits = {eqn: len({*eqn.invars} & makers.keys()) for eqn in equations}
    return Body((), tuple(arguments), equations[-1].outvars, tuple(equations), users, makers, (), {}, waits, {})


def steps_of(order, fused=()):
    steps = []
    while True:
        if order.released:
            eqn = order.released.popleft()
            if eqn not in fused:
                order.queue(eqn)
                continue
            step = eqn
        elif (step := order.next()) is None:
            return steps
        steps.append(step)
        order.done(step)


@sees("a combined sum", "a sum of a sum", "a preparation")
@settings(deadline=None, max_examples=60)
@given(st.integers(0, 1 << 32))
def test_every_step_comes_after_what_it_needs_and_no_sum_is_combined_with_one_that_it_needs(seed):
    draw = random.Random(seed)
    values = arguments = [variable() for _ in range(2)]
    equations = []
    for _ in range(draw.randint(3, 20)):
        equations.append(equation(*draw.choices(values, k=2)))
        values = [*values, *equations[-1].outvars]
    axes = {eqn: draw.choice(("data", "model")) for eqn in equations if draw.random() < 0.5}
    prepared = {eqn: {eqn.invars[0]: draw.randint(1, 3)} for eqn in equations if draw.random() < 0.3}
    body = body_of(arguments, equations)
    sums = combined_sums(body, axes)
    assert sums.keys() == axes.keys()
    steps = steps_of(
        InstructionOrder(body, prepared, sums),
        [eqn for eqn in equations if draw.random() < 0.2 and eqn not in axes and eqn not in prepared],
    )
    assert {*steps} >= {*equations, *sums.values()}
    preparations = sum(count for one in prepared.values() for count in one.values())
    assert len(steps) == len({*steps}) == len(equations) + len({*sums.values()}) + preparations
    when = {step: k for k, step in enumerate(steps)}
    ready = {eqn.outvars[0]: when[sums.get(eqn, eqn)] for eqn in equations}
    for step, k in when.items():
        match step:
            case Preparation(eqn, var, left):
                saw("a preparation")
                assert ready.get(var, -1) < k < when[Preparation(eqn, var, left - 1) if left else eqn]
            case Sums(members):
                assert len({axes[eqn] for eqn in members}) == 1
                assert all(when[eqn] < k for eqn in members)
                if len(members) > 1:
                    saw("a combined sum")
            case Equation():
                assert all(ready.get(var, -1) < k for var in step.invars)
                if any(maker in axes for maker in equations if maker.outvars[0] in step.invars and step in axes):
                    saw("a sum of a sum")


def test_what_needs_only_arguments_comes_first_and_the_rest_as_it_becomes_ready():
    x, w, v = variable(), variable(), variable()
    first = equation(x, w)
    second = equation(first.outvars[0], v)
    third = equation(second.outvars[0], w)
    only_of_arguments = equation(x, v)
    last = equation(third.outvars[0], only_of_arguments.outvars[0])
    body = body_of((x, w, v), [first, second, third, only_of_arguments, last])
    order = InstructionOrder(body, {second: {v: 2}})
    assert steps_of(order) == [
        *(Preparation(second, v, 1), first, only_of_arguments),
        *(Preparation(second, v, 0), second, third, last),
    ]
