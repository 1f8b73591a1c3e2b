"""The training step of a transformer that the other benchmarks time."""

import cold
from truth_models.training import Model, two_axes


def transformer() -> Model:
    mesh, problem = two_axes(), cold.make_problem(24)
    step = cold.fresh_step(cold.make_contestants(mesh)["pjit"], problem, cold.Counter())
    return Model(step, (problem.state, problem.tokens), mesh)
