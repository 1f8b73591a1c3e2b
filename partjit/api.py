"""`pjit`: its signature, and how the stages are tied together."""

import enum
import functools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax

from partjit import lazy
from partjit._jax.shardings import UNSPECIFIED, UnspecifiedValue
from partjit._jax.types import Device, PyTree
from partjit.arguments import (
    Function,
    argument_numbers,
    check_callable,
    check_names,
    check_numbers,
    host_argument_numbers,
    name_of,
    signature_of,
    source_of,
)
from partjit.auto_specs import AUTO, DEFAULT_SEARCH, SearchOptions
from partjit.calls import is_program_with_calls
from partjit.checks import require, require_choice, require_flag, wrong_type, wrong_value
from partjit.compile import Traced
from partjit.dispatch import make_function
from partjit.eager import on_values
from partjit.infer import Definition, infer_program
from partjit.pieces.calls import with_global_arguments
from partjit.spec import parse_spec_tree

if TYPE_CHECKING:
    from partjit.pieces import stages as local_stages
    from partjit.plan.plan import Plan
    from partjit.plan.run import stages
else:  # a program without calls does without
    local_stages, stages = lazy.module("partjit.pieces.stages"), lazy.module("partjit.plan.run.stages")

__all__ = ["pjit"]


class _Stages:
    """The methods of a function made by `pjit`: each stops at an earlier stage than a call."""

    def __init__(self, fun: Function, definition: Definition) -> None:
        self._fun = fun
        self._definition = definition

    def trace(self, *args: PyTree, **kwargs: PyTree) -> "Traced | local_stages.LocalTraced":
        """Traces and validates a call with these arguments (`jax.ShapeDtypeStruct` will do) without executing it."""
        definition, pieces = self._definition, None
        if definition.is_local:
            args, kwargs, pieces = with_global_arguments(definition, args, kwargs)
        program, leaves = infer_program(self._fun, definition, args, kwargs)
        is_planned = program.host or is_program_with_calls(program.jaxpr)
        traced = (stages.PlannedTraced if is_planned else Traced)(program, leaves)
        return traced if pieces is None else local_stages.LocalTraced(traced, pieces)

    def plan(self, *args: PyTree, **kwargs: PyTree) -> "Plan":
        """The plan of a call with these arguments: the fragments to dispatch and the colocated calls to make, in order.

        Nothing is compiled or executed.
        """
        if self._definition.is_local:
            args, kwargs, _ = with_global_arguments(self._definition, args, kwargs)
        return stages.PlannedTraced(*infer_program(self._fun, self._definition, args, kwargs)).plan

    def lower(self, *args: PyTree, **kwargs: PyTree) -> "jax.stages.Lowered | local_stages.LocalLowered":
        """Traces and lowers a call with these arguments; `.compile()` of the result gives a `jax.stages.Compiled`."""
        return self.trace(*args, **kwargs).lower()

    def eval_shape(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """A tree like the result, of `jax.ShapeDtypeStruct` with the shardings of the out specs."""
        return self.trace(*args, **kwargs).out_info


def pjit(
    fun: Function | UnspecifiedValue = UNSPECIFIED,
    in_axis_resources: PyTree = UNSPECIFIED,
    out_axis_resources: PyTree = UNSPECIFIED,
    static_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
    *,
    in_shardings: PyTree = UNSPECIFIED,
    out_shardings: PyTree = UNSPECIFIED,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    host_argnums: int | Sequence[int] = (),
    host_argnames: str | Iterable[str] | None = None,
    positional_semantics: Literal["global", "local"] = "global",
    keep_unused: bool = False,
    device: Device | None = None,
    backend: str | None = None,
    inline: bool | enum.Enum = False,
    name: str | None = None,
    agree: bool | str = True,
    search: SearchOptions | None = None,
) -> Any:
    """Compiles `fun` into one program partitioned over a mesh.

    The mesh is the ambient one of each call: that of `with mesh:` or `set_mesh`. An argument that is not yet sharded as
    its spec says is resharded: silently if it is a NumPy array, a scalar or uncommitted, with a `ReshardWarning` if it
    is a committed array on the same devices (see `reshard_policy`).

    Args:
        fun: a function of pytrees of arrays. Left out, `pjit(...)` is a decorator.
        in_axis_resources: how the arguments are sharded: a tree prefix of the tuple of positional arguments (without
            the static ones), with leaves

            * `PartitionSpec`: per dimension, the mesh axes it is sharded over;
            * None: replicated over the mesh;
            * `NamedSharding`: brings its own mesh;
            * `UNSPECIFIED` (the default): the partitioner chooses; a committed array stays as it is;
            * `FROM_ARRAY`: as the committed array that is passed;
            * `AUTO`: chosen by a search when the function is first called, traced or lowered with such arguments.
        out_axis_resources: how the results are sharded, a tree prefix of the result with leaves as above but
            `FROM_ARRAY`. What it says is what the results have.
        static_argnums: numbers of arguments that are compile-time constants; they must be hashable.
        donate_argnums: numbers of arguments whose buffers the program may reuse; they are gone after the call.
        in_shardings, out_shardings: today's names of `in_axis_resources` and `out_axis_resources`.
        host_argnums: numbers of arguments that only colocated functions get: any objects, such as texts, paths and
            configurations. Unlike static arguments they need not be hashable, and another object neither traces nor
            compiles anything anew; but their values are not known while `fun` is traced.
        static_argnames, donate_argnames, host_argnames: the same as the numbers, by name.
        positional_semantics: on a mesh over several processes, `"global"`: arguments and results are arrays over all of
            them; `"local"`: each process passes and receives its own pieces, as `from_process_local` and
            `to_process_local` have them. An array over several processes is then passed as it is. On the devices of one
            process, and inside of other programs, both are the same.
        keep_unused: pass arguments that `fun` does not read to the executable all the same.
        device: deprecated, as in `jax.jit`: the device that arguments are moved to, and that results are on.
        backend: deprecated: the name of a platform, for its first device: "cpu".
        inline: whether a call in a function that is traced becomes the equations of `fun`, not one equation with all of
            them, where its specs are UNSPECIFIED throughout. A `jax.Inline` is accepted where jax has it.
        name: what the program is called, `fun.__name__` by default.
        agree: whether the processes of a program with colocated calls agree at each of its fragments that all of them
            go on, so that what fails in one ends it in all. Each fragment waits for that; with "ahead" only those do
            that would take something away if another process failed. With False they agree that they run the same
            plan, before its first execution, and on nothing else. It has to be the same in every process. A program
            inside of another does as that one does.
        search: how specs that are `AUTO` are searched: for which machine and memory, with how many questions, and where
            what was found is kept. A search also constrains activations; see docs/search.md.

    Returns:
        A function like `fun`, with the methods `trace`, `plan`, `lower`, `eval_shape` and `clear_cache`. Keyword
        arguments are accepted if the in specs are UNSPECIFIED, FROM_ARRAY or AUTO throughout: others describe
        positional ones.

    Raises:
        TypeError: `fun` is not callable, a leaf is no spec, or an option is of a wrong type.
        ValueError: a spec is wrong by itself (an axis used twice), old and new names are mixed, static and donated
            arguments intersect, or one of them is none that `fun` has.

        When called: `ShardingError` (a ValueError) listing every spec that does not fit its value or the mesh, and
        `MissingMeshError` where a spec needs a mesh and none is set; `MemoryLimitError` if no specs were found with
        which the program fits into the memory.

    Example:
        >>> import jax.numpy as jnp
        >>> from partjit import Mesh, P
        >>> @pjit(in_axis_resources=(P("data"), None), out_axis_resources=P("data"))
        ... def affine(x, w):
        ...     return x @ w
        >>> with Mesh(jax.devices(), "data"):
        ...     y = affine(jnp.ones((16, 4)), jnp.ones((4, 2)))
        >>> y.sharding.spec, y.addressable_shards[0].data.shape
        (P('data',), (2, 2))

    Source: `jax.experimental.pjit.pjit` as of jax 0.2.26, the classic positional order included; the two positional
    semantics are `_PositionalSemantics` of its `jax.experimental.maps`, where local was the default for all arguments
    but global device arrays.
    """
    static_argnums = check_numbers("pjit", "static_argnums", static_argnums)
    donate_argnums = check_numbers("pjit", "donate_argnums", donate_argnums)
    static_argnames = check_names("pjit", "static_argnames", static_argnames)
    donate_argnames = check_names("pjit", "donate_argnames", donate_argnames)
    host_argnums = check_numbers("pjit", "host_argnums", host_argnums)
    host_argnames = check_names("pjit", "host_argnames", host_argnames)
    require_choice("pjit", "positional_semantics", positional_semantics, ("global", "local"))
    keep_unused = require_flag("pjit", "keep_unused", keep_unused)
    require("pjit", "device", device, jax.Device | None, "a device, as in jax.devices(), or None")
    require("pjit", "backend", backend, str | None, "the name of a platform, a str, or None")
    is_inlined = _is_inlined(inline)
    require("pjit", "name", name, str | None, "the name of the program, a str, or None")
    agreeing = _agreeing(agree)
    require("pjit", "search", search, SearchOptions | None, "partjit.SearchOptions or None")
    options = {
        "in_axis_resources": in_axis_resources,
        "out_axis_resources": out_axis_resources,
        "static_argnums": static_argnums,
        "donate_argnums": donate_argnums,
        "in_shardings": in_shardings,
        "out_shardings": out_shardings,
        "static_argnames": static_argnames,
        "donate_argnames": donate_argnames,
        "host_argnums": host_argnums,
        "host_argnames": host_argnames,
        "positional_semantics": positional_semantics,
        "keep_unused": keep_unused,
        "device": device,
        "backend": backend,
        "inline": inline,
        "name": name,
        "agree": agree,
        "search": search,
    }
    if isinstance(fun, UnspecifiedValue):
        return functools.partial(pjit, **options)
    check_callable(fun)
    in_name, in_tree = _one_of("in_axis_resources", in_axis_resources, "in_shardings", in_shardings)
    out_name, out_tree = _one_of("out_axis_resources", out_axis_resources, "out_shardings", out_shardings)
    if device is not None or backend is not None:
        _check_device(device, backend, {in_name: in_tree, out_name: out_tree})
    signature = signature_of(fun)
    static, donate = argument_numbers(
        fun, signature, (static_argnums, static_argnames), (donate_argnums, donate_argnames)
    )
    others = {"static": static, "donated": donate}
    host = host_argument_numbers(fun, signature, (host_argnums, host_argnames), others)
    definition = Definition(
        name or name_of(fun),
        source_of(fun),
        signature,
        in_name,
        out_name,
        # A list of in specs is meant as the argument list; arguments come in a tuple.
        parse_spec_tree(tuple(in_tree) if isinstance(in_tree, list) else in_tree, in_name, allow_auto=True),
        parse_spec_tree(out_tree, out_name, allow_auto=True),
        static,
        donate,
        keep_unused,
        host,
        backend if device is None else device,
        is_inlined,
        agreeing,
        positional_semantics == "local",
        DEFAULT_SEARCH if search is None else search,
    )
    if definition.is_local and AUTO in jax.tree.leaves((definition.in_specs, definition.out_specs)):
        raise ValueError(
            "pjit: specs cannot be AUTO with positional_semantics='local', where the pieces that a process passes are "
            "those of known specs"
        )
    stages = _Stages(fun, definition)
    methods = {"trace": stages.trace, "plan": stages.plan, "lower": stages.lower, "eval_shape": stages.eval_shape}
    return make_function(fun, definition, on_values(fun, definition), methods, lambda: pjit(fun, **options))


def _one_of(old_name: str, old: PyTree, new_name: str, new: PyTree) -> tuple[str, PyTree]:
    if isinstance(new, UnspecifiedValue):
        return old_name, old
    if isinstance(old, UnspecifiedValue):
        return new_name, new
    raise ValueError(f"pjit got both {old_name} and {new_name}, which are two names of the same thing: give one")


def _check_device(device: Device | None, backend: str | None, specs: Mapping[str, PyTree]) -> None:
    warnings.warn(
        "backend and device argument on pjit is deprecated, as on jax.jit. You can use "
        '`jax.device_put(..., jax.local_devices(backend="cpu")[0])` on the inputs to the function to get the same '
        "behavior.",
        DeprecationWarning,
        stacklevel=3,
    )
    if device is not None and backend is not None:
        raise ValueError(f"can't specify both a device and a backend for pjit, got {device=} and {backend=}")
    for name, tree in specs.items():
        if tree is not None and not isinstance(tree, UnspecifiedValue):
            raise ValueError(f"If backend or device is specified on pjit, then {name} should not be specified.")


def _is_inlined(inline: bool | enum.Enum) -> bool:
    kinds = getattr(jax, "Inline", ())  # jax 0.10 has flags only
    if not isinstance(inline, enum.Enum) or not isinstance(inline, kinds):
        return require_flag("pjit", "inline", inline)
    if inline.name.startswith("XLA"):
        raise wrong_value("pjit", "inline", inline, "a flag, Inline.JAX_EARLY, Inline.JAX_LATE or Inline.AUTO")
    return inline.name != "AUTO"


def _agreeing(agree: bool | str) -> bool | str:
    if isinstance(agree, str) and agree == "barrier":
        return True
    if isinstance(agree, str) and agree == "ahead":
        return agree
    expected = 'True, "barrier" (the same), "ahead" or False'
    if isinstance(agree, str):
        raise wrong_value("pjit", "agree", agree, expected)
    if not isinstance(agree, bool):
        raise wrong_type("pjit", "agree", agree, expected)
    return agree
