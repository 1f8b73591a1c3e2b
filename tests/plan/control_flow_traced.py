"""Random programs with control flow as functions of jax: what is traced, with colocated calls."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

import partjit
from partjit import P, colocated
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
    is_varied,
    loss,
    operate,
    spread,
    surrogate,
    surrogate_tangent,
    tangents,
    variant,
)
from tests.plan.random_control_flow import KINDS, SHAPE, calls_of, result_kinds


class Traced:
    """Makes functions of steps; colocated functions and objects are made once per program."""

    def __init__(self, program, mesh, *, is_eager=False):
        self.mesh = mesh
        self.is_eager = is_eager  # then a call is where its arguments are
        self.program = program
        objects = {}
        self.functions = {step.number: self._function(step, objects) for step in calls_of(program.steps)}

    def __call__(self, *arguments):
        """The results of the program."""
        *arguments, self.tag = arguments
        values = self.run(self.program.steps, arguments)
        return tuple(values[i] for i in self.program.results)

    def run(self, steps, values):
        values = [*values]
        for step in steps:
            values += getattr(self, f"_{type(step).__name__.lower()}")(step, values)
        return values

    def _device(self, step, values):
        return [operate(step.op, [values[i] for i in step.args])]

    def _constant(self, step, values):
        return [constant(step)]

    def _call(self, step, values):
        args = [lax.stop_gradient(values[i]) if step.is_stopped else values[i] for i in step.args]
        function = self.functions[step.number]
        if step.form == "by keyword":
            return [*function(**{f"x{i}": arg for i, arg in enumerate(args)})]
        if step.form == "in a tree":
            return [*function({"given": args, "none": None})["found"]]
        return [*function(*args, *[self.tag] * (step.form == "beside a tag"))]

    def _nested(self, step, values):
        def body(*values):
            return self.run(step.steps, values)[step.out]

        return [WRAPPERS[step.wrapper](body)(*values)]

    def _scan(self, step, values):
        def body(carry, xs):
            inner = self.run(step.steps, [*values, *carry, *xs])
            return tuple(inner[i] for i in step.carry), tuple(inner[i] for i in step.ys)

        init = _start(values, step.init, step.anchor)
        given = [values[i] for i in step.xs]
        xs = tuple(x if x.ndim in (1, 3) else spread(x, step.length) for x in given)
        carry, ys = lax.scan(body, init, xs, step.length, reverse=step.is_reverse, unroll=step.unroll)
        return [*carry, *ys]

    def _fori(self, step, values):
        def body(turn, carry):
            inner = self.run(step.steps, [*values, jnp.asarray(turn, jnp.int32), *carry])
            return tuple(inner[i] for i in step.carry)

        # A result that is weakly typed, and has 32 bits, is an argument later, maybe where numbers have 64.
        upper = step.upper if step.traced is None else jnp.asarray(values[step.traced], jnp.int32)
        return [*lax.fori_loop(step.lower, upper, body, _start(values, step.init, step.anchor))]

    def _while(self, step, values):
        def goes_on(state):
            turns, carry = state
            watching = self.run(step.predicate, [*values, *carry])
            goes_on = turns < step.most
            return goes_on if step.watched is None else goes_on & ~is_large(watching[step.watched])

        def body(state):
            turns, carry = state
            inner = self.run(step.steps, [*values, *carry])
            return turns + 1, tuple(inner[i] for i in step.carry)

        return [*lax.while_loop(goes_on, body, (jnp.int32(0), tuple(values[i] for i in step.init)))[1]]

    def _branch(self, step, values):
        def branch(steps, outs):
            return lambda: _start(self.run(steps, values), outs, step.anchor)

        branches = [branch(*one) for one in zip(step.branches, step.outs, strict=True)]
        chosen = choice(values[step.on], len(branches))
        if len(branches) == 2:
            return [*lax.cond(chosen > 0, branches[1], branches[0])]
        return [*lax.switch(chosen, branches)]

    def _derivative(self, step, values):
        def fun(*wrt):
            inner = [*values]
            for i, value in zip(step.wrt, wrt, strict=True):
                inner[i] = value
            return loss(self.run(step.steps, inner)[step.of])

        primals = tuple(values[i] for i in step.wrt)
        numbers = tuple(range(len(primals)))
        if step.way == "jvp":
            # Of a weak type, half of it would be of 64 bits where these are enabled.
            found = jax.jvp(fun, primals, tuple((x / 2).astype(x.dtype) for x in primals))
        elif step.way == "grad":
            found = jax.grad(fun, numbers)(*primals)
        else:
            value, gradients = jax.value_and_grad(fun, numbers)(*primals)
            found = [value, *gradients]
        return [anchored(x, primals[0]) for x in found] if step.is_batched else [*found]

    def _vmap(self, step, values):
        def body(*values):
            inner = self.run(step.steps, values)
            return tuple(inner[i] for i in step.outs)

        axes = tuple(0 if is_varied(x) else None for x in values)
        batched = [
            x if axis is None else jnp.stack([variant(x, j) for j in range(step.size)])
            for x, axis in zip(values, axes, strict=True)
        ]
        return [sum(x) / step.size for x in jax.vmap(body, axes)(*batched)]

    def _function(self, step, objects):
        """The colocated function of a call, with its rule."""
        function = self._plain(step, objects)
        if step.rule == "jvp":
            # What a rule calls is the function itself, once.
            function.defjvp(lambda args, given: (function(*args), tangents(step, args, given)))
        elif step.rule == "vjp on devices":
            function.defvjp(lambda *args: (function(*args), args), lambda args, given: backward(step, args, given, jnp))
        elif step.rule == "vjp on hosts":
            forward = colocated.colocated_python(
                lambda *args: (taking(step)(*args), args),
                **{**self._said(step), "out_specs_fn": lambda *args: (self._results(step), args)},
            )
            pull = colocated.colocated_python(
                lambda args, given: host_backward(step, args, given),
                out_specs_fn=lambda args, given: args,
                **{key: said for key, said in self._said(step).items() if key in ("stream", "mode", "vmap_method")},
            )
            function.defvjp(forward, pull)
        return function

    def _plain(self, step, objects):
        if step.of is None:
            return colocated.colocated_python(taking(step), **self._said(step))
        if step.of not in objects:
            calls = [call for call in calls_of(self.program.steps) if call.of == step.of]
            objects[step.of] = _object(calls)
        return getattr(objects[step.of], f"m{step.number}").specialize(**self._said(step))

    def _results(self, step):
        found = tuple(
            jax.ShapeDtypeStruct(
                *KINDS[kind],
                sharding=NamedSharding(self.mesh, step.out_spec) if kind == "m" and self._says(step.out_spec) else None,
            )
            for kind in result_kinds(step)
        )
        return {"found": found, "none": None} if step.form == "in a tree" else found

    def _says(self, spec):
        return spec is not None and not self.is_eager

    def _said(self, step):
        # Under a batched method the function returns a batch, which its specs tell by their rank.
        said = {"stream": step.stream, "mode": step.mode, "out_specs_fn": lambda *_, **__: self._results(step)}
        if step.vmap_method is not None:
            said["vmap_method"] = step.vmap_method
        said |= {"jax": {}, "numpy": {"arrays": "numpy"}, "no jax": {"uses_jax": False}}[step.gets]
        if step.pure:
            said["pure"] = True
        if self.is_eager and not step.args:
            said["devices"] = [*self.mesh.devices.flat]
        if self._says(step.in_spec):
            first = jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=NamedSharding(self.mesh, step.in_spec))
            rest = [jax.ShapeDtypeStruct(*KINDS[kind]) for kind in step.arg_kinds[1:]]
            said["in_specs"] = ((first, *rest), {})
        return said


def taking(step, turn=lambda: 0):
    """What a call does, as a function of arguments in the form of the call."""

    def each(*xs):
        return host(step, xs, turn())

    def by_keyword(**xs):
        return each(*(xs[name] for name in sorted(xs)))

    def in_a_tree(tree):
        return {"found": each(*tree["given"]), "none": tree["none"]}

    def beside_a_tag(*xs):
        return host(step, xs[:-1], turn(), xs[-1])

    forms = {"each": each, "by keyword": by_keyword, "in a tree": in_a_tree, "beside a tag": beside_a_tag}
    return decorated(forms[step.form]) if step.is_decorated else forms[step.form]


def _object(calls):
    """A colocated object with a method for each of these calls."""
    members: dict = {"__init__": lambda self: setattr(self, "counter", Counter())}
    for step in calls:

        def method(self, *xs, step=step, **named):
            return taking(step, self.counter.turn)(*xs, **named)

        members[f"m{step.number}"] = method
    return colocated.colocated_python_class(type("Object", (), members))()


def _start(values, indices, anchor):
    return tuple(values[i] if anchor is None else anchored(values[i], values[anchor]) for i in indices)


def _custom_jvp(fun):
    wrapped = jax.custom_jvp(fun)

    @wrapped.defjvp
    def rule(values, given):
        out = fun(*values)
        return out, surrogate_tangent(out, [*given])

    return wrapped


def _custom_vjp(fun):
    wrapped = jax.custom_vjp(fun)
    wrapped.defvjp(
        lambda *values: (fun(*values), values),
        lambda values, given: tuple(surrogate(value, given) for value in values),
    )
    return wrapped


WRAPPERS = {
    "pjit": partjit.pjit,
    "pjit on x": lambda fun: partjit.pjit(fun, out_axis_resources=P("x")),
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "custom_jvp": _custom_jvp,
    "custom_vjp": _custom_vjp,
}
