"""The machine that a step would run on: what its devices compute, store and send per second."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

from jax.sharding import AbstractMesh, Mesh

from partjit.checks import (
    items_of,
    require,
    require_integer,
    require_mesh_type,
    require_number,
    require_text,
    wrong_value,
)
from partjit.inspect.collectives import KINDS
from partjit.render.numbers import shown_bytes, shown_duration, shown_flops
from partjit.render.text import table

__all__ = ["CLASSES", "Link", "Machine", "TimedCollective", "dtype_class", "h100", "tpu_v5p", "tpu_v6e"]

AnyMesh: TypeAlias = Mesh | AbstractMesh

CLASSES = ("f64", "f32", "f16", "8bit")
"""Classes of dtypes that are computed at one speed, the widest first; bf16 is of "f16", f8 and int8 are of "8bit"."""


@dataclasses.dataclass(frozen=True)
class Link:
    """What connects the devices along an axis of a mesh.

    Attributes:
        bandwidth: bytes per second that a device sends along the axis, both directions of a ring together.
        latency: seconds that one message takes however small it is.
    """

    bandwidth: float
    latency: float = 1e-6

    def __post_init__(self) -> None:
        _positive("Link", "bandwidth", self.bandwidth, "bytes per second")
        _not_negative("Link", "latency", self.latency)


@dataclasses.dataclass(frozen=True)
class TimedCollective:
    """How long a collective was measured to take: `latency + nbytes / bandwidth`.

    Attributes:
        kind: one of `partjit.inspect.collectives.KINDS`.
        axes: the axes of the mesh that it communicates over, whole ones.
        latency: seconds, however small it is.
        bandwidth: bytes per second, of the operand or the result of a device, whichever is larger.
    """

    kind: str
    axes: tuple[str, ...]
    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise wrong_value("TimedCollective", "kind", self.kind, f"one of {', '.join(KINDS)}")
        object.__setattr__(self, "axes", tuple(items_of("TimedCollective", "axes", self.axes, "the names of axes")))
        _positive("TimedCollective", "bandwidth", self.bandwidth, "bytes per second")
        _not_negative("TimedCollective", "latency", self.latency)

    def seconds(self, nbytes: float) -> float:
        """How long it takes with so many bytes."""
        return self.latency + nbytes / self.bandwidth


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices of one kind, and what connects them along the axes of a mesh.

    Attributes:
        name: its name.
        flops: floating point operations per second of a device, by classes of dtypes (see `CLASSES`). A class that is
            not there is computed as the next wider one that is, or else as the widest.
        memory: bytes of a device.
        memory_bandwidth: bytes per second that a device reads and writes.
        links: what connects the devices along each axis, by the name of the axis.
        launch: seconds that a device takes to begin an operation, or several that are fused: 0 where it begins one
            while it computes another, as the presets assume.
        convolutions: as `flops`, of convolutions; by default they are as fast as products of matrices.
        collectives: collectives that were measured, which then take as long as that, and not as the links say. Over
            several axes of which only each by itself was measured, they go axis by axis.

    Rates are those of one device while all of them compute and send: devices that share the cores of a host, as virtual
    ones do, share what it can do.

    Raises:
        TypeError, ValueError: a rate is no number above 0, or a class or link is none.

    Example:
        >>> machine = Machine("boxes", {"f32": 1e12}, 16_000_000_000, 5e11, {"data": Link(1e10), "model": Link(1e11)})
        >>> print(machine)
        boxes: 16.0 GB per device, 500.0 GB/s
        dtypes  per second
        f32     1.0 Tflop
        axis   bandwidth   latency
        data   10.0 GB/s   1.00 us
        model  100.0 GB/s  1.00 us
    """

    name: str
    flops: Mapping[str, float]
    memory: int
    memory_bandwidth: float
    links: Mapping[str, Link]
    launch: float = 0.0
    convolutions: Mapping[str, float] = dataclasses.field(default_factory=dict)
    collectives: tuple[TimedCollective, ...] = ()

    def __post_init__(self) -> None:
        require_text("Machine", "name", self.name, "a name")
        flops, convolutions = (_rates(name, getattr(self, name)) for name in ("flops", "convolutions"))
        if not flops:
            raise wrong_value("Machine", "flops", self.flops, "the rate of at least one class of dtypes")
        require_integer("Machine", "memory", self.memory, 1)
        _positive("Machine", "memory_bandwidth", self.memory_bandwidth, "bytes per second")
        for axis, link in require("Machine", "links", self.links, Mapping, "a dict from axes to Links").items():
            require("Machine", f"links[{axis!r}]", link, Link, "a Link")
        _not_negative("Machine", "launch", self.launch)
        timed = items_of("Machine", "collectives", self.collectives, "TimedCollectives")
        for one in timed:
            require("Machine", "collectives", one, TimedCollective, "a TimedCollective")
        object.__setattr__(self, "flops", flops)
        object.__setattr__(self, "convolutions", convolutions)
        object.__setattr__(self, "links", dict(self.links))
        object.__setattr__(self, "collectives", tuple(timed))
        object.__setattr__(self, "_timed", {(one.kind, frozenset(one.axes)): one for one in timed})

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    @property
    def fingerprint(self) -> str:
        """A text that two machines have in common if they are equal."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    def rate(self, dtypes: str, primitive: str = "dot_general") -> float:
        """The operations per second of a primitive on a class of dtypes."""
        flops = self.convolutions if self.convolutions and primitive == "conv_general_dilated" else self.flops
        wider = [one for one in CLASSES[: CLASSES.index(dtypes) + 1] if one in flops]
        return flops[wider[-1]] if wider else next(iter(flops.values()))

    def seconds_to_send(self, kind: str, sizes: Mapping[str, int], operand: float, result: float) -> float:
        """How long a collective takes that is alone on the links.

        It goes axis by axis, the slowest while a device has least of the data: a gather begins with that axis, a
        reduction ends with it. Each axis takes the messages of a recursive algorithm and the bytes of an optimal one.
        Along an axis without a link nothing takes time.

        Args:
            kind: one of `partjit.inspect.collectives.KINDS`.
            sizes: the axes that it communicates over, with their sizes.
            operand, result: the bytes of the operand and the result on a device.

        Example:
            >>> machine = Machine("boxes", {"f32": 1e12}, 1 << 34, 5e11, {"x": Link(100.0, 0.0), "y": Link(10.0, 0.0)})
            >>> machine.seconds_to_send("all-gather", {"x": 2, "y": 2}, 100.0, 400.0)
            12.0
            >>> machine.seconds_to_send("all-gather", {"y": 4}, 100.0, 400.0)
            30.0

        Source: Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH, 2005, for
        the costs; Chan, Heimlich, Purkayastha and van de Geijn, Collective communication: theory, practice, and
        experience, 2007, for several dimensions.
        """
        timed = self._timed_over(kind, [axis for axis, size in sizes.items() if size > 1])
        if timed is not None:
            return _one_by_one(timed, kind, sizes, operand, result)
        axes = sorted(
            ((self.links[axis], size) for axis, size in sizes.items() if axis in self.links and size > 1),
            key=lambda entry: entry[0].bandwidth,
        )
        if not axes:
            return 0.0
        match kind:
            case "all-gather":
                return _gathered(axes, result)
            case "reduce-scatter":
                return _gathered(axes, operand)
            case "all-reduce":
                return 2 * _gathered(axes, operand)
            case "collective-permute":
                return max(link.latency + operand / link.bandwidth for link, _ in axes)
            case _:  # each device keeps its own part
                return sum(
                    math.ceil(math.log2(n)) * link.latency + (n - 1) / n * operand / link.bandwidth for link, n in axes
                )

    def _timed_over(self, kind: str, axes: Sequence[str]) -> list[TimedCollective] | None:
        """What was measured over these axes together, or else over each of them; None if that was not."""
        known: Mapping[tuple[str, frozenset[str]], TimedCollective] = self._timed  # type: ignore[attr-defined]
        together = known.get((kind, frozenset(axes)))
        if together is not None:
            return [together]
        each = [known.get((kind, frozenset([axis]))) for axis in axes]
        return [one for one in each if one is not None] if axes and None not in each else None

    def __str__(self) -> str:
        rates = [(one, shown_flops(rate)) for one, rate in self.flops.items()]
        links = [
            (axis, f"{shown_bytes(link.bandwidth)}/s", shown_duration(link.latency))
            for axis, link in self.links.items()
        ]
        timed = [
            (one.kind, " x ".join(one.axes), f"{shown_bytes(one.bandwidth)}/s", shown_duration(one.latency))
            for one in self.collectives
        ]
        launch = f", {shown_duration(self.launch)} per launch" if self.launch else ""
        title = f"{self.name}: {shown_bytes(self.memory)} per device, {shown_bytes(self.memory_bandwidth)}/s{launch}"
        rates += [(f"{one}, convolutions", shown_flops(rate)) for one, rate in self.convolutions.items()]
        parts = [title, table(("dtypes", "per second"), rates)]
        if links and not timed:
            parts.append(table(("axis", "bandwidth", "latency"), links))
        if timed:
            parts.append(table(("collective", "axes", "bandwidth", "latency"), timed))
        return "\n".join(parts)


def _one_by_one(
    timed: Sequence[TimedCollective], kind: str, sizes: Mapping[str, int], operand: float, result: float
) -> float:
    """The time of a collective over these axes, the slowest while a device has least of the data."""
    if len(timed) == 1:
        return timed[0].seconds(max(operand, result))
    seconds, has = 0.0, min(operand, result)
    for one in sorted(timed, key=lambda one: one.bandwidth):
        if kind in ("all-gather", "reduce-scatter"):
            has *= math.prod(sizes[axis] for axis in one.axes)
        seconds += one.seconds(has)
    return seconds


def _gathered(axes: list[tuple[Link, int]], whole: float) -> float:
    """The time to gather so many bytes, the slowest axis first."""
    seconds, has = 0.0, whole / math.prod(size for _, size in axes)
    for link, size in axes:
        seconds += math.ceil(math.log2(size)) * link.latency + (size - 1) * has / link.bandwidth
        has *= size
    return seconds


def dtype_class(name: str) -> str:
    """The class of a dtype, by its name.

    Example:
        >>> dtype_class("bfloat16"), dtype_class("float32"), dtype_class("int8"), dtype_class("complex64")
        ('f16', 'f32', '8bit', 'f32')
    """
    if name.startswith(("bool", "float8", "float4", "int4", "uint4", "int8", "uint8")):
        return "8bit"
    if name in ("float64", "int64", "uint64", "complex128"):
        return "f64"
    return "f16" if name.endswith("16") else "f32"


def tpu_v5p(mesh: AnyMesh, *, dcn: object = ()) -> Machine:
    """TPU v5p: each axis of the mesh along an axis of the torus, with the links of both directions.

    459 T operations per second in bf16, which is also what jax computes products of float32 in by default, 918 T in
    int8; 95 GB at 2.77 TB/s; 90 GB/s per link and direction; 6.25 GB/s per chip over the data center's network.

    Args:
        mesh: the mesh, or an abstract one.
        dcn: the names of the axes between slices, which the data center's network connects.

    Raises:
        TypeError: `mesh` is no mesh, or `dcn` no collection of names.
        ValueError: `dcn` names no axis of the mesh.

    Example:
        >>> from jax.sharding import AbstractMesh
        >>> tpu_v5p(AbstractMesh((2, 64), ("slice", "data")), dcn=["slice"]).links
        {'slice': Link(bandwidth=6250000000.0, latency=1e-05), 'data': Link(bandwidth=180000000000.0, latency=1e-06)}

    Source: https://cloud.google.com/tpu/docs/v5p; How to Scale Your Model, https://jax-ml.github.io/scaling-book/tpus.
    An axis that does not wrap around, which has less than four chips or a part of the pod, has half of the bandwidth.
    """
    return _tpu("tpu_v5p", "TPU v5p", mesh, dcn, 4.59e14, 95_000_000_000, 2.765e12, 6.25e9)


def tpu_v6e(mesh: AnyMesh, *, dcn: object = ()) -> Machine:
    """TPU v6e (Trillium): each axis of the mesh along an axis of the torus, with the links of both directions.

    918 T operations per second in bf16, 1 836 T in int8; 32 GB at 1.64 TB/s; 90 GB/s per link and direction; 12.5 GB/s
    per chip over the data center's network. The arguments and exceptions are those of `tpu_v5p`.

    Example:
        >>> from jax.sharding import AbstractMesh
        >>> tpu_v6e(AbstractMesh((16, 16), ("data", "model"))).rate("f16")
        918000000000000.0

    Source: https://cloud.google.com/tpu/docs/v6e; How to Scale Your Model, https://jax-ml.github.io/scaling-book/tpus.
    The torus has two dimensions: three axes of a mesh share its links.
    """
    return _tpu("tpu_v6e", "TPU v6e", mesh, dcn, 9.18e14, 32_000_000_000, 1.64e12, 1.25e10)


def _tpu(
    where: str, name: str, mesh: AnyMesh, dcn: object, bf16: float, memory: int, hbm: float, network: float
) -> Machine:
    require_mesh_type(where, "mesh", mesh, or_abstract=True)
    slow = items_of(where, "dcn", dcn, "the names of axes")
    for axis in slow:
        if axis not in mesh.axis_names:
            raise wrong_value(where, "dcn", axis, f"the name of an axis of the mesh, {', '.join(mesh.axis_names)}")
    links = {str(axis): Link(network, 1e-5) if axis in slow else Link(1.8e11, 1e-6) for axis in mesh.axis_names}
    # A product of float32 takes one pass in bf16 at jax's default precision.
    return Machine(name, {"f32": bf16, "f16": bf16, "8bit": 2 * bf16}, memory, hbm, links)


def h100(mesh: AnyMesh, *, per_node: int = 8) -> Machine:
    """Nodes of H100 SXM GPUs: the minor axes of the mesh within a node, over NVLink, the others over InfiniBand.

    67 T operations per second in float64, 495 T in float32 (as TF32, which is jax's default precision there), 989 T in
    bf16, 1 979 T in f8, all dense; 80 GB at 3.35 TB/s; 450 GB/s to the other GPUs of the node, 50 GB/s to other nodes.
    An axis that is partly within a node counts as one between nodes.

    Args:
        mesh: the mesh, or an abstract one.
        per_node: the number of GPUs of a node.

    Raises:
        TypeError, ValueError: `mesh` is no mesh, or `per_node` no number.

    Example:
        >>> from jax.sharding import AbstractMesh
        >>> links = h100(AbstractMesh((8, 8), ("data", "model"))).links
        >>> links["data"].bandwidth, links["model"].bandwidth
        (50000000000.0, 450000000000.0)

    Source: NVIDIA H100 Tensor Core GPU Datasheet; How to Scale Your Model, https://jax-ml.github.io/scaling-book/gpus.
    """
    require_mesh_type("h100", "mesh", mesh, or_abstract=True)
    per_node = require_integer("h100", "per_node", per_node, 1)
    links, within = {}, 1
    for axis in reversed(mesh.axis_names):
        within *= mesh.shape[axis]
        links[str(axis)] = Link(4.5e11, 3e-6) if per_node % within == 0 else Link(5e10, 1e-5)
    flops = {"f64": 6.7e13, "f32": 4.947e14, "f16": 9.89e14, "8bit": 1.979e15}
    return Machine("H100", flops, 80_000_000_000, 3.35e12, {str(axis): links[str(axis)] for axis in mesh.axis_names})


def _rates(name: str, given: object) -> dict[str, float]:
    """Rates by classes of dtypes, the widest first."""
    rates = require("Machine", name, given, Mapping, f"a dict from {', '.join(CLASSES)} to rates")
    for dtypes, rate in rates.items():
        if dtypes not in CLASSES:
            raise wrong_value("Machine", name, dtypes, f"by classes of dtypes, {', '.join(CLASSES)}")
        _positive("Machine", f"{name}[{dtypes!r}]", rate, "operations per second")
    return {one: float(rates[one]) for one in CLASSES if one in rates}


def _not_negative(where: str, name: str, value: object) -> None:
    if cast(float, require_number(where, name, value, "a number of seconds")) < 0:
        raise wrong_value(where, name, value, "a number of seconds of at least 0")


def _positive(where: str, name: str, value: object, what: str) -> None:
    expected = f"a number of {what} above 0"
    if cast(float, require_number(where, name, value, expected)) <= 0:
        raise wrong_value(where, name, value, expected)
