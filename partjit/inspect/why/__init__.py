"""Why a value is sharded as it is: the requested spec that each axis comes from, and the path from there."""
