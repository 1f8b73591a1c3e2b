"""Exact conversion between XLA's shardings and PartitionSpecs."""

from partjit.opsharding.convert import parse_op_sharding as parse_op_sharding
from partjit.opsharding.convert import to_op_sharding as to_op_sharding
from partjit.opsharding.superdims import explode_superdims as explode_superdims
from partjit.opsharding.superdims import strides_for_sizes as strides_for_sizes
from partjit.opsharding.superdims import unflatten_array as unflatten_array
from partjit.opsharding.superdims import unflatten_superdims as unflatten_superdims
