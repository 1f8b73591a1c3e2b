"""The pieces of global arrays that one process has, and calls that take and return them."""
