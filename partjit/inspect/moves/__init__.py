"""Models of what XLA's SPMD partitioner moves by itself, for operations on sharded dimensions."""
