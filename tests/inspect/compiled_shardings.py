"""What the compiled program says of where its values lie, by jax's own `inspect_array_sharding`."""

import contextlib
from functools import partial
from unittest import mock

import jax
from jax._src import core
from jax._src.debugging import inspect_sharding_p
from jax.sharding import NamedSharding

from partjit._jax.jaxprs import closed_jaxpr
from partjit.compile import lower_jaxpr_anew
from partjit.inspect import inlining, propagation
from partjit.inspect.marks import mark_p

# What is asked is answered before code is generated.
_AT_ONCE = {"xla_backend_optimization_level": 0}


def as_asked(partitioned):
    """The program annotated as if somebody asked for each value: none is unused then, and each has another use."""
    keeping = mock.patch.object(propagation, "remove_unused_values", return_value=None)
    lowering = mock.patch.object(inlining, "without_unused", lambda eqns, _: ([*eqns], set()))
    seeing = mock.patch.object(propagation, "hidden_marks", return_value=contextlib.nullcontext())
    with keeping, lowering, seeing:
        return propagation.partition(partitioned.unit)


def values_that_lie_otherwise(partitioned):
    """The values whose annotation differs from what the compiled program says, and how many were compared.

    The marks of the opened program are replaced by equations that ask the compiler, at any depth. A value that XLA has
    found to be one of those it is made of, as what is selected of two equal ones, lies as that does.
    """
    partitioned = as_asked(partitioned)
    seen = {}
    unit = partitioned.unit
    asking = _asking(partitioned.inlined.jaxpr, seen)
    donated = (False,) * len(unit.in_shardings)
    lowering = lower_jaxpr_anew(
        asking, unit.in_shardings, unit.out_shardings, donated, unit.mesh, "asking", keep_unused=True
    )
    try:
        lowering.compile(_AT_ONCE)
    except jax.errors.JaxRuntimeError as error:
        if not any(text in str(error) for text in ("IndivisibleError", "KeyError: np.int64")):
            raise
        return [], 0  # jax's own inspection knows neither shards of different sizes nor parts of a mesh axis
    values = {value.number: value for value in partitioned.tree.values if value.number in seen}
    selected = [equation for equation in partitioned.tree.walk() if equation.primitive == "select_n"]
    made_of = {value.number: equation.inputs for equation in selected for value in equation.outputs}
    otherwise = []
    for number, value in values.items():
        alike = [value, *(v for v in made_of.get(number, ()) if v.is_array and v.aval.shape == value.aval.shape)]
        if any(":" in str(v.spec) for v in alike):
            continue  # nor does a NamedSharding know parts of an axis, `x:(1)2`
        told = [NamedSharding(unit.mesh, v.spec) for v in alike]
        if not any(seen[number].is_equivalent_to(sharding, value.aval.ndim) for sharding in told):
            otherwise.append((value, seen[number]))
    return otherwise, len(values)


def computed_from_arguments(program):
    """The numbers of what equations compute, but not of numbers alone: XLA computes that before it partitions."""
    of_numbers, computed = set(), set()
    for equation in program.walk():
        is_known = all(value.literal or value.number in of_numbers for value in equation.inputs)
        if equation.bodies:
            if is_known:
                given = [*equation.outputs, *(value for body in equation.bodies.values() for value in body.inputs)]
                of_numbers.update(value.number for value in given)
            continue
        (of_numbers if is_known else computed).update(value.number for value in equation.outputs)
    return computed


def _asking(jaxpr, seen):
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    eqns = []
    for eqn in inner.eqns:
        if eqn.primitive is mark_p:
            eqns += _questions(eqn, seen)
            continue
        params = {name: _inside(value, seen) for name, value in eqn.params.items()}
        effects = {effect for nested in core.jaxprs_in_params(params) for effect in nested.effects}
        eqns.append(eqn.replace(params=params, effects={*eqn.effects, *effects}))
    consts = dict(zip(inner.constvars, getattr(jaxpr, "consts", ()), strict=False))
    return closed_jaxpr(inner.invars, inner.outvars, eqns, consts)


def _questions(mark, seen):
    for number, var in zip(mark.params["numbers"], mark.invars, strict=True):
        if var.aval.ndim and not jax.dtypes.issubdtype(var.aval.dtype, jax.dtypes.extended):
            _, effects = inspect_sharding_p.abstract_eval(var.aval, callback=None)
            params = {"callback": partial(seen.__setitem__, number)}
            yield core.new_jaxpr_eqn([var], [], inspect_sharding_p, params, effects)


def _inside(param, seen):
    if isinstance(param, tuple) and any(hasattr(item, "eqns") for item in param):
        return tuple(_inside(item, seen) for item in param)
    if not hasattr(param, "eqns"):
        return param
    made = _asking(param, seen)
    return made if hasattr(param, "consts") else made.jaxpr
