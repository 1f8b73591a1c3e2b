"""Colocated Python: what runs on the hosts of a set of devices."""

from partjit.colocated.devices import colocated_cpu_devices as colocated_cpu_devices
from partjit.colocated.function import colocated_python as colocated_python
from partjit.colocated.lifetime import watch as _watch
from partjit.colocated.object import colocated_python_class as colocated_python_class
from partjit.colocated.pending import PendingArray as PendingArray
from partjit.colocated.serialization import deserialize as deserialize
from partjit.colocated.serialization import serialize as serialize
from partjit.colocated.streams import Stream as Stream
from partjit.colocated.streams import stream as stream
from partjit.colocated.streams import wait as wait

_watch()
