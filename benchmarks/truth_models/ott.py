"""Optimal transport of OTT: Sinkhorn's iterations on points that are sharded."""

import jax
import jax.numpy as jnp
from ott.geometry import pointcloud
from ott.problems.linear import linear_problem
from ott.solvers.linear import sinkhorn

from partjit import P, pjit
from truth_models.training import Model, floats, two_axes


def transport() -> Model:
    def cost(x, y):
        geometry = pointcloud.PointCloud(x, y, epsilon=0.1)
        solver = sinkhorn.Sinkhorn(min_iterations=20, max_iterations=20, inner_iterations=10)
        return jnp.sum(solver(linear_problem.LinearProblem(geometry)).reg_ot_cost)

    made = pjit(jax.value_and_grad(cost), in_shardings=(P("data"), P("model")), out_shardings=(None, P("data")))
    return Model(made, (floats(64, 8), floats(64, 8)), two_axes())
