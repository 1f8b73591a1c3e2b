"""Whether a program reads what it donated.

In a traced function a donation of a nested program does nothing, so that the result is right. Where the same function
runs eagerly, or becomes the outermost program, the array is gone: "Array has been deleted".
"""

from collections.abc import Iterator, Mapping

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params

from partjit._jax.sources import at_site

__all__ = ["reads_of_donated_values"]


def reads_of_donated_values(closed: ClosedJaxpr, names: list[str]) -> Iterator[str]:
    """The values that a nested program consumes and that are used afterwards, or twice in its call.

    Args:
        closed: the function, traced.
        names: those of its arguments.

    Example:
        >>> import jax
        >>> consume = jax.jit(lambda x: x + 1, donate_argnums=0)
        >>> next(reads_of_donated_values(jax.make_jaxpr(lambda x: consume(x) * x)(1.0), ["x"]))
        'x is donated to <lambda>...and read afterwards, by mul...'
    """
    yield from _reads(closed.jaxpr, dict(zip(closed.jaxpr.invars, names, strict=True)))


def _reads(jaxpr: Jaxpr, names: Mapping[Var, str]) -> Iterator[str]:
    donated: dict[Var, str] = {}
    for eqn in jaxpr.eqns:
        operands = [v for v in eqn.invars if not isinstance(v, Literal)]
        for v in dict.fromkeys(operands):
            if v in donated:
                yield f"{_name(v, names)} is donated to {donated[v]} and read afterwards, by {_reader(eqn)}"
        for v, is_donated in zip(eqn.invars, eqn.params.get("donated_invars", ()), strict=False):
            if is_donated and not isinstance(v, Literal) and v not in donated:
                donated[v] = _reader(eqn)
                if operands.count(v) > 1:
                    yield f"{_name(v, names)} is donated and passed a second time in one call of {_reader(eqn)}"
        for inner in jaxprs_in_params(eqn.params):
            yield from _reads(inner, {})
    for v in jaxpr.outvars:
        if not isinstance(v, Literal) and v in donated:
            yield f"{_name(v, names)} is donated to {donated[v]} and returned"


def _name(v: Var, names: Mapping[Var, str]) -> str:
    return names.get(v) or f"a value {v.aval.str_short()}"


def _reader(eqn: JaxprEqn) -> str:
    return f"{eqn.params.get('name', eqn.primitive.name)}{at_site(eqn.source_info)}"
