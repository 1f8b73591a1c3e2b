"""`colocated_call_p`: a colocated call as one equation of a traced function.

Parameters:

* `callee`: the function, and the types and shardings of its arguments and results.
* `stream`: the stream on which the traced function itself put the call; None for that of the program's caller.

Unless its function is pure, an equation has an effect, so that it is never eliminated or duplicated. Calls of a stream,
and of an object, run in the order of the equations. In programs of the package the plan keeps it; for those that other
wrappers compile the effect is one of jax's ordered effects, the same for all streams.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

from jax.core import AbstractValue, ShapedArray
from jax.extend.core import ClosedJaxpr, Effect, Jaxpr, JaxprEqn, jaxprs_in_params
from jax.sharding import NamedSharding, Sharding

from partjit._jax.caches import keyed_weakly
from partjit._jax.rules import register_printing
from partjit._jax.shard_maps import varying_type
from partjit._jax.types import Device, Params, PyTreeDef
from partjit.colocated.cache import SpecializationCache
from partjit.colocated.definition import Definition
from partjit.colocated.devices import colocated_sharding
from partjit.colocated.options import Options
from partjit.colocated.runtime.arrivals import effect
from partjit.colocated.runtime.in_specs import InSpecs
from partjit.colocated.runtime.out_spec import OutSpec
from partjit.colocated.runtime.out_specs import OutSpecs
from partjit.colocated.runtime.shards import Shards
from partjit.colocated.runtime.spec_structs import struct_of
from partjit.colocated.runtime.streams import Stream
from partjit.colocated.specialization import Specialization
from partjit.primitive import colocated_call_p

__all__ = ["Callee", "SpecializationOfKind", "calls_in", "colocated_call_p"]

SpecializationOfKind = TypeVar("SpecializationOfKind", bound=Specialization)


@keyed_weakly  # an object of a colocated class is destroyed with the last program that calls it
@dataclasses.dataclass(frozen=True, eq=False)
class Callee:
    """A colocated function for one kind of arguments, in a traced function.

    Attributes:
        definition: the function with its options.
        in_tree: the structure of `(args, kwargs)`.
        in_avals: the type of each argument.
        in_shardings: the sharding required of each argument; None where the partitioner chooses.
        out_tree: the structure of the result.
        out_avals: the type of each result.
        out_shardings: the sharding of each result; None where the partitioner chooses.
        paths: the key path of each argument, in terms of the function's parameters.
        cache: the specializations of the function, for calls outside of programs.
        batch: the sizes of the leading axes added to arguments and results by `jax.vmap`.
        shards: the types of its shards if it is called per shard in a `shard_map`.
    """

    definition: Definition
    in_tree: PyTreeDef
    in_avals: tuple[ShapedArray, ...]
    in_shardings: tuple[NamedSharding | None, ...]
    out_tree: PyTreeDef
    out_avals: tuple[ShapedArray, ...]
    out_shardings: tuple[NamedSharding | None, ...]
    paths: tuple[str, ...]
    cache: SpecializationCache
    batch: tuple[int, ...] = ()
    shards: Shards | None = None
    _derived: dict[Hashable, "Callee"] = dataclasses.field(init=False, repr=False, default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.definition.name

    @property
    def options(self) -> Options:
        """The options of its calls."""
        return self.definition.options

    @property
    def is_pure(self) -> bool:
        """Whether calls with unused results may be eliminated, and equal calls be made once."""
        return bool(self.options.pure)

    @property
    def returns_shards(self) -> bool:
        """Whether it returns shards, which are assembled by its own specs whatever sharding is needed."""
        return self.options.layout == "per_shard"

    @property
    def results(self) -> tuple[Hashable, ...]:
        """The structure, types and shardings of what it returns."""
        return self.out_tree, self.out_avals, self.out_shardings

    def derived(self, key: Hashable, make: Callable[[], "Callee"]) -> "Callee":
        """The callee that a transformation makes of this one, the same for equal keys: equal calls stay equal."""
        found = self._derived.get(key)
        return self._derived.setdefault(key, make()) if found is None else found

    def specialized(
        self,
        stream: Stream | None,
        in_shardings: Sequence[Sharding],
        out_specs: Sequence[OutSpec],
        devices: Sequence[Device],
        kind: type[SpecializationOfKind],
    ) -> SpecializationOfKind:
        """The function specialized for a call in a program.

        Args:
            stream: the stream on which the program puts the call.
            in_shardings: the shardings of the arguments on the hosts.
            out_specs: the results on the hosts.
            devices: those of the program; used unless the options name others.
            kind: the class of the result.
        """
        inputs = [*map(struct_of, self.in_avals, in_shardings)]
        # Shards of results are assembled on the hosts by these shardings; None where the user gave none.
        of_shards = [s and colocated_sharding(s) for s in self.out_shardings] if self.returns_shards else None
        return kind(
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
    """The name of a stream in printed equations."""
    if stream is None:
        return "caller"
    return stream.name or f"stream {id(stream):x}"


@colocated_call_p.def_effectful_abstract_eval
def _abstract_eval(*_: AbstractValue, callee: Callee, **__: object) -> tuple[list[AbstractValue], set[Effect]]:
    # In a shard_map the function is called per shard, and its results may differ between shards.
    return [*map(varying_type, callee.out_avals)], set() if callee.is_pure else {effect}


def calls_in(jaxprs: Iterable[ClosedJaxpr | Jaxpr]) -> Iterator[JaxprEqn]:
    """The equations in jaxprs that are calls, at any depth."""
    for jaxpr in jaxprs:
        for eqn in jaxpr.eqns:
            if eqn.primitive is colocated_call_p:
                yield eqn
            yield from calls_in(jaxprs_in_params(eqn.params))


def _show(params: Params) -> Params:
    callee: Callee = params["callee"]
    options = callee.options
    return {
        "name": callee.name,
        "stream": stream_name(params["stream"]),
        "in_specs": _show_shardings(callee.in_shardings),
        "out_specs": _show_shardings(callee.out_shardings),
        **({"pure": True} if callee.is_pure else {}),
        **({"layout": options.layout} if options.layout not in (None, "global") else {}),
        **({"arrays": options.arrays} if options.arrays not in (None, "jax") else {}),
        **({"isolate": options.isolate} if options.isolate else {}),
        **({"run_ahead": options.run_ahead} if options.run_ahead else {}),
        **({"batch": callee.batch} if callee.batch else {}),
    }


def _show_shardings(shardings: Sequence[Sharding | None]) -> str:
    shown = ("open" if s is None else str(getattr(s, "spec", s)).replace("PartitionSpec", "P") for s in shardings)
    return f"({', '.join(shown)})"


register_printing(colocated_call_p, _show)
