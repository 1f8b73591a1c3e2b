"""An annotated program as text: one line per equation, with the specs of its results and its source line."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from partjit._jax.shardings import UnspecifiedValue
from partjit.inspect.annotated import AnnotatedEquation, AnnotatedJaxpr, AnnotatedValue, shown_spec
from partjit.inspect.user_lines import Site, shown_line
from partjit.render.numbers import shown_bytes

__all__ = ["Line", "Listing", "lines_of"]


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a listing.

    Attributes:
        depth: the number of equations that it is nested in.
        values, types, specs: the names of the values it defines, their types and specs.
        nbytes: bytes of the largest shard of each; 0 for values that are no arrays.
        text: how they are computed, or their role.
        site: the line of the user's code.
        number: of its equation; None for arguments and headers.
        module: the path of its module.
        is_local: whether it is in the body of a `shard_map`, where each device has values of its own.
    """

    depth: int
    values: tuple[str, ...]
    types: tuple[str, ...]
    specs: tuple[str, ...]
    nbytes: tuple[int, ...]
    text: str
    site: Site | None = None
    number: int | None = None
    module: str = ""
    is_local: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Listing:
    """The lines of a program, and the title above them."""

    title: str
    lines: tuple[Line, ...]

    def __str__(self) -> str:
        return "\n".join([self.title, *_shown(self.lines)])

    __repr__ = __str__


def lines_of(
    program: AnnotatedJaxpr,
    depth: int = 0,
    roles: Iterable[str] = itertools.repeat("an argument"),
    is_local: bool = False,
) -> Iterator[Line]:
    """The lines of a program: its arguments with their roles, its equations with those nested in them, its results."""
    for value in program.constants:
        yield _defining(depth, (value,), "a constant", is_local)
    for value, role in zip(program.inputs, roles, strict=False):
        yield _defining(depth, (value,), value.path or role, is_local)
    for equation in program.equations:
        yield from _of_equation(equation, depth, is_local)
    names = " ".join(value.name for value in program.outputs)
    yield Line(depth, (), (), (), (), f"return {names}".rstrip())


def _of_equation(equation: AnnotatedEquation, depth: int, is_local: bool) -> Iterator[Line]:
    inputs = " ".join(value.name for value in equation.inputs)
    params = _shown_params(equation)
    yield _defining(depth, equation.outputs, f"= {equation.primitive}{params} {inputs}".rstrip(), is_local, equation)
    for name, body in equation.bodies.items():
        times = {1: "", None: ", unknown trip count"}.get(equation.trip_count, f", {equation.trip_count} times")
        if len(equation.bodies) > 1 or times:
            yield Line(depth + 1, (), (), (), (), f"{_BODIES.get(name, name)}{times}:")
        constants = len(body.inputs) - equation.carried if name == "cond_jaxpr" else equation.constants
        roles = ["loop-invariant"] * constants + ["carried"] * equation.carried
        others = itertools.repeat("a slice" if roles else "an argument")
        inside = is_local or equation.primitive == "shard_map"
        yield from lines_of(body, depth + 1, itertools.chain(roles, others), inside)


_BODIES = {"jaxpr": "body", "body_jaxpr": "body", "cond_jaxpr": "condition", "branches[0]": "branch 0 (false)"} | {
    f"branches[{k}]": f"branch {k}" for k in range(1, 100)
}


def _defining(
    depth: int,
    values: tuple[AnnotatedValue, ...],
    text: str,
    is_local: bool,
    equation: AnnotatedEquation | None = None,
) -> Line:
    return Line(
        depth,
        tuple(value.name for value in values),
        tuple(value.shown_type for value in values),
        tuple(value.shown_spec if value.is_array else "" for value in values),
        tuple(value.nbytes_per_device for value in values),
        text,
        None if equation is None else equation.site,
        None if equation is None else equation.number,
        "" if equation is None else equation.module,
        is_local,
    )


_LONGEST = 40
# Parameters that repeat what the line shows, or that only jax reads.
# fmt: off
_HIDDEN_PARAMS = frozenset((
    "agree", "check_vma", "cond_nconsts", "body_nconsts", "copy_semantics", "ctx_mesh", "differentiated",
    "ft_in", "ft_out", "in_layouts", "in_specs", "inline", "keep_unused", "layout", "linear", "manual_axes", "mode",
    "newly_manual_axes",
    "num_carry", "num_consts", "out_layouts", "out_sharding", "out_specs", "preferred_element_type", "prevent_cse",
    "reverse", "sharding", "unroll", "witness",
))
# fmt: on


def _shown_params(equation: AnnotatedEquation) -> str:
    """The informative parameters of an equation, as far as they are short."""
    if "callee" in equation.params:
        return f"[{equation.params['callee'].name}]"
    if equation.primitive == "sharding_constraint":
        spec = equation.params.get("spec") or getattr(equation.params.get("sharding"), "spec", None)
        return "" if spec is None else f"[{shown_spec(spec)}]"
    texts = ((name, _short(value)) for name, value in equation.params.items() if name not in _HIDDEN_PARAMS)
    shown = [f"{name}={text}" for name, text in texts if text is not None and len(text) <= _LONGEST]
    return f"[{' '.join(shown)}]" if shown else ""


def _short(value: object) -> str | None:
    many = value if isinstance(value, tuple | list) else (value,)
    if all(item is None or item is False or isinstance(item, UnspecifiedValue) for item in many):
        return None
    if any(hasattr(item, "eqns") or callable(item) for item in many):
        return None
    text = str(value).replace(" ", "")
    return None if "0x" in text or "\n" in text else text


def _shown(lines: tuple[Line, ...]) -> Iterator[str]:
    rows = []
    for line in lines:
        indent = "  " * (line.depth + 1)
        many = zip(line.values, line.types, line.specs, line.nbytes, strict=True)
        named = [
            (f"{indent}{name}:{type_}", spec, shown_bytes(size) if spec else "") for name, type_, spec, size in many
        ]
        first = named[0] if named else (indent + line.text, "", "")
        where = "" if line.site is None else f"# {shown_line(line.site)} {line.module}".rstrip()
        rows.append((*first, line.text if named else "", where))
        rows += [(*more, "", "") for more in named[1:]]
    defining = [row for row in rows if row[1] or row[3]]
    widths = [max((len(row[k]) for row in defining), default=0) for k in range(2)]
    widths = [min(width, limit) for width, limit in zip(widths, (40, 32), strict=True)]
    for left, spec, size, text, where in rows:
        if not spec and not text:
            yield left
        else:
            body = f"{left:<{widths[0]}}  {spec:<{widths[1]}}  {size:>8}  {text}"
            yield f"{body:<100}  {where}".rstrip()
