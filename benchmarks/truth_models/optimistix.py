"""Least squares of Optimistix, whose inner systems Lineax solves."""

import jax
import jax.numpy as jnp
import lineax
import optimistix

from partjit import P, pjit
from truth_models.training import Model, floats, two_axes


def least_squares() -> Model:
    """A fit by Levenberg and Marquardt, with residuals that are sharded by samples."""

    def fit(start, x, y):
        def residuals(params, _):
            return jnp.tanh(x @ params["w"] + params["b"]) - y

        solver = optimistix.LevenbergMarquardt(rtol=1e-3, atol=1e-3, linear_solver=lineax.QR())
        return optimistix.least_squares(residuals, solver, start, max_steps=8, throw=False).value

    made = pjit(fit, in_shardings=(P(), P("data"), P("data")), out_shardings=P())
    return Model(made, ({"w": floats(8), "b": floats()}, floats(64, 8), floats(64)), two_axes())


def conjugate_gradients() -> Model:
    """A linear system by conjugate gradients of Lineax, with an operator that is sharded by rows and columns."""

    def solve(a, b):
        def apply(x):
            return a.T @ (a @ x) + x

        operator = lineax.FunctionLinearOperator(apply, jax.eval_shape(lambda: b), lineax.positive_semidefinite_tag)
        return lineax.linear_solve(operator, b, lineax.CG(rtol=1e-4, atol=1e-4, max_steps=20), throw=False).value

    made = pjit(solve, in_shardings=(P("data", "model"), P("model")), out_shardings=P("model"))
    return Model(made, (floats(64, 32), floats(32)), two_axes())
