"""Colocated Python: functions and objects that run on the hosts of devices, asynchronously to the devices.

    @colocated.colocated_python
    def load(step): ...                      # reads files on the hosts

    batch = load(step)                       # returns at once, with an array whose value comes later

`colocated_python` and `colocated_python_class` wrap functions and classes; `stream` and `wait` control the order of
calls. docs/colocated.md is the guide.
"""

from partjit.colocated.cache import CacheInfo as CacheInfo
from partjit.colocated.devices import colocated_cpu_devices as colocated_cpu_devices
from partjit.colocated.function import ColocatedFunction as ColocatedFunction
from partjit.colocated.function import colocated_python as colocated_python
from partjit.colocated.ir import autodiff as autodiff
from partjit.colocated.ir import batching as batching
from partjit.colocated.ir import lowering as lowering
from partjit.colocated.ir import shard_map as shard_map
from partjit.colocated.journaling.contents import JournaledCall as JournaledCall
from partjit.colocated.journaling.identity import idempotency_key as idempotency_key
from partjit.colocated.journaling.journal import Journal as Journal
from partjit.colocated.journaling.journal import journal as journal
from partjit.colocated.object import colocated_python_class as colocated_python_class
from partjit.colocated.runtime.lifetime import watch as _watch
from partjit.colocated.runtime.pending import PendingArray as PendingArray
from partjit.colocated.runtime.shards import mesh_coordinates as mesh_coordinates
from partjit.colocated.runtime.streams import Stream as Stream
from partjit.colocated.runtime.streams import stream as stream
from partjit.colocated.runtime.streams import wait as wait
from partjit.colocated.serialization import deserialize as deserialize
from partjit.colocated.serialization import serialize as serialize

_watch()
