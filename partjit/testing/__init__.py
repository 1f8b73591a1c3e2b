"""For people who property-test their own sharded code: strategies, laws and counters. See `docs/testing.md`."""

from importlib.util import find_spec as _find_spec

if _find_spec("hypothesis") is None:
    raise ImportError("partjit.testing needs hypothesis: pip install 'partjit[testing]'")

from partjit.testing.collectives import assert_collectives as assert_collectives
from partjit.testing.collectives import assert_no_collectives as assert_no_collectives
from partjit.testing.collectives import assert_no_transfers as assert_no_transfers
from partjit.testing.expected_shards import assert_laid_out as assert_laid_out
from partjit.testing.expected_shards import axes_of as axes_of
from partjit.testing.expected_shards import pieces as pieces
from partjit.testing.laws import assert_same_meaning as assert_same_meaning
from partjit.testing.mesh_strategies import meshes as meshes
from partjit.testing.programs import ShardedProgram as ShardedProgram
from partjit.testing.programs import sharded_programs as sharded_programs
from partjit.testing.recompiles import assert_no_recompile as assert_no_recompile
from partjit.testing.round_trip import assert_round_trip as assert_round_trip
from partjit.testing.strategies import op_shardings as op_shardings
from partjit.testing.strategies import partition_specs as partition_specs
from partjit.testing.strategies import shapes as shapes
from partjit.testing.strategies import sharded_arrays as sharded_arrays
from partjit.testing.strategies import shardings as shardings
from partjit.testing.strategies import spec_trees as spec_trees
