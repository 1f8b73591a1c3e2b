"""The rules of jax that partjit replaces: when they are replaced, and that programs without calls are as without."""

import contextlib
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partjit import colocated
from partjit._jax import patches
from tests._jax.programs_without_calls import function_of, programs
from tests.census import saw, sees

X = np.asarray([0.25, 1.5, 0.75], np.float32)


@pytest.fixture(autouse=True, scope="module")
def _installed():
    call = colocated.colocated_python(lambda x: x).specialize(out_specs_fn=lambda x: x)
    jax.make_jaxpr(call)(X)


def names_of_patches():
    return [replacement.__name__ for _, _, replacement in patches.PATCHES]


@contextlib.contextmanager
def replaced(make):
    ours = [
        (table, primitive, table[primitive], name)
        for (table, primitive, _), name in zip(patches.PATCHES, names_of_patches(), strict=True)
    ]
    for table, primitive, rule, name in ours:
        table[primitive] = make(rule, name)
    try:
        yield
    finally:
        for table, primitive, rule, _ in ours:
            table[primitive] = rule


def reporting(rule, name):
    def reported(*args, **params):
        saw(name)
        return rule(*args, **params)

    return reported


def total(fun):
    return lambda x: jnp.sum(fun(x))


TRANSFORMED = {
    "jit": lambda f: f,
    "grad": lambda f: jax.grad(total(f)),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](x),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "transpose": lambda f: lambda x: jax.linear_transpose(lambda y: jax.jvp(f, (x,), (y,))[1], x)(x),
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x + 1])),
    "vmap of grad": lambda f: lambda x: jax.vmap(jax.grad(total(f)))(jnp.stack([x, x + 1])),
    "grad of checkpoint": lambda f: jax.grad(jax.checkpoint(total(f))),
    "grad of vmap": lambda f: jax.grad(lambda x: jnp.sum(jax.vmap(f)(jnp.stack([x, x + 1])))),
    "hessian": lambda f: jax.hessian(total(f)),
}


def seen_of(steps, name):
    """The jaxpr, and the module that XLA compiles; or with which words it is refused."""
    try:
        traced = jax.jit(TRANSFORMED[name](function_of(steps))).trace(X)
    except ValueError as error:  # a while_loop in reverse mode
        saw("refused", "Reverse-mode differentiation" in str(error))
        return str(error)
    return str(traced.jaxpr), traced.lower().as_text()


@sees("refused", *names_of_patches())
@given(programs(), st.sampled_from(sorted(TRANSFORMED)))
@settings(max_examples=25)
def test_programs_without_calls_are_what_jax_makes_of_them(steps, name):
    with replaced(reporting), contextlib.suppress(ValueError):
        jax.make_jaxpr(TRANSFORMED[name](function_of(steps)))(X)
    ours = seen_of(steps, name)
    with replaced(lambda rule, _: rule.of_jax):
        assert seen_of(steps, name) == ours


TABLES = """
import sys, threading
import jax, jax.numpy as jnp
from jax.extend.core import Primitive
import jax.extend, jax.experimental.checkify  # imported by partjit as well, and fill tables

def tables():
    modules = [module for name, module in [*sys.modules.items()] if name.startswith("jax._src")]
    found = {(module.__name__, name): value for module in modules for name, value in vars(module).items()
             if isinstance(value, dict) and any(isinstance(key, Primitive) for key in value)}
    return {place: dict(table) for place, table in found.items()}

def changed(before):
    after = tables()
    return [(*place, key.name) for place, table in before.items() for key, rule in table.items()
            if isinstance(key, Primitive) and after[place].get(key) is not rule]

before = tables()
assert {"primitive_linearizations", "custom_partial_eval_rules", "dce_rules"} <= {name for _, name in before}
import partjit
"""


BEFORE_CALLS = """
assert changed(before) == []
octuple = partjit.pjit(lambda x: jax.lax.fori_loop(0, 3, lambda _, c: 2 * c, x), partjit.PartitionSpec("x"), None)
with partjit.Mesh(jax.devices()[:1], ("x",)):
    assert jax.grad(lambda x: octuple(x).sum())(jnp.ones(3))[0] == 8
assert partjit.colocated.colocated_python(lambda x: x)(jnp.ones(3)).shape == (3,)
assert changed(before) == []
"""

CALLS = """
from partjit._jax import patches

call = partjit.colocated.colocated_python(lambda x: x).specialize(out_specs_fn=lambda x: x)
start = threading.Barrier(8)

def trace():
    start.wait()
    jax.make_jaxpr(call)(jnp.ones(3))

threads = [threading.Thread(target=trace) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
for table, primitive, _ in patches.PATCHES:
    rule = table[primitive]
    assert rule.of_jax in [value for tables in before.values() for key, value in tables.items() if key is primitive]
rules = [table[primitive] for table, primitive, _ in patches.PATCHES]
jax.make_jaxpr(lambda x: call(2 * x))(jnp.ones(3))
assert rules == [table[primitive] for table, primitive, _ in patches.PATCHES]
assert sorted((table, name) for _, table, name in changed(before)) == [
    ("custom_partial_eval_rules", "remat2"),
    ("custom_partial_eval_rules", "scan"),
    ("custom_partial_eval_rules", "while"),
    ("fancy_primitive_batchers", "cond"),
    ("fancy_primitive_batchers", "while"),
    ("partial_eval_jaxpr_custom_rules", "scan"),
    ("partial_eval_jaxpr_custom_rules", "while"),
    ("primitive_linearizations", "scan"),
]
"""


def test_programs_without_calls_change_no_rule_and_the_first_traced_call_replaces_each_once_in_whichever_threads():
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    program = [sys.executable, "-W", "error", "-c", TABLES + BEFORE_CALLS + CALLS]
    ran = subprocess.run(program, capture_output=True, text=True, env=env, check=False)
    assert ran.returncode == 0, ran.stderr
