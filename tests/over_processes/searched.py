"""Specs that are AUTO over processes: one searches, and all have what it has found."""

import os
import tempfile
import zlib

import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from started import distributed, number, refused, require_equal

from partjit import AUTO, SearchOptions, pjit, reshard_policy
from partjit.search import auto

X = np.arange(8 * 16, dtype=np.float32).reshape(8, 16) / 100
W = np.eye(16, dtype=np.float32)


def layer(w, x):
    return jnp.tanh(x @ w)


def searched(**options):
    # Each process has a folder of its own, as on a machine of its own.
    search = SearchOptions(questions=8, isolated=False, cache=tempfile.mkdtemp(), **options)
    return pjit(layer, in_shardings=AUTO, out_shardings=AUTO, search=search), search.cache


def check_one_process_searches():
    fun, folder = searched()
    made, real = [], auto.SearchedProgram
    auto.SearchedProgram = lambda *args: made.append(args) or real(*args)
    try:
        args = distributed(W), distributed(X)
        with reshard_policy("allow"):
            result = fun(*args)
            fun(*args)
    finally:
        auto.SearchedProgram = real
    require_equal(result, np.tanh(X))
    assert len(made) == (number == 0)
    assert len(os.listdir(folder)) == (number == 0)
    specs = "; ".join(map(str, fun.trace(*args).program.in_specs))
    multihost_utils.assert_equal(np.uint32(zlib.crc32(specs.encode())), "the specs differ")


def check_errors():
    fun, _ = searched(memory=100)
    text = refused(fun, distributed(W), distributed(X))
    assert "layer does not fit into 100 B per device" in text, text
    assert (number == 0) != ("process 0 found no specs for layer: pjit: layer" in text), text
    multihost_utils.sync_global_devices("the end")  # the first process leaves last
