"""A colocated call as an equation: the primitive, its rules under jax's transformations, and how it is traced."""
