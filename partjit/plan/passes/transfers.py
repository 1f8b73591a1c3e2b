"""Moves between accelerators and the CPU devices of their hosts, each as early as its values are there."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from partjit.colocated.devices import colocated_sharding
from partjit.plan.ir.names import Names
from partjit.plan.ir.nodes import Node, Transfer, Value

__all__ = ["Transfers"]


class Transfers:
    """The moves of one block of nodes. A value is moved once in each direction.

    Args:
        names: what nodes and values are named by.
        home: where values lie of which nothing else says it, or None.
        captured: the values from outside, which are moved there, once for all turns.
        outer: the moves of the block around it.

    Attributes:
        hoisted: moves for this block that are to be made in the one around it, before it.
    """

    def __init__(
        self, names: Names, home: Any, captured: Collection[Value] = (), outer: "Transfers | None" = None
    ) -> None:
        self._names = names
        self._home = home
        self._captured = captured
        self._outer = outer
        self._on_host: dict[Value, Value] = {}
        self._on_device: dict[Value, Value] = {}
        self._place_of: dict[Value, Any] = {}
        self.hoisted: list[Node] = []

    def is_on_host(self, value: Value, place: Any) -> None:
        """Tells that a value is on the hosts, and where it is to lie on the devices."""
        self._place_of[value] = place

    def to_hosts(self, values: Sequence[Value]) -> list[Node]:
        """A transfer of those values that the hosts do not have yet, if there are any."""
        return [*self._moved(values, "hosts")]

    def to_devices(self, values: Sequence[Value]) -> list[Node]:
        """A transfer of those values that the devices do not have yet, if there are any."""
        return [*self._moved(values, "devices")]

    def on_host(self, value: Value) -> Value:
        """A value as the hosts have it."""
        return self._on_host.get(value, value)

    def on_device(self, value: Value) -> Value:
        """A value as the devices have it."""
        return self._on_device.get(value, value)

    def place_on_devices(self, value: Value) -> Any:
        """Where a value lies on the devices, or is to lie once it is moved to them from the hosts."""
        if value in self._place_of or self._outer is None:
            return self._place_of.get(value, value.sharding)
        return self._outer.place_on_devices(value)

    def _moved(self, values: Sequence[Value], where: str) -> Iterator[Node]:
        known = self._on_host if where == "hosts" else self._on_device
        target: Callable[[Value], Any] = self._host_of if where == "hosts" else self._place_of.get
        moves = {}
        for value in values:
            if value in known:
                continue
            if self._outer is not None and value in self._captured:
                self.hoisted += self._outer._moved([value], where)
                known[value] = (self._outer.on_host if where == "hosts" else self._outer.on_device)(value)
            elif (there := target(value)) is not None:
                moves[value] = known[value] = Value(self._names.take(f"{value.name}_{where}"), value.aval, there)
        if moves:
            yield Transfer(self._names.take(f"to_{where}"), tuple(moves), tuple(moves.values()))

    def _host_of(self, value: Value) -> Any:
        place = value.sharding or self._home
        host = None if place is None else colocated_sharding(place)
        return None if host == place else host
