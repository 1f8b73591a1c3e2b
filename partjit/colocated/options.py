"""The options of a colocated function: their names, types and checks, in one place.

`Options` checks and stores them. Public functions take them as `**options: Unpack[OptionArguments]`, the types that
users pass; `takes_options` spells them out in the signature.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Annotated, Literal, ParamSpec, TypedDict, TypeVar, get_args, get_type_hints

import jax
from jax.sharding import Mesh

from partjit._jax.types import Device, PyTree, PyTreeDef
from partjit.checks import devices_in, require_callable, require_choice, require_flag, require_integer
from partjit.colocated.runtime.failures import add_note
from partjit.colocated.runtime.in_specs import InSpecs
from partjit.colocated.runtime.spec_structs import check_out_specs
from partjit.colocated.runtime.streams import Stream, as_stream
from partjit.structures import similar

__all__ = [
    "Arrays",
    "CallOptions",
    "Devices",
    "Isolate",
    "Layout",
    "Mode",
    "ObjectOptions",
    "OptionArguments",
    "Options",
    "VmapMethod",
    "takes_options",
]

Mode = Literal["auto", "inline", "stream"]
"""Where a call runs: in its caller, on a thread, or whichever is faster."""

Layout = Literal["global", "per_shard"]
"""What the function is called with: arrays, once; or the shards of arrays, once for each device."""

VmapMethod = Literal["sequential", "expand_dims", "broadcast_all"]
"""How a batch is called: one call per example, or one call with batched arrays, in which arguments that are not batched
get an axis of size 1 or are repeated."""


Arrays = Literal["jax", "numpy"]
"""As what the function gets its arguments."""

Isolate = Literal["process"]
"""In what the function is isolated."""

Devices = Device | Mesh | Iterable[Device]
"""Devices as users pass them."""


class ObjectOptions(TypedDict, total=False):
    """Keyword options of all methods of a colocated class."""

    arrays: Arrays | None
    uses_jax: bool | None
    mode: Mode | None
    stream: str | Stream | None


class CallOptions(ObjectOptions, total=False):
    """Options that `specialize` takes by keyword only."""

    out_specs: PyTree
    pure: bool | None
    layout: Layout | None
    run_ahead: int | None
    vmap_method: VmapMethod | None


class OptionArguments(CallOptions, total=False):
    """All options."""

    in_specs: PyTree
    out_specs_fn: Callable[..., PyTree] | None
    devices: Devices | None
    isolate: Isolate | None


_SPECS_FN = "a function of the specs of the arguments"
_MOST_AHEAD = 1_000_000
"""More calls than that are never in flight at a time; they would only fill the memory."""


def _devices(where: str, name: str, devices: object) -> tuple[Device, ...]:
    found = devices_in(where, name, devices)
    if not found:
        raise ValueError(f"{where}: {name} must name at least one device, but is empty")
    if len({*found}) < len(found):
        raise ValueError(f"{where}: {name} must name each device once, but are {[*map(str, found)]}")
    return found


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a colocated function, as documented in `ColocatedFunction.specialize`; None if not given.

    Each type is annotated with its check, which takes the name of the function called, that of the option and the
    user's value, and returns the value to store.

    Attributes:
        in_specs: the arguments.
        out_specs: the results: a tree of ShapeDtypeStructs.
        out_specs_fn: computes `out_specs` from the ShapeDtypeStructs of the arguments.
        devices: those on whose hosts the function runs.
        arrays: as what the function gets its arguments.
        uses_jax: whether the function may run jax.
        mode: where a call runs.
        stream: the stream of the calls.
        pure: whether a call has no effect but its results.
        layout: what the function is called with.
        run_ahead: how many calls without arguments are made before their results are requested.
        vmap_method: how `jax.vmap` makes a call.
        isolate: where the function runs, if not in this process.
    """

    in_specs: Annotated[InSpecs | None, lambda _where, _name, specs: InSpecs.of_user(specs)] = None
    out_specs: Annotated[PyTree, check_out_specs] = None
    out_specs_fn: Annotated[Callable[..., PyTree] | None, partial(require_callable, expected=_SPECS_FN)] = None
    devices: Annotated[tuple[Device, ...] | None, _devices] = None
    arrays: Annotated[Arrays | None, partial(require_choice, choices=get_args(Arrays))] = None
    uses_jax: Annotated[bool | None, require_flag] = None
    mode: Annotated[Mode | None, partial(require_choice, choices=get_args(Mode))] = None
    stream: Annotated[Stream | None, lambda where, _, stream: as_stream(stream, where)] = None
    pure: Annotated[bool | None, require_flag] = None
    layout: Annotated[Layout | None, partial(require_choice, choices=get_args(Layout))] = None
    run_ahead: Annotated[int | None, partial(require_integer, least=0, most=_MOST_AHEAD)] = None
    vmap_method: Annotated[VmapMethod | None, partial(require_choice, choices=get_args(VmapMethod))] = None
    isolate: Annotated[Isolate | None, partial(require_choice, choices=get_args(Isolate), or_none=True)] = None

    def adding(self, where: str, **options: object) -> "Options":
        """These options and more.

        Args:
            where: the public name of the function called with them, for messages.
            options: the new ones, as users pass them; None is the same as leaving one out.

        Raises:
            ValueError: an option was given before, or has none of its possible values.
            TypeError: an option is of the wrong type.
        """
        given = {name: value for name, value in options.items() if value is not None}
        for name in given:
            if getattr(self, name) is not None:
                raise ValueError(f"{name} already specified")
        if all(name in given or getattr(self, name) is not None for name in ("out_specs", "out_specs_fn")):
            raise ValueError("out_specs and out_specs_fn say the same: give one of them")
        checked = {name: check(where, name, given[name]) for name, check in _checks().items() if name in given}
        new = dataclasses.replace(self, **checked)
        if new.isolate is not None:
            if new.arrays == "jax":
                raise ValueError(f"{where}: isolate='process' and arrays='jax' exclude each other: a worker has no jax")
            new = dataclasses.replace(new, arrays=None if new.layout == "per_shard" else "numpy")
        if new.uses_jax is False and (new.arrays == "jax" or new.layout == "per_shard"):
            option = "arrays='jax'" if new.arrays == "jax" else "layout='per_shard'"
            raise ValueError(
                f"{where}: uses_jax=False and {option} exclude each other: a function that does not use jax is called "
                "with NumPy arrays"
            )
        if new.arrays == "numpy" and new.layout == "per_shard":
            raise ValueError(
                f"{where}: arrays='numpy' and layout='per_shard' exclude each other: a function that is called per "
                "shard gets jax.Shards, and numpy.asarray(shard.data) is the memory of one"
            )
        return new

    def out_specs_for(self, tree: PyTreeDef, inputs: Sequence[jax.ShapeDtypeStruct]) -> PyTree:
        """The specs of the results of a call with such inputs, from `out_specs` or `out_specs_fn`."""
        if self.out_specs_fn is None:
            return self.out_specs
        args, kwargs = jax.tree.unflatten(tree, inputs)
        try:
            return self.out_specs_fn(*args, **kwargs)
        except Exception as error:
            add_note(error, "This is from out_specs_fn, called as the function is with a spec for each array")
            raise

    @property
    def takes_numpy(self) -> bool:
        """Whether the function is called with NumPy arrays."""
        return self.arrays == "numpy" or self.uses_jax is False

    @property
    def is_agreed_on(self) -> bool:
        """Whether several processes agree on a call outside of programs, or on the one that shows what it returns."""
        return self.mode == "inline" or not self.has_out_specs

    @property
    def has_out_specs(self) -> bool:
        """Whether they specify what a call returns."""
        return self.out_specs is not None or self.out_specs_fn is not None


@functools.cache
def _checks() -> dict[str, Callable[[str, str, object], object]]:
    return {name: get_args(hint)[-1] for name, hint in get_type_hints(Options, include_extras=True).items()}


_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def takes_options(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Spells out the `**options: Unpack[...]` of a function in its signature, and rejects other names."""
    signature = inspect.signature(function)
    *named, options = signature.parameters.values()
    hints = get_type_hints(*get_args(options.annotation))
    shown = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hints[name])
        for name in _checks()
        if name in hints
    ]
    accepted = {parameter.name for parameter in (*named, *shown)}

    @functools.wraps(function)
    def checked(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        for name in kwargs:
            if name not in accepted:
                meant = similar(name, sorted(accepted))
                hint = "" if meant is None else f". Did you mean {meant!r}?"
                raise TypeError(f"{function.__qualname__}() got an unexpected keyword argument {name!r}{hint}")
        return function(*args, **kwargs)

    vars(checked)["__signature__"] = signature.replace(parameters=[*named, *shown])
    return checked
