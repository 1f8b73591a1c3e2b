"""Why a value lies as it does: who asked for each axis, and the way from there to the value."""
