"""Colocated calls in linear solvers and root finders of jax, which have several functions and evaluate one of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.sparse.linalg import bicgstab, cg, gmres

from partjit import pjit
from partjit.colocated import colocated_python
from tests.colocated import rendezvous

pytestmark = pytest.mark.usefixtures("meeting")

A = np.eye(4, dtype=np.float32) * 3 + 0.1
B = np.arange(1, 5, dtype=np.float32)
X = np.linalg.solve(A, B)
GRADIENT = np.linalg.solve(A.T, np.ones(4, np.float32))


def host(name, function, **options):
    """A colocated function that logs its calls."""

    def call(*args):
        rendezvous.logs[name].append(1)
        return function(*args)

    return colocated_python(call, arrays="numpy", out_specs_fn=lambda x: x, **options)


def same(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-4)


@pytest.mark.parametrize(("solve", "pure"), [(cg, False), (cg, True), (gmres, False), (bicgstab, False)])
def test_the_operator_of_a_solver_is_on_the_hosts(mesh, solve, pure):
    operator = host("operator", lambda v: A @ v, pure=pure)

    def f(b):
        return solve(operator, b, maxiter=5)[0]

    with mesh:
        nested = [pjit(jax.jit(f)), pjit(jax.checkpoint(f)), pjit(f).lower(B).compile()] if solve is cg else []
        for program in (pjit(f), *nested):
            rendezvous.logs.clear()
            same(program(B), X)
            assert 2 <= len(rendezvous.logs["operator"]) <= 8


def test_a_solver_is_in_a_loop(mesh):
    operator = host("operator", lambda v: A @ v)

    def body(c, _):
        return cg(operator, c, maxiter=5)[0], None

    with mesh:
        same(pjit(lambda b: jax.lax.scan(body, b, None, length=2)[0])(B), np.linalg.solve(A, X))


def test_a_symmetric_solver_is_differentiated(mesh):
    operator = host("operator", lambda v: A @ v)

    def f(b):
        return jnp.sum(cg(operator, b, maxiter=5)[0])

    with mesh:
        for gradient in (pjit(jax.grad(f)), jax.grad(pjit(f))):
            same(gradient(B), GRADIENT)


def test_what_would_have_to_be_transposed_is_refused_only_where_it_is_needed(mesh):
    operator = host("operator", lambda v: A @ v)

    def f(b):
        return jnp.sum(gmres(operator, b, maxiter=5)[0])

    with mesh:
        for gradient in (pjit(jax.grad(f)), jax.grad(pjit(f))):
            with pytest.raises(ValueError, match="the colocated function call cannot be transposed"):
                gradient(B)


def test_the_solve_of_a_linear_solve_is_made_once_with_what_it_captures(mesh):
    solve = host("solve", lambda b: np.linalg.solve(A, b))
    back = host("back", lambda b: np.linalg.solve(A.T, b))
    never = host("never", lambda v: v)

    def f(b, scale):
        return jax.lax.custom_linear_solve(
            lambda v: A @ (scale * v), b, lambda _, b: solve(b) / scale, lambda _, b: back(b) / scale
        )

    def with_host_operator(b):
        return jax.lax.custom_linear_solve(never, b, lambda _, b: solve(b), symmetric=True)

    with mesh:
        same(pjit(f)(B, np.float32(2)), X / 2)
        assert {name: len(log) for name, log in rendezvous.logs.items()} == {"solve": 1}
        same(pjit(jax.grad(lambda b: jnp.sum(f(b, 2.0))))(B), GRADIENT / 2)
        assert {name: len(log) for name, log in rendezvous.logs.items()} == {"solve": 2, "back": 1}
        same(pjit(with_host_operator)(B), X)
        assert not rendezvous.logs["never"]


def test_a_root_is_found_with_calls(mesh):
    residual = host("residual", lambda x: x * x - B)

    def newton(f, x):
        return jax.lax.fori_loop(0, 20, lambda _, x: x - f(x) / (2 * x), x)

    def f(a):
        def equation(x):
            return residual(jax.lax.stop_gradient(x)) + (x * x - jax.lax.stop_gradient(x * x)) + (B - a)

        return jax.lax.custom_root(equation, jnp.ones_like(a), newton, lambda g, y: y / g(jnp.ones_like(y)))

    with mesh:
        for program in (pjit(f), pjit(jax.jit(f)), pjit(f).lower(B).compile()):
            rendezvous.logs.clear()
            same(program(B), np.sqrt(B))
            assert len(rendezvous.logs["residual"]) == 20
        for gradient in (pjit(jax.grad(lambda a: jnp.sum(f(a)))), jax.grad(lambda a: jnp.sum(pjit(f)(a)))):
            same(gradient(B), 0.5 / np.sqrt(B))
