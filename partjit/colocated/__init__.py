"""Colocated Python: what runs on the hosts of a set of devices."""

from partjit.colocated.devices import colocated_cpu_devices as colocated_cpu_devices
from partjit.colocated.serialization import deserialize as deserialize
from partjit.colocated.serialization import serialize as serialize
