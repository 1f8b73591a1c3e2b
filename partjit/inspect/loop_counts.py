"""Trip counts of the loops in a jaxpr, as far as they can be read from it."""

from jax.extend.core import JaxprEqn, Literal, Var

from partjit._jax.jaxprs import Atom, control_flow_kind, scan_counts

__all__ = ["loop_counts", "trip_count_of"]


def loop_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """How many arguments of the body of a loop are constants, and how many are carried; 0 and 0 for other equations."""
    match control_flow_kind(eqn):
        case "scan":
            return scan_counts(eqn)
        case "while":
            return eqn.params["body_nconsts"], len(eqn.outvars)
        case _:
            return 0, 0


def trip_count_of(eqn: JaxprEqn) -> int | None:
    """How often the bodies of an equation run."""
    match control_flow_kind(eqn):
        case "scan":
            return eqn.params["length"]
        case "while":
            return _trip_count_of_while(eqn)
        case _:
            return 1


def _trip_count_of_while(eqn: JaxprEqn) -> int | None:
    """The trip count of a `while_loop` that counts by ones up to a constant, as `fori_loop` makes it."""
    cond, body = (eqn.params[name].jaxpr for name in ("cond_jaxpr", "body_jaxpr"))
    cond_consts, body_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    if len(cond.eqns) != 1 or cond.eqns[0].primitive.name != "lt" or cond.outvars[0] is not cond.eqns[0].outvars[0]:
        return None
    initial = [*eqn.invars[:cond_consts], *eqn.invars[cond_consts + body_consts :]]  # of the predicate's arguments

    def first(atom: Atom) -> int | None:
        """The number that an operand of the predicate is in the first iteration."""
        if isinstance(atom, Var) and atom in cond.invars:
            atom = initial[cond.invars.index(atom)]
        return int(atom.val) if isinstance(atom, Literal) else None

    def carried(atom: Atom) -> int | None:
        """The position of an operand of the predicate among the carried values."""
        is_carried = isinstance(atom, Var) and atom in cond.invars[cond_consts:]
        return cond.invars.index(atom) - cond_consts if is_carried else None

    counter, bound = cond.eqns[0].invars
    k = carried(counter)
    if k is None:
        return None
    step = next((e for e in body.eqns if body.outvars[k] in e.outvars), None)
    if step is None or step.primitive.name != "add" or body.invars[body_consts + k] not in step.invars:
        return None
    if not any(isinstance(atom, Literal) and atom.val == 1 for atom in step.invars):
        return None
    other = carried(bound)
    if other is not None and body.outvars[other] is not body.invars[body_consts + other]:
        return None
    start, stop = first(counter), first(bound)
    return None if start is None or stop is None else max(0, stop - start)
