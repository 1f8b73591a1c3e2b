"""The origin of each mesh axis that shards a value: the spec of an argument, constraint, nested program or shard_map.

Shardy records origins in a mode that can crash the process, so it runs in a subprocess. Where it reports none, the
nearest spec with that axis is taken instead, along the paths on which shardings propagate.
"""

import dataclasses
import functools
import importlib.util
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict

from partjit._jax.compiling import MLIR_BINDINGS
from partjit.inspect.annotated import AnnotatedEquation
from partjit.inspect.inlining import TAG
from partjit.inspect.marks import MARK
from partjit.inspect.propagation import Partitioned
from partjit.inspect.why.dataflow import Dataflow
from partjit.inspect.why.requests import Request, requests_of
from partjit.inspect.why.script_process import ScriptFailedError, run_script

__all__ = ["Origin", "Origins", "OriginsUnavailableError", "ask_partitioner", "known_origins", "origins"]

_SCRIPT = "partjit.inspect.why.origins_script"
_GROUP = "sdy.sharding_group"
_TIMEOUT = 120.0  # seconds
_PREFERENCES = ("result", "shard_map argument")  # a value may have another sharding than these; it is resharded then


class Named(TypedDict):
    """What bears a name of an origin; see `partjit.inspect.why.origins_script`."""

    tags: list[int]
    operands: int
    results: int
    numbers: list[int]


class Reported(TypedDict):
    """The output of that script."""

    values: dict[str, dict[str, str]]
    names: dict[str, Named]


class OriginsUnavailableError(RuntimeError):
    """The partitioner could not report the origins of shardings; the message says why, and what to do instead."""


@dataclasses.dataclass(frozen=True, eq=False)
class Origin:
    """Why a mesh axis shards a value.

    Attributes:
        axis: the axis, or the part of one: "data:(1)2" are the two major parts of "data".
        request: the spec that the user wrote.
        is_certain: whether the partitioner reported it; otherwise it is the nearest spec with that axis.
    """

    axis: str
    request: Request
    is_certain: bool
    _find_way: Callable[[], tuple[AnnotatedEquation, ...]] = dataclasses.field(repr=False)

    @functools.cached_property
    def way(self) -> tuple[AnnotatedEquation, ...]:
        """The equations through which it propagated from there to the value, from first to last."""
        return self._find_way()

    def __str__(self) -> str:
        return str(self.request)


class Origins(dict[int, Mapping[str, Origin]]):
    """The origins of all values of a program: by the number of each, and each axis that shards it.

    Attributes:
        flow: the dataflow of the program.
        requests: the requests for each value, by its number.
        problem: why they are all guesses, if they are.
    """

    def __init__(
        self,
        found: Mapping[int, Mapping[str, tuple[Request, bool]]],
        flow: Dataflow,
        requests: Mapping[int, Sequence[Request]],
        problem: str | None,
    ) -> None:
        self.flow, self.requests, self.problem = flow, requests, problem
        for number, of_axes in found.items():
            self[number] = {
                axis: Origin(axis, request, is_certain, functools.partial(self._way, number, axis, request))
                for axis, (request, is_certain) in of_axes.items()
            }

    def _way(self, number: int, axis: str, request: Request) -> tuple[AnnotatedEquation, ...]:
        """The path through values that have the axis from the same spec, or else through any that have it."""

        def same(other: int) -> bool:
            origins = self.get(other, {}).items()
            return any(_base(name) == _base(axis) and origin.request is request for name, origin in origins)

        def any_with(other: int) -> bool:
            return any(_base(name) == _base(axis) for name in self.get(other, ()))

        starts = _starts(request)
        for may_pass in (same, any_with):
            way = self.flow.way(starts, number, may_pass)
            if way is not None:
                return tuple(equation for equation in way if equation is not request.equation)
        return ()


_known: "weakref.WeakKeyDictionary[Partitioned, Origins]" = weakref.WeakKeyDictionary()


def origins(partitioned: Partitioned) -> Origins:
    """Why each value is sharded as it is, computed once for each program.

    Where the partitioner reports nothing within two minutes, the origins are guesses.

    Raises:
        ValueError: the text of the program was not kept.
    """
    found = known_origins(partitioned)
    if found is None:
        found = _known[partitioned] = _origins(partitioned)
    return found


def known_origins(partitioned: Partitioned) -> Origins | None:
    """The same if they were computed before; None otherwise."""
    return _known.get(partitioned)


def ask_partitioner(partitioned: Partitioned, without: Sequence[str] = ()) -> Reported:
    """The output of `partjit.inspect.why.origins_script` for a program without some operations.

    Raises:
        OriginsUnavailableError: there is none.
        ValueError: the text of the program was not kept.
    """
    if not partitioned.text:
        raise ValueError("origins need the text of the program: partition(unit, keep_text=True)")
    script = importlib.util.find_spec(_SCRIPT)
    request = {**MLIR_BINDINGS, "mark": MARK, "tag": TAG, "without": list(without)}
    try:
        return run_script(str(script and script.origin), request, partitioned.text, _TIMEOUT)
    except ScriptFailedError as error:
        raise OriginsUnavailableError(
            f"the partitioner could not report the origins of the shardings of {partitioned.unit.name!r}: {error}. It "
            "ran in a subprocess, so this process is unaffected, and the shardings themselves are known. Look at the "
            "specs of the value's operands and of the constraints near it, or leave out shard_map or shard_alike"
        ) from error


def _origins(partitioned: Partitioned) -> Origins:
    flow = Dataflow(partitioned.tree)
    shardings = partitioned.inlined.shardings
    axes = {
        number: [axis for dim in shardings[number].axes for axis in dim]
        for number in flow.values
        if number in shardings
    }
    requests = list(requests_of(partitioned))
    of_value: dict[int, list[Request]] = {}
    for request in requests:
        of_value.setdefault(request.value, []).append(request)
    if not any(axes.values()):
        return Origins({number: {} for number in axes}, flow, of_value, None)
    reported, problem = _reported(partitioned)
    found: dict[int, dict[str, tuple[Request, bool]]] = {number: {} for number in axes}
    if reported is not None:
        request_named = _RequestsByName(partitioned, requests, reported["names"])
        for number, names in reported["values"].items():
            for axis, name in names.items():
                request = request_named(name)
                # It may name a constraint that leaves the dimension open, behind the one that says the axis.
                if axis in axes.get(int(number), ()) and request is not None and _base(axis) in request.axes:
                    found[int(number)][axis] = request, problem is None
    for request in requests:
        if request.kind not in _PREFERENCES:
            # Shardy may name a constraint that is equal to the spec of the argument that it constrains.
            for axis in axes.get(request.value, ()):
                if _base(axis) in request.axes:
                    found[request.value][axis] = request, True
    _guess(flow, axes, requests, found)
    return Origins(found, flow, of_value, problem)


def _reported(partitioned: Partitioned) -> tuple[Reported | None, str | None]:
    """The partitioner's report, and what went wrong."""
    try:
        return ask_partitioner(partitioned), None
    except OriginsUnavailableError as error:
        if _GROUP not in partitioned.text:
            return None, str(error)
        problem = str(error)
    try:  # it fails on sharding groups (shard_alike), but not on the rest of the program
        return ask_partitioner(partitioned, [_GROUP]), problem
    except OriginsUnavailableError:
        return None, problem


class _RequestsByName:
    """The requests that the partitioner's names of origins refer to."""

    def __init__(self, partitioned: Partitioned, requests: Sequence[Request], names: Mapping[str, Named]) -> None:
        self._names = names
        self._equations = partitioned.inlined.equations
        self._requests = {(r.kind, r.position, r.equation): r for r in requests}
        self._by_value: dict[tuple[AnnotatedEquation | None, int], Request] = {
            (r.equation, r.value): r for r in requests
        }
        self._offsets = {"input": 0, "output": 0}
        if partitioned.propagated is not None:
            shardings = partitioned.propagated.shardings
            self._offsets = {  # constants and tokens come first
                "input": len(shardings.of_arguments()) - len(partitioned.unit.paths),
                "output": len(shardings.of_results()) - len(partitioned.unit.out_shardings),
            }

    def __call__(self, name: str) -> Request | None:
        if (match := re.fullmatch(r"(input|output): (\d+)", name)) is not None:
            position = int(match[2]) - self._offsets[match[1]]
            return self._requests.get(({"input": "argument", "output": "result"}[match[1]], position, None))
        boundary = re.fullmatch(r"(\w+)_(input|output): (\d+)", name)
        named = self._names.get(boundary[1] if boundary else name)
        if named is None or not named["tags"]:
            return None
        equation = self._equations[named["tags"][-1]]
        if boundary is None:
            by_value = (self._by_value.get((equation, number)) for number in named["numbers"])
            return next(filter(None, by_value), None) or self._requests.get(("constraint", 0, equation))
        kind, values, count = (
            ("shard_map argument", equation.inputs, named["operands"])
            if boundary[2] == "input"
            else ("shard_map result", equation.outputs, named["results"])
        )
        return self._requests.get((kind, int(boundary[3]) - (count - len(values)), equation))


def _guess(
    flow: Dataflow,
    axes: Mapping[int, Sequence[str]],
    requests: Sequence[Request],
    found: dict[int, dict[str, tuple[Request, bool]]],
) -> None:
    """Fills in missing origins: that of the nearest value that has one, or the nearest spec with the axis."""
    missing = {_base(axis) for number in axes for axis in axes[number] if axis not in found[number]}
    for base in missing:
        sharded = {number for number, of_value in axes.items() if base in map(_base, of_value)}
        starts: dict[int, Request] = {}
        for number in sharded:
            known = [found[number][axis][0] for axis in axes[number] if axis in found[number] and _base(axis) == base]
            if known:
                starts[number] = known[0]
        for request in requests:
            if base in request.axes:
                for number in _starts(request):
                    if number in sharded:
                        starts.setdefault(number, request)
        nearest = flow.nearest(starts, sharded.__contains__)
        for number in sharded:
            for axis in axes[number]:
                if axis not in found[number] and _base(axis) == base and number in nearest:
                    found[number][axis] = starts[nearest[number]], False


def _starts(request: Request) -> tuple[int, ...]:
    """The numbers of the values that a spec is for: on both sides of its constraint or boundary."""
    if request.equation is None or request.kind.startswith("shard_map"):
        return (request.value,)
    if request.kind == "constraint":
        return (request.value, request.equation.inputs[0].number)
    body = request.equation.bodies["jaxpr"]
    outside = request.equation.inputs if request.kind == "nested argument" else body.outputs
    return (request.value, outside[request.position].number)


def _base(axis: str) -> str:
    return axis.partition(":")[0]
