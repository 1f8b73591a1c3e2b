"""Showing plans: as Python source, as a graph, as pictures."""
