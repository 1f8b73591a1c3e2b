"""A program that sends what it has defined to workers; `test_pickling.py` runs it.

python -P tests/pickling_main.py spawn   # multiprocessing: plain pickle, and a child that imports this file
python -P tests/pickling_main.py pipe    # as ray does it: cloudpickle, and a child that has not this file
"""

import functools
import multiprocessing
import pickle
import subprocess
import sys

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from partjit import FROM_ARRAY, UNSPECIFIED, Mesh, P, colocated, pjit, with_sharding_constraint

jax.config.update("jax_num_cpu_devices", 8)

SETTINGS = {"factor": 3.0}
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))


@pjit
def scale(x):
    return x * SETTINGS["factor"]


def plain(x, times):
    SETTINGS["times"] = times
    return with_sharding_constraint(x, NamedSharding(mesh, P("x", "y"))) * times


named = pjit(plain, in_shardings=(NamedSharding(mesh, P("x")),), out_shardings=P("y"), static_argnums=1)


@colocated.colocated_python(out_specs=jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=NamedSharding(mesh, P("x"))))
def load(x):
    return jnp.asarray(np.asarray(x) + SETTINGS["factor"])


@pjit
def with_call(x):
    return scale(load(x))


@functools.partial(pjit, static_argnums=1)
def power(x, n):
    return x * power(x, n - 1) if n else x


@colocated.colocated_python_class
class Counter:
    def __init__(self, start):
        self.count = start

    def add(self, x):
        self.count = self.count + x
        return self.count


def work(sent):
    """What a worker does: calls what it was sent, and says what came of it."""
    functions, x = sent
    markers = functions.pop()
    assert all(one is own for one, own in zip(markers, [UNSPECIFIED, FROM_ARRAY, P.UNCONSTRAINED], strict=True))
    counter = functions.pop()(x)
    found = []
    with mesh:
        for function, *others in functions:
            text = function.lower(x, *others).as_text()
            out = function(x, *others)
            found.append((text, np.asarray(out), str(out.sharding.spec) if hasattr(out.sharding, "spec") else ""))
    colocated.wait()
    return found, np.asarray(counter.add(x)), SETTINGS


def sent():
    x = np.arange(16, dtype=np.float32).reshape(8, 2)
    markers = [UNSPECIFIED, FROM_ARRAY, P.UNCONSTRAINED]
    return [(scale,), (named, 2), (with_call,), (power, 2), Counter, markers], x


def same(one, other):
    (found, added, settings), (expected, expected_added, expected_settings) = one, other
    np.testing.assert_array_equal(added, expected_added)
    assert settings == expected_settings == {"factor": 3.0, "times": 2}
    for (text, out, spec), (expected_text, expected_out, expected_spec) in zip(found, expected, strict=True):
        assert text == expected_text
        assert spec == expected_spec
        np.testing.assert_array_equal(out, expected_out)


def main(how):
    if how == "spawn":
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            answer = pool.apply(work, (sent(),))
        for function, *_ in sent()[0][:4]:
            assert pickle.loads(pickle.dumps(function)) is function
    else:
        code = (
            "import pickle, sys, jax; jax.config.update('jax_num_cpu_devices', 8)\n"
            "work, sent = pickle.load(sys.stdin.buffer)\n"
            "sys.stdout.buffer.write(pickle.dumps(work(sent)))"
        )
        blob = cloudpickle.dumps((work, sent()))
        ran = subprocess.run([sys.executable, "-c", code], input=blob, stdout=subprocess.PIPE, check=True)
        answer = pickle.loads(ran.stdout)
    same(answer, work(sent()))
    print("same")


if __name__ == "__main__":
    main(sys.argv[1])
