"""Calls whose first fragment C++ dispatches as it recognizes them.

To find out in Python that a call is like an earlier one takes about as long as to dispatch it. So a C++ function that
knows the arguments of the program by their types and shardings runs the executable of the first fragment, and returns
its results with the function that does the rest of the plan. Where that needs no argument, or returns what the first
fragment has computed, as a step does that only logs, it is a short cut: the function of the user does so itself, and
Python sees nothing of the call before.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Var
from jax.sharding import Sharding
from jax.tree_util import treedef_is_leaf

from partjit import short_cuts
from partjit._jax.dispatch import (
    FastPath,
    check_results,
    fast_path_then,
    results_are_checked,
    then_with_arguments,
)
from partjit._jax.layouts import has_default_layout
from partjit._jax.types import PyTree, PyTreeDef
from partjit.arguments import abstract_argument
from partjit.plan.ir.nodes import ColocatedCall, Fragment, Value
from partjit.plan.ir.plan import PlanData
from partjit.plan.ir.walk import blocks_of, walk
from partjit.plan.plan import Plan
from partjit.plan.run.direct import LeftToDispatch
from partjit.plan.run.intact import refusing_deleted
from partjit.plan.run.placing import Move
from partjit.plan.run.so_far import keep_results

__all__ = ["AfterFirst", "after_first"]


def after_first(plan: Plan) -> PlanData | None:
    """The plan without its first fragment: of the results of that, and of the arguments that are read later.

    None if it begins with something else, or if C++ cannot dispatch it with what the program gets.
    """
    first = plan.nodes[0] if plan.nodes else None
    if not isinstance(first, Fragment) or first.nodes:
        return None
    position = {value: i for i, value in enumerate(plan.inputs)}
    taken = [position.get(value, -1) for value in first.inputs]
    donated = {value for value, is_donated in zip(first.inputs, first.donated, strict=True) if is_donated}
    counted, counters = plan.counted, {*plan.counters}
    if -1 in taken or taken != sorted({*taken}) or not plan.released <= donated | counters:
        return None
    read = {*plan.outputs, *counters}
    for node in walk(plan.nodes[1:]):
        read.update(node.inputs, *(block.outputs for block in blocks_of(node)))
    inputs = (*first.outputs, *(value for value in plan.inputs if value in read))
    fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(PlanData)}
    if counted is not None:
        positions = tuple(map(inputs.index, plan.counters))
        counted = dataclasses.replace(counted, inputs=positions)
    rest = {"inputs": inputs, "nodes": plan.nodes[1:], "released": plan.released - donated, "counted": counted}
    return PlanData(**{**fields, **rest})


class AfterFirst:
    """What a plan does after its first fragment.

    Args:
        plan: the plan.
        rest: what `after_first` says of it.
        execute: a function of the inputs of that.
        late: the arguments that nothing reads before a call.
        sharding_of: the sharding of a value of the plan.
        fast_paths: what C++ needs to dispatch fragments, by their names; of those that have been dispatched before.
        direct: what of the plan's values are NumPy arrays.

    Attributes:
        inputs: the positions of the arguments that are read after the first fragment.
        dispatched: those of its own arguments.
        streams: the streams that the program itself puts calls on.
    """

    def __init__(
        self,
        plan: Plan,
        rest: PlanData,
        execute: Callable[..., Sequence[jax.Array]],
        late: frozenset[Value],
        sharding_of: Callable[[Value], Sharding],
        fast_paths: Mapping[str, FastPath],
        direct: LeftToDispatch,
    ) -> None:
        first = plan.nodes[0]
        assert isinstance(first, Fragment), "as `after_first` has seen"
        self._plan = plan
        self._first = first
        self._rest = rest
        self._own = execute
        self._late = late
        self._direct = direct
        self._fast_paths = fast_paths
        read = {*rest.inputs}
        self.inputs = tuple(i for i, value in enumerate(plan.inputs) if value in read)
        taken = {*first.inputs}
        self.dispatched = tuple(i for i, value in enumerate(plan.inputs) if value in taken)
        donated = {value for value, is_donated in zip(first.inputs, first.donated, strict=True) if is_donated}
        self._donated = [(i, sharding_of(value)) for i, value in enumerate(plan.inputs) if value in donated]
        calls = [node for node in walk(plan.nodes, into_fragments=True) if isinstance(node, ColocatedCall)]
        self.streams = frozenset(call.stream for call in calls if call.stream is not None)

    def are_taken(self, args: Sequence[Any]) -> bool:
        """Whether C++ takes such arguments as they are: of one elsewhere it donates a copy, and the plan deletes it."""
        donated = [(args[i], sharding) for i, sharding in self._donated if isinstance(args[i], jax.Array)]
        is_there = all(arg.sharding.is_equivalent_to(sharding, arg.ndim) for arg, sharding in donated)
        return is_there and all(map(has_default_layout, args))

    def fast_path(self, tree: PyTreeDef, moves: Mapping[int, Move], numbers: Sequence[int]) -> FastPath | None:
        """What C++ needs to recognize a call; it then returns a function of the arguments that does the rest.

        Args:
            tree: the structure of the result.
            moves: what is done with those of the arguments, by position, that are not where the plan wants them.
            numbers: of each of the flat arguments, which of the arguments of that function it is.

        Returns:
            None if C++ cannot dispatch the fragment, which first has to be dispatched without, or would return the data
            of typed keys in place of keys.
        """
        plan, execute, direct = self._plan, self._execute(moves), self._direct
        inputs = [(numbers[i], moves.get(i)) for i in self.inputs]
        own = self._fast_path_of_first()
        if own is None:
            return None
        is_leaf = _is_leaf(tree)

        def go_on(results: Sequence[jax.Array], args: Sequence[Any]) -> PyTree:
            try:
                read = [args[i] if to is None else to.argument(args[i]) for i, to in inputs]
                own = execute(*results, *read)
                return own[0] if is_leaf else tree.unflatten(own)
            except BaseException as error:
                keep_results(error, plan, tree, direct)
                raise

        return fast_path_then(own, [i in self.dispatched for i in range(len(plan.inputs))], go_on)

    def short_cut(
        self,
        tree: PyTreeDef,
        moves: Mapping[int, Move],
        read: Callable[[tuple[PyTree, ...], dict[str, PyTree]], Sequence[Any]],
    ) -> FastPath | None:
        """What C++ needs to recognize a call, and to have the rest done; None where there is no such way.

        Args:
            tree, moves: as of `fast_path`.
            read: returns those of the arguments of a call whose positions are `inputs`.
        """
        plan, execute, direct = self._plan, self._execute(moves), self._direct
        own, first = self._fast_path_of_first(), self._first
        if own is None or (self.inputs and not (plan.outputs and {*plan.outputs} <= {*first.outputs})):
            return None
        is_leaf, name = _is_leaf(tree), f"{plan.name}_{first.name}"
        returned = [first.outputs.index(value) for value in plan.outputs] if self.inputs else []
        inputs = [moves.get(i) for i in self.inputs]
        given = {*first.jaxpr.jaxpr.invars}  # which may have NaNs that no device has computed
        computed = [i for i, var in enumerate(first.jaxpr.jaxpr.outvars) if isinstance(var, Var) and var not in given]

        def check(results: Sequence[jax.Array]) -> None:
            short_cuts.close()  # for whoever looks at the next call finds the operation as well
            check_results([results[i] for i in computed], name)

        def go_on(results: Sequence[jax.Array]) -> PyTree:
            try:
                if results_are_checked():
                    check(results)
                own = execute(*results)
                return own[0] if is_leaf else tree.unflatten(own)
            except BaseException as error:
                keep_results(error, plan, tree, direct)
                raise

        def go_on_later(results: Sequence[jax.Array]) -> PyTree:
            if results_are_checked():
                check(results)
            out = results[returned[0]] if is_leaf else tree.unflatten([results[i] for i in returned])
            return then_with_arguments(out, go_on_with, results)

        def go_on_with(results: Sequence[jax.Array], args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> None:
            given = read(args, kwargs)
            try:
                values = [x if to is None else to.argument(x) for x, to in zip(given, inputs, strict=True)]
            except OverflowError:
                self._name_too_large(given, results, tree)
                raise
            try:
                execute(*results, *values)
            except BaseException as error:
                keep_results(error, plan, tree, direct)
                raise

        is_given = [i in self.dispatched for i in range(len(plan.inputs))]
        return fast_path_then(own, is_given, go_on_later if self.inputs else go_on, is_at_once=True)

    def _name_too_large(self, given: Sequence[Any], results: Sequence[jax.Array], tree: PyTreeDef) -> None:
        """Raises for the first integer among the arguments that is too large, with what has been computed."""
        plan = self._plan
        try:
            for i, value in zip(self.inputs, given, strict=True):
                abstract_argument(value, plan.paths[i], plan.name)
        except OverflowError as error:
            found = {value.name: result for value, result in zip(self._first.outputs, results, strict=True)}
            keep_results(error, plan, tree, self._direct, found)
            raise

    def _execute(self, moves: Mapping[int, Move]) -> Callable[..., Sequence[jax.Array]]:
        """The function of the rest, for arguments of which those at some positions are NumPy arrays or numbers."""
        late = self._late.difference(self._plan.inputs[i] for i, move in moves.items() if not move.is_read)
        return self._direct.putting(refusing_deleted(self._own, self._plan, self._rest, late))

    def _fast_path_of_first(self) -> FastPath | None:
        first = self._first
        if any(jax.dtypes.issubdtype(value.aval.dtype, jax.dtypes.extended) for value in first.outputs):
            return None
        return self._fast_paths.get(first.name)


def _is_leaf(tree: PyTreeDef) -> bool:
    """Whether a result is one array; None and () are leaves as well, to jax."""
    return tree.num_leaves == 1 and treedef_is_leaf(tree)
