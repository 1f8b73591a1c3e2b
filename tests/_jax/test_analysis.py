"""Lowering for analysis gives the module that jax would compile, or leaves the program to jax."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from partjit._jax.analysis import lower_for_analysis
from partjit._jax.compiling import lower_to_computation
from partjit._jax.meshes import under_mesh
from partjit._jax.shardings import UNSPECIFIED
from partjit.inspect.inlining import names_in
from partjit.shardy import nested


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


def step(w, x, scale):
    def loss(w):
        hidden, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w) * scale, h.sum()), x, w)
        return lax.cond(scale > 0, jnp.sum, jnp.max, jnp.where(hidden > 0, hidden, -1e9))

    value, gradient = jax.value_and_grad(loss)(w)
    return w - 0.1 * gradient, value


def solution(w, x, scale):
    solved, _ = jax.scipy.sparse.linalg.cg(lambda v: w[0] @ v + scale * v, x[0])  # a jaxpr among others that are None
    return solved, jax.random.normal(jax.random.key(0), (8,))


def constrained(w, x, scale, mesh):
    return lax.with_sharding_constraint(w, NamedSharding(mesh, P(None, "x"))), jax.jit(jnp.sin)(x) * scale


def shard_mapped(w, x, scale, mesh):
    return jax.shard_map(lambda x: lax.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())(x), w.sum() * scale


TABLE = np.arange(8.0, dtype=np.float32)


def plain(w, x, scale):
    """Constants, arguments and numbers among results, equal equations, and some of which a result is not used."""
    (last, _), (_, places) = (lax.top_k(row, 2) for row in (x[0], x[1] + TABLE))
    zeros = x * 0.0 + x * -0.0 + (x.astype("bfloat16") * 0.0 + 0).astype(x.dtype) + x * jnp.sign(-0.0)
    return zeros, x, jnp.float32(2.5), jnp.sin(x * 2.0) + jnp.sin(x * 2.0), x, last, places, x * 3.0, TABLE


def lowered(fun, mesh: Mesh, on: Mesh | AbstractMesh | None = None):
    """The program of a function of a weight, an activation and a scale on a mesh: by itself, and as jax lowers it."""
    arguments = jnp.ones((3, 8, 8)), jnp.ones((8, 8)), 2.0
    ins = NamedSharding(mesh, P(None, "x", "y")), NamedSharding(mesh, P("x")), UNSPECIFIED
    with under_mesh(mesh):
        jaxpr: ClosedJaxpr = jax.make_jaxpr(fun)(*arguments)
        outs = (UNSPECIFIED,) * len(jaxpr.out_avals)
        own = lower_for_analysis(jaxpr, "step", ins, outs, on or mesh)
        of_jax = functools.partial(lower_to_computation, jaxpr, "step", ins, outs, (False,) * 3)
        return own, lambda: of_jax(keep_unused=True, context_mesh=mesh).stablehlo()


def text_of(module) -> str:
    """The text of a module, but for its name and those of results, and the parentheses these bring."""
    text = re.sub(r'jax\.result_info = "[^"]*"(, )?', "", str(module.operation.get_asm(enable_debug_info=False)))
    return re.sub(r"[()]| \{\}", "", text.split("\n", 1)[1])


@pytest.mark.parametrize("fun", [step, solution, plain, constrained, shard_mapped])
def test_a_program_is_lowered_as_jax_lowers_it(fun, mesh: Mesh) -> None:
    if fun in (constrained, shard_mapped):
        fun = functools.partial(fun, mesh=mesh)
    own, of_jax = lowered(fun, mesh)
    assert own is not None
    assert text_of(own) == text_of(of_jax())
    assert own.operation.verify()


def test_each_operation_is_where_the_innermost_scope_of_its_equation_says(mesh: Mesh) -> None:
    def scoped(w, x, scale):
        for k in range(3):
            with jax.named_scope("outer"), jax.named_scope(f"scope{k}"):
                x = x * 2.0
        return x

    own, _ = lowered(scoped, mesh)
    assert own is not None
    (*products,) = (op for op in nested(own.operation) if op.name == "stablehlo.multiply")
    assert [names_in(op.location).split("/")[0] for op in products] == ["scope0", "scope1", "scope2"]


def constrained_elsewhere(w, x, scale, other):
    return constrained(w, x, scale, other)


def in_a_branch(w, x, scale, other):
    return lax.cond(scale > 0, lambda w: constrained(w, x, scale, other)[0], lambda w: w, w)


def printed(w, x, scale):
    jax.debug.print("{}", scale, ordered=True)
    return w


def with_a_ref(w, x, scale):
    ref = jax.new_ref(x)
    ref[...] += scale
    return w * ref[0, 0]


@pytest.mark.parametrize("fun", [constrained_elsewhere, in_a_branch, printed, with_a_ref])
def test_what_may_be_elsewhere_or_needs_more_is_left_to_jax(fun, mesh: Mesh) -> None:
    if fun in (constrained_elsewhere, in_a_branch):
        fun = functools.partial(fun, other=Mesh(mesh.devices.reshape(2, 4), ("y", "x")))
    assert lowered(fun, mesh)[0] is None


def test_meshes_without_devices_and_arguments_in_other_memories_are_left_to_jax(mesh: Mesh) -> None:
    assert lowered(step, mesh, AbstractMesh((4, 2), ("x", "y")))[0] is None
    arguments = jnp.ones((3, 8, 8)), jnp.ones((8, 8)), 2.0
    jaxpr = jax.make_jaxpr(step)(*arguments)
    kinds = {memory.kind for memory in mesh.devices.flat[0].addressable_memories()}
    (other, *_) = kinds - {mesh.devices.flat[0].default_memory().kind}
    elsewhere = NamedSharding(mesh, P(), memory_kind=other)
    ins = elsewhere, UNSPECIFIED, UNSPECIFIED
    assert lower_for_analysis(jaxpr, "step", ins, (UNSPECIFIED,) * len(jaxpr.out_avals), mesh) is None


def test_types_that_say_how_arrays_are_sharded_are_left_to_jax() -> None:
    explicit = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(explicit):
        jaxpr = jax.make_jaxpr(jnp.sin)(jax.device_put(jnp.ones(8), NamedSharding(explicit, P("x"))))
    assert lower_for_analysis(jaxpr, "sin", (UNSPECIFIED,), (UNSPECIFIED,), explicit) is None
