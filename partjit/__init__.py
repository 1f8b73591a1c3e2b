"""partjit: a function and its specs go in, one program partitioned over a mesh of devices comes out.

from partjit import Mesh, P, pjit

with Mesh(devices, ("data", "model")):
    step = pjit(train_step, in_axis_resources=(specs, P("data")), out_axis_resources=(specs, None))
    params, loss = step(params, batch)
"""

from importlib.metadata import version as _version
from typing import TYPE_CHECKING

from partjit import _jax as _jax  # refuses a jax outside of the supported range
from partjit.lazy import attributes as _attributes

__version__ = _version("partjit")

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec as PartitionSpec

    from partjit import colocated as colocated
    from partjit import events as events
    from partjit import inspect as inspect
    from partjit import search as search
    from partjit.api import pjit as pjit
    from partjit.auto_specs import AUTO as AUTO
    from partjit.auto_specs import SearchOptions as SearchOptions
    from partjit.colocated.journaling.replay import replay as replay
    from partjit.constraint import with_sharding_constraint as with_sharding_constraint
    from partjit.errors import JournalError as JournalError
    from partjit.errors import MemoryLimitError as MemoryLimitError
    from partjit.errors import MeshChangedError as MeshChangedError
    from partjit.errors import MissingMeshError as MissingMeshError
    from partjit.errors import OtherProcessError as OtherProcessError
    from partjit.errors import ProgramsDifferError as ProgramsDifferError
    from partjit.errors import ReshardWarning as ReshardWarning
    from partjit.errors import ShardingError as ShardingError
    from partjit.errors import UnrepresentableShardingError as UnrepresentableShardingError
    from partjit.errors import WorkerDiedError as WorkerDiedError
    from partjit.mesh import Mesh as Mesh
    from partjit.mesh import set_mesh as set_mesh
    from partjit.opsharding import parse_op_sharding as parse_op_sharding
    from partjit.opsharding import to_op_sharding as to_op_sharding
    from partjit.pieces.arrays import from_process_local as from_process_local
    from partjit.pieces.arrays import to_process_local as to_process_local
    from partjit.placement import reshard_policy as reshard_policy
    from partjit.plan.plan import Plan as Plan
    from partjit.plan.run.so_far import results_so_far as results_so_far
    from partjit.recording.display import progress as progress
    from partjit.recording.gathering import gather_timelines as gather_timelines
    from partjit.recording.merging import merge_timelines as merge_timelines
    from partjit.recording.otel import export_spans as export_spans
    from partjit.recording.timeline import record as record
    from partjit.search.specs import search_specs as search_specs
    from partjit.search.step_time import estimate_time as estimate_time
    from partjit.spec import FROM_ARRAY as FROM_ARRAY
    from partjit.spec import FROM_GDA as FROM_GDA
    from partjit.spec import UNSPECIFIED as UNSPECIFIED
    from partjit.spec import ParsedPartitionSpec as ParsedPartitionSpec
    from partjit.spec import SpecSync as SpecSync
    from partjit.specs_by_path import spec_table as spec_table
    from partjit.specs_by_path import specs_like as specs_like

    P = PartitionSpec
else:
    _origins = {
        "P": "jax.sharding:PartitionSpec",
        "PartitionSpec": "jax.sharding:PartitionSpec",
        "colocated": "partjit.colocated:",
        "events": "partjit.events:",
        "inspect": "partjit.inspect:",
        "search": "partjit.search:",
        "pjit": "partjit.api:pjit",
        "replay": "partjit.colocated.journaling.replay:replay",
        "with_sharding_constraint": "partjit.constraint:with_sharding_constraint",
        "AUTO": "partjit.auto_specs:AUTO",
        "SearchOptions": "partjit.auto_specs:SearchOptions",
        "JournalError": "partjit.errors:JournalError",
        "MemoryLimitError": "partjit.errors:MemoryLimitError",
        "MeshChangedError": "partjit.errors:MeshChangedError",
        "MissingMeshError": "partjit.errors:MissingMeshError",
        "OtherProcessError": "partjit.errors:OtherProcessError",
        "ProgramsDifferError": "partjit.errors:ProgramsDifferError",
        "ReshardWarning": "partjit.errors:ReshardWarning",
        "ShardingError": "partjit.errors:ShardingError",
        "UnrepresentableShardingError": "partjit.errors:UnrepresentableShardingError",
        "WorkerDiedError": "partjit.errors:WorkerDiedError",
        "Mesh": "partjit.mesh:Mesh",
        "set_mesh": "partjit.mesh:set_mesh",
        "parse_op_sharding": "partjit.opsharding:parse_op_sharding",
        "to_op_sharding": "partjit.opsharding:to_op_sharding",
        "reshard_policy": "partjit.placement:reshard_policy",
        "Plan": "partjit.plan.plan:Plan",
        "results_so_far": "partjit.plan.run.so_far:results_so_far",
        "from_process_local": "partjit.pieces.arrays:from_process_local",
        "to_process_local": "partjit.pieces.arrays:to_process_local",
        "progress": "partjit.recording.display:progress",
        "gather_timelines": "partjit.recording.gathering:gather_timelines",
        "merge_timelines": "partjit.recording.merging:merge_timelines",
        "export_spans": "partjit.recording.otel:export_spans",
        "record": "partjit.recording.timeline:record",
        "search_specs": "partjit.search.specs:search_specs",
        "estimate_time": "partjit.search.step_time:estimate_time",
        "FROM_ARRAY": "partjit.spec:FROM_ARRAY",
        "FROM_GDA": "partjit.spec:FROM_GDA",
        "UNSPECIFIED": "partjit.spec:UNSPECIFIED",
        "ParsedPartitionSpec": "partjit.spec:ParsedPartitionSpec",
        "SpecSync": "partjit.spec:SpecSync",
        "spec_table": "partjit.specs_by_path:spec_table",
        "specs_like": "partjit.specs_by_path:specs_like",
    }
    __all__ = [*_origins]
    __getattr__, __dir__ = _attributes(__name__, _origins)
