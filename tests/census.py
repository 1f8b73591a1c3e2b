"""A census of what laws draw: a law that never saw a case it is about proves nothing.

Hypothesis begins with the simplest example, so that a law of few examples may see nothing but the sine of a scalar.
Every `@given` of the tests therefore declares, with `@sees(...)` above it, what must be among its examples:

    @sees("two mesh axes", "a partitioned value")
    @given(meshes(), st.data())
    def test_of_something(mesh, data): ...

What an example is made of is found by the types of what was drawn: `features` knows meshes, specs, shardings, arrays
and plain data, and a module that draws something else registers its type. What a law makes itself it reports by
`saw(...)`. Examples that `assume` rejects do not count.
"""

import collections
import dataclasses
import functools
import math
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from hypothesis import seed, settings
from hypothesis.strategies import DataObject
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from partjit.testing import ShardedProgram, axes_of

GENERAL = {
    "different examples": "at least three examples of which no two are equal",
    "several elements": "a collection of two or more",
    "text": "a text that is not empty",
    "several mesh devices": "a mesh of more than one device",
    "two mesh axes": "a mesh with two axes of more than one device each",
    "permuted devices": "a mesh whose devices are not in the order of `jax.devices()`",
    "an explicit axis": "a mesh with an axis of type Explicit",
    "an axis name": "a spec that names a mesh axis",
    "two axes in one dimension": "a spec that partitions one dimension over several axes",
    "a value of several dimensions": "two dimensions longer than 1, or more",
    "a partitioned value": "a sharding, or a spec on a mesh, that partitions over more than one device",
    "two meshes": "two meshes that differ",
}
"""What any law may declare, and what it means. A law may declare more, which it or its types report."""


class Census:
    """The counts of one law.

    Attributes:
        required: what must be seen.
        counts: by feature, in how many examples it was seen.
        examples: the number of examples.
    """

    def __init__(self, required: tuple[str, ...]) -> None:
        self.required = required
        self.clear()

    def clear(self) -> None:
        """Forgets the examples so far."""
        self.counts: collections.Counter[str] = collections.Counter()
        self.examples = 0
        self._different: set[str] = set()

    def add(self, drawn: list[Any], reported: set[str]) -> None:
        """Counts an example."""
        self.examples += 1
        self._different.add(repr(drawn))
        self.counts.update(reported.union(*(features(value) for value in drawn), _together(drawn)))
        self.counts["different examples"] = len(self._different)

    def check(self, name: str) -> None:
        """Fails where something was never seen."""
        wanted = {feature: 3 if feature == "different examples" else 1 for feature in self.required}
        missing = [feature for feature, least in wanted.items() if self.counts[feature] < least]
        assert not missing, (
            f"{name}: none of its {self.examples} examples had {', '.join(map(repr, missing))}, which it is about; "
            f"they had {dict(self.counts)}. Draw real cases (`partitioned=True` of the strategies, more examples)"
        )


_reported: list[set[str]] = []  # of the laws that run, a law inside of another law last


def saw(feature: str, when: Any = True) -> None:
    """Reports what the example of the law that runs has, besides what was drawn."""
    if when:
        _reported[-1].add(feature)


def sees(*required: str) -> Any:
    """Declares what must be among the examples of the hypothesis test below."""
    if not required:
        raise TypeError("sees() needs what the law is about, such as 'a partitioned value'")

    def declare(law: Any) -> Any:
        census = Census(required)
        law.hypothesis.inner_test = _counted(law.hypothesis.inner_test, census)

        @functools.wraps(law)
        def run(*args: Any, **kwargs: Any) -> None:
            census.clear()
            law(*args, **kwargs)
            census.check(law.__name__)

        run.census = census
        return run

    return declare


def of_its_own(name: str) -> Any:
    """Lets a law draw other examples than the laws of other names.

    A deterministic profile takes the seed from the code of a law, which is the same for all parameters of a test.
    """
    return seed(zlib.crc32(name.encode())) if settings().derandomize else lambda law: law


def _counted(test: Any, census: Census) -> Any:
    """The body of a law, which adds every example that it accepts to the census."""

    @functools.wraps(test)
    def body(*args: Any, **kwargs: Any) -> None:
        drawn = [*args, *kwargs.values()]
        for data in drawn:
            if isinstance(data, DataObject):
                _record_draws(data, drawn)
        _reported.append(set())
        try:
            test(*args, **kwargs)
            census.add([value for value in drawn if not isinstance(value, DataObject)], _reported[-1])
        finally:
            _reported.pop()

    return body


def _record_draws(data: DataObject, drawn: list[Any]) -> None:
    draw = data.draw

    def record(*args: Any, **kwargs: Any) -> Any:
        drawn.append(draw(*args, **kwargs))
        return drawn[-1]

    data.draw = record


# What values are made of


@functools.singledispatch
def features(value: Any) -> set[str]:
    """What a value shows, and what its parts show: those of dataclasses and collections."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _of_all(getattr(value, field.name) for field in dataclasses.fields(value))
    return set()


def _together(drawn: list[Any]) -> set[str]:
    """What values show together: a spec partitions if its axes have several devices on a mesh of the example."""
    leaves = jax.tree.leaves(drawn, is_leaf=lambda value: isinstance(value, P))
    drawn_meshes = [leaf for leaf in leaves if isinstance(leaf, Mesh)]
    specs = [leaf for leaf in leaves if isinstance(leaf, P)]
    return _named(
        ("a partitioned value", any(is_partitioned(mesh, spec) for mesh in drawn_meshes for spec in specs)),
        ("two meshes", len({*drawn_meshes}) > 1),
    )


def _of_all(values: Any) -> set[str]:
    return set().union(*map(features, values))


@features.register(list)
@features.register(tuple)
@features.register(set)
@features.register(frozenset)
def _(values: Any) -> set[str]:
    return _of_all(values) | ({"several elements"} if len(values) > 1 else set())


@features.register
def _(values: dict) -> set[str]:
    return features([*values.items()])


@features.register
def _(text: str) -> set[str]:
    return {"text"} if text else set()


@features.register
def _(mesh: Mesh) -> set[str]:
    ids = [device.id for device in mesh.devices.flat]
    return _named(
        ("several mesh devices", mesh.size > 1),
        ("two mesh axes", sum(size > 1 for size in mesh.devices.shape) > 1),
        ("permuted devices", ids != sorted(ids)),
        ("an explicit axis", AxisType.Explicit in mesh.axis_types),
    )


@features.register
def _(spec: P) -> set[str]:
    axes = axes_of(P(*(None if entry is P.UNCONSTRAINED else entry for entry in spec)), len(spec))
    return _named(("an axis name", any(axes)), ("two axes in one dimension", any(len(each) > 1 for each in axes)))


@features.register
def _(sharding: NamedSharding) -> set[str]:
    return (
        features(sharding.mesh)
        | features(sharding.spec)
        | _named(("a partitioned value", is_partitioned(sharding.mesh, sharding.spec)))
    )


@features.register(jax.Array)
@features.register(np.ndarray)
def _(array: Any) -> set[str]:
    found = _named(("a value of several dimensions", sum(size > 1 for size in array.shape) > 1))
    return found | (features(array.sharding) if isinstance(array, jax.Array) else set())


@features.register
def _(program: ShardedProgram) -> set[str]:
    found = _named(
        ("a value of several dimensions", any(sum(n > 1 for n in shape) > 1 for shape in program.arg_shapes))
    )
    return found | features(program.steps)


def _named(*pairs: tuple[str, bool]) -> set[str]:
    return {name for name, holds in pairs if holds}


def is_partitioned(mesh: Mesh, spec: P | None) -> bool:
    """Whether a spec partitions a value over more than one device of the mesh."""
    axes = [] if spec is None else [axis for axis in _axes(spec) if axis in mesh.shape]
    return math.prod(mesh.shape[axis] for axis in axes) > 1


def _axes(spec: P) -> Iterator[str]:
    for entry in spec:
        if entry is not None and entry is not P.UNCONSTRAINED:
            yield from (entry,) if isinstance(entry, str) else entry
