"""Where each mesh axis that divides a value comes from: an argument, a constraint, a nested program, a shard_map.

Shardy can tell, but telling can end the process, so it is asked in one of its own. Where it does not answer, the
nearest spec with that axis is taken instead, by the ways along which shardings spread.
"""

import dataclasses
import functools
import importlib.util
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from partjit._jax.compiling import MLIR_BINDINGS
from partjit.inspect.annotated import AnnotatedEquation
from partjit.inspect.inlining import MARK, TAG
from partjit.inspect.propagation import Partitioned
from partjit.inspect.user_lines import Site
from partjit.inspect.why.dataflow import Dataflow
from partjit.inspect.why.requests import Request, requests_of
from partjit.inspect.why.script_process import ScriptFailedError, run_script

__all__ = ["Origin", "Origins", "OriginsUnavailableError", "ask_partitioner", "origins"]

_SCRIPT = "partjit.inspect.why.origins_script"
_GROUP = "sdy.sharding_group"
_TIMEOUT = 120.0
_WISHES = ("result", "shard_map argument")  # a value need not lie as these say; it is moved then


class OriginsUnavailableError(RuntimeError):
    """The partitioner could not say where shardings come from; the message says what happened and what is left."""


@dataclasses.dataclass(frozen=True, eq=False)
class Origin:
    """Why a mesh axis divides a value.

    Attributes:
        axis: the axis, or the part of one: "data:(1)2" are the two major parts of "data".
        request: the spec that somebody wrote.
        is_certain: whether the partitioner says so; otherwise it is the nearest spec with that axis.
    """

    axis: str
    request: Request
    is_certain: bool
    _find_way: Callable[[], tuple[AnnotatedEquation, ...]] = dataclasses.field(repr=False)

    @functools.cached_property
    def way(self) -> tuple[AnnotatedEquation, ...]:
        """The equations by which it came from there to the value, from first to last."""
        return self._find_way()

    @property
    def kind(self) -> str:
        """What the spec is of; see `Request`."""
        return self.request.kind

    @property
    def path(self) -> str:
        """The key path of an argument or result."""
        return self.request.path

    @property
    def spec(self) -> P:
        """The spec."""
        return self.request.spec

    @property
    def equation(self) -> AnnotatedEquation | None:
        """Where the spec stands in the program; None for those of its arguments and results."""
        return self.request.equation

    @property
    def site(self) -> Site | None:
        """The line of the user's code where the spec stands, if it stands in the program."""
        return self.request.site

    def __str__(self) -> str:
        return str(self.request)


@dataclasses.dataclass(frozen=True, eq=False)
class Origins(Mapping[int, Mapping[str, Origin]]):
    """The origins of all values of a program: for the number of each, and each axis that divides it, an origin.

    Attributes:
        flow: the ways of the program.
        requests: the specs that somebody wrote of each value, by its number.
        problem: why they are all guesses, if they are.
    """

    flow: Dataflow
    requests: Mapping[int, Sequence[Request]]
    problem: str | None
    _names: Mapping[int, Mapping[str, tuple[Request, bool]]] = dataclasses.field(repr=False)
    _found: dict[int, Mapping[str, Origin]] = dataclasses.field(repr=False, default_factory=dict)

    def __getitem__(self, number: int) -> Mapping[str, Origin]:
        if number not in self._found:
            self._found[number] = {
                axis: Origin(axis, request, certain, functools.partial(self._way, number, axis, request))
                for axis, (request, certain) in self._names[number].items()
            }
        return self._found[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _way(self, number: int, axis: str, request: Request) -> tuple[AnnotatedEquation, ...]:
        """The way through values that have the axis from the same spec, or else through any that have it."""

        def same(other: int) -> bool:
            return any(
                _base(name) == _base(axis) and found is request
                for name, (found, _) in self._names.get(other, {}).items()
            )

        def any_with(other: int) -> bool:
            return any(_base(name) == _base(axis) for name in self._names.get(other, ()))

        starts = _starts(request)
        for may_pass in (same, any_with):
            way = self.flow.way(starts, number, may_pass)
            if way is not None:
                return tuple(equation for equation in way if equation is not request.equation)
        return ()


_known: "weakref.WeakKeyDictionary[Partitioned, Origins]" = weakref.WeakKeyDictionary()


def origins(partitioned: Partitioned, timeout: float = _TIMEOUT) -> Origins:
    """Why each value is divided as it is.

    The partitioner is asked once for each program. Where it cannot tell, the answers are guesses, and say so.

    Args:
        partitioned: the program, with its text.
        timeout: the seconds that the partitioner may take.

    Returns:
        The origins, by the numbers of values.

    Raises:
        ValueError: the text of the program was not kept.
    """
    found = _known.get(partitioned)
    if found is None:
        found = _known[partitioned] = _origins(partitioned, timeout)
    return found


def ask_partitioner(partitioned: Partitioned, timeout: float = _TIMEOUT, without: Sequence[str] = ()) -> Any:
    """What the partitioner says of origins, in its own words; see `partjit.inspect.why.origins_script`.

    Args:
        partitioned: the program, with its text.
        timeout: the seconds that it may take.
        without: names of operations to leave out.

    Raises:
        OriginsUnavailableError: it said nothing.
        ValueError: the text of the program was not kept.
    """
    if not partitioned.text:
        raise ValueError("origins need the text of the program: partition(unit, keep_text=True)")
    script = importlib.util.find_spec(_SCRIPT)
    question = {**MLIR_BINDINGS, "mark": MARK, "tag": TAG, "without": list(without)}
    try:
        return run_script(str(script and script.origin), question, partitioned.text, timeout)
    except ScriptFailedError as error:
        raise OriginsUnavailableError(
            f"the partitioner could not say where the shardings of {partitioned.unit.name!r} come from: {error}. It "
            "was asked in a process of its own, so that nothing is lost here; the shardings themselves are known. Look "
            "at the specs of the value's operands and of the constraints near it, or leave out shard_map or shard_alike"
        ) from error


def _origins(partitioned: Partitioned, timeout: float) -> Origins:
    flow = Dataflow(partitioned.tree)
    layouts = partitioned.inlined.layouts
    axes = {
        number: [axis for dim in layouts[number].axes for axis in dim] for number in flow.values if number in layouts
    }
    requests = list(requests_of(partitioned))
    of_value: dict[int, list[Request]] = {}
    for request in requests:
        of_value.setdefault(request.value, []).append(request)
    if not any(axes.values()):
        return Origins(flow, of_value, None, {number: {} for number in axes})
    said, problem = _asked(partitioned, timeout)
    found: dict[int, dict[str, tuple[Request, bool]]] = {number: {} for number in axes}
    if said is not None:
        meant = _Meant(partitioned, requests, said["names"])
        for number, names in said["values"].items():
            for axis, name in names.items():
                request = meant(name)
                if axis in axes.get(int(number), ()) and request is not None:
                    found[int(number)][axis] = request, problem is None
    for request in requests:
        if request.kind not in _WISHES:
            # Shardy may name a constraint that says the same as the argument that it constrains.
            for axis in axes.get(request.value, ()):
                if _base(axis) in request.axes:
                    found[request.value][axis] = request, True
    _guess(flow, axes, requests, found)
    return Origins(flow, of_value, problem, found)


def _asked(partitioned: Partitioned, timeout: float) -> tuple[Any, str | None]:
    """What the partitioner says, and what went wrong."""
    try:
        return ask_partitioner(partitioned, timeout), None
    except OriginsUnavailableError as error:
        if _GROUP not in partitioned.text:
            return None, str(error)
        problem = str(error)
    try:  # groups of values that shard alike are what it cannot tell of; the rest of the program it can
        return ask_partitioner(partitioned, timeout, [_GROUP]), problem
    except OriginsUnavailableError:
        return None, problem


class _Meant:
    """What the names that the partitioner gives to origins stand for."""

    def __init__(self, partitioned: Partitioned, requests: Sequence[Request], names: Mapping[str, Any]) -> None:
        self._names = names
        self._equations = partitioned.inlined.equations
        self._requests = {(r.kind, r.position, r.equation): r for r in requests}
        self._by_value: dict[tuple[AnnotatedEquation | None, int], Request] = {
            (r.equation, r.value): r for r in requests
        }
        self._offsets = {"input": 0, "output": 0}
        if partitioned.shardings is not None:
            self._offsets = {  # constants and tokens come first
                "input": len(partitioned.shardings.of_arguments()) - len(partitioned.unit.paths),
                "output": len(partitioned.shardings.of_results()) - len(partitioned.unit.out_shardings),
            }

    def __call__(self, name: str) -> Request | None:
        if (match := re.fullmatch(r"(input|output): (\d+)", name)) is not None:
            position = int(match[2]) - self._offsets[match[1]]
            return self._requests.get(({"input": "argument", "output": "result"}[match[1]], position, None))
        if (match := re.fullmatch(r"(\w+)_(input|output): (\d+)", name)) is not None:
            equation, said = self._of(match[1])
            if equation is None:
                return None
            kind, values, count = (
                ("shard_map argument", equation.inputs, said["operands"])
                if match[2] == "input"
                else ("shard_map result", equation.outputs, said["results"])
            )
            return self._requests.get((kind, int(match[3]) - (count - len(values)), equation))
        equation, said = self._of(name)
        by_value = (self._by_value.get((equation, number)) for number in said["numbers"]) if equation else ()
        return next(filter(None, by_value), None) or self._requests.get(("constraint", 0, equation))

    def _of(self, name: str) -> tuple[AnnotatedEquation | None, Any]:
        said = self._names.get(name)
        return (self._equations[said["tags"][-1]], said) if said is not None and said["tags"] else (None, said)


def _guess(
    flow: Dataflow,
    axes: Mapping[int, Sequence[str]],
    requests: Sequence[Request],
    found: dict[int, dict[str, tuple[Request, bool]]],
) -> None:
    """Fills in what is missing: the origin of the nearest value that has one, or the nearest spec with the axis."""
    missing = {_base(axis) for number in axes for axis in axes[number] if axis not in found[number]}
    for base in missing:
        divided = {number for number, of_value in axes.items() if base in map(_base, of_value)}
        starts: dict[int, Request] = {}
        for number in divided:
            known = [found[number][axis][0] for axis in axes[number] if axis in found[number] and _base(axis) == base]
            if known:
                starts[number] = known[0]
        for request in requests:
            if base in request.axes:
                for number in _starts(request):
                    if number in divided:
                        starts.setdefault(number, request)
        nearest = flow.nearest(starts, divided.__contains__)
        for number in divided:
            for axis in axes[number]:
                if axis not in found[number] and _base(axis) == base and number in nearest:
                    found[number][axis] = starts[nearest[number]], False


def _starts(request: Request) -> tuple[int, ...]:
    """The numbers of the values that a spec is of: what it makes so, and what it is made from."""
    if request.equation is None or request.kind.startswith("shard_map"):
        return (request.value,)
    if request.kind == "constraint":
        return (request.value, request.equation.inputs[0].number)
    body = request.equation.bodies["jaxpr"]
    outside = request.equation.inputs if request.kind == "nested argument" else body.outputs
    return (request.value, outside[request.position].number)


def _base(axis: str) -> str:
    return axis.partition(":")[0]
