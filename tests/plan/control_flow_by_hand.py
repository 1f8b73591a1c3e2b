"""Random programs with control flow, evaluated operation by operation in Python.

Loops are Python's, branches are chosen by Python, calls are made where they stand. Of jax there are eager operations
only, and of its derivatives those of single operations: the rules of calls say the rest. A value is an integer, or a
tuple with one array per example of the batch, of which there is one outside of `Vmap`.
"""

import jax
import jax.numpy as jnp

from tests.plan import random_control_flow as rc
from tests.plan.control_flow_operations import (
    Counter,
    anchored,
    backward,
    choice,
    constant,
    decorated,
    host,
    host_backward,
    is_large,
    loss,
    operate,
    spread,
    surrogate,
    surrogate_tangent,
    tangents,
    variant,
)


class ByHand:
    """Evaluates steps; its objects live as long as it does."""

    def __init__(self):
        self.objects = {}

    def results(self, program, arguments):
        """The values that a program returns."""
        *arguments, self.tag = arguments
        values = [arguments[0], *((x,) for x in arguments[1:])]
        values = self.run(program.steps, values, 1)
        return [values[i][0] if isinstance(values[i], tuple) else values[i] for i in program.results]

    def run(self, steps, values, size):
        """The values after the steps, for so many examples."""
        values = [*values]
        for step in steps:
            values += getattr(self, f"_{type(step).__name__.lower()}")(step, values, size)
        return values

    def _device(self, step, values, size):
        args = [values[i] for i in step.args]
        if step.op == "constrain":  # says where a value lies
            return args
        if not isinstance(args[0], tuple):
            return [operate(step.op, args)]
        return [tuple(operate(step.op, list(one)) for one in zip(*args, strict=True))]

    def _constant(self, step, values, size):
        return [constant(step) if step.kind == "i" else (constant(step),) * size]

    def _call(self, step, values, size):
        args = [values[i] for i in step.args]
        if step.is_stopped or step.result == "none":
            args = [_map(jax.lax.stop_gradient, arg) for arg in args]
        if step.rule == "jvp":
            call = jax.custom_jvp(lambda *args: self._make(step, args, size))
            call.defjvp(lambda args, given: (self._make(step, args, size), _tangents(step, args, given, size)))
        elif step.rule:
            call = jax.custom_vjp(lambda *args: self._make(step, args, size))
            call.defvjp(
                lambda *args: (self._make(step, args, size), args),
                lambda args, given: _backward(step, args, given, size),
            )
        else:
            found = self._make(step, args, size)
            return [x[0] if kind in rc.INTEGERS else x for x, kind in zip(found, rc.result_kinds(step), strict=True)]
        return [*call(*args)]

    def _make(self, step, args, size):
        """The results of a call: of one for each example, or of one for all."""

        def once(*args):
            turn = 0
            if step.of is not None:
                turn = self.objects.setdefault(step.of, Counter()).turn()
            tag = self.tag if step.form == "beside a tag" else None
            function = decorated(host) if step.is_decorated else host
            return function(step, args, turn, tag)

        return _each(step, once, args, size)

    def _nested(self, step, values, size):
        def body(*values):
            return self.run(step.steps, values, size)[step.out]

        if step.wrapper == "custom_vjp":
            fun = jax.custom_vjp(body)
            fun.defvjp(
                lambda *values: (body(*values), values),
                lambda values, given: tuple(_with(surrogate, value, given) for value in values),
            )
            return [fun(*values)]
        if step.wrapper == "custom_jvp":
            fun = jax.custom_jvp(body)

            @fun.defjvp
            def jvp(values, given):
                out = body(*values)
                rest = [*zip(*(t for t in given if isinstance(t, tuple)), strict=True)]
                return out, tuple(surrogate_tangent(o, [*t]) for o, t in zip(out, rest, strict=True))

            return [fun(*values)]
        return [body(*values)]

    def _scan(self, step, values, size):
        carry = [_start(values, i, step.anchor) for i in step.init]
        xs = [_map(lambda x: x if x.ndim in (1, 3) else spread(x, step.length), values[i]) for i in step.xs]
        stacked = [[None] * step.length for _ in step.ys]
        turns = range(step.length)
        inner = None
        for turn in reversed(turns) if step.is_reverse else turns:
            inner = self.run(step.steps, [*values, *carry, *(_map(lambda x, t=turn: x[t], x) for x in xs)], size)
            carry = [_start(inner, i, step.anchor) for i in step.carry]
            for at, i in enumerate(step.ys):
                stacked[at][turn] = inner[i]
        ys = []
        for kind, rows in zip(step.y_kinds, stacked, strict=True):
            empty = jnp.zeros((0, *(rc.SHAPE if kind == "m" else ())), jnp.float32)
            ys.append(tuple(jnp.stack([row[j] for row in rows]) if rows else empty for j in range(size)))
        return [*carry, *ys]

    def _fori(self, step, values, size):
        carry = [_start(values, i, step.anchor) for i in step.init]
        upper = step.upper if step.traced is None else int(values[step.traced])
        for turn in range(step.lower, upper):
            inner = self.run(step.steps, [*values, jnp.int32(turn), *carry], size)
            carry = [_start(inner, i, step.anchor) for i in step.carry]
        return carry

    def _while(self, step, values, size):
        carry, turns = [values[i] for i in step.init], 0
        while True:
            watching = self.run(step.predicate, [*values, *carry], size)
            if turns >= step.most or (step.watched is not None and bool(is_large(watching[step.watched][0]))):
                return carry
            inner = self.run(step.steps, [*values, *carry], size)
            carry, turns = [inner[i] for i in step.carry], turns + 1

    def _branch(self, step, values, size):
        on = values[step.on][0] if step.by == "s" else values[step.on]
        taken = min(max(int(choice(jax.lax.stop_gradient(on), len(step.branches))), 0), len(step.branches) - 1)
        inner = self.run(step.branches[taken], values, size)
        return [_start(inner, i, step.anchor) for i in step.outs[taken]]

    def _derivative(self, step, values, size):
        def fun(*wrt):
            inner = [*values]
            for i, value in zip(step.wrt, wrt, strict=True):
                inner[i] = value
            return tuple(map(loss, self.run(step.steps, inner, size)[step.of]))

        primals = tuple(values[i] for i in step.wrt)
        if step.way == "jvp":
            return [*jax.jvp(fun, primals, tuple(_map(lambda x: x / 2, x) for x in primals))]
        value, pullback = jax.vjp(fun, *primals)
        gradients = pullback(tuple(jnp.float32(1) for _ in range(size)))
        return [*gradients] if step.way == "grad" else [value, *gradients]

    def _vmap(self, step, values, size):
        assert size == 1
        batched = [
            tuple(variant(value[0], j) for j in range(step.size)) if isinstance(value, tuple) else value
            for value in values
        ]
        inner = self.run(step.steps, batched, step.size)
        return [(sum(inner[i]) / step.size,) for i in step.outs]


def _map(fun, value):
    return tuple(map(fun, value)) if isinstance(value, tuple) else fun(value)


def _with(fun, value, other):
    return tuple(map(fun, value, other)) if isinstance(value, tuple) else fun(value, other)


def _start(values, i, anchor):
    # What a loop carries has a tangent in all of its turns if it has one in any.
    if anchor is None or not isinstance(values[i], tuple):
        return values[i]
    return tuple(map(anchored, values[i], values[anchor]))


def _each(step, once, args, size):
    """What a function of the arguments of a call makes of examples: one after the other, or of all at once."""
    if step.vmap_method in (None, "sequential"):
        found = [once(*one) for one in _examples(args, size)]
        return [*zip(*found, strict=True)]
    found = once(*(jnp.stack(arg) for arg in args))
    return [tuple(x[j] for j in range(size)) for x in found]


def _examples(args, size):
    return [tuple(arg[j] if isinstance(arg, tuple) else arg for arg in args) for j in range(size)]


def _tangents(step, args, given, size):
    found = [tangents(step, *pair) for pair in zip(_examples(args, size), _examples(given, size), strict=True)]
    return [*zip(*found, strict=True)]


def _backward(step, args, given, size):
    count = len(args)

    def once(*both):
        if step.rule == "vjp on hosts":
            return host_backward(step, both[:count], both[count:])
        return backward(step, both[:count], both[count:], jnp)

    if step.rule == "vjp on hosts":
        return tuple(_each(step, once, [*args, *given], size))
    found = [once(*one) for one in _examples([*args, *given], size)]
    return tuple(zip(*found, strict=True))
