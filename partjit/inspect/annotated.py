"""A jaxpr annotated by the partitioner: every value with its spec and bytes, every equation with its source line."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.source_info_util import SourceInfo
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from partjit._jax.sources import source_sites
from partjit.inspect.user_lines import Site, is_installed, nearest_lines
from partjit.records import quick_dataclass
from partjit.shardy import TensorSharding

__all__ = ["AnnotatedEquation", "AnnotatedJaxpr", "AnnotatedValue", "element_bits", "shown_axes", "shown_spec"]


def shown_spec(spec: P) -> str:
    """A spec as it is written in Python.

    Example:
        >>> shown_spec(P("data", None))
        "P('data', None)"
    """
    return str(spec).replace("PartitionSpec", "P", 1).replace(",)", ")")


def shown_axes(axes: Sequence[tuple[str, ...] | None]) -> str:
    """The axes of each dimension as the spec that says so.

    Example:
        >>> shown_axes([("data", "model"), None, ("x",)])
        "P(('data', 'model'), None, 'x')"
    """
    return shown_spec(P(*[(dim or (None,))[0] if len(dim or ()) < 2 else dim for dim in axes]))


def element_bits(dtype: Any) -> int:
    """The bits of an element in memory, where several of fewer than eight share a byte, as XLA packs int4."""
    return jax.dtypes.itemsize_bits(dtype) if dtype.itemsize == 1 else 8 * dtype.itemsize


def _nbytes(shape: Sequence[int], dtype: Any) -> int:
    return -(-math.prod(shape) * element_bits(dtype) // 8)


@quick_dataclass()
class AnnotatedValue:
    """A value of a program.

    Attributes:
        name: its name in the printed jaxpr; unique in the program.
        number: of the array in the inlined program: values with the same number are one array. Negative for literals.
        aval: its type.
        mesh: the mesh of the program.
        path: the key path of an argument of the program, or of the first result that it is.
        literal: whether it is a literal in the text of the program.
    """

    name: str
    number: int
    aval: Any
    mesh: Mesh
    shardings: Mapping[int, TensorSharding] = dataclasses.field(repr=False)
    path: str | None = None
    literal: bool = False

    @property
    def is_array(self) -> bool:
        """Whether it is an array; a ref or a token is not."""
        return isinstance(self.aval, ShapedArray)

    @property
    def sharding(self) -> TensorSharding | None:
        """How it is sharded; None if that is not known: nobody needs it, and so it is not computed."""
        return self.shardings.get(self.number)

    @functools.cached_property
    def spec(self) -> P | None:
        """Its sharding as a spec with one entry per dimension; None if that is not known.

        In the body of a `shard_map` the value is that of one shard, and the spec is how it is sharded further. Where
        the partitioner uses a part of an axis, the entry names that part: "data:(1)2".
        """
        if self.sharding is None:
            return None
        dims = self.sharding.axes[: len(self.aval.shape)]  # a key has one dimension more on the device
        return P(*[dim[0] if len(dim) == 1 else dim or None for dim in dims])

    @property
    def shown_spec(self) -> str:
        """The spec as it is written in Python, "?" if it is not known."""
        return "?" if self.spec is None else shown_spec(self.spec)

    @property
    def shown_type(self) -> str:
        """Its type as jaxprs show it: "f32[8,4]"."""
        return self.aval.str_short(short_dtypes=True)

    @functools.cached_property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of the largest shard."""
        if self.sharding is None:
            return self.aval.shape
        parts = [math.prod(dim) for dim in self.sharding.parts]
        return tuple(-(-size // n) for size, n in zip(self.aval.shape, parts, strict=False))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return _nbytes(self.aval.shape, self.aval.dtype) if self.is_array else 0

    @property
    def nbytes_per_device(self) -> int:
        """Bytes of the largest shard."""
        return _nbytes(self.shard_shape, self.aval.dtype) if self.is_array else 0

    @property
    def is_replicated(self) -> bool:
        """Whether every device has all of it, as far as is known."""
        return self.sharding is not None and not any(self.sharding.axes)

    def __str__(self) -> str:
        if self.literal or not self.is_array:
            return self.name
        return f"{self.name}:{self.shown_type} {self.shown_spec}"


@quick_dataclass()
class AnnotatedEquation:
    """An equation of a program.

    Attributes:
        number: its position among all equations of the program, nested ones included.
        primitive: the name of its primitive.
        inputs, outputs: its values.
        params: its parameters, as jax has them.
        sources: jax's source info of the equation and of those that it is nested in, innermost first.
        bodies: the jaxprs in it, by the names of parameters.
        trip_count: how often those run in one execution of the equation; None if that is not known.
        module_of: gives the module path of an equation of the program.
        loop_of: gives the loop before which an equation is computed.
        constants, carried: of a loop, how many arguments of its body are loop-invariant, and how many are carried from
            one iteration to the next; those of a scan that come after these are slices.
    """

    number: int
    primitive: str
    inputs: tuple[AnnotatedValue, ...]
    outputs: tuple[AnnotatedValue, ...]
    params: Mapping[str, Any]
    sources: tuple[SourceInfo, ...] = dataclasses.field(repr=False)
    bodies: "Mapping[str, AnnotatedJaxpr]"
    module_of: "Callable[[AnnotatedEquation], str]" = dataclasses.field(repr=False)
    loop_of: "Callable[[AnnotatedEquation], AnnotatedEquation | None]" = dataclasses.field(repr=False)
    trip_count: int | None = 1
    constants: int = 0
    carried: int = 0

    @functools.cached_property
    def site(self) -> Site | None:
        """The user's line it comes from: its own, that of an equation around it, or that of one nested in it.

        It is the nearest one outside of installed packages.
        """
        within = (inner.site for body in self.bodies.values() for inner in body.walk())
        return self._lines[0] or next(filter(None, within), None)

    @property
    def library(self) -> Site | None:
        """The innermost line, if that is in an installed package which the user's line calls."""
        return self._lines[1]

    @functools.cached_property
    def _lines(self) -> tuple[Site | None, Site | None]:
        found = nearest_lines(itertools.chain.from_iterable(map(source_sites, self.sources)))
        if found[0] is not None and is_installed(found[0][0]) and (loop := self.loop_of(self)) is not None:
            around = nearest_lines(itertools.chain.from_iterable(map(source_sites, loop.sources)))[0]
            return found if around is None or is_installed(around[0]) else (around, found[0])
        return found

    @functools.cached_property
    def module(self) -> str:
        """The path of the module that it belongs to, "Block_3/Dense_0"; see `partjit.inspect.modules`."""
        return self.module_of(self)

    @functools.cached_property
    def scope(self) -> str:
        """Its name stack: nested functions, `jvp(..)` and `transpose(..)`."""
        return "/".join(filter(None, (str(source.name_stack) for source in reversed(self.sources))))


@dataclasses.dataclass(frozen=True, eq=False)
class AnnotatedJaxpr:
    """A program, or the jaxpr in a parameter of an equation.

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
        """All equations, nested ones right after the equation that they are in."""
        for equation in self.equations:
            yield equation
            for body in equation.bodies.values():
                yield from body.walk()

    @property
    def values(self) -> Iterator[AnnotatedValue]:
        """All values that have names, those of nested jaxprs included."""
        yield from (*self.constants, *self.inputs)
        for equation in self.equations:
            for body in equation.bodies.values():
                yield from body.values
            yield from equation.outputs
