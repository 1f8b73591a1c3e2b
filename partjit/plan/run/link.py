"""A plan made to run: its fragments compiled, its calls bound, its source turned into a function."""

import collections
import dataclasses
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from types import CodeType
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.sharding import Mesh, Sharding, SingleDeviceSharding
from jax.typing import ArrayLike

from partjit._jax.arrays import ArrayImpl, item_of, numpy_putter, replica_of
from partjit._jax.compiling import (
    MeshComputation,
    MeshExecutable,
    executable_key,
    move_outputs,
    shard_constants,
    without_tokens,
)
from partjit._jax.dispatch import (
    USE_OF_DONATED_BUFFERS_CRASHES,
    FastPath,
    InternalFloatingPointError,
    fast_path_data,
    make_cpp_function,
    recheck_for_nans,
    set_function_for_nans,
)
from partjit._jax.layouts import in_default_layouts
from partjit._jax.meshes import EMPTY_MESH, is_other_mesh_set, under_mesh
from partjit._jax.moves import resharded
from partjit._jax.shardings import device_list
from partjit.colocated.devices import colocated_sharding
from partjit.colocated.emitted import EmittedCall, SpecializationForExecutables
from partjit.colocated.executions import run_answering, run_emitting, run_gathering
from partjit.colocated.in_programs import SpecializationForPrograms
from partjit.colocated.ir.eager import DefaultSharding
from partjit.colocated.ir.emission import ANSWERED, has_other_effects
from partjit.colocated.ir.primitive import SpecializationOfKind
from partjit.colocated.journaling.identity import in_scope_of_caller
from partjit.colocated.runtime.host_values import HostArgument
from partjit.colocated.runtime.numbers import Numbers
from partjit.colocated.runtime.out_spec import OutSpec
from partjit.compile import lower_jaxpr
from partjit.mesh import has_explicit_axes
from partjit.nan_sources import evaluated
from partjit.plan.ir.integers import computed_by_host, integer_of
from partjit.plan.ir.nodes import ColocatedCall, Fragment, Loop, Value
from partjit.plan.ir.walk import blocks_of, known_number, walk
from partjit.plan.passes.emit import handed_over, returned
from partjit.plan.passes.fragments import shardings_of_fragment
from partjit.plan.passes.gather import gathered_calls
from partjit.plan.plan import Plan
from partjit.plan.run.agreed import agreement_for
from partjit.plan.run.ahead import zeros_of
from partjit.plan.run.counters import counting_along, given_numbers, integer_of_counter, is_number, know
from partjit.plan.run.direct import LeftToDispatch, left_to_dispatch
from partjit.plan.run.first import AfterFirst, after_first
from partjit.plan.run.host_thread import running_in_host_thread
from partjit.plan.run.intact import read_after_calls, refusing_deleted, refusing_shared
from partjit.plan.run.moving import mover, typed_on, value_of
from partjit.plan.run.observe import observed
from partjit.plan.run.run import Execute, Run
from partjit.plan.show.source import emit

__all__ = ["LoweredFragment", "compile_fragments", "link", "lower_fragment"]


@dataclasses.dataclass(frozen=True, eq=False)
class LoweredFragment:
    """A fragment before it is compiled.

    Attributes:
        fragment: the fragment.
        lowering: as jax has it.
    """

    fragment: Fragment[Value, Value]
    lowering: MeshComputation


def lower_fragment(plan: Plan, fragment: Fragment[Value, Value], mesh: Mesh) -> LoweredFragment:
    """Lowers a fragment for arguments with the shardings of the plan."""
    ins, outs = shardings_of_fragment(fragment, plan.mesh)
    if fragment.by_one_device and not plan.mesh.empty:
        first, mesh = SingleDeviceSharding(plan.mesh.devices.flat[0]), EMPTY_MESH
        ins, outs = (first,) * len(ins), (first,) * len(outs)
    name = f"{plan.name}_{fragment.name}"
    lowering = lower_jaxpr(fragment.jaxpr, ins, outs, fragment.donated_arguments, mesh, name, False)
    return LoweredFragment(fragment, lowering)


def compile_fragments(fragments: Sequence[LoweredFragment], mesh: Mesh) -> list[MeshExecutable]:
    """The executables of fragments, whose results come back on the user's mesh; equal fragments share one."""
    kinds = [_kind(lowered.fragment) for lowered in fragments]
    counts = collections.Counter(kinds)
    compiled: dict[Hashable, MeshExecutable] = {}
    executables = []
    for i, (lowered, kind) in enumerate(zip(fragments, kinds, strict=True)):
        has_peers = counts[kind] > 1 and not lowered.fragment.calls
        key = (executable_key(lowered.lowering) if has_peers else None) or i
        if key not in compiled:
            compiled[key] = lowered.lowering.compile()
            if has_explicit_axes(mesh) and not lowered.fragment.by_one_device:
                move_outputs(compiled[key], mesh)
        executables.append(compiled[key])
    return executables


def _kind(fragment: Fragment[Value, Value]) -> Hashable:
    """What is equal for equal fragments, and found at once."""
    return tuple(fragment.jaxpr.in_avals), len(fragment.jaxpr.eqns), fragment.donated_arguments, fragment.by_one_device


def link(
    plan: Plan,
    fragments: Sequence[LoweredFragment],
    executables: Sequence[MeshExecutable],
    default: DefaultSharding,
    mesh: Mesh,
) -> Run:
    """Makes the function of a plan.

    Args:
        plan: the plan.
        fragments, executables: its fragments in their order, lowered and compiled.
        default: the sharding of values whose own the plan leaves open.
        mesh: the user's mesh, maybe with Explicit axes, on which results come back.
    """
    fast_paths: dict[str, FastPath] = {}
    namespace: dict[str, Any] = {"wait": value_of, "read": _read, "release": _release, "count": know}
    numbers_of_loops = (known_number(node) for node in walk(plan.nodes) if isinstance(node, Loop))
    counters = {*plan.counters, *(number for number in numbers_of_loops if number is not None)}
    if plan.counted is not None:
        namespace["know"] = counting_along(plan.counted)
    agreement = agreement_for(plan)
    sharding_of = partial(_sharding_of, mesh, default)
    for value, constant in plan.constants:
        namespace[value.name] = _put(constant, typed_on(mesh, value.sharding or default.sharding))
    put = numpy_putter(ShapedArray((), np.dtype(np.int32)), default.sharding, default.committed, is_explicit=True)
    may_wait = ANSWERED.issuperset(device.platform for device in device_list(default.sharding))
    for lowered, executable in zip(fragments, executables, strict=True):
        dispatch = _dispatcher(plan, lowered, executable, fast_paths, on_cpu=may_wait)
        emitted = [
            EmittedCall(
                _specialized(call, default, mesh, SpecializationForExecutables),
                handed_over(call, plan.mesh),
                returned(call, plan.mesh),
                call.site,
                call.name,
                call.is_answered,
            )
            for call in lowered.fragment.calls
        ]
        gathered = gathered_calls(lowered.fragment, plan.mesh)
        run_fragment: Callable[..., Sequence[jax.Array]] = dispatch
        if lowered.fragment.gathered:
            run_fragment = partial(run_gathering, emitted, gathered, dispatch, f"{plan.name}_{lowered.fragment.name}")
        elif lowered.fragment.waits_for_calls:
            run_fragment = _with_calls(run_answering, emitted, dispatch, put)
        elif emitted:
            emitting = partial(run_emitting, gathered=gathered, may_wait=may_wait)
            run_fragment = _with_calls(emitting, emitted, dispatch, put)
        if lowered.fragment.by_one_device:
            on_device = partial(_by_one_device, dispatch)
            number_of = integer_of if counters.isdisjoint(lowered.fragment.inputs) else integer_of_counter
            run_fragment = computed_by_host(lowered.fragment.jaxpr, on_device, number_of) or on_device
        name = lowered.fragment.name
        if agreement is not None:  # it dispatches on a thread of its own
            on_zeros = zeros_of(plan, lowered.fragment, sharding_of)
            zeros = None if on_zeros is None else lambda dispatch=dispatch, on_zeros=on_zeros: dispatch(*on_zeros())
            names = [value.name for value in lowered.fragment.inputs]
            agreed = partial(agreement.dispatching, name, on_zeros=zeros, names=names)
            run_fragment = in_scope_of_caller(run_fragment, agreed) if emitted else agreed(run_fragment)
        namespace[name] = run_fragment
    numbers = set() if agreement is not None else counters | {v for v, _ in plan.constants if is_number(v)}
    own = _read_once(plan) if agreement is None else ()
    direct = LeftToDispatch()
    if agreement is None:
        direct = left_to_dispatch(plan, default.sharding, default.committed, sharding_of)
    for call in walk(plan.nodes):
        if isinstance(call, ColocatedCall):
            specialization = _specialized(call, default, mesh, SpecializationForPrograms, direct.made)
            # One with results may as well be left to whoever waits for it.
            is_made_if_brief = agreement is None and (plan.makes_brief_calls or not call.outputs)
            run_call = _caller(call, specialization, own, is_made_if_brief=is_made_if_brief)
            run_call = given_numbers(run_call, call.inputs, numbers, sharding_of)
            names = [value.name for value in call.outputs]
            namespace[call.name] = run_call if agreement is None else agreement.calling(names, run_call)
    for transfer in plan.transfers:
        move = mover(transfer, mesh)
        namespace[transfer.name] = move if agreement is None else agreement.moving(move)
    if agreement is not None:
        namespace |= {"read": agreement.reading(_read), "wait": agreement.waiting(value_of)}
        namespace["release"] = agreement.releasing(_release)
    source = plan.source if agreement is None else emit(plan, is_agreed=True)
    code = compile(source, f"<plan of {plan.name}>", "exec")
    name = source[len("def ") : source.index("(")]
    late = read_after_calls(plan)
    with_events = refusing_deleted(observed(plan, code, name, dict(namespace)), plan, plan, late)
    with_events = direct.putting(refusing_shared(with_events, plan, sharding_of))
    execute = refusing_deleted(_defined(code, name, namespace), plan, plan, late)
    execute = direct.putting(refusing_shared(execute, plan, sharding_of))
    is_other_set = is_other_mesh_set(mesh)
    if is_other_set:  # functions compute with arrays over that of the program
        execute, with_events = partial(_executed_under, mesh, execute), partial(_executed_under, mesh, with_events)
    if plan.in_host_thread and agreement is None:
        (device,) = device_list(default.sharding)
        execute, with_events = running_in_host_thread(device, execute), running_in_host_thread(device, with_events)
        return Run(plan, execute, with_events, agreement, namespace["wait"], direct, None)
    remaining = after_first(plan) if agreement is None and not is_other_set else None
    rest = None
    if remaining is not None:
        code_of_rest = compile(emit(remaining), code.co_filename, "exec")
        execute_rest = _defined(code_of_rest, name, namespace)
        rest = AfterFirst(plan, remaining, execute_rest, late, sharding_of, fast_paths, direct)
    return Run(plan, execute, with_events, agreement, namespace["wait"], direct, rest)


def _defined(code: CodeType, name: str, namespace: Mapping[str, Any]) -> Execute:
    """The function that the source of a plan defines."""
    own = dict(namespace)
    exec(code, own)
    return own[name]


def _executed_under(mesh: Mesh, execute: Execute, *args: Any) -> Sequence[jax.Array]:
    with under_mesh(mesh):
        return execute(*args)


def _dispatcher(
    plan: Plan,
    lowered: LoweredFragment,
    executable: MeshExecutable,
    fast_paths: dict[str, FastPath],
    *,
    on_cpu: bool,
) -> Callable[..., Sequence[jax.Array]]:
    """A function that dispatches a fragment, without a Python frame once it has run.

    It adds what C++ needs for that to `fast_paths`, unless a donated argument was left that the plan has to delete.
    """
    fragment = lowered.fragment
    # Its calls have a place in their stream, which is waited for at exit; its failure comes with its results.
    is_seen_to = on_cpu and fragment.calls and fragment.outputs and not has_other_effects(fragment.jaxpr)
    if fragment.waits_for_calls or is_seen_to:
        without_tokens(executable)
    consts = shard_constants(lowered.lowering, executable)
    out_tree = jax.tree.structure((0,) * len(lowered.fragment.jaxpr.out_avals))
    jaxpr = lowered.fragment.jaxpr
    # Not if it would make its calls again, or if it has consumed its arguments.
    is_repeatable = not lowered.fragment.calls and not any(lowered.fragment.donated)

    def dispatch(*args: jax.Array) -> tuple[Sequence[jax.Array], object, bool]:
        given, are_others = in_default_layouts(args)
        try:
            outs = executable.unsafe_call(*consts, *given)
        except InternalFloatingPointError as error:
            if not is_repeatable:
                raise FloatingPointError(f"invalid value ({error.ty}) encountered in {name}") from None
            recheck_for_nans(error, partial(evaluated, jaxpr), args, {})
            raise
        if are_others:
            return tuple(outs), None, False
        fast_path = fast_path_data(executable, out_tree, args, outs, jaxpr, consts)
        donated = (arg for arg, flag in zip(args, lowered.fragment.donated_arguments, strict=True) if flag)
        if fast_path is not None and all(isinstance(arg, jax.Array) and arg.is_deleted() for arg in donated):
            fast_paths[lowered.fragment.name] = fast_path
        return tuple(outs), fast_path, False

    name = f"{plan.name}_{lowered.fragment.name}"
    function = make_cpp_function(lambda *args: dispatch(*args)[0], name, dispatch, ((), ()), object())
    set_function_for_nans(function, partial(evaluated, jaxpr) if is_repeatable else None, name)
    return function


def _specialized(
    call: ColocatedCall[Value, Value],
    default: DefaultSharding,
    mesh: Mesh,
    kind: type[SpecializationOfKind],
    direct: Collection[Value] = (),
) -> SpecializationOfKind:
    """The function of a call for its arguments and results; `direct` are those that are left to the dispatch."""
    sharding_of = partial(_sharding_of, mesh, default)
    outputs = [
        OutSpec(v.aval, sharding_of(v), v.sharding is not None or default.committed, is_left_to_dispatch=v in direct)
        for v in call.outputs
    ]
    in_shardings = [colocated_sharding(sharding_of(value)) for value in call.inputs]
    shardings = [*in_shardings, *(spec.sharding for spec in outputs), default.sharding]
    return call.callee.specialized(call.stream, in_shardings, outputs, (*device_list(shardings[0]),), kind)


def _put(constant: ArrayLike, sharding: Sharding) -> jax.Array:
    """A constant on its devices, without a program over those of several processes if each has all of it.

    `jax.numpy.asarray` would compile a program for each type of constants.
    """
    owned = np.array(constant) if isinstance(constant, np.ndarray) else constant  # `device_put` shares the memory
    return resharded(jax.device_put(owned), sharding)


def _sharding_of(mesh: Mesh, default: DefaultSharding, value: Value) -> Sharding:
    return typed_on(mesh, default.sharding if value.sharding is None else value.sharding)


def _read_once(plan: Plan) -> Collection[Value]:
    """What fragments compute for one node alone, which nobody else has."""
    nodes = [*walk(plan.nodes)]
    read = collections.Counter(plan.outputs)
    for node in nodes:
        read.update(node.inputs)
        for block in blocks_of(node):
            read.update(block.outputs)
    return {v for node in nodes if isinstance(node, Fragment) for v in node.outputs if read[v] == 1}


def _caller(
    call: ColocatedCall[Value, Value],
    specialization: SpecializationForPrograms,
    of_one: Collection[Value],
    *,
    is_made_if_brief: bool,
) -> Callable[..., Sequence[jax.Array]]:
    """A function that makes a call, in this thread or on another; `of_one` are the values that one node alone reads."""
    site, distinct, node = call.site, call.distinct, call.name
    pinned = [None if v in of_one and not flag else flag for v, flag in zip(call.inputs, call.pinned, strict=True)]
    if call.is_inline:
        return specialization.calling(distinct, site, node)
    here = call.is_before_inline
    return specialization.submitting(pinned, site, node, is_run_here=here, is_made_if_brief=is_made_if_brief)


def _with_calls(
    run: Callable[..., Sequence[jax.Array]],
    calls: Sequence[EmittedCall],
    dispatch: Callable[..., Sequence[jax.Array]],
    put: Callable[[np.ndarray], jax.Array],
) -> Callable[..., Sequence[jax.Array]]:
    """A function that dispatches a fragment that makes calls."""
    return partial(run, calls, dispatch, Numbers(put))


def _by_one_device(dispatch: Callable[..., Sequence[jax.Array]], *args: Any) -> Sequence[jax.Array]:
    """Dispatches a fragment of numbers on one device, which of arrays on all devices gets what one of them has."""
    return dispatch(*map(_on_one_device, args))


def _on_one_device(arg: Any) -> Any:
    if type(arg) is ArrayImpl:
        return replica_of(arg)
    return np.asarray(arg) if type(arg) is HostArgument else arg


def _read(array: jax.Array | int) -> bool | int:
    """The value of a predicate, or the number of a branch.

    A process without devices of the program does not learn it, and goes whichever way: its results have no shards.
    """
    if isinstance(array, int):  # the host has computed it
        return array
    try:
        return item_of(array)
    except RuntimeError:
        if array.sharding.addressable_devices:
            raise
        return False


def _release(*arguments: object) -> None:
    """Gives up the memory of arguments that the caller donated; what was taken over is gone already."""
    for argument in arguments:
        if type(argument) is ArrayImpl:
            if USE_OF_DONATED_BUFFERS_CRASHES or not argument.is_deleted():  # which takes a third of the time
                argument.delete()
        elif isinstance(argument, jax.Array):
            argument.delete()
