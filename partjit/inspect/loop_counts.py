"""How often the loops of a jaxpr turn, as far as that can be read from it."""

from typing import Any

from jax.extend.core import Literal, Var

from partjit._jax.jaxprs import control_flow_kind, scan_counts

__all__ = ["loop_counts", "trip_count_of"]


def loop_counts(eqn: Any) -> tuple[int, int]:
    """How many arguments of the body of a loop are constants, and how many are carried; none of what is no loop."""
    match control_flow_kind(eqn):
        case "scan":
            return scan_counts(eqn)
        case "while":
            return eqn.params["body_nconsts"], len(eqn.outvars)
        case _:
            return 0, 0


def trip_count_of(eqn: Any) -> int | None:
    """How often the bodies of an equation run."""
    kind = control_flow_kind(eqn)
    if kind == "scan":
        return eqn.params["length"]
    return _counted_turns(eqn) if kind == "while" else 1


def _counted_turns(eqn: Any) -> int | None:
    """The turns of a `while_loop` that counts by ones up to a number, as `fori_loop` makes it."""
    cond, body = (eqn.params[name].jaxpr for name in ("cond_jaxpr", "body_jaxpr"))
    cond_consts, body_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    if len(cond.eqns) != 1 or cond.eqns[0].primitive.name != "lt" or cond.outvars[0] is not cond.eqns[0].outvars[0]:
        return None
    carried = eqn.invars[cond_consts + body_consts :]

    def start(atom: Any) -> int | None:
        """The value that a number of the predicate has in all turns, or in the first one."""
        if isinstance(atom, Var) and atom in cond.invars:
            k = cond.invars.index(atom)
            atom = eqn.invars[k] if k < cond_consts else carried[k - cond_consts]
        return int(atom.val) if isinstance(atom, Literal) else None

    counter, bound = cond.eqns[0].invars
    if not isinstance(counter, Var) or counter not in cond.invars[cond_consts:]:
        return None
    k = cond.invars.index(counter) - cond_consts
    step = next((e for e in body.eqns if body.outvars[k] in e.outvars), None)
    counts = step is not None and step.primitive.name == "add" and body.invars[body_consts + k] in step.invars
    if step is None or not counts or not any(isinstance(a, Literal) and a.val == 1 for a in step.invars):
        return None
    if isinstance(bound, Var) and bound in cond.invars[cond_consts:]:
        other = cond.invars.index(bound) - cond_consts
        if body.outvars[other] is not body.invars[body_consts + other]:
            return None
    first, last = start(counter), start(bound)
    return None if first is None or last is None else max(0, last - first)
