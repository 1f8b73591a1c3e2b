"""Everything of the package that can be called, with valid arguments, and what each argument takes besides.

Which public names there are is not written here: `public_callables` finds them, and `tests/test_bad_input.py` fails
where one is neither a target nor among those that are made by the package alone.
"""

import contextlib
import dataclasses
import enum
import functools
import io
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import partjit
import partjit.opsharding
import partjit.testing
from partjit import colocated, events
from partjit.command import main
from partjit.recording import Timeline
from tests.bad_values import HostileError

__all__ = ["MADE_BY_PARTJIT", "TARGETS", "Target", "public_callables"]

SPEC_TREE = "tree tree_inside spec unspecified unspecified_inside spec_inside empty empty_inside"
IN_SPEC_TREE = f"{SPEC_TREE} from_array from_array_inside"
OTHER_ARRAYS = (
    "object_array object_array_inside str_array str_array_inside datetime datetime_inside numpy_scalar "
    "numpy_scalar_inside"
)
DELETED = "deleted deleted_inside"
VALUES = "leaf leaf_inside leaf_tree leaf_tree_inside tree empty empty_inside none_inside nones nones_inside struct"


@dataclasses.dataclass(frozen=True)
class Target:
    """Something to be called.

    Attributes:
        name: its dotted name, and in parentheses what is done with the result.
        call: calls it with the arguments that `base` gives, of which one is replaced.
        base: gives valid arguments.
        takes: per argument, the kinds of bad values that it may take.
        raises: what it may raise besides TypeError and ValueError.
        named: how else messages may name an argument.
        lets_pass: parts of messages of errors that are jax's or Python's, and let pass by intent.
    """

    name: str
    call: Callable[..., Any]
    base: Callable[[], dict[str, Any]]
    takes: Mapping[str, str]
    raises: tuple[type[BaseException], ...] = ()
    named: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    lets_pass: tuple[str, ...] = ()

    def allows(self, argument: str, kinds: frozenset[str]) -> bool:
        """Whether an argument may take a value of these kinds."""
        return bool(kinds & {*self.takes[argument].split()})


@functools.cache
def mesh() -> partjit.Mesh:
    return partjit.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))


def same(x: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf, x)


def struct(x: Any = None) -> Any:
    return jax.ShapeDtypeStruct((8,), np.float32)


@functools.cache
def ones() -> jax.Array:
    return jnp.ones(8, np.float32)


@functools.cache
def partitioned() -> Any:
    return partjit.pjit(same, in_axis_resources=P("x"))


@functools.cache
def with_call() -> Any:
    host = colocated.colocated_python(lambda x: x, out_specs_fn=struct)
    return partjit.pjit(lambda x: host(x) + 1)


@functools.cache
def report() -> Any:
    return partjit.inspect.explain(partitioned(), ones(), mesh=mesh())


@functools.cache
def machine() -> Any:
    link = partjit.search.Link(1e9)
    return partjit.search.Machine("two links", {"f32": 1e9}, 1 << 30, 1e9, {"x": link, "y": link})


@functools.cache
def timeline() -> Timeline:
    return Timeline(
        [
            events.ProgramStarted("step", 3, time=0.0, thread=1),
            events.CallStarted(0, "load", "io", time=1.0, thread=2),
            events.CallFinished(0, "load", "io", time=4.0, thread=2),
            events.FragmentDispatched("step", 3, "fragment_0", time=4.5, thread=1),
            events.FragmentReady("step", 3, "fragment_0", time=6.0, thread=1),
        ]
    )


def colocated_same() -> Any:
    return colocated.colocated_python(same)


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.count = start

    def add(self, x: Any) -> Any:
        return x + self.count


def entered(call: Callable[..., Any]) -> Callable[..., Any]:
    """What enters and leaves the context that a function gives."""

    @functools.wraps(call)
    def enter(**arguments: Any) -> None:
        with call(**arguments):
            pass

    return enter


def _in_new_directory(call: Callable[..., Any]) -> Callable[..., Any]:
    """What writes files where no other call finds them."""

    def elsewhere(**arguments: Any) -> None:
        with tempfile.TemporaryDirectory() as path, contextlib.chdir(path):
            call(**arguments)

    return elsewhere


def _journal() -> str:
    """The path of a journal with results."""
    with colocated.journal("replayed", results=True):
        return "replayed"


_REFUSALS = (TypeError, ValueError)


def drawn(strategy: Callable[..., Any]) -> Callable[..., Any]:
    """What draws one example of the strategy that a function gives."""

    def draw(**arguments: Any) -> None:
        errors: list[Exception] = []

        @settings(max_examples=1, database=None, derandomize=True, suppress_health_check=[*HealthCheck], deadline=None)
        @given(st.data())
        def test(data: Any) -> None:
            try:
                data.draw(strategy(**arguments))
            except (
                TypeError,
                ValueError,
                RuntimeError,
                HostileError,
                OverflowError,
                AttributeError,
                LookupError,
            ) as error:
                errors.append(error)  # hypothesis would print the arguments, which may not be printable

        test()
        if errors:
            raise errors[0]

    return draw


def _method(obj: Callable[[], Any], name: str) -> Callable[..., Any]:
    return lambda **arguments: getattr(obj(), name)(**arguments)


def _star(call: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """A function that takes some of its arguments by position."""
    return lambda **arguments: call(*[arguments.pop(name) for name in names], **arguments)


def _pjit_called(x: Any, **options: Any) -> Any:
    with mesh():
        return partjit.pjit(same, **options)(x)


def _quietly(call: Callable[..., Any]) -> Callable[..., Any]:
    def quiet(**arguments: Any) -> Any:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return call(**arguments)

    return quiet


def _in_mesh(call: Callable[..., Any]) -> Callable[..., Any]:
    def within(**arguments: Any) -> Any:
        with mesh():
            return call(**arguments)

    return within


def _policy_kept(policy: Any) -> None:
    with partjit.reshard_policy(policy):
        pass


def _set_and_unset(mesh: Any) -> None:
    with partjit.set_mesh(mesh):
        pass


def _written(**arguments: Any) -> str:
    """JSON of a report; the page would be written to a file."""
    return report().to_json(**arguments)


def _waited_for(function: Any) -> None:
    jax.block_until_ready(function(ones()))
    colocated.wait()


def _spanned(started):
    with events.span(started):
        pass


def _listened(listener: Any) -> None:
    with events.subscribe(listener):
        pass


def _watched(functions: Any, warmup: Any) -> None:
    with partjit.testing.assert_no_recompile(functions, warmup=warmup):
        pass


def _read_timeline(recorded: Any) -> str:
    return Timeline(recorded).summary()


_OF_ARRAYS = (
    "Array has been deleted",
    "called with a deleted array",
    "does not fit int32",  # an OverflowError, as jax's
    "too large to convert",
    "Non-hashable static arguments",
    "takes no arguments",
    "Only scalar arrays",
)
"""What jax says of arrays and numbers, and Python of calling a class, before the package has a say."""
_OF_STRATEGIES = ("__repr__ returned non-string", "Array has been deleted")
"""Hypothesis shows a strategy that is drawn from, and so asks its arguments for their `repr`."""
_OF_COSTS = ("takes no arg", "int() arg", "takes 0 pos", "not a valid JAX type", "only supports jax.Array")
"""What a callable says that is no function of a node."""
_OF_SPECS = ("One of pjit arguments", "One of pjit outputs", "One of with_sharding_constraint arguments")
_OF_HOST = ("host argument",)
_PJIT_TAKES = {
    "fun": "callable none",
    "in_axis_resources": IN_SPEC_TREE,
    "out_axis_resources": SPEC_TREE,
    "static_argnums": "zero minus_one ints none empty_seq",
    "donate_argnums": "zero minus_one ints none empty_seq",
    "static_argnames": "none x empty_seq",
    "donate_argnames": "none x empty_seq",
    "host_argnums": "zero minus_one ints none empty_seq",
    "host_argnames": "none x empty_seq",
    "positional_semantics": "",
    "keep_unused": "bool",
    "device": "none device",
    "backend": "none str",
    "inline": "bool",
    "name": "none str",
    "agree": "bool",
}
_OUT_STRUCTS = (
    "none none_inside nones_inside tree empty empty_inside struct struct_inside array array_inside numpy_scalar "
    "numpy_scalar_inside"
)
_TREES = (
    "none none_inside nones nones_inside empty empty_inside empty_seq array array_inside numpy_scalar "
    "numpy_scalar_inside"
)
_ITEMS_TAKE = {
    "in_specs": "none",
    "out_specs": _OUT_STRUCTS,
    "out_specs_fn": "none callable",
    "arrays": "none",
    "devices": "none mesh device devices",
    "mode": "none",
    "stream": "none str stream",
    "pure": "none bool",
    "layout": "none",
    "run_ahead": "none positive zero",
    "vmap_method": "none",
}


def _nothing() -> dict[str, Any]:
    return {}


def _targets() -> Iterator[Target]:
    yield Target(
        "partjit.pjit",
        partjit.pjit,
        lambda: {
            "fun": same,
            "in_axis_resources": P("x"),
            "out_axis_resources": P("x"),
            "static_argnums": (),
            "donate_argnums": (),
            "static_argnames": None,
            "donate_argnames": None,
            "host_argnums": (),
            "host_argnames": None,
            "positional_semantics": "global",
            "keep_unused": False,
            "device": None,
            "backend": None,
            "inline": False,
            "name": "same",
            "search": None,
        },
        {**_PJIT_TAKES, "search": "none"},
        named={"fun": ("callable", "function")},
    )
    yield Target(
        "partjit.pjit (today's names)",
        partjit.pjit,
        lambda: {"fun": same, "in_shardings": P("x"), "out_shardings": P("x")},
        {"fun": "callable none", "in_shardings": IN_SPEC_TREE, "out_shardings": SPEC_TREE},
        named={"fun": ("callable", "function")},
    )
    yield Target(
        "partjit.pjit (as a decorator)",
        lambda **options: partjit.pjit(**options)(same),
        lambda: {
            "static_argnums": (),
            "donate_argnames": None,
            "keep_unused": False,
            "name": None,
            "in_shardings": None,
        },
        {**_PJIT_TAKES, "in_shardings": IN_SPEC_TREE},
    )
    yield Target(
        "partjit.pjit (called)",
        _pjit_called,
        lambda: {
            "x": np.ones(8, np.float32),
            "in_axis_resources": P("x"),
            "out_axis_resources": P("x"),
            "static_argnums": (),
            "donate_argnums": (),
            "static_argnames": (),
            "donate_argnames": (),
            "host_argnums": (),
            "host_argnames": (),
            "keep_unused": False,
            "name": None,
        },
        {**_PJIT_TAKES, "x": f"{VALUES} huge huge_inside"},
        named={
            "in_axis_resources": _OF_SPECS,
            "out_axis_resources": _OF_SPECS,
            "host_argnums": _OF_HOST,
            "host_argnames": _OF_HOST,
        },
        lets_pass=_OF_ARRAYS,
    )
    for stage in ("trace", "lower", "plan", "eval_shape"):
        yield Target(
            f"partjit.pjit ({stage})",
            _in_mesh(lambda x, stage=stage: getattr(partitioned(), stage)(x)),
            lambda: {"x": struct()},
            {"x": f"{VALUES} jax jax_inside huge huge_inside struct struct_inside"},
            lets_pass=_OF_ARRAYS,
        )
    yield Target(
        "partjit.pjit (planned, compiled, called)",
        lambda x: with_call().lower(struct()).compile()(x),
        lambda: {"x": ones()},
        {"x": "leaf huge"},
        named={"x": ("structure",)},
        lets_pass=(*_OF_ARRAYS, "returned an array that was deleted"),  # the function that the array is passed to
    )
    yield Target(
        "partjit.with_sharding_constraint",
        _in_mesh(partjit.with_sharding_constraint),
        lambda: {"x": np.ones((8, 2), np.float32), "specs": P("x")},
        {"x": f"{VALUES} huge huge_inside", "specs": "none spec tree unconstrained_pspec"},
        named={"specs": ("shardings", *_OF_SPECS)},
        lets_pass=_OF_ARRAYS,
    )
    yield Target(
        "partjit.Mesh",
        partjit.Mesh,
        lambda: {"devices": jax.devices()[:2], "axis_names": ("a",), "axis_types": None},
        {"devices": "devices same_devices", "axis_names": "str one_hashable", "axis_types": "none"},
    )
    rules = "callable empty empty_seq spec_inside unconstrained_pspec_inside unspecified_inside from_array_inside"
    for by_path in (partjit.specs_like, partjit.spec_table):
        yield Target(
            f"partjit.{by_path.__name__}",
            by_path,
            lambda: {"tree": {"w": ones()}, "rules": {"w": P("x")}, "default": P()},
            {
                "tree": "everything",
                "rules": rules,
                "default": "none spec unconstrained_pspec unspecified from_array",
            },
            lets_pass=("not a valid JAX type",),  # what a function of pjit says of a path
        )
    yield Target(
        "partjit.spec_table (on a mesh)",
        partjit.spec_table,
        lambda: {"tree": {"w": ones()}, "rules": {"w": P("x")}, "mesh": mesh()},
        {"tree": "everything", "rules": rules, "mesh": "none mesh empty_mesh"},
        lets_pass=("not a valid JAX type",),
    )
    yield Target("partjit.set_mesh", _set_and_unset, lambda: {"mesh": mesh()}, {"mesh": "none mesh empty_mesh"})
    yield Target("partjit.reshard_policy", _policy_kept, lambda: {"policy": "allow"}, {"policy": ""})
    yield Target(
        "partjit.ParsedPartitionSpec",
        partjit.ParsedPartitionSpec,
        lambda: {
            "unsafe_user_spec": P("x"),
            "partitions": (("x",),),
            "sync": partjit.SpecSync.IN_SYNC,
            "mesh": None,
            "memory_kind": None,
        },
        {
            "unsafe_user_spec": "none pspec unconstrained_pspec bad_pspec",
            "partitions": "empty_seq empty_seq_inside unconstrained_pspec parsed tuple_inside",
            "sync": "",
            "mesh": "none mesh empty_mesh",
            "memory_kind": "none str",
        },
    )
    yield Target(
        "partjit.ParsedPartitionSpec.from_user_input",
        partjit.ParsedPartitionSpec.from_user_input,
        lambda: {"entry": P("x"), "arg_name": "in_shardings", "allow_unconstrained_dims": False},
        {"entry": "none spec", "arg_name": "str", "allow_unconstrained_dims": "bool"},
        named={"entry": ("in_shardings",)},
    )
    spec = functools.cache(lambda: partjit.ParsedPartitionSpec.from_user_input(P("x", None), "spec"))
    yield Target(
        "partjit.ParsedPartitionSpec.insert_axis_partitions",
        _method(spec, "insert_axis_partitions"),
        lambda: {"dim": 0, "partition": ("y",)},
        {"dim": "zero positive", "partition": "tuple empty_seq"},
    )
    yield Target(
        "partjit.ParsedPartitionSpec.unsynced_user_spec",
        _method(spec, "unsynced_user_spec"),
        lambda: {"min_sync": partjit.SpecSync.IN_SYNC},
        {"min_sync": ""},
    )
    yield Target(
        "partjit.ParsedPartitionSpec.named_sharding",
        _method(spec, "named_sharding"),
        lambda: {"mesh": mesh()},
        {"mesh": "mesh abstract_mesh"},
        lets_pass=("is not found in mesh",),
    )
    yield Target(
        "partjit.parse_op_sharding",
        partjit.parse_op_sharding,
        lambda: {"sharding": "{devices=[8]<=[8]}", "mesh": mesh()},
        {"sharding": "empty_bytes", "mesh": "mesh abstract_mesh"},
    )
    yield Target(
        "partjit.to_op_sharding",
        partjit.to_op_sharding,
        lambda: {"spec": P("x"), "mesh": mesh(), "ndim": 1, "as_list": False},
        {"spec": "none spec parsed", "mesh": "mesh abstract_mesh", "ndim": "positive", "as_list": "bool"},
    )
    for name, base, takes in (
        ("strides_for_sizes", {"sizes": [2, 3]}, {"sizes": "ints empty_seq"}),
        ("unflatten_superdims", {"assignment": [0, 2, 1, 3]}, {"assignment": "ints empty_seq"}),
        ("explode_superdims", {"sizes": [2, 3], "dims": [(6, 1)]}, {"sizes": "ints", "dims": "empty_seq"}),
        (
            "unflatten_array",
            {"named_sizes": {"x": 2}, "assignment": [0, 1]},
            {"named_sizes": "str_dict", "assignment": "ints"},
        ),
    ):
        yield Target(
            f"partjit.opsharding.{name}",
            getattr(partjit.opsharding, name),
            lambda base=base: dict(base),
            takes,
            raises=(NotImplementedError,),
        )
    yield Target("partjit.progress", entered(partjit.progress), lambda: {"console": None}, {"console": "none"})
    yield Target("partjit.record", entered(partjit.record), _nothing, {})
    yield Target(
        "partjit.export_spans",
        entered(partjit.export_spans),
        lambda: {"tracer_provider": None},
        {"tracer_provider": "none"},
    )
    yield Target(
        "partjit.recording.Timeline", _read_timeline, lambda: {"recorded": []}, {"recorded": "empty empty_seq"}
    )
    for name in ("critical_path", "to_svg"):
        yield Target(
            f"partjit.recording.Timeline.{name}",
            _method(timeline, name),
            lambda: {"program": "step", "execution": 3},
            {"program": "none", "execution": "none positive ints"},
        )
    yield Target(
        "partjit.recording.Timeline.save",
        _in_new_directory(_method(timeline, "save")),
        lambda: {"path": "trace.json"},
        {"path": "str"},
        (OSError,),
    )
    yield Target(
        "partjit.merge_timelines",
        partjit.merge_timelines,
        lambda: {"timelines": [timeline()]},
        {"timelines": ""},
        (OSError, ValueError),
    )
    yield Target(
        "partjit.gather_timelines",
        partjit.gather_timelines,
        lambda: {"timeline": timeline(), "timeout": 1.0},
        {"timeline": "", "timeout": "positive number"},
    )
    yield Target("partjit.recording.Timeline.summary", _method(timeline, "summary"), _nothing, {})
    for name in ("critical_path", "to_svg"):
        yield Target(
            f"partjit.Plan.{name}",
            _method(lambda: with_call().plan(ones()), name),
            lambda: {"costs": None},
            {"costs": "none function dict"},
            lets_pass=_OF_COSTS,
        )
    yield Target("partjit.Plan.to_mermaid", _method(lambda: with_call().plan(ones()), "to_mermaid"), _nothing, {})
    # Colocated
    yield Target(
        "partjit.colocated.colocated_python",
        colocated.colocated_python,
        lambda: {"fun": same, "isolate": None, **dict.fromkeys(_ITEMS_TAKE)},
        {"fun": "callable none", "isolate": "none", **_ITEMS_TAKE},
    )
    yield Target(
        "partjit.colocated.ColocatedFunction.specialize",
        _method(colocated_same, "specialize"),
        lambda: dict.fromkeys(_ITEMS_TAKE),
        _ITEMS_TAKE,
    )
    yield Target(
        "partjit.colocated.colocated_python (called)",
        lambda x: jax.block_until_ready(colocated_same()(x)),
        lambda: {"x": ones()},
        {"x": f"{VALUES} jax jax_inside"},
        named={"x": ("No devices found",)},
        lets_pass=_OF_ARRAYS,
    )
    yield Target(
        "partjit.colocated.colocated_python (out_specs, called)",
        lambda out_specs: _waited_for(colocated.colocated_python(lambda x: x, out_specs=out_specs)),
        lambda: {"out_specs": struct()},
        {"out_specs": _OUT_STRUCTS},
        named={"out_specs": ("output specs",)},
    )
    yield Target(
        "partjit.colocated.colocated_python (out_specs_fn, called)",
        lambda result: _waited_for(colocated.colocated_python(lambda x: x, out_specs_fn=lambda *_: result)),
        lambda: {"result": struct()},
        {"result": _OUT_STRUCTS},
        named={"result": ("out_specs", "output specs")},
    )
    yield Target(
        "partjit.colocated.ColocatedFunction.defvjp",
        _method(colocated_same, "defvjp"),
        lambda: {"fwd": same, "bwd": same, "symbolic_zeros": False},
        {"fwd": "callable", "bwd": "callable", "symbolic_zeros": "bool"},
    )
    yield Target(
        "partjit.colocated.ColocatedFunction.defjvp",
        _method(colocated_same, "defjvp"),
        lambda: {"jvp": same, "symbolic_zeros": False},
        {"jvp": "callable", "symbolic_zeros": "bool"},
    )
    yield Target(
        "partjit.from_process_local",
        _in_mesh(partjit.from_process_local),
        lambda: {"specs": P("x"), "local_data": ones(), "global_shape": None},
        {
            "specs": "tree tree_inside spec spec_inside empty empty_inside",
            "local_data": _TREES,
            "global_shape": "none",
        },
        named={"specs": ("One of the pieces", "One of the arrays")},
        lets_pass=_OF_ARRAYS,
    )
    yield Target("partjit.to_process_local", partjit.to_process_local, lambda: {"arrays": ones()}, {"arrays": _TREES})
    yield Target(
        "partjit.results_so_far", partjit.results_so_far, lambda: {"error": ValueError()}, {"error": "exception"}
    )
    yield Target("partjit.colocated.ColocatedFunction.cache_info", _method(colocated_same, "cache_info"), _nothing, {})
    yield Target(
        "partjit.colocated.ColocatedFunction.discard_ahead", _method(colocated_same, "discard_ahead"), _nothing, {}
    )
    yield Target(
        "partjit.colocated.colocated_python_class",
        colocated.colocated_python_class,
        lambda: {
            "cls": Counter,
            "concurrent": False,
            "state": None,
            "devices": None,
            "isolate": None,
            "arrays": None,
            "mode": None,
            "stream": None,
        },
        {
            "cls": "class none",
            "concurrent": "bool",
            "state": "none",
            "devices": "none mesh device devices",
            "isolate": "none",
            "arrays": "none",
            "mode": "none",
            "stream": "none str stream",
        },
    )
    yield Target(
        "partjit.colocated.colocated_python_class (specialize)",
        _method(lambda: colocated.colocated_python_class(Counter).add, "specialize"),
        lambda: dict.fromkeys(_ITEMS_TAKE),
        _ITEMS_TAKE,
    )
    yield Target(
        "partjit.colocated.colocated_cpu_devices",
        colocated.colocated_cpu_devices,
        lambda: {"devices_or_mesh": jax.devices()},
        {"devices_or_mesh": "mesh empty_mesh device devices same_devices empty_seq"},
    )
    yield Target("partjit.colocated.mesh_coordinates", colocated.mesh_coordinates, _nothing, {}, (RuntimeError,))
    yield Target("partjit.colocated.idempotency_key", colocated.idempotency_key, _nothing, {}, (RuntimeError,))
    yield Target(
        "partjit.colocated.journal",
        colocated.journal,
        lambda: {"path": "journal", "objects": None, "results": False, "repartition": None},
        {"path": "str", "objects": "none dict empty_dict", "results": "bool", "repartition": "none function callable"},
    )
    yield Target(
        "partjit.replay",
        partjit.replay,
        lambda: {"path": _journal(), "process": None},
        {"path": "str", "process": "none zero"},
        (partjit.JournalError,),
    )
    yield Target(
        "partjit.colocated.stream",
        entered(colocated.stream),
        lambda: {"name": "fuzzed", "size": None},
        {"name": "none str stream", "size": "none positive"},
    )
    yield Target(
        "partjit.colocated.Stream",
        colocated.Stream,
        lambda: {"name": "a", "size": 3, "is_private": False, "root": None},
        {"name": "none str", "size": "positive", "is_private": "bool", "root": "none stream"},
    )
    yield Target(
        "partjit.colocated.wait",
        colocated.wait,
        lambda: {"stream": None, "timeout": 1.0},
        {"stream": "none str stream", "timeout": "none number"},
    )
    yield Target(
        "partjit.colocated.serialize",
        colocated.serialize,
        lambda: {"obj": 5},
        {"obj": "everything"},
        lets_pass=("cannot pickle", "a stream without a name", "deleted"),
    )
    yield Target(
        "partjit.colocated.deserialize",
        colocated.deserialize,
        lambda: {"data": colocated.serialize(5), "authenticate": True},
        {"data": "", "authenticate": "bool"},
    )
    yield Target(
        "partjit.colocated.ColocatedFunction",
        colocated.ColocatedFunction,
        lambda: {
            "fun": same,
            "function": colocated_same()._definition.function,
            "options": colocated_same().options,
            "derivatives": None,
        },
        {"fun": "callable", "function": "", "options": "", "derivatives": "none"},
    )
    # Inspection
    yield Target(
        "partjit.inspect.explain",
        _star(partjit.inspect.explain, "fun", "x"),
        lambda: {"fun": partitioned(), "x": ones(), "mesh": mesh(), "compiled": False, "large": 1 << 20},
        {
            "fun": "function callable",
            "x": f"{VALUES} jax huge huge_inside jax_inside struct_inside",
            "mesh": "none mesh abstract_mesh",
            "compiled": "bool",
            "large": "none number",
        },
        lets_pass=_OF_ARRAYS,
    )
    yield Target(
        "partjit.estimate_time",
        partjit.estimate_time,
        lambda: {"report": report(), "machine": machine(), "overlap": 0.5},
        {"report": "", "machine": "", "overlap": "zero"},
    )
    yield Target(
        "partjit.SearchOptions",
        partjit.SearchOptions,
        lambda: {
            "machine": machine(),
            "memory": 1e9,
            "questions": 1,
            "time_limit": 1.0,
            "constrain": True,
            "overlap": 0.0,
            "methods": ["descent"],
            "isolated": False,
            "workers": 1,
            "cache": False,
            "progress": False,
        },
        {
            "machine": "none",
            "memory": "none positive number",
            "questions": "positive",
            "time_limit": "none positive number",
            "constrain": "bool strs empty_seq",
            "overlap": "zero",
            "methods": "empty_seq",
            "isolated": "bool",
            "workers": "none positive",
            "cache": "bool str path",
            "progress": "none bool callable",
        },
    )
    yield Target(
        "partjit.search_specs",
        _star(partjit.search_specs, "fun", "x"),
        lambda: {
            "fun": same,
            "x": ones(),
            "mesh": mesh(),
            "memory": 1e9,
            "machine": machine(),
            "in_specs": partjit.AUTO,
            "out_specs": partjit.AUTO,
            "constrain": True,
            "donate_argnums": (),
            "overlap": 0.0,
            "questions": 1,
            "time_limit": 1.0,
            "methods": ["descent"],
            "progress": False,
            "isolated": False,
            "workers": 1,
        },
        {
            "fun": "function callable",
            "x": f"{VALUES} jax huge huge_inside jax_inside",
            "mesh": "mesh",
            "memory": "none positive number",
            "machine": "none",
            "in_specs": IN_SPEC_TREE,
            "out_specs": SPEC_TREE,
            "constrain": "bool strs empty_seq",
            "donate_argnums": "zero empty_seq",
            "overlap": "zero",
            "questions": "positive",
            "time_limit": "none positive number",
            "methods": "empty_seq",
            "progress": "none bool callable",
            "isolated": "bool",
            "workers": "none positive",
        },
        lets_pass=_OF_ARRAYS,
    )
    yield Target(
        "partjit.inspect.draw_array",
        partjit.inspect.draw_array,
        lambda: {"x": (8, 2), "spec": P("x"), "mesh": mesh()},
        {
            "x": "ints array object_array str_array struct key empty",
            "spec": "pspec spec none parsed unconstrained_pspec sharding tree empty_bytes",
            "mesh": "none mesh abstract_mesh",
        },
        named={"spec": ("no sharding", "sharding says")},
    )
    yield Target(
        "partjit.inspect.draw_mesh",
        partjit.inspect.draw_mesh,
        lambda: {"mesh": mesh()},
        {"mesh": "none mesh abstract_mesh"},
    )
    picture = functools.cache(lambda: partjit.inspect.draw_array((8, 2), P("x"), mesh()))
    yield Target(
        "partjit.inspect.ArrayPicture.to_text",
        _method(picture, "to_text"),
        lambda: {"width": 80, "table": None},
        {"width": "none positive zero", "table": "none bool"},
    )
    for name in ("to_svg", "to_html"):
        yield Target(f"partjit.inspect.ArrayPicture.{name}", _method(picture, name), _nothing, {})
    yield Target(
        "partjit.inspect.Report.why", _method(report, "why"), lambda: {"value": "x"}, {"value": "str"}, (LookupError,)
    )
    yield Target("partjit.inspect.Report.diff", _method(report, "diff"), lambda: {"other": report()}, {"other": ""})
    yield Target(
        "partjit.inspect.Report.suggest",
        _method(report, "suggest"),
        lambda: {"most": 5, "questions": 1, "workers": 1, "isolated": False},
        {"most": "positive", "questions": "positive", "workers": "none positive", "isolated": "bool"},
    )
    yield Target(
        "partjit.inspect.Report.to_html",
        _in_new_directory(_method(report, "to_html")),
        lambda: {"path": None},
        {"path": "none str"},
        (OSError,),
    )
    yield Target("partjit.inspect.Report.to_json", _written, lambda: {"indent": 2}, {"indent": "none positive zero"})
    yield Target(
        "partjit.inspect.Report.to_text",
        _method(report, "to_text"),
        lambda: {"most": 5},
        {"most": "none positive zero"},
    )
    yield Target("partjit.inspect.Report.as_data", _method(report, "as_data"), _nothing, {})
    yield Target(
        "partjit.inspect.Report.collectives.to_text",
        lambda most: report().collectives.to_text(most),
        lambda: {"most": 5},
        {"most": "none positive zero"},
    )
    yield Target(
        "partjit.inspect.Report.diff.to_text",
        lambda most: report().diff(report()).to_text(most),
        lambda: {"most": 5},
        {"most": "none positive zero"},
    )
    # Events
    yield Target(
        "partjit.events.emit", events.emit, lambda: {"event": events.ProgramStarted("step", 0)}, {"event": "everything"}
    )
    yield Target(
        "partjit.events.span", _spanned, lambda: {"started": events.ProgramStarted("step", 0)}, {"started": ""}
    )
    yield Target("partjit.events.subscribe", _listened, lambda: {"listener": print}, {"listener": "callable"})
    # Testing
    yield from _testing_targets()
    yield Target(
        "partjit.command.main",
        _quietly(main),
        lambda: {"argv": ["parse", "{devices=[8]<=[8]}", "--mesh", "x=8"]},
        {"argv": "none strs empty_seq"},
    )


def _testing_targets() -> Iterator[Target]:
    testing = partjit.testing
    specs = {"in_specs": IN_SPEC_TREE, "out_specs": SPEC_TREE}
    named = {
        "x": ("args[0]",),
        "fun": ("function", "callable", "result", *_OF_SPECS),
        "reference": ("function", "callable", "result", *_OF_SPECS),
        "in_specs": (*_OF_SPECS, "in_axis_resources"),
        "out_specs": (*_OF_SPECS, "out_axis_resources"),
    }
    yield Target(
        "partjit.testing.assert_collectives",
        _star(testing.assert_collectives, "expected", "fun", "x"),
        lambda: {
            "expected": {},
            "fun": same,
            "x": np.ones(8, np.float32),
            "mesh": mesh(),
            "in_specs": P("x"),
            "out_specs": P("x"),
        },
        {
            "expected": "empty",
            "fun": "callable",
            "x": f"{VALUES} {DELETED} struct_inside",
            "mesh": "none mesh",
            **specs,
        },
        (AssertionError,),
        named=named,
        lets_pass=_OF_ARRAYS,
    )
    yield Target(
        "partjit.testing.assert_no_collectives",
        _star(testing.assert_no_collectives, "fun", "x"),
        lambda: {"fun": same, "x": np.ones(8, np.float32), "mesh": mesh(), "in_specs": P("x"), "out_specs": P("x")},
        {"fun": "callable", "x": f"{VALUES} {DELETED} struct_inside", "mesh": "none mesh", **specs},
        (AssertionError,),
        named=named,
        lets_pass=_OF_ARRAYS,
    )
    yield Target(
        "partjit.testing.assert_no_transfers",
        entered(testing.assert_no_transfers),
        lambda: {"allow_explicit": False},
        {"allow_explicit": "bool"},
    )
    yield Target(
        "partjit.testing.assert_round_trip",
        testing.assert_round_trip,
        lambda: {"spec": P("x"), "mesh": mesh(), "ndim": 2},
        {"spec": "none pspec", "mesh": "mesh abstract_mesh", "ndim": "positive"},
    )
    yield Target(
        "partjit.testing.assert_same_meaning",
        _star(testing.assert_same_meaning, "fun", "x"),
        lambda: {
            "fun": same,
            "x": np.ones(8, np.float32),
            "mesh": mesh(),
            "in_specs": P("x"),
            "out_specs": P("x"),
            "grad": False,
            "vmap": False,
            "reference": None,
            "tolerance": None,
            "custom_derivatives": True,
        },
        {
            "fun": "function callable",
            "x": f"{VALUES} huge huge_inside",
            "mesh": "mesh",
            **specs,
            "grad": "bool",
            "vmap": "bool",
            "reference": "none function callable",
            "tolerance": "none number",
            "custom_derivatives": "bool",
        },
        (AssertionError,),
        named=named,
        lets_pass=_OF_ARRAYS,
    )
    yield Target(
        "partjit.testing.assert_laid_out",
        testing.assert_laid_out,
        lambda: {
            "array": jax.device_put(np.ones(8), jax.sharding.NamedSharding(mesh(), P("x"))),
            "mesh": mesh(),
            "spec": P("x"),
        },
        {"array": "jax", "mesh": "mesh", "spec": "none pspec"},
        (AssertionError,),
    )
    yield Target(
        "partjit.testing.axes_of",
        testing.axes_of,
        lambda: {"spec": P("x"), "ndim": 2},
        {"spec": "none pspec", "ndim": "positive"},
    )
    yield Target(
        "partjit.testing.pieces",
        testing.pieces,
        lambda: {"mesh": mesh(), "spec": P("x"), "shape": (8, 2)},
        {"mesh": "mesh", "spec": "none pspec", "shape": "ints"},
    )
    yield Target(
        "partjit.testing.assert_no_recompile",
        _watched,
        lambda: {"functions": same, "warmup": 0},
        {"functions": "callable", "warmup": "positive zero"},
    )
    program = functools.cache(lambda: testing.ShardedProgram(((8,),), None, (("add", (0, 0), ()),), (1,)))
    yield Target(
        "partjit.testing.ShardedProgram.arguments",
        _method(program, "arguments"),
        lambda: {"seed": 0},
        {"seed": "positive zero"},
    )
    for name in ("__call__", "plain"):
        yield Target(
            f"partjit.testing.ShardedProgram.{name}",
            lambda x, name=name: getattr(program(), name)(x),
            lambda: {"x": ones()},
            {"x": "array"},
            named={"x": ("args[0]",)},
            lets_pass=_OF_ARRAYS,
        )
    yield Target(
        "partjit.testing.ShardedProgram",
        testing.ShardedProgram,
        lambda: {"shapes": ((8,),), "num_indices": None, "steps": (), "results": (0,)},
        {"shapes": "everything", "num_indices": "everything", "steps": "everything", "results": "everything"},
    )
    yield Target(
        "partjit.testing.meshes",
        drawn(testing.meshes),
        lambda: {"mesh_shapes": [(2,)], "axis_names": [("a", "b", "c")], "permuted": False, "explicit": False},
        {
            "mesh_shapes": "none ints_inside empty_seq_inside",
            "axis_names": "none parsed strs_inside",
            "permuted": "bool",
            "explicit": "bool",
        },
        lets_pass=_OF_STRATEGIES,
    )
    yield Target(
        "partjit.testing.partition_specs",
        drawn(testing.partition_specs),
        lambda: {"mesh": mesh(), "ndim": None, "shape": (8, 2), "avoid": (), "divisible": True, "unconstrained": False},
        {
            "mesh": "mesh empty_mesh abstract_mesh",
            "ndim": "none positive zero",
            "shape": "ints empty_seq",
            "avoid": "empty_seq strs",
            "divisible": "bool",
            "unconstrained": "bool",
        },
        lets_pass=_OF_STRATEGIES,
    )
    yield Target(
        "partjit.testing.shapes",
        drawn(testing.shapes),
        lambda: {"spec": P("x"), "mesh": mesh(), "divisible": True, "min_ndim": 0, "max_ndim": 3, "max_size": 256},
        {
            "spec": "none pspec unconstrained_pspec",
            "mesh": "mesh abstract_mesh",
            "divisible": "bool",
            "min_ndim": "positive zero",
            "max_ndim": "positive zero",
            "max_size": "positive",
        },
        lets_pass=_OF_STRATEGIES,
    )
    yield Target(
        "partjit.testing.shardings",
        drawn(testing.shardings),
        lambda: {"mesh": mesh(), "ndim": 2, "shape": None},
        {"mesh": "none mesh empty_mesh", "ndim": "positive zero", "shape": "none ints empty_seq"},
        lets_pass=_OF_STRATEGIES,
    )
    yield Target(
        "partjit.testing.op_shardings",
        drawn(testing.op_shardings),
        lambda: {"mesh": mesh(), "ndim": 2, "representable": None},
        {"mesh": "mesh empty_mesh abstract_mesh", "ndim": "positive zero", "representable": "none bool"},
        lets_pass=_OF_STRATEGIES,
    )
    yield Target(
        "partjit.testing.sharded_arrays",
        drawn(testing.sharded_arrays),
        lambda: {"mesh": mesh(), "spec": P("x"), "shape": (8, 2), "dtype": np.float32},
        {"mesh": "none mesh", "spec": "none pspec", "shape": "none ints", "dtype": "dtype class"},
        lets_pass=_OF_STRATEGIES,
    )
    yield Target(
        "partjit.testing.spec_trees",
        drawn(testing.spec_trees),
        lambda: {"tree": {"w": np.ones((4, 8))}, "mesh": mesh(), "prefix": True},
        {
            "tree": f"{VALUES} huge huge_inside struct_inside array array_inside {OTHER_ARRAYS}",
            "mesh": "mesh empty_mesh abstract_mesh",
            "prefix": "bool",
        },
        lets_pass=_OF_STRATEGIES,
    )
    yield Target(
        "partjit.testing.sharded_programs",
        drawn(testing.sharded_programs),
        lambda: {"mesh": mesh(), "avoid": (), "max_steps": 1, "depth": 1, "max_size": 1},
        {
            "mesh": "mesh empty_mesh",
            "avoid": "empty_seq strs",
            "max_steps": "positive",
            "depth": "positive zero",
            "max_size": "positive",
        },
        lets_pass=_OF_STRATEGIES,
    )


TARGETS = tuple(_targets())

MADE_BY_PARTJIT = frozenset(
    [
        "partjit.Plan",
        "partjit.colocated.CacheInfo",
        "partjit.colocated.Journal",
        "partjit.colocated.JournaledCall",
        "partjit.colocated.PendingArray",
        "partjit.events.Subscription",
        "partjit.inspect.ArrayPicture",
        "partjit.inspect.Collective",
        "partjit.inspect.Report",
    ]
)
"""Classes whose objects are results: their constructors are for the package alone, and data classes take anything."""


def public_callables() -> set[str]:
    """The names of everything public that is the package's own and takes arguments."""
    found: set[str] = set()
    for module in (partjit, colocated, partjit.inspect, partjit.testing, partjit.opsharding, events):
        for name in getattr(module, "__all__", None) or (name for name in vars(module) if not name.startswith("_")):
            value = getattr(module, name)
            is_own = getattr(value, "__module__", "").startswith("partjit")
            is_data = isinstance(value, type) and issubclass(value, Exception | events.Event | enum.Enum)
            if is_own and callable(value) and not is_data and (module is partjit or not hasattr(partjit, name)):
                found.add(f"{module.__name__}.{name}")
    return found
