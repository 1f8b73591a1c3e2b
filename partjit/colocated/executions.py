"""Executions of executables that make calls: how these take their place in the order of calls."""

import contextlib
import contextvars
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import jax
import numpy as np

from partjit._jax.callbacks import raise_of_xla
from partjit._jax.dispatch import check_results, results_are_checked, results_unchecked
from partjit._jax.refusal import leave_refusal
from partjit._jax.threads import ThreadSettings
from partjit._jax.types import PyTree
from partjit.colocated.emitted import EmittedCall
from partjit.colocated.runtime import scheduler, threads
from partjit.colocated.runtime.answering import Answering
from partjit.colocated.runtime.call import Call, Lane, current_calls
from partjit.colocated.runtime.caller import Caller
from partjit.colocated.runtime.emission import Execution
from partjit.colocated.runtime.emission_on_streams import ExecutionOnStreams
from partjit.colocated.runtime.gathered import GatheredCalls
from partjit.colocated.runtime.numbers import Number, Numbers
from partjit.colocated.runtime.streams import Stream, inside

__all__ = ["run_answering", "run_emitting", "run_gathering"]

Dispatch: TypeAlias = Callable[..., Sequence[jax.Array]]
"""Dispatches an executable, given the number of the execution and the other arguments; the first result is the number
of calls made."""


def run_emitting(
    calls: Sequence[EmittedCall],
    dispatch: Dispatch,
    numbers: Numbers,
    *args: jax.Array,
    gathered: Sequence[GatheredCalls],
    may_wait: bool,
) -> Sequence[jax.Array]:
    """Dispatches an executable that makes calls; they run in the place of one call.

    Args:
        calls: its calls; those of each object are on one stream.
        dispatch: dispatches it.
        numbers: those of its executions.
        args: its other arguments.
        gathered: those that are handed over for several iterations at once.
        may_wait: whether the devices may run calls themselves, if that is quicker. Otherwise a thread does.

    Returns:
        The other results.
    """
    _prepare(calls)
    if len({call.specialization.own_stream() for call in calls}) > 1:
        return _run_on_streams(calls, gathered, dispatch, numbers, args)
    lanes = _lanes(calls)
    free = [*scheduler.not_entered(lanes)]
    number = numbers.take()

    def run_calls() -> None:
        execution.run_calls()
        if execution.is_complete:
            numbers.give_back(number)

    if len(free) < len(lanes) or threads.may_have_no_more():
        execution = _execution(calls, gathered, number)
        try:
            return _dispatched(execution, dispatch, number, args)
        except BaseException:  # also where a signal handler raises on the way there
            execution.abandon()
            raise
        finally:
            _run_as_part(calls, free, run_calls)
    # Many calls at once had better run beside the iterations that follow.
    may_wait = may_wait and not any(own.is_repeated for own in gathered)
    if may_wait and all(call.specialization.is_quick for call in calls) and not any(lane.calls for lane in lanes):
        return _run_beside_devices(calls, gathered, dispatch, numbers, number, args)
    execution = _execution(calls, gathered, number)
    try:
        scheduler.submit(_in_place_of_all(calls, free, run_calls))
        return _dispatched(execution, dispatch, number, args)
    except BaseException:
        execution.abandon()
        raise


def _run_on_streams(
    calls: Sequence[EmittedCall],
    gathered: Sequence[GatheredCalls],
    dispatch: Dispatch,
    numbers: Numbers,
    args: Sequence[jax.Array],
) -> Sequence[jax.Array]:
    """As `run_emitting`, where the calls are of several streams; those of each run in the place of one call in it."""
    number, running = numbers.take(), current_calls()
    streams = [call.specialization.own_stream() for call in calls]
    execution = ExecutionOnStreams(calls, gathered, number.value, streams, running[-1] if running else None)
    here: list[Callable[[], None]] = []

    def run_calls_of(stream: Stream) -> None:
        if execution.run_calls_of(stream):
            numbers.give_back(number)

    try:
        places, own = _places_by_stream(calls, streams, run_calls_of)
        here.extend(own)
        for place in places:
            scheduler.submit(place)
        return _dispatched(execution, dispatch, number, args)
    except BaseException:  # also where a signal handler raises on the way there
        execution.abandon()
        raise
    finally:
        for run in here:
            run()


def _places_by_stream(
    calls: Sequence[EmittedCall], streams: Sequence[Stream | None], run_calls_of: Callable[[Stream], None]
) -> tuple[Sequence[Call], Sequence[Callable[[], None]]]:
    """Calls in the place of those of each stream; and what this thread is to run once the executable is dispatched.

    That is what is a part of its own call; and all calls, if there may be no thread that could run them meanwhile.

    Args:
        calls: the calls of an executable.
        streams: the stream of each; None for those that are not meant.
        run_calls_of: runs those of one stream.
    """
    places: list[Call] = []
    here: list[Callable[[], None]] = []
    for stream in dict.fromkeys(streams):
        if stream is None:
            continue
        own = [call for call, of in zip(calls, streams, strict=True) if of is stream]
        lanes = _lanes(own)
        free = [*scheduler.not_entered(lanes)]
        run = partial(run_calls_of, stream)
        if len(free) < len(lanes) or threads.may_have_no_more():
            here.append(partial(_run_as_part, own, free, run))
        else:
            places.append(_in_place_of_all(own, free, run))
    return places, here


def _run_as_part(calls: Sequence[EmittedCall], lanes: Sequence[Lane], run: Callable[[], None]) -> None:
    """Runs calls in this thread, as a part of the call that it runs, if any, in the lanes that it is not in."""
    if lanes:
        scheduler.run_here(_in_place_of_all(calls, lanes, run))
    else:
        run()


def _in_place_of_all(calls: Sequence[EmittedCall], lanes: Sequence[Lane], run: Callable[[], None]) -> Call:
    """A call in the place of those of an executable that are on one stream, in the context of its caller.

    Args:
        calls: these.
        lanes: its lanes.
        run: runs them.
    """
    context, settings = contextvars.copy_context(), ThreadSettings.here()
    stream = calls[0].specialization.own_stream()  # of this thread, not of that which runs the calls

    def body() -> Sequence[jax.Array]:
        settings.run(context.run, in_context)
        return ()

    def in_context() -> None:
        inside(stream)
        run()

    return _call_in_place_of_all(calls, lanes, body)


def _call_in_place_of_all(calls: Sequence[EmittedCall], lanes: Sequence[Lane], body: Callable[[], PyTree]) -> Call:
    first, *others = (call.specialization for call in calls)
    return first.in_place_of_all(calls[0].site, lanes, body, others)


def _run_in_place_of_all(
    calls: Sequence[EmittedCall], body: Callable[[Call | None], Sequence[jax.Array]]
) -> Sequence[jax.Array]:
    """Runs a function in this thread, in the place of all calls of an executable, which are on one stream.

    It gets the call in their place, or None if they are a part of another one, or nobody else makes calls there.
    """
    lanes, stream = _lanes(calls), calls[0].specialization.own_stream()
    # No other thread can submit a call to a private stream in between.
    if len(lanes) == 1 and not stream.calls and stream.is_private:
        return body(None)
    free = [*scheduler.not_entered(lanes)]
    if not free:
        return body(None)
    call = _call_in_place_of_all(calls, free, lambda: body(call))
    return scheduler.run_here(call)


def run_gathering(
    calls: Sequence[EmittedCall],
    gathered: Sequence[GatheredCalls],
    dispatch: Callable[..., Sequence[jax.Array]],
    name: str,
    *args: jax.Array,
) -> Sequence[jax.Array]:
    """Dispatches an executable that returns what its calls get; they run in the place of one call in each stream.

    Args:
        calls: its calls; those of each object are on one stream.
        gathered: which of its first results each of them gets, in their order.
        dispatch: dispatches it.
        name: its name.
        args: its arguments.

    Returns:
        The other results.

    Raises:
        FloatingPointError: one of them has a NaN or infinity, and the user wants to know. The calls are made.
    """
    _prepare(calls)
    is_checked = results_are_checked()
    with results_unchecked() if is_checked else contextlib.nullcontext():
        results = dispatch(*args)
    ends = [*itertools.accumulate(own.stacks + own.others for own in gathered)]
    parts = [results[start:end] for start, end in itertools.pairwise([0, *ends])]
    streams, running = [call.specialization.own_stream() for call in calls], current_calls()
    parent = running[-1] if running else None

    def run_calls_of(stream: Stream) -> None:
        for own, part in zip(gathered, parts, strict=True):
            try:
                values = [*map(np.asarray, part)]
            except Exception:  # the executable has failed, which its other results show
                return
            for which, _, arrays in own.each(values):
                if streams[which] is stream:
                    calls[which].run_with(stream, parent, arrays)

    places, here = _places_by_stream(calls, streams, run_calls_of)
    for place in places:
        scheduler.submit(place)
    for run in here:
        run()
    others = results[ends[-1] :]
    if is_checked:
        check_results(others, name)
    return others


def run_answering(
    calls: Sequence[EmittedCall], dispatch: Dispatch, numbers: Numbers, *args: jax.Array
) -> Sequence[jax.Array]:
    """Dispatches an executable that waits for the calls that it makes, and waits for its end.

    Args:
        calls: its calls; those that it waits for are on one stream, on which no others are.
        dispatch: dispatches it.
        numbers: those of its executions.
        args: its other arguments.

    Returns:
        The other results.

    Raises:
        Exception: what a function raised, with a note that names the call.
    """
    _prepare(calls)
    if not all(call.is_answered for call in calls):
        return _run_answering_beside_others(calls, dispatch, numbers, args)

    def body(place: Call | None) -> Sequence[jax.Array]:
        number = numbers.take()
        _, *results = _answered(Answering(calls, number.value, place), calls, dispatch, number, args)
        numbers.give_back(number)
        return results

    return _run_in_place_of_all(calls, body)


def _run_answering_beside_others(
    calls: Sequence[EmittedCall], dispatch: Dispatch, numbers: Numbers, args: Sequence[jax.Array]
) -> Sequence[jax.Array]:
    """As `run_answering`, where it does not wait for some calls: those of each stream run in the place of one in it."""
    number, running = numbers.take(), current_calls()
    streams = [None if call.is_answered else call.specialization.own_stream() for call in calls]
    others = ExecutionOnStreams(calls, (), number.value, streams, running[-1] if running else None)

    def run_calls_of(stream: Stream) -> None:
        place = current_calls()[-1]
        if others.run_calls_of(stream, place if place in places else None):
            numbers.give_back(number)

    def body(place: Call | None) -> Sequence[jax.Array]:
        # Not before: what is in their streams may wait for calls that have the place of these.
        for other in places:
            scheduler.submit(other)
        made, *results = _answered(Answering(calls, number.value, place, others), calls, dispatch, number, args)
        others.end(int(np.asarray(made)[2]))
        return results

    places, here = _places_by_stream(calls, streams, run_calls_of)
    for other in places:
        scheduler.wait_for_room(other.lanes[0])
        other.needs_no_room = True  # it is not waited for once this thread has what others may wait for
    try:
        return _run_in_place_of_all([call for call in calls if call.is_answered], body)
    except BaseException:  # also where a signal handler raises on the way there
        others.abandon()
        raise
    finally:
        for run in here:
            run()


def _answered(
    answering: Answering, calls: Sequence[EmittedCall], dispatch: Dispatch, number: Number, args: Sequence[jax.Array]
) -> Sequence[jax.Array]:
    """Dispatches an executable that waits for calls, and waits for its end; gives all of its results."""
    with answering as execution:
        try:
            made, *results = dispatch(number.array, *args)
            made.block_until_ready()
        except BaseException as error:
            leave_refusal()
            if execution.failure is not None:
                which, cause = execution.failure
                calls[which].specialization.failure(cause, calls[which].site).raise_()
            raise_of_xla(error)
    return [made, *results]


def _prepare(calls: Sequence[EmittedCall]) -> None:
    """Prepares functions to be called."""
    for call in calls:
        call.specialization.prepare()


def _lanes(calls: Sequence[EmittedCall]) -> list[Lane]:
    """Those of the streams that calls are on, and of the objects whose methods they are."""
    return [*dict.fromkeys(lane for call in calls for lane in call.specialization.lanes())]


def _execution(
    calls: Sequence[EmittedCall], gathered: Sequence[GatheredCalls], number: Number, caller: Caller | None = None
) -> Execution:
    running, stream = current_calls(), calls[0].specialization.own_stream()
    return Execution(calls, gathered, number.value, stream, running[-1] if running else None, caller)


def _run_beside_devices(
    calls: Sequence[EmittedCall],
    gathered: Sequence[GatheredCalls],
    dispatch: Dispatch,
    numbers: Numbers,
    number: Number,
    args: Sequence[jax.Array],
) -> Sequence[jax.Array]:
    """Dispatches an executable whose calls threads of the devices run, and waits for its end."""
    execution = _execution(calls, gathered, number, Caller(calls[0].specialization.own_stream()))

    def body(_: Call | None) -> Sequence[jax.Array]:
        results = _dispatched(execution, dispatch, number, args)
        execution.join()
        if execution.is_complete:
            numbers.give_back(number)
        return results

    return _run_in_place_of_all(calls, body)


def _dispatched(
    execution: Execution, dispatch: Dispatch, number: Number, args: Sequence[jax.Array]
) -> Sequence[jax.Array]:
    try:
        made, *results = dispatch(number.array, *args)
        execution.dispatched(made)
    except BaseException as error:
        if execution.interrupt is not None:
            raise execution.interrupt from None
        raise_of_xla(error)
    if execution.interrupt is not None:
        raise execution.interrupt
    return results
