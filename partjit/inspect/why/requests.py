"""The requested specs of a program: of its arguments, results and constraints, of nested programs and shard_maps."""

import dataclasses
from collections.abc import Iterator, Sequence

from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from partjit.inspect.annotated import AnnotatedEquation, AnnotatedValue, shown_spec
from partjit.inspect.propagation import Partitioned
from partjit.inspect.user_lines import Site, shown_line
from partjit.primitive import sharding_constraint_p
from partjit.spec import ParsedPartitionSpec

__all__ = ["Request", "axes_in", "requests_of", "spec_in"]


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """A spec that the user wrote, and the value it is for.

    Attributes:
        kind: "argument" or "result" of the program, "constraint", "nested argument" or "nested result" of a nested
            `pjit` or `jax.jit`, "shard_map argument" or "shard_map result".
        position: of the argument or result.
        path: the key path of an argument or result, or its name.
        spec: the spec.
        value: the number of the value.
        equation: the equation that has it; None for an argument or a result of the program.
    """

    kind: str
    position: int
    path: str
    spec: P
    value: int
    equation: AnnotatedEquation | None = None

    @property
    def site(self) -> Site | None:
        """The line of the user's code that has it."""
        return None if self.equation is None else self.equation.site

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that it names."""
        return tuple(axis for entry in self.spec for axis in axes_in(entry))

    def __str__(self) -> str:
        spec = shown_spec(self.spec)
        if self.equation is None:
            if self.kind == "argument":
                return f"argument {self.path} with spec {spec}"
            return f"{self.path or 'result'}, requested as {spec}"
        where = shown_line(self.site) + (f" in {self.site[2]}" if self.site else "")
        if self.kind == "constraint":
            return f"the constraint {spec} at {where}"
        side = "argument" if self.kind.endswith("argument") else "result"
        what = f"the nested {self.equation.primitive} {self.equation.params.get('name', '')}".rstrip()
        what = "the shard_map" if self.equation.primitive == "shard_map" else what
        return f"the spec {spec} of {side} {self.path} of {what} at {where}"


def requests_of(partitioned: Partitioned) -> Iterator[Request]:
    """The requests of a program: arguments first, then its equations in their order, then results."""
    unit, tree = partitioned.unit, partitioned.tree
    yield from _each("argument", unit.paths, unit.in_shardings, tree.inputs, None)
    for equation in tree.walk():
        yield from _of_equation(equation)
    yield from _each("result", unit.result_paths, unit.out_shardings, tree.outputs, None)


def _of_equation(equation: AnnotatedEquation) -> Iterator[Request]:
    params = equation.params
    if equation.primitive == "shard_map":
        names = [str(i) for i in range(max(len(equation.inputs), len(equation.outputs)))]
        yield from _each("shard_map argument", names, params["in_specs"], equation.inputs, equation)
        yield from _each("shard_map result", names, params["out_specs"], equation.outputs, equation)
        return
    ins = params.get("in_specs", params.get("in_shardings"))
    outs = params.get("out_specs", params.get("out_shardings"))
    if "jaxpr" in equation.bodies and ins is not None and outs is not None:
        body, info = equation.bodies["jaxpr"], getattr(getattr(params["jaxpr"], "jaxpr", None), "debug_info", None)
        names, count = getattr(info, "arg_names", None) or (), len(body.inputs)
        paths = [name or str(i) for i, name in enumerate(names if len(names) == count else [""] * count)]
        yield from _each("nested argument", paths, ins, body.inputs, equation)
        yield from _each("nested result", [str(i) for i in range(len(outs))], outs, equation.outputs, equation)
        return
    # A constraint: the primitive of this package has a spec, jax's has a sharding, and some others have one as well.
    if len(equation.outputs) == 1 and not equation.bodies:
        spec = params.get("spec", params.get("sharding"))
        if equation.primitive in _CONSTRAINTS or _is_of_explicit_axes(spec):
            yield from _each("constraint", [""], [spec], equation.outputs, equation)


_CONSTRAINTS = ("sharding_constraint", sharding_constraint_p.name)


def _is_of_explicit_axes(sharding: object) -> bool:
    """Whether a sharding in another equation can be the user's; over Auto axes jax fills it in."""
    return isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types


def _each(
    kind: str,
    paths: Sequence[str],
    specs: Sequence[object],
    values: Sequence[AnnotatedValue],
    equation: AnnotatedEquation | None,
) -> Iterator[Request]:
    for position, (path, written, value) in enumerate(zip(paths, specs, values, strict=False)):
        spec = spec_in(written)
        if spec is not None:
            yield Request(kind, position, path, spec, value.number, equation)


def spec_in(written: object) -> P | None:
    """The spec that a parameter of an equation has: a spec, parsed or not, or a sharding with one; None for others."""
    if isinstance(written, ParsedPartitionSpec):
        return written.partition_spec
    if isinstance(written, NamedSharding):
        return written.spec
    return written if isinstance(written, P) else None


def axes_in(entry: object) -> tuple[str, ...]:
    """The axes that the entry of a spec for one dimension names."""
    return (entry,) if isinstance(entry, str) else entry if isinstance(entry, tuple) else ()
