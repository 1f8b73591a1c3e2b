"""A colocated function made ready for one kind of arguments: what every call of it needs, however it runs."""

import os
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
from jax.sharding import Sharding

from partjit import events
from partjit._jax.arrays import ArrayImpl
from partjit._jax.moves import moved, moved_to
from partjit._jax.types import Device, PyTree
from partjit.colocated.agreement.setup import agreement_of
from partjit.colocated.cheapness import Cheapness, CheapnessAhead
from partjit.colocated.definition import Definition
from partjit.colocated.devices import check_processes_of_numpy, check_processes_of_results, colocated_sharding
from partjit.colocated.journaling import log as journal
from partjit.colocated.journaling.entries import Entry
from partjit.colocated.journaling.identity import Place
from partjit.colocated.on_thread import OnThread
from partjit.colocated.readiness import Readiness
from partjit.colocated.runtime import scheduler
from partjit.colocated.runtime.call import Call, Lane, current_calls
from partjit.colocated.runtime.failures import CodeSite, Site, call_site
from partjit.colocated.runtime.host_mesh import on_host_mesh
from partjit.colocated.runtime.host_values import HostArgument
from partjit.colocated.runtime.in_specs import InSpecs, argument_paths
from partjit.colocated.runtime.moved_by_calls import MOST_BYTES_COPIED_THERE, Beside, MovedByCall
from partjit.colocated.runtime.numpy_functions import with_numpy_arguments, without_jax
from partjit.colocated.runtime.one_by_one import one_by_one
from partjit.colocated.runtime.out_spec import OutSpec
from partjit.colocated.runtime.out_specs import OutSpecs
from partjit.colocated.runtime.pending import PendingArray, values_of
from partjit.colocated.runtime.pins import Pins, Taken, copied, pin, unpinned
from partjit.colocated.runtime.run_ahead import Prepared
from partjit.colocated.runtime.shards import Shards, on_each_shard, per_shard, sharding_as_arguments
from partjit.colocated.runtime.spec_structs import spec_structs, struct_of
from partjit.colocated.runtime.streams import Stream, current_stream
from partjit.colocated.unspecified import UnspecifiedResults
from partjit.host_objects import with_objects

__all__ = ["PreparedFunction"]

_PLAIN = frozenset({ArrayImpl})
_PLAIN_OR_OF_HOST = _PLAIN | {HostArgument}


class PreparedFunction:
    """A colocated function made ready for one kind of arguments.

    Attributes:
        in_specs: the arguments.
        out_specs: the results; None until they are known.
    """

    def __init__(
        self,
        definition: Definition,
        in_specs: InSpecs,
        leaves: Sequence[jax.Array | jax.ShapeDtypeStruct],
        devices: Sequence[Device],
        *,
        stream: Stream | None = None,
        out_specs: OutSpecs | None = None,
        shards: Shards | None = None,
        shardings_of_shards: Sequence[Sharding | None] | None = None,
    ) -> None:
        shardings = [cast(Sharding, leaf.sharding) for leaf in leaves]
        self.in_specs = in_specs
        self.out_specs: OutSpecs | None = out_specs
        self._function = definition.function
        self._name = definition.function.name
        self._lane = definition.function.lane
        self._history = definition.function.history
        self._shows_state = definition.function.shows_state and not leaves
        self._options = definition.options
        self._ahead = definition.ahead
        self._mode = definition.options.mode or "auto"
        self._stream = definition.options.stream or stream
        self._shardings = shardings
        self._uncommitted = [
            s for s, leaf in zip(shardings, leaves, strict=True) if not getattr(leaf, "committed", True)
        ]
        self._devices = devices
        self._unspecified = UnspecifiedResults(
            self._name, shardings, self._uncommitted, devices, are_devices_given=bool(self._options.devices)
        )
        self._is_prepared = False
        self._is_simple = False  # whether a call takes nothing into account but its lanes; set by `prepare`
        self._is_plain = False  # whether a call is no more than one of its function with the leaves; set by `prepare`
        self._has_own_thread = self._mode == "stream" or self._stream is not None
        self._pins = Pins(len(leaves))
        self._pins_of_some: dict[tuple[bool | None, ...], Pins] = {}  # by which of the arguments they are of
        self._pins_beside_host: dict[tuple[int, ...], Pins] = {}  # by which they are not of
        self._preparation = Lane()  # not a lock: `out_specs_fn` may make calls and wait for them
        self._target: Callable[..., PyTree]  # set by `prepare`, as are the next two
        self._of_numpy: Callable[..., PyTree] | None = None  # the function of NumPy arrays that `_target` calls, if so
        self._on_thread: OnThread
        self._shards = shards
        self._shardings_of_shards = shardings_of_shards
        self._takes_numpy = definition.options.takes_numpy and shards is None  # which are made of an array
        self._is_of_shards = shards is not None or definition.options.layout == "per_shard"
        self._agreement = agreement_of(devices, self._name, lambda: self._name)
        # Whether all processes know what it returns: where the call that shows it fails in one, none of them does.
        self._is_known_to_all = self._agreement is None or out_specs is not None
        self._is_only_process = jax.process_count() == 1
        # Whether a call may take less than to have another thread run it, as far as its options are concerned.
        self._may_be_brief = self._is_only_process and self._mode == "auto" and self._stream is None
        self._is_here = any(device.process_index == jax.process_index() for device in devices)
        host = [colocated_sharding(sharding) for sharding in shardings]
        self._host_shardings = None if host == shardings else host
        self._cheapness = Cheapness() if self._ahead is None else CheapnessAhead()
        self._catches_up_from = 0.0  # in seconds of `time.monotonic`: from when on a caller waits for a thread again
        self._readiness = Readiness()
        self._places: dict[str, Place] = {}

    def prepare(self) -> None:
        """Copies the function for its host and determines what it returns, once."""
        if self._is_prepared:
            return
        # A finalizer that interrupts a submission must not wait.
        lanes = [] if scheduler.is_changing_lanes() else [self._preparation]
        scheduler.run_in_lanes(f"{self._name} (out_specs_fn)", call_site(), current_stream(), lanes, self._prepare)

    def _prepare(self) -> None:
        if self._is_prepared:
            return
        options = self._options
        if self.out_specs is None and options.has_out_specs:
            inputs = [*map(struct_of, self.in_specs.leaves, self._shardings)]
            out_specs = options.out_specs_for(self.in_specs.tree, inputs)
            self.out_specs = OutSpecs.of_user(out_specs, self._name, self._default_sharding(inputs), self._uncommitted)
            if options.layout == "per_shard":  # shards are assembled on the hosts
                given = [spec.sharding for spec in spec_structs(out_specs, self._name)[0]]
                self._shardings_of_shards = [sharding and colocated_sharding(sharding) for sharding in given]
        if self.out_specs is not None:
            check_processes_of_results(self._name, self._devices, [spec.sharding for spec in self.out_specs.leaves])
        if self._is_here:
            target, examples = with_objects(self._function.load(), self.in_specs.tree), self._function.examples
            self._target = on_host_mesh(target if examples is None else one_by_one(target, examples))
            if options.uses_jax is False:
                self._target = without_jax(self._target, self._name)
            if options.takes_numpy:
                if self._shards is None:
                    args, kwargs = self.in_specs.tree.unflatten(self.in_specs.leaves)
                    paths = argument_paths(self._function.signature, args, kwargs)
                    check_processes_of_numpy(self._name, paths, self._shardings)
                self._of_numpy = None if self._is_of_shards else self._target
                self._target = with_numpy_arguments(self._target, self._name)
            if self._shards is not None and self.out_specs is not None:
                self._target = on_each_shard(self._target, self._name, self._shards, self.out_specs)
            elif options.layout == "per_shard":
                self._target = per_shard(self._target, self._name, self.out_specs, self._shardings_of_shards)
            may_run_here = self._mode == "auto" and self._stream is None
            cheapness = self._cheapness if may_run_here else None
            self._on_thread = OnThread(
                self._name,
                self._target,
                self.in_specs.tree,
                cheapness,
                self._lane,
                self._history,
                uses_jax=options.uses_jax is not False,
            )
        elif self.out_specs is None:
            raise ValueError(
                f"{self._name} runs on the hosts of {[*map(str, self._devices)]}, none of which belongs to process "
                f"{jax.process_index()}: give out_specs or out_specs_fn"
            )
        can_move = self._mode != "inline" and self._host_shardings is None
        self._is_simple = self._is_here and can_move and not self._shows_state
        self._is_plain = self._is_here and self.in_specs.are_positional
        self._is_prepared = True

    def _default_sharding(self, args: Sequence[jax.ShapeDtypeStruct]) -> Callable[[tuple[int, ...], int], Sharding]:
        """What returns the sharding of a result whose spec has none, from its shape and which it is.

        Of shards it is that of the arguments of this shape; else the result is replicated over the devices of the call.
        """

        def default(shape: tuple[int, ...], i: int) -> Sharding:
            if self._options.layout == "per_shard" and any(arg.shape == shape for arg in args):
                return sharding_as_arguments(shape, args, self._name, i)
            return self._unspecified.sharding()

        return default

    def _runs_simply(self, *, is_brief: bool = False) -> bool:
        """Whether a call now runs on a thread, or in one that waits for it, and takes into account its lanes alone.

        That is so of one that is a part of no other, that nobody observes or records, and that no other is ahead of.
        """
        is_on_thread = self._ahead is None and (self._has_own_thread or not self._cheapness.is_shown)
        is_own = self._is_simple and (is_brief or is_on_thread)
        return is_own and not events.listeners and journal.current is None and not current_calls()

    def _entry(self, log: journal.Log, stream: Stream, node: str = "", site: Site | None = None) -> Entry | None:
        """The entry of a call in the journal, if it is one of its own."""
        if not self._is_here:
            return None
        place = self._places.get(node)
        if place is None:
            line = f"{os.path.basename(site[0])}:{site[1]}" if node and site is not None else ""
            place = self._places.setdefault(node, Place(self._name, node, line, self.in_specs.text))
        return log.begin(place, stream.name or "", None if self._shows_state else self._history)

    def _learn(self, result: PyTree) -> None:
        """Takes the result of the first call for the specs of all, unless each may have its own."""
        if self._mode != "inline":
            flat, tree = jax.tree.flatten(result)
            self.out_specs = OutSpecs([OutSpec(x.aval, x.sharding, x.committed) for x in values_of(flat)], tree)

    def _lanes(self, stream: Stream) -> tuple[Sequence[Lane], bool]:
        """The lanes of a call, and whether some are left out because it is made by a call in them."""
        lanes = [stream] if self._lane is None else [stream, self._lane]
        free = scheduler.not_entered(lanes)
        return free, len(free) < len(lanes)

    def _call(self, site: Site | CodeSite, stream: Stream, lanes: Sequence[Lane], body: Callable[[], PyTree]) -> Call:
        call = Call(self._name, site, stream, lanes, body)
        self._order(call)
        return call

    def _order(self, call: Call) -> None:
        if self._history is not None and self._lane in call.lanes:
            self._history.order(call, shows_state=self._shows_state)

    def _prepared(
        self,
        takes: list[Taken],
        lanes: Sequence[Lane],
        stream: Stream,
        out_specs: OutSpecs,
        site: Site | CodeSite,
        entry: Entry | None,
    ) -> Prepared:
        record = entry if self._ahead is None or journal.current is None else journal.current.ahead(self._history)
        prepared = self._on_thread.prepared(takes, lanes, stream, out_specs, site, record)
        if self._ahead is None:  # what the calls that run ahead see is up to `RunAhead`
            self._order(prepared.call)
        return prepared

    def _pinned_all(self, leaves: Sequence[Any]) -> list[Taken]:
        """What returns the arguments, as they are now, on the host when the function runs."""
        if self._host_shardings is None:
            kinds = {*map(type, leaves)}
            if kinds <= _PLAIN:
                return self._pins.pin_all(leaves)
            if kinds <= _PLAIN_OR_OF_HOST:
                return self._pinned_beside_host(leaves)
        beside: Beside = []
        return [self._pinned(i, leaf, beside) for i, leaf in enumerate(leaves)]

    def _pinned_beside_host(self, leaves: Sequence[Any]) -> list[Taken]:
        """The same of plain arrays and `HostArgument`s, of which there are few as a rule."""
        of_host = tuple([i for i, leaf in enumerate(leaves) if type(leaf) is HostArgument])
        arrays = [*leaves]
        for i in reversed(of_host):
            del arrays[i]
        pins = self._pins_beside_host.get(of_host)
        if pins is None:
            pins = self._pins_beside_host.setdefault(of_host, Pins(len(arrays)))
        takes = [*pins.pin_all(arrays)]
        for i in of_host:
            takes.insert(i, self._taken_of_host(leaves[i]))
        return takes

    def _pinned(self, i: int, leaf: Any, beside: Beside) -> Taken:
        """What returns an argument, as it is now, on the host when the function runs.

        Args:
            i, leaf: its position, and the argument.
            beside: where those that are moved together are listed.
        """
        if type(leaf) is HostArgument:
            target = None if self._host_shardings is None else self._host_shardings[i]
            return self._taken(leaf if target is None else leaf.moved(target), is_pinned=False)
        if self._host_shardings is None or leaf.sharding == self._host_shardings[i]:
            return self._pins.pin(i, leaf)
        target = self._host_shardings[i]
        if type(leaf) is not PendingArray and leaf.nbytes > MOST_BYTES_COPIED_THERE:
            return unpinned(moved_to(leaf, target))  # to move it from a GPU waits until it is computed
        take = copied(leaf)
        return MovedByCall(take if type(leaf) is PendingArray else take(), target, beside)

    def _taken_all(self, leaves: Sequence[Any], pinned: Sequence[bool | None]) -> list[Taken]:
        """What returns the arguments of a call when the function runs; which are pinned, as of `submitting`."""
        plain: list[Taken] = []
        for leaf, is_pinned in zip(leaves, pinned, strict=True):  # of most calls all are numbers, or of nobody else
            kind = type(leaf)
            if kind is HostArgument:
                plain.append(self._taken_of_host(leaf))
            elif kind is ArrayImpl and is_pinned is None and not events.listeners:  # which wait for what is computed
                plain.append(leaf)
            else:
                break
        else:
            return plain
        if True in pinned:
            kept = [leaf for leaf, is_pinned in zip(leaves, pinned, strict=True) if is_pinned]
            if _PLAIN.issuperset(map(type, kept)):
                pins = self._pins_of_some.get(key := tuple(pinned))
                if pins is None:
                    pins = self._pins_of_some.setdefault(key, Pins(len(kept)))
                takes = iter(pins.pin_all(kept))
                return [
                    next(takes) if is_pinned else self._taken(leaf, is_pinned)
                    for leaf, is_pinned in zip(leaves, pinned, strict=True)
                ]
        return [*map(self._taken, leaves, pinned)]

    def _taken(self, leaf: Any, is_pinned: bool | None) -> Taken:
        """What returns an argument of a call in a program when the function runs; None as of `submitting`."""
        if is_pinned is None and type(leaf) is ArrayImpl and not events.listeners:  # which wait for what is computed
            return leaf
        if type(leaf) is HostArgument:
            return self._taken_of_host(leaf)
        return pin(leaf) if is_pinned else unpinned(leaf)

    def _taken_of_host(self, argument: HostArgument) -> Taken:
        """What returns an argument that no array on devices holds yet, when the function runs."""
        if self._takes_numpy:
            return argument.itself
        return argument.array if self._is_of_shards else argument.when_used

    def _on_host(self, leaves: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """The arguments, copied to the CPU devices of the hosts where they are elsewhere."""
        return leaves if self._host_shardings is None else moved(leaves, self._host_shardings)
