"""Compiled programs: their text parsed, their collectives read, XLA's warnings caught."""
