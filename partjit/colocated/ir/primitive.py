"""`colocated_call_p`: a colocated call as one equation of a traced function.

Parameters:

* `callee`: the function for one kind of arguments: what is known of it and of its results.
* `stream`: the stream that the traced function itself put the call on; None where the caller's is meant.

An equation has an effect unless its function was said to be pure, so that nothing drops it or does it twice. The effect
is not one of jax's ordered ones, which there are on a single device only: in which order the calls of a stream run is
the order of the equations, and it is the plan's work to keep it.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

from jax.core import ShapedArray
from jax.extend.core import Effect, Primitive, jaxprs_in_params
from jax.interpreters import mlir
from jax.sharding import NamedSharding, Sharding

from partjit._jax.effects import register_effect
from partjit._jax.lowering import lower_constraint_to, lower_opaque
from partjit._jax.rules import register_printing
from partjit._jax.shard_maps import varying_type
from partjit.colocated.cache import SpecializationCache
from partjit.colocated.definition import Definition
from partjit.colocated.devices import colocated_sharding
from partjit.colocated.options import Options
from partjit.colocated.runtime.run_ahead import RunAhead
from partjit.colocated.runtime.shards import Shards
from partjit.colocated.runtime.specs import InSpecs, OutSpec, OutSpecs, struct_of
from partjit.colocated.runtime.streams import Stream
from partjit.colocated.specialization import Specialization

__all__ = ["Callee", "ColocatedEffect", "calls_in", "colocated_call_p", "opaque_calls"]

colocated_call_p = Primitive("colocated_call")
colocated_call_p.multiple_results = True


@dataclasses.dataclass(frozen=True)
class ColocatedEffect(Effect):  # type: ignore[misc]  # jax gives the base class no types
    """That host Python runs.

    Attributes:
        stream: the name of the stream it runs on.
    """

    stream: str

    def __str__(self) -> str:
        return f"Colocated<{self.stream}>"


@dataclasses.dataclass(frozen=True, eq=False)
class Callee:
    """A colocated function for one kind of arguments in a traced function.

    Attributes:
        definition: the function with the options of its calls.
        in_tree: the structure of `(args, kwargs)`.
        in_avals: the type of each argument.
        in_shardings: the sharding each argument should have; None where the partitioner chooses.
        out_tree: the structure of the result.
        out_avals: the type of each result.
        out_shardings: the sharding of each result; None where the partitioner chooses.
        paths: the key path of each argument in terms of the function's parameters.
        cache: the specializations of the function, for calls outside of programs.
        batch: the sizes of the leading axes that `jax.vmap` gave the arguments and results.
        shards: what it is called with if it is called for each shard in a `shard_map`.
    """

    definition: Definition
    in_tree: Any
    in_avals: tuple[ShapedArray, ...]
    in_shardings: tuple[NamedSharding | None, ...]
    out_tree: Any
    out_avals: tuple[ShapedArray, ...]
    out_shardings: tuple[NamedSharding | None, ...]
    paths: tuple[str, ...]
    cache: SpecializationCache
    batch: tuple[int, ...] = ()
    shards: Shards | None = None
    _derived: dict[Hashable, "Callee"] = dataclasses.field(init=False, repr=False, default_factory=dict)

    @property
    def name(self) -> str:
        """What the function is called."""
        return self.definition.name

    @property
    def options(self) -> Options:
        """What was said of its calls."""
        return self.definition.options

    @property
    def ahead(self) -> RunAhead | None:
        """Its calls that were made before their results are requested."""
        return self.definition.ahead

    @property
    def is_pure(self) -> bool:
        """Whether a call may be left out when nobody needs its results, and be made once for equal arguments."""
        return bool(self.options.pure)

    @property
    def returns_shards(self) -> bool:
        """Whether its specs alone say what its results are, in whatever sharding they are needed."""
        return self.options.layout == "per_shard"

    def returns_what(self, other: "Callee") -> bool:
        """Whether the results are known to be of the same types, with the same shardings."""
        known = (self.out_tree, self.out_avals, self.out_shardings)
        return known == (other.out_tree, other.out_avals, other.out_shardings)

    def derived(self, key: Hashable, make: Callable[[], "Callee"]) -> "Callee":
        """The callee that a transformation makes of this one: one for equal keys, as equal calls have one callee."""
        found = self._derived.get(key)
        return self._derived.setdefault(key, make()) if found is None else found

    def specialized(
        self,
        stream: Stream | None,
        in_shardings: Sequence[Sharding],
        out_specs: Sequence[OutSpec],
        devices: Sequence[Any],
    ) -> Specialization:
        """What a call of it does in a program.

        Args:
            stream: the stream that the program puts the call on.
            in_shardings: the shardings of its arguments on the hosts.
            out_specs: its results there.
            devices: those of the program, unless the options name others.
        """
        inputs = [*map(struct_of, self.in_avals, in_shardings)]
        # The shardings by which shards of results are assembled on the hosts; None where the user left it open.
        of_shards = [s and colocated_sharding(s) for s in self.out_shardings] if self.returns_shards else None
        return Specialization(
            self.definition,
            InSpecs(inputs, self.in_tree),
            inputs,
            self.options.devices or devices,
            stream=stream,
            out_specs=OutSpecs(out_specs, self.out_tree),
            shards=self.shards,
            shardings_of_shards=of_shards,
        )


def stream_name(stream: Stream | None) -> str:
    """How a stream is called where it is printed."""
    if stream is None:
        return "caller"
    return stream.name or f"stream {id(stream):x}"


@colocated_call_p.def_effectful_abstract_eval
def _abstract_eval(*_: Any, callee: Callee, stream: Stream | None) -> Any:
    # In a shard_map the function is called for each shard, and may return something else each time.
    return [*map(varying_type, callee.out_avals)], set() if callee.is_pure else {ColocatedEffect(stream_name(stream))}


def calls_in(jaxprs: Iterable[Any]) -> Iterator[Any]:
    """The equations in jaxprs that are calls, at any depth."""
    for jaxpr in jaxprs:
        for eqn in jaxpr.eqns:
            if eqn.primitive is colocated_call_p:
                yield eqn
            yield from calls_in(jaxprs_in_params(eqn.params))


class _Mode(threading.local):
    def __init__(self) -> None:
        self.is_opaque = False


_mode = _Mode()


@contextlib.contextmanager
def opaque_calls() -> Iterator[None]:
    """Lets programs with calls be lowered in the block, to be looked at; they cannot run."""
    outer, _mode.is_opaque = _mode.is_opaque, True
    try:
        yield
    finally:
        _mode.is_opaque = outer


def _lower(ctx: Any, *args: Any, callee: Callee, **_: Any) -> Any:
    if not _mode.is_opaque and ctx.module_context.lowering_parameters.for_export:
        raise ValueError(
            f"the colocated function {callee.name} cannot be part of an exported program, in which there is no place "
            "for a Python function: export the functions between the calls, each by itself"
        )
    if not _mode.is_opaque:
        raise ValueError(
            f"the colocated function {callee.name} is called in a program of jax.jit, which cannot call Python on the "
            "hosts beside its devices: wrap the outermost function with partjit.pjit instead of jax.jit"
        )
    args = tuple(
        arg if sharding is None else lower_constraint_to(ctx, arg, aval, sharding)
        for arg, aval, sharding in zip(args, ctx.avals_in, callee.in_shardings, strict=True)
    )
    results = lower_opaque(ctx, "colocated_call", args)
    return [
        result if sharding is None else lower_constraint_to(ctx, result, aval, sharding)
        for result, aval, sharding in zip(results, ctx.avals_out, callee.out_shardings, strict=True)
    ]


def _show(params: dict[str, Any]) -> dict[str, Any]:
    callee: Callee = params["callee"]
    options = callee.options
    return {
        "name": callee.name,
        "stream": stream_name(params["stream"]),
        "in_specs": _show_shardings(callee.in_shardings),
        "out_specs": _show_shardings(callee.out_shardings),
        **({"pure": True} if callee.is_pure else {}),
        **({"layout": options.layout} if options.layout not in (None, "global") else {}),
        **({"run_ahead": options.run_ahead} if options.run_ahead else {}),
        **({"batch": callee.batch} if callee.batch else {}),
    }


def _show_shardings(shardings: Sequence[Any]) -> str:
    shown = ("open" if s is None else str(getattr(s, "spec", s)).replace("PartitionSpec", "P") for s in shardings)
    return f"({', '.join(shown)})"


register_effect(ColocatedEffect)
register_printing(colocated_call_p, _show)
mlir.register_lowering(colocated_call_p, _lower, cacheable=False)
