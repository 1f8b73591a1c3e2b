"""The passes of the planner, from a jaxpr to nodes; `partjit.plan.pipeline` says in which order."""
