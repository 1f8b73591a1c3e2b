"""A colocated function specialized for one kind of arguments, and the ways in which its calls run.

A call runs in its caller, with as little overhead as possible; in its caller, once it is first in its lanes; or on a
thread, with pending results.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
from jax.sharding import Sharding

from partjit import events
from partjit._jax.arrays import ArrayImpl, device_put, moved
from partjit._jax.types import Device, PyTree
from partjit.colocated.agreement.program import agreement_of
from partjit.colocated.cheapness import Cheapness
from partjit.colocated.definition import Definition
from partjit.colocated.devices import colocated_sharding
from partjit.colocated.on_thread import OnThread
from partjit.colocated.runtime import scheduler
from partjit.colocated.runtime.call import Call, Lane, failure_here
from partjit.colocated.runtime.failures import Site, call_site, without_stop
from partjit.colocated.runtime.host_values import (
    HostArgument,
    put_host_arguments,
    with_numpy_arguments,
    without_jax,
)
from partjit.colocated.runtime.interrupts import is_interrupt
from partjit.colocated.runtime.observation import observe_call, profiled
from partjit.colocated.runtime.pending import PendingArray, values_of
from partjit.colocated.runtime.pins import Pins, Take, distinct, pin, unpinned
from partjit.colocated.runtime.run_ahead import Prepared
from partjit.colocated.runtime.shards import Shards, on_each_shard, per_shard
from partjit.colocated.runtime.specs import InSpecs, OutSpec, OutSpecs, argument_paths, struct_of
from partjit.colocated.runtime.streams import Stream, current_stream
from partjit.colocated.unspecified import UnspecifiedResults
from partjit.host_objects import with_objects

__all__ = ["Specialization"]

_perf_counter = time.perf_counter


class Specialization:
    """A colocated function specialized for one kind of arguments.

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
        self.out_specs = out_specs
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
        self._pins = Pins(len(leaves))
        self._preparation = Lane()  # not a lock: `out_specs_fn` may make calls and wait for them
        self._target: Callable[..., PyTree]  # set by `prepare`, as is the next
        self._on_thread: OnThread
        self._shards = shards
        self._shardings_of_shards = shardings_of_shards
        self._takes_numpy = definition.options.takes_numpy
        self._agreement = agreement_of(devices, self._name, lambda: self._name)
        self._is_here = any(device.process_index == jax.process_index() for device in devices)
        host = [colocated_sharding(sharding) for sharding in shardings]
        self._host_shardings = None if host == shardings else host
        self._cheapness = Cheapness()

    def __call__(
        self,
        args: Sequence[PyTree],
        kwargs: Mapping[str, PyTree],
        leaves: Sequence[jax.Array],
        are_plain: bool,
        is_agreed: bool = False,
    ) -> PyTree:
        """Calls the function.

        Args:
            args, kwargs, leaves: the arguments, and their arrays.
            are_plain: whether none of these is pending or an array of keys.
            is_agreed: whether other processes know of it if this one fails.
        """
        if self._agreement is not None and not is_agreed and (self._mode == "inline" or self.out_specs is None):
            return self._agreement.run(self, (args, kwargs, leaves, are_plain, True))
        try:
            if not self._is_prepared:
                self.prepare()
            stream = self._stream or current_stream()
            is_ready = self._host_shardings is None and (are_plain or PendingArray not in map(type, leaves))
            # No other thread can submit a call to a private stream in between.
            if is_ready and not stream.calls and stream.is_private and not events.listeners:
                if self._mode == "inline":
                    run = self._run_inline
                elif self._mode == "auto" and self._cheapness.is_shown and self._ahead is None:
                    run = self._run_cheap
                else:
                    return self._run_in_order(leaves, stream)
                if self._lane is None:
                    return run(args, kwargs, stream)
                if not self._lane.calls:
                    lanes = [stream, self._lane]
                    result = self._run_if_free(functools.partial(run, args, kwargs, stream), lanes, stream)
                    if result is not scheduler.NOT_FREE:
                        return result
            return self._run_in_order(leaves, stream)
        except StopIteration as error:
            raise without_stop(error, self._name) from error

    def call_with_host_arguments(self, leaves: Sequence[Any]) -> PyTree:
        """Calls the function with flat arguments, `HostArgument`s among them; the others are plain arrays."""
        is_cheap = self._mode == "auto" and self._stream is None and self._cheapness.is_shown
        if not self._is_prepared or self._mode == "inline" or is_cheap:
            leaves = put_host_arguments(leaves)
            args, kwargs = self.in_specs.tree.unflatten(leaves)
            return self(args, kwargs, leaves, True)
        try:
            return self._run_in_order(leaves, self._stream or current_stream())
        except StopIteration as error:
            raise without_stop(error, self._name) from error

    def run_for_program(self, leaves: Sequence[Any], which: Sequence[int], site: Site) -> Sequence[jax.Array]:
        """Calls the function in this thread, for a program, and returns the flat results.

        Args:
            leaves: the flat arguments: arrays on the hosts, and `HostArgument`s.
            which: the positions of results that must be distinct from the arguments and from each other.
            site: where the user's code makes the call.

        Raises:
            Exception: what the function raised, with a note that names the call.
        """
        if not self._is_prepared:
            self.prepare()
        stream = self._stream or current_stream()
        out_specs = self.out_specs
        assert out_specs is not None
        leaves = leaves if self._takes_numpy else put_host_arguments(leaves)
        try:
            if self._lane is None and not stream.calls and stream.is_private and not events.listeners:
                if PendingArray in map(type, leaves):
                    leaves = values_of(leaves)
                args, kwargs = self.in_specs.tree.unflatten(leaves)
                with profiled(self._name):
                    results = out_specs.fit_flat(self._target(*args, **kwargs), self._name)
            else:
                results = out_specs.tree.flatten_up_to(self._run_here(leaves, self._lanes(stream)[0], stream, site))
            return distinct(results, leaves, which) if which else results
        except Exception as error:
            failure_here(error, self._name, site, stream).raise_()

    def submit_for_program(self, leaves: Sequence[Any], pinned: Sequence[bool], site: Site) -> Sequence[jax.Array]:
        """Submits a call to a thread, for a program, and returns the flat results, which are pending.

        Args:
            leaves: the flat arguments: arrays on the hosts, and `HostArgument`s.
            pinned: which of them may be donated while the call runs.
            site: where the user's code makes the call.
        """
        if not self._is_prepared:
            self.prepare()
        stream = self._stream or current_stream()
        out_specs = self.out_specs
        assert out_specs is not None
        lanes, is_nested = self._lanes(stream)
        if is_nested:  # made by a call of its own stream, it is part of that call
            made = self._ahead.made(out_specs) if self._ahead is not None else None
            return self.run_for_program(leaves, range(len(out_specs.leaves)), site) if made is None else made

        def prepared() -> Prepared:
            takes = [self._taken(leaf, is_pinned) for leaf, is_pinned in zip(leaves, pinned, strict=True)]
            return self._prepared(takes, lanes, stream, out_specs, site)

        return prepared().submit() if self._ahead is None else self._ahead.take(out_specs, prepared)

    # Preparation

    def prepare(self) -> None:
        """Copies the function for its host and determines what it returns, once."""
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
            self.out_specs = OutSpecs.of_user(out_specs, self._unspecified.sharding, self._uncommitted)
        if self._is_here:
            self._target = with_objects(self._function.load(), self.in_specs.tree)
            if options.uses_jax is False:
                self._target = without_jax(self._target, self._name)
            if self._takes_numpy:
                paths = argument_paths(self._function.signature, *self.in_specs.tree.unflatten(self.in_specs.leaves))
                self._target = with_numpy_arguments(self._target, self._name, paths)
            if self._shards is not None and self.out_specs is not None:
                self._target = on_each_shard(self._target, self._name, self._shards, self.out_specs)
            elif options.layout == "per_shard":
                self._target = per_shard(self._target, self._name, self.out_specs, self._shardings_of_shards)
            may_run_here = self._mode == "auto" and self._stream is None
            measured = self._cheapness.measured if may_run_here else None
            self._on_thread = OnThread(self._name, self._target, self.in_specs.tree, measured)
        elif self.out_specs is None:
            raise ValueError(
                f"{self._name} runs on the hosts of {[*map(str, self._devices)]}, none of which belongs to process "
                f"{jax.process_index()}: give out_specs or out_specs_fn"
            )
        self._is_prepared = True

    # Ways to run

    def _run_inline(self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree], _: Stream) -> PyTree:
        result = self._target(*args, **kwargs)
        if self.out_specs is not None:
            return self.out_specs.fit(result, self._name)
        return result if type(result) is ArrayImpl else self._unspecified.as_arrays(result)

    def _run_cheap(self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree], stream: Stream) -> PyTree:
        """Runs a call in its caller, but with the results and errors of an asynchronous one, as only timing decides."""
        target = observe_call(self._name, stream)(self._target) if events.listeners else self._target
        started = _perf_counter()
        assert self.out_specs is not None
        try:
            result = self._without_arguments(self.out_specs.fit(target(*args, **kwargs), self._name), args, kwargs)
        except Exception as error:
            if is_interrupt(error):  # of the caller, not of the call
                raise
            failure = failure_here(error, self._name, call_site(), stream)
            failed = [PendingArray.failed(failure, s.aval, s.sharding, s.committed) for s in self.out_specs.leaves]
            return self.out_specs.tree.unflatten(failed)
        self._cheapness.measured(_perf_counter() - started)
        return result

    def _without_arguments(self, result: PyTree, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> PyTree:
        """The result without arguments in it: on a thread it would be another array that shares the memory."""
        given = {*map(id, jax.tree.leaves((args, kwargs)))}
        if given.isdisjoint(map(id, jax.tree.leaves(result))):
            return result
        return jax.tree.map(lambda leaf: pin(leaf)() if id(leaf) in given else leaf, result)

    def _run_in_order(self, leaves: Sequence[jax.Array], stream: Stream) -> PyTree:
        """Runs a call in the order of its lanes, in its caller or on a thread."""
        lanes, is_nested = self._lanes(stream)
        out_specs = self.out_specs
        if not self._is_here:
            assert out_specs is not None
            return out_specs.tree.unflatten([_without_shards(spec) for spec in out_specs.leaves])
        if is_nested and self._ahead is not None and out_specs is not None:
            made = self._ahead.made(out_specs)
            if made is not None:
                return out_specs.tree.unflatten(made)
        if self._mode == "inline" or out_specs is None or is_nested:
            return self._run_here(put_host_arguments(leaves), lanes, stream, call_site())
        if self._ahead is not None:
            results = self._ahead.take(out_specs, lambda: self._prepared([], lanes, stream, out_specs, call_site()))
            return out_specs.tree.unflatten(results)
        is_cheap = self._mode == "auto" and self._stream is None and self._cheapness.is_shown
        is_ahead = self._history is not None and self._history.is_ahead
        if is_cheap and not is_ahead and all(map(_has_value, leaves)) and not any(lane.calls for lane in lanes):
            args, kwargs = self.in_specs.tree.unflatten(self._on_host(values_of(put_host_arguments(leaves))))
            result = self._run_if_free(functools.partial(self._run_cheap, args, kwargs, stream), lanes, stream)
            if result is not scheduler.NOT_FREE:
                return result
        takes = [*map(self._pinned, range(len(leaves)), leaves)]
        prepared = self._prepared(takes, lanes, stream, out_specs, call_site())
        return out_specs.tree.unflatten(prepared.submit())

    def _lanes(self, stream: Stream) -> tuple[Sequence[Lane], bool]:
        """The lanes of a call, and whether some are left out because it is made by a call in them."""
        lanes = [stream] if self._lane is None else [stream, self._lane]
        free = scheduler.not_entered(lanes)
        return free, len(free) < len(lanes)

    def _run_here(self, leaves: Sequence[jax.Array], lanes: Sequence[Lane], stream: Stream, site: Site) -> PyTree:
        def body() -> PyTree:
            args, kwargs = self.in_specs.tree.unflatten(self._on_host(values_of(leaves)))
            started = _perf_counter()
            result = observe(self._target)(*args, **kwargs)
            if self.out_specs is not None:
                result = self.out_specs.fit(result, self._name)
            else:
                result = self._unspecified.as_arrays(result)
                if self._mode != "inline":
                    flat, tree = jax.tree.flatten(result)
                    out_specs = [OutSpec(x.aval, x.sharding, x.committed) for x in values_of(flat)]
                    self.out_specs = OutSpecs(out_specs, tree)
                    self._cheapness.measured(_perf_counter() - started)
                    result = self._without_arguments(result, args, kwargs)
            return result

        observe = observe_call(self._name, stream)
        return scheduler.run_here(self._call(site, stream, lanes, body)) if lanes else body()

    def _run_if_free(self, body: Callable[[], PyTree], lanes: Sequence[Lane], stream: Stream) -> PyTree:
        call = Call(self._name, call_site(), stream, lanes, body)
        if self._history is not None:
            call.entering = self._history.has_nothing_ahead
        return scheduler.run_here(call, only_if_free=True)

    def _call(self, site: Site, stream: Stream, lanes: Sequence[Lane], body: Callable[[], PyTree]) -> Call:
        call = Call(self._name, site, stream, lanes, body)
        self._order(call)
        return call

    def _order(self, call: Call) -> None:
        if self._history is not None and self._lane in call.lanes:
            self._history.order(call, shows_state=self._shows_state)

    def _prepared(
        self, takes: list[Take], lanes: Sequence[Lane], stream: Stream, out_specs: OutSpecs, site: Site
    ) -> Prepared:
        prepared = self._on_thread.prepared(takes, lanes, stream, out_specs, site)
        if self._ahead is None:  # what the calls that run ahead see is up to `RunAhead`
            self._order(prepared.call)
        return prepared

    def _pinned(self, i: int, leaf: Any) -> Take:
        """What returns an argument, as it is now, on the host when the function runs."""
        if type(leaf) is HostArgument:
            target = None if self._host_shardings is None else self._host_shardings[i]
            return self._taken(leaf if target is None else leaf.moved(target), is_pinned=False)
        if self._host_shardings is None or leaf.sharding == self._host_shardings[i]:
            return self._pins.pin(i, leaf)
        target = self._host_shardings[i]
        if type(leaf) is PendingArray:
            take = pin(leaf)
            return lambda: device_put(take(), target)
        copy = device_put(leaf, target)
        return lambda: copy

    def _taken(self, leaf: Any, is_pinned: bool) -> Take:
        """What returns an argument of a call in a program when the function runs."""
        if type(leaf) is HostArgument:
            return leaf.itself if self._takes_numpy else leaf.array
        return pin(leaf) if is_pinned else unpinned(leaf)

    def _on_host(self, leaves: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """The arguments, copied to the CPU devices of the hosts where they are elsewhere."""
        return leaves if self._host_shardings is None else moved(leaves, self._host_shardings)


def _has_value(leaf: jax.Array) -> bool:
    return type(leaf) is not PendingArray or leaf.has_value


def _without_shards(spec: OutSpec) -> jax.Array:
    """A result on a host that has none of its devices."""
    return jax.make_array_from_single_device_arrays(spec.shape, spec.sharding, [], dtype=spec.dtype)
