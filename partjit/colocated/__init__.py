"""Colocated Python: functions and objects on the hosts of devices, called with arrays and beside what the devices do.

    @colocated.colocated_python
    def load(step): ...                      # reads files, on the hosts

    batch = load(step)                       # at once: an array whose value comes later

`colocated_python` and `colocated_python_class` make functions and classes; `stream` and `wait` are about their order;
docs/colocated.md tells the whole of it.
"""

from partjit.colocated import batches as batches
from partjit.colocated import in_shard_map as in_shard_map
from partjit.colocated import rules as rules
from partjit.colocated.devices import colocated_cpu_devices as colocated_cpu_devices
from partjit.colocated.function import ColocatedFunction as ColocatedFunction
from partjit.colocated.function import colocated_python as colocated_python
from partjit.colocated.layouts import mesh_coordinates as mesh_coordinates
from partjit.colocated.lifetime import watch as _watch
from partjit.colocated.object import colocated_python_class as colocated_python_class
from partjit.colocated.pending import PendingArray as PendingArray
from partjit.colocated.serialization import deserialize as deserialize
from partjit.colocated.serialization import serialize as serialize
from partjit.colocated.specialization import CacheInfo as CacheInfo
from partjit.colocated.streams import Stream as Stream
from partjit.colocated.streams import stream as stream
from partjit.colocated.streams import wait as wait

_watch()
