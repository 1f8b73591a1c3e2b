"""Specs found automatically, for a machine: what a step would take there, and the specs for which it takes least."""

from partjit.search.found import Candidate, Constraint, FoundSpecs, SpecChange
from partjit.search.machine import Link, Machine, TimedCollective, h100, tpu_v5p, tpu_v6e
from partjit.search.measure import measure_machine
from partjit.search.specs import search_specs
from partjit.search.step_time import StepTime, estimate_time

__all__ = [
    "Candidate",
    "Constraint",
    "FoundSpecs",
    "Link",
    "Machine",
    "SpecChange",
    "StepTime",
    "TimedCollective",
    "estimate_time",
    "h100",
    "measure_machine",
    "search_specs",
    "tpu_v5p",
    "tpu_v6e",
]
