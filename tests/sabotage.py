"""Breaks partjit in ways that a law has to notice: `python -m tests.sabotage` tries each and says which law did.

It is a process of its own, because what is compiled while something is broken would stay in caches.
"""

import sys
import time

import jax
import pytest
from hypothesis import Phase, settings
from jax.interpreters import ad, mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import partjit
from partjit import compile as compiling
from partjit._jax.shardings import UNSPECIFIED
from partjit.plan.passes import cut
from partjit.plan.run import link
from partjit.primitive import pjit_p, sharding_constraint_p
from partjit.rules import batching, jvp, transpose
from partjit.spec import ParsedPartitionSpec

settings.register_profile("sabotage", phases=(Phase.generate,), derandomize=True, deadline=None, database=None)
settings.load_profile("sabotage")  # before the laws are imported, whose settings are made of it

from tests import test_promises as promises  # noqa: E402
from tests.plan import test_programs_random as programs  # noqa: E402


def drop_every_spec(patch):
    patch.setattr(ParsedPartitionSpec, "named_sharding", lambda self, mesh: NamedSharding(self.mesh or mesh, P()))


def drop_the_specs_of_results(patch):
    lower = compiling.lower_jaxpr

    def replicated(jaxpr, ins, outs, *rest):
        outs = tuple(NamedSharding(out.mesh, P()) if isinstance(out, NamedSharding) else out for out in outs)
        return lower(jaxpr, ins, outs, *rest)

    patch.setattr(compiling, "lower_jaxpr", replicated)


def drop_the_specs_of_transposes(patch):
    rule = ad.primitive_transposes[pjit_p]
    assert rule is transpose._transpose
    patch.setitem(
        ad.primitive_transposes,
        pjit_p,
        lambda *args, in_specs, **params: rule(*args, in_specs=(UNSPECIFIED,) * len(in_specs), **params),
    )


def double_tangents(patch):
    def doubled(*args, **params):
        outs, tangents = jvp._jvp(*args, **params)
        return outs, [tangent if type(tangent) is ad.Zero else 2 * tangent for tangent in tangents]

    patch.setitem(ad.primitive_jvps, pjit_p, doubled)


def put_the_batch_at_the_end_of_specs(patch):
    insert = batching.insert_batch_axis
    patch.setattr(batching, "insert_batch_axis", lambda spec, dim, *rest: insert(spec, len(spec), *rest))


def drop_spmd_axis_name(patch):
    patch.setattr(batching, "insert_batch_axis", lambda spec, dim, *_: spec.insert_axis_partitions(dim, ()))


def ignore_constraints(patch):
    mlir.register_lowering(sharding_constraint_p, lambda ctx, x, **_: [x])  # for good, so it comes last


def forget_the_order_of_calls(patch):
    patch.setattr(cut, "orders_of", lambda node: [object()])


def make_calls_twice(patch):
    caller = link._caller

    def twice(*args, **options):
        call = caller(*args, **options)
        return lambda *leaves: (call(*leaves), call(*leaves))[1]

    patch.setattr(link, "_caller", twice)


def drop_calls_without_results(patch):
    caller = link._caller

    def without(call, *args, **options):
        return caller(call, *args, **options) if call.outputs else lambda *leaves: ()

    patch.setattr(link, "_caller", without)


def law(name, count=2):
    return lambda: promises.check(name, count)


def program(about):
    devices = jax.devices()
    meshes = {n: partjit.Mesh(programs.np.array(devices[:n]).reshape(-1, min(n, 2)), ("x", "y")) for n in (1, 8)}

    def holds():
        with pytest.MonkeyPatch.context() as patch:
            programs.test_a_random_program_obeys_all_laws(meshes, patch, about)

    return holds


spmd = promises.test_spmd_axis_name_divides_the_batch_and_changes_no_value
SABOTAGES = {
    drop_every_spec: law("call"),
    drop_the_specs_of_results: law("call"),
    drop_the_specs_of_transposes: law("grad", 8),  # the partitioner often chooses what the spec says
    double_tangents: law("jvp"),
    put_the_batch_at_the_end_of_specs: law("vmap"),
    drop_spmd_axis_name: lambda: spmd("vmap"),
    forget_the_order_of_calls: program("nested"),
    make_calls_twice: program("nested"),
    drop_calls_without_results: program("a row"),
    ignore_constraints: promises.test_a_constraint_is_where_it_says_and_an_uneven_one_keeps_the_value,
}


def noticed(sabotage, holds):
    """What a law says while something is broken, in short, or None."""
    with pytest.MonkeyPatch.context() as patch, partjit.reshard_policy("allow"):
        sabotage(patch)
        try:
            holds()
        except Exception as error:
            return " ".join(f"{type(error).__name__}: {error}".split())[:150]
        finally:
            jax.clear_caches()
    return None


def main():
    unnoticed = []
    for sabotage, holds in SABOTAGES.items():
        start = time.process_time()
        found = noticed(sabotage, holds)
        print(f"{sabotage.__name__} ({time.process_time() - start:.1f} s): {found}", flush=True)
        unnoticed += [] if found and "none of its" not in found else [sabotage.__name__]
    print("not noticed:", *unnoticed or ["nothing"])
    return len(unnoticed)


if __name__ == "__main__":
    sys.exit(main())
