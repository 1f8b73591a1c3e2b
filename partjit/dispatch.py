"""Calling a program: the slow path, which reshards arguments and compiles, and the C++ fast path it leaves behind.

The C++ function remembers, per signature of a call (types, shardings, static arguments, ambient mesh), which executable
to run; from then on such a call has no Python frame of ours in its path. It takes an array over several devices for
what the executable expects without looking at its layout, so a call with a misplaced argument leaves no fast path.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from partjit import lazy, short_cuts
from partjit._jax.caches import weakref_cache
from partjit._jax.dispatch import (
    USE_OF_DONATED_BUFFERS_CRASHES,
    InternalFloatingPointError,
    fast_path_data,
    make_cpp_function,
    recheck_for_nans,
    results_are_checked,
)
from partjit._jax.layouts import in_default_layouts
from partjit._jax.meshes import under_mesh
from partjit._jax.shardings import MaybeSharding, UnspecifiedValue
from partjit._jax.tracing import has_high_types, is_eager, is_staged, trace_state_clean
from partjit._jax.types import PyTree
from partjit.arguments import Function, parameter_names, positions, require_values
from partjit.attempt import Attempt
from partjit.calls import is_program_with_calls
from partjit.compile import Program
from partjit.evaluate import are_pending, dispatched, function_of, run_equation
from partjit.host_objects import HostReference, calling_with, given
from partjit.infer import Definition, forget, infer_program
from partjit.letting_in import LettingIn, this_thread
from partjit.mesh import has_explicit_axes
from partjit.pickling import Recipe, reducer
from partjit.pieces.calls import NOT_LOCAL, call_locally
from partjit.placement import Misplaced, misplaced, reshard
from partjit.primitive import pjit_p, shardings_of
from partjit.retiring import retiring
from partjit.traced_calls import TracedCalls
from partjit.typed import check_types, resharded
from partjit.validate import require_devices_of_mesh

if TYPE_CHECKING:
    from partjit.colocated.agreement import arguments
    from partjit.colocated.agreement.program import Agreement
    from partjit.plan.run import program as plans
    from partjit.plan.run import recent as recent_calls
else:  # a program without calls does without
    arguments = lazy.module("partjit.colocated.agreement.arguments")
    plans, recent_calls = lazy.module("partjit.plan.run.program"), lazy.module("partjit.plan.run.recent")

__all__ = ["CacheMiss", "make_function"]

Outcome: TypeAlias = tuple[PyTree, object, bool]
"""Of a call: its result, the data of its fast path or None, and whether the C++ function drops its entry."""


class CacheMiss:
    """The C++ function calls this for an unknown signature, and for every call of a program that a plan runs.

    Args:
        fun: the user's function.
        definition: what `pjit` was given with it.

    Attributes:
        fun: the user's function.
        recent: the last calls of programs that a plan runs; None before the first.
        letting_in: of which signatures the C++ functions that call this have entries that let others in.
        of_arrays: where each process passes its own pieces, the C++ function of the arrays, and what it calls.
    """

    def __init__(self, fun: Function, definition: Definition) -> None:
        self.fun = fun
        self._definition = definition
        self._misplacement = Misplaced(definition.name)
        self.recent: recent_calls.Recent | None = None
        self._known = TracedCalls()
        self._is_left_out = False  # whether there was a call that neither C++ nor a plan recognizes the next time
        self.of_arrays: tuple[Function, CacheMiss] | None = None
        self._agreement: Agreement | None = None
        self._is_of_one_process = True
        # What looks for a call among the last ones before anything else; None where other processes may have to know of
        # the call before it is found, or where it has to be changed to be found.
        self._recognized: Callable[..., Outcome | None] | None = None
        # Of host arguments: the positional ones, by how many positional arguments there are, and those by name.
        self._places: dict[int, list[tuple[int, HostReference]]] = {}
        self._named_places = [(name, HostReference(definition.name, name)) for name in definition.host[1]]
        self.letting_in = LettingIn()

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> Outcome:
        """The outcome of a call."""
        return self.recognized(args, kwargs) or self._unrecognized(args, kwargs)

    def _unrecognized(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> Outcome:
        attempt = None
        try:
            if this_thread.is_letting_in:
                return None, this_thread.short_cut, False
            if self.recent is not None and self.letting_in.has_plans_only and self.letting_in.is_new and is_eager():
                self._let_in(args, kwargs)  # before anything that takes time
            attempt = Attempt(self._definition.name, self._last_agreement())
            if self.of_arrays is not None:
                call = attempt.handing_over(self.of_arrays[0])
                result = call_locally(self._definition, call, args, kwargs, self._misplacement)
                if result is not NOT_LOCAL:
                    return result, None, False
            objects = self._definition.referenced(args, kwargs)[2]
            if not objects:
                return self._outcome(args, kwargs, attempt)
            with given(objects):  # which C++ knows nothing of, so that there is no fast path
                return self._outcome(args, kwargs, attempt)[0], None, False
        except BaseException as error:
            (attempt or Attempt(self._definition.name, self._last_agreement())).fail(error)
            raise

    def recognized(
        self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], *, retires: bool = False
    ) -> Outcome | None:
        """The outcome of a call that is like one of the last ones at a glance, which then are of a plan; else None.

        With `retires` for a call that is not `retiring`, and so has to do the same itself.
        """
        find = self._recognized
        if find is None or this_thread.is_letting_in:
            return None
        entries, recent = self.letting_in, self.recent
        if recent is not None:
            if entries.is_new:
                if not is_eager():  # others, for which C++ finds an entry, are eager
                    return None
                if entries.has_plans_only or recent.knows(args, kwargs):
                    self._let_in(args, kwargs)
            elif recent.has_learned or entries.may_shorten:
                self._shorten(args, kwargs, recent)
        return find(args, kwargs, retires=retires)

    def _let_in(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> None:
        """Lets further calls with such arguments in, at once: those that come before have to wait for this one."""
        if self.letting_in.replaces_another():
            self.letting_in.let_in(args, kwargs)
            self.letting_in.may_shorten = True

    def _shorten(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], recent: "recent_calls.Recent") -> None:
        """Lets calls with such arguments in by a short cut, if there is one and nobody is in its way."""
        entries, found = self.letting_in, None
        if self._definition.host == ((), ()):
            found = recent.short_cut(args, kwargs, self._is_fit_for_short_cut)
        recent.has_learned = False
        entries.may_shorten = results_are_checked()  # until they are no more
        if found is None:
            return
        fast_path, streams = found
        if not recent_calls.is_watched(streams):
            entries.let_in(args, kwargs, fast_path, streams)
            if not recent_calls.is_watched(streams):
                return
            entries.let_in(args, kwargs)  # someone has begun meanwhile
        short_cuts.closed_for_now(entries)

    def _is_fit_for_short_cut(self, array: jax.Array) -> bool:
        """Whether C++ may take such an argument at any time."""
        is_checked = USE_OF_DONATED_BUFFERS_CRASHES and any(self._definition.donate)
        return not is_checked or len(array.sharding.device_set) == 1

    def _with_objects(
        self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], *, retires: bool = False
    ) -> Outcome | None:
        """As `recent.outcome`, of a program with host arguments."""
        if self.recent is None:
            return None
        definition, count = self._definition, len(args)
        places = self._places.get(count)
        if places is None:
            names, numbers = parameter_names(definition.signature, count), positions(definition.host[0], count)
            places = self._places[count] = [(i, HostReference(definition.name, names[i])) for i in sorted(numbers)]
        objects = {reference: args[i] for i, reference in places}
        if kwargs:
            objects.update((reference, kwargs[name]) for name, reference in self._named_places if name in kwargs)
        return calling_with(objects, self.recent.outcome, args, kwargs, retires=retires)

    def _last_agreement(self) -> "Agreement | None":
        return (self if self.of_arrays is None else self.of_arrays[1])._agreement

    def _outcome(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], attempt: Attempt) -> Outcome:
        if self.recent is not None and self._recognized is None and is_eager():
            outcome = self.recent.outcome(args, kwargs, attempt.runs)
            if outcome is not None:
                return outcome
        program, leaves = self._program(args, kwargs)
        values = [*program.consts, *leaves]
        if has_high_types(program.jaxpr):
            return jax.tree.unflatten(program.out_tree, _by_jax(program, values)), None, False
        if not trace_state_clean() or any(isinstance(value, Tracer) for value in values):
            outs = (_inlined if self._is_inlined(program) else _bind)(program, values)
            return jax.tree.unflatten(program.out_tree, outs), None, False
        require_values(leaves, program.arg_paths, program.name)
        require_devices_of_mesh(program.mesh, program.name)
        is_plan = is_program_with_calls(program.jaxpr)
        if not is_plan and are_pending(values):
            values = arguments.agreed_values(values, program.mesh, program.name)
        shardings = shardings_of(program.in_specs, program.mesh)
        moved = misplaced(values, shardings)
        report = None
        if moved:
            own = len(program.consts)
            self._is_left_out = True
            if self._definition.device is None:
                which = {"shardings": shardings[own:], "paths": program.arg_paths, "indices": [i - own for i in moved]}
                report = functools.partial(self._misplacement.report, **which)
                report(values[own:])
        if is_plan:  # which reshards by itself, in all of its processes or in none
            if self.recent is None or self.letting_in.is_new:
                self._let_in(args, kwargs)
            plan = plans.plan_of(values, **program.params)
            self._agreement = attempt.runs(plan)
            placing, run = plans.placing_of(plan, values, program.mesh), plans.runnable_of(plan, values, program.mesh)
            if not program.consts:
                self.recent = self.recent or recent_calls.Recent(self._definition.static, self._definition.host)
                self.recent.remember(
                    args, kwargs, program.in_tree, leaves, plan, placing, run, program.out_tree, report
                )
                self._is_of_one_process = self._is_of_one_process and self._agreement is None
                find = self.recent.outcome if self._definition.host == ((), ()) else self._with_objects
                self._recognized = find if self._is_of_one_process and self.of_arrays is None else None
            return run(placing.apply(values), program.out_tree), None, False
        fast_path = None
        try:
            if moved:
                outs = dispatched(reshard(values, shardings, moved), program.params)
            else:
                values, are_others = in_default_layouts(values)
                outs, executable, consts = run_equation(values, **program.params)
                if not are_others and not program.consts:
                    fast_path = fast_path_data(executable, program.out_tree, leaves, outs, program.jaxpr, consts)
        except InternalFloatingPointError as error:
            recheck_for_nans(error, self.fun, args, kwargs)
            raise
        if self.recent is not None:
            self.letting_in.take_back()
        self.letting_in.count_one_more()
        self._is_left_out = self._is_left_out or fast_path is None
        return jax.tree.unflatten(program.out_tree, outs), fast_path, False

    def _program(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> tuple[Program, list[Any]]:
        is_remembered = self._definition.untraced == ((), ()) and (self._is_left_out or not is_eager())
        known = self._known.find(args, kwargs) if is_remembered else None
        if known is None:
            known = infer_program(self.fun, self._definition, args, kwargs)
            if is_remembered and not self._definition.is_searched:
                self._known.remember(args, kwargs, known[0])
        return known

    def clear(self) -> None:
        """Forgets all calls."""
        self._known.clear()
        self.letting_in.clear()
        if self.recent is not None:
            self.recent.clear()

    def _is_inlined(self, program: Program) -> bool:
        """Whether the equations of a program take the place of an equation that is one, as those of `jax.jit` do."""
        return (
            self._definition.inline
            and is_staged()
            and all(isinstance(spec, UnspecifiedValue) for spec in (*program.in_specs, *program.out_specs))
        )


def make_function(
    fun: Function,
    definition: Definition,
    on_values: Function,
    methods: Mapping[str, Callable[..., object]],
    recipe: Recipe,
) -> Any:
    """The C++ function that dispatches calls, with attributes like those of `fun` and methods of its own.

    Args:
        fun: the user's function.
        definition: what `pjit` was given with it.
        on_values: called under `jax.disable_jit()`.
        methods: its methods besides `clear_cache`, by name.
        recipe: makes such a function anew, where it is unpickled.
    """
    cache_miss = CacheMiss(fun, definition)
    function = _cpp_function(cache_miss, definition, on_values)
    if definition.is_local:
        global_definition = dataclasses.replace(definition, is_local=False)
        of_arrays = CacheMiss(fun, global_definition)
        cache_miss.of_arrays = _cpp_function(of_arrays, global_definition, on_values), of_arrays
    functools.update_wrapper(function, fun)

    def clear_cache() -> None:
        """Forgets all that was traced and compiled for this function."""
        for each in (cache_miss, *(cache_miss.of_arrays or ())[1:]):
            each.clear()
        forget(fun)

    own = {**methods, "clear_cache": clear_cache, "__reduce_ex__": reducer(function, recipe), "_recipe": recipe}
    function.__dict__ = _Attributes(function.__dict__, own)
    return function


def _cpp_function(cache_miss: CacheMiss, definition: Definition, on_values: Function) -> Any:
    name, static, donate, key = definition.name, definition.static, definition.donate, definition.dispatch_key
    function = cpp_function = make_cpp_function(on_values, name, cache_miss, static, key)
    cpp_function._fun = cache_miss.fun  # where jax looks for the function when a result has a NaN
    if USE_OF_DONATED_BUFFERS_CRASHES and any(donate):

        def consume(*args: PyTree, **kwargs: PyTree) -> PyTree:
            outcome = cache_miss.recognized(args, kwargs)
            return cpp_function(*args, **kwargs) if outcome is None else outcome[0]

        call = retiring(consume, donate)

        def call_retiring(*args: PyTree, **kwargs: PyTree) -> Outcome:
            outcome = cache_miss.recognized(args, kwargs, retires=True)
            if outcome is not None:
                return outcome
            if this_thread.is_letting_in:
                return None, this_thread.short_cut, False
            return call(*args, **kwargs), None, False

        function = make_cpp_function(on_values, name, call_retiring, static, (*key, "retiring"))
    cache_miss.letting_in.functions = tuple({id(f): f for f in (function, cpp_function)}.values())
    return function


class _Attributes(dict[str, object]):
    """The attributes of one function, of which `functools.update_wrapper` sees those that another may share.

    The function is an instance of jax's class, whose methods are those of `jax.jit`: others can only be attributes of
    the instance. A wrapper such as `jax.jit` copies the attributes of what it wraps, but must not copy these.
    """

    def __init__(self, shared: Mapping[str, object], own: Mapping[str, object]) -> None:
        super().__init__({**shared, **own})
        self._own = frozenset(own)

    def __iter__(self) -> Iterator[str]:
        return (name for name in super().__iter__() if name not in self._own)

    def keys(self) -> Any:
        return list(self)


def _bind(program: Program, values: Sequence[object]) -> Sequence[object]:
    """Binds the program as an equation of the current trace, with arguments of the types that it has inside."""
    own = len(program.consts)
    avals = program.jaxpr.in_avals
    check_types(values[own:], avals[own:], program.arg_paths, program.name)
    if has_explicit_axes(program.mesh):
        values = [resharded(x, aval, program.mesh) for x, aval in zip(values, avals, strict=True)]
    return pjit_p.bind(*values, **program.params)


def _inlined(program: Program, values: Sequence[object]) -> Sequence[object]:
    """Evaluates the equations of a program in the current trace."""
    numbers = bool | int | float | complex | np.ndarray | np.generic  # a result that is an argument is none of them
    arrays = [jax.numpy.asarray(value) if isinstance(value, numbers) else value for value in values]
    return jaxpr_as_fun(program.jaxpr)(*arrays)


def _by_jax(program: Program, values: Sequence[object]) -> Sequence[object]:
    """Calls a program with values of types that users define: jax makes arrays of them as it evaluates `jax.jit`."""
    specs = [shardings_of(specs, program.mesh) for specs in (program.in_specs, program.out_specs)]
    with contextlib.nullcontext() if program.mesh.empty else under_mesh(program.mesh):
        try:
            return _jitted(program.jaxpr, *map(tuple, specs))(*values)
        except ValueError as error:
            if is_program_with_calls(program.jaxpr):
                error.add_note(f"{program.name} is run by jax.jit, for it takes or returns values of hijax types")
            raise


@weakref_cache
def _jitted(
    jaxpr: ClosedJaxpr, in_shardings: tuple[MaybeSharding, ...], out_shardings: tuple[MaybeSharding, ...]
) -> Function:
    fun = function_of(jaxpr)
    return jax.jit(lambda *args: tuple(fun(*args)), in_shardings=in_shardings, out_shardings=out_shardings)
