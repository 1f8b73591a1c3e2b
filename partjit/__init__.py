"""partjit: a function and its specs go in, one program partitioned over a mesh of devices comes out.

from partjit import Mesh, P, pjit

with Mesh(devices, ("data", "model")):
    step = pjit(train_step, in_axis_resources=(specs, P("data")), out_axis_resources=(specs, None))
    params, loss = step(params, batch)
"""

from importlib.metadata import version as _version

from jax.sharding import PartitionSpec as PartitionSpec

from partjit import _jax as _jax  # refuses a jax outside of the supported range
from partjit import colocated as colocated
from partjit import events as events
from partjit import inspect as inspect
from partjit.api import pjit as pjit
from partjit.constraint import with_sharding_constraint as with_sharding_constraint
from partjit.errors import MeshChangedError as MeshChangedError
from partjit.errors import MissingMeshError as MissingMeshError
from partjit.errors import ReshardWarning as ReshardWarning
from partjit.errors import ShardingError as ShardingError
from partjit.errors import UnrepresentableShardingError as UnrepresentableShardingError
from partjit.errors import WorkerDiedError as WorkerDiedError
from partjit.mesh import Mesh as Mesh
from partjit.mesh import set_mesh as set_mesh
from partjit.opsharding import parse_op_sharding as parse_op_sharding
from partjit.opsharding import to_op_sharding as to_op_sharding
from partjit.placement import reshard_policy as reshard_policy
from partjit.plan.plan import Plan as Plan
from partjit.plan.run.so_far import results_so_far as results_so_far
from partjit.recording.display import progress as progress
from partjit.recording.timeline import record as record
from partjit.spec import FROM_ARRAY as FROM_ARRAY
from partjit.spec import FROM_GDA as FROM_GDA
from partjit.spec import UNSPECIFIED as UNSPECIFIED
from partjit.spec import ParsedPartitionSpec as ParsedPartitionSpec
from partjit.spec import SpecSync as SpecSync
from partjit.specs_by_path import spec_table as spec_table
from partjit.specs_by_path import specs_like as specs_like

P = PartitionSpec
__version__ = _version("partjit")
