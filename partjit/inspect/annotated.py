"""A program with what the partitioner made of it: every value with its spec and bytes, every equation with its line."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from jax.core import ShapedArray
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from partjit._jax.sources import source_site
from partjit.inspect.user_lines import Site
from partjit.shardy import TensorSharding

__all__ = ["AnnotatedEquation", "AnnotatedJaxpr", "AnnotatedValue", "shown_spec"]


def shown_spec(spec: P) -> str:
    """A spec as one writes it.

    Example:
        >>> shown_spec(P("data", None))
        "P('data', None)"
    """
    return str(spec).replace("PartitionSpec", "P", 1).replace(",)", ")")


@dataclasses.dataclass(frozen=True, eq=False)
class AnnotatedValue:
    """A value of a program.

    Attributes:
        name: its name in the printed jaxpr; unique in the program.
        number: what it is in the program whose nested programs are opened: values with the same number are one array.
        aval: its type.
        mesh: the mesh of the program.
        path: the key path of an argument of the program, or of the first result that it is.
        literal: whether it is a number in the text of the program.
    """

    name: str
    number: int
    aval: Any
    mesh: Mesh
    layouts: Mapping[int, TensorSharding] = dataclasses.field(repr=False)
    path: str | None = None
    literal: bool = False

    @property
    def is_array(self) -> bool:
        """Whether it is an array, of which devices hold parts; a ref or a token is not."""
        return isinstance(self.aval, ShapedArray)

    @property
    def layout(self) -> TensorSharding | None:
        """How it is divided; None if that is not known."""
        return self.layouts.get(self.number)

    @functools.cached_property
    def spec(self) -> P | None:
        """How it is divided over the axes of the mesh, with one entry per dimension; None if that is not known.

        In the body of a `shard_map` the value is that of one shard, and the spec is how that is divided further. Where
        the partitioner uses a part of an axis, the entry says which: "data:(1)2".
        """
        if self.layout is None:
            return None
        dims = self.layout.axes[: len(self.aval.shape)]  # a key has one dimension more on the device
        return P(*[dim[0] if len(dim) == 1 else dim or None for dim in dims])

    @functools.cached_property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of the largest part that a device holds."""
        if self.layout is None:
            return self.aval.shape
        parts = [math.prod(dim) for dim in self.layout.parts]
        return tuple(-(-size // n) for size, n in zip(self.aval.shape, parts, strict=False))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.aval.shape) * self.aval.dtype.itemsize if self.is_array else 0

    @property
    def nbytes_per_device(self) -> int:
        """Bytes of the largest part that a device holds."""
        return math.prod(self.shard_shape) * self.aval.dtype.itemsize if self.is_array else 0

    @property
    def is_replicated(self) -> bool:
        """Whether every device holds all of it."""
        return self.layout is None or not any(self.layout.axes)

    def __str__(self) -> str:
        if self.literal or not self.is_array:
            return self.name
        where = "?" if self.spec is None else shown_spec(self.spec)
        return f"{self.name}:{self.aval.str_short(short_dtypes=True)} {where}"


@dataclasses.dataclass(frozen=True, eq=False)
class AnnotatedEquation:
    """An equation of a program.

    Attributes:
        number: of all equations of the program, nested ones as well, in the order of the text.
        primitive: the name of its primitive.
        inputs, outputs: its values.
        params: its parameters, as jax has them.
        sources: what jax knows of where it comes from, and what it stands in does.
        bodies: the programs in it, by the names of parameters.
        turns: how often those run, each time that it runs; None if that is not known.
        constants, carried: of a loop, how many arguments of its body are the same in each turn, and how many a turn
            hands to the next one; those of a scan that come after these are slices.
    """

    number: int
    primitive: str
    inputs: tuple[AnnotatedValue, ...]
    outputs: tuple[AnnotatedValue, ...]
    params: Mapping[str, Any]
    sources: tuple[Any, ...] = dataclasses.field(repr=False)
    bodies: "Mapping[str, AnnotatedJaxpr]"
    turns: int | None = 1
    constants: int = 0
    carried: int = 0

    @functools.cached_property
    def site(self) -> Site | None:
        """The line of the user's code that it comes from: its own, that of what it stands in, or of what is in it."""
        known = filter(None, map(source_site, self.sources))
        within = (inner.site for body in self.bodies.values() for inner in body.walk())
        return next(known, None) or next(filter(None, within), None)

    @property
    def scope(self) -> str:
        """The names of what it stands in: nested functions, `jvp(..)` and `transpose(..)`."""
        return "/".join(filter(None, (str(source.name_stack) for source in reversed(self.sources))))


@dataclasses.dataclass(frozen=True, eq=False)
class AnnotatedJaxpr:
    """A program, or a program in an equation.

    Attributes:
        constants: the arrays that it closes over.
        inputs, outputs: its arguments and results.
        equations: in their order.
    """

    constants: tuple[AnnotatedValue, ...]
    inputs: tuple[AnnotatedValue, ...]
    outputs: tuple[AnnotatedValue, ...]
    equations: tuple[AnnotatedEquation, ...]

    def walk(self) -> Iterator[AnnotatedEquation]:
        """All equations, those in equations right after them."""
        for equation in self.equations:
            yield equation
            for body in equation.bodies.values():
                yield from body.walk()

    @property
    def values(self) -> Iterator[AnnotatedValue]:
        """All values that have names, those of nested programs as well."""
        yield from (*self.constants, *self.inputs)
        for equation in self.equations:
            for body in equation.bodies.values():
                yield from body.values
            yield from equation.outputs
