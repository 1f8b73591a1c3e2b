"""Mutation testing: changes the package a little, and the tests have to notice. See `docs/mutation.md`."""
