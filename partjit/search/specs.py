"""`search_specs`: from a function, its arguments and a machine to specs."""

from collections.abc import Iterable, Sequence

import jax
from jax.sharding import AbstractMesh, Mesh

from partjit._jax.types import PyTree
from partjit.api import pjit
from partjit.auto_specs import AUTO
from partjit.checks import (
    items_of,
    require,
    require_flag,
    require_integer,
    require_mesh_type,
    require_number,
    wrong_value,
)
from partjit.inspect.tracing import trace_function
from partjit.mesh import ambient_or_abstract_mesh
from partjit.search.find import OWN, Progress, Ranking, find
from partjit.search.found import Candidate, Constraint, FoundSpecs, paths_by_number, spec_of
from partjit.search.given import given_axes
from partjit.search.improve import METHODS, Scored
from partjit.search.machine import Machine
from partjit.search.options import (
    bytes_of,
    machine_of,
    names_of,
    require_auto_axes,
    require_mesh_of,
    shown_progress,
    workers_of,
)
from partjit.search.program import SearchedProgram
from partjit.search.space import Space
from partjit.search.timed import fastest, require_measurable

__all__ = ["search_specs"]


def search_specs(
    fun: object,
    *args: object,
    mesh: Mesh | AbstractMesh | None = None,
    memory: float | None = None,
    machine: Machine | None = None,
    in_specs: PyTree = AUTO,
    out_specs: PyTree = AUTO,
    constrain: bool | Iterable[str] = True,
    donate_argnums: int | Sequence[int] = (),
    overlap: float = 0.0,
    questions: int = 200,
    time_limit: float | None = None,
    methods: Iterable[str] = ("descent",),
    progress: Progress | bool | None = None,
    isolated: bool = True,
    workers: int | None = None,
    measure: int = 0,
) -> FoundSpecs:
    """Finds specs for the arguments, results and activations of a function with which a step takes the least time.

    The function is traced and lowered once. Then it is asked what specs would cost: their collectives, memory and
    FLOPs are predicted as `partjit.inspect.explain` predicts them, and the machine says how long they take. Nothing is
    compiled or executed, unless the best are to be measured. The search starts from data parallelism, ZeRO-1 and
    ZeRO-3, Megatron, both and sequence parallelism, and improves the best of them; it never returns anything worse than
    these. Layers that are alike are decided together, and the state of an optimizer is sharded as its parameter, or
    over more axes.

    Args:
        fun: a function, or what `pjit` or `jax.jit` made of one. The specs that it has are not taken as fixed; see
            `FoundSpecs.diff`.
        *args: its arguments, trees of arrays or of `jax.ShapeDtypeStruct`s.
        mesh: the mesh, or None for the ambient one.
        memory: the bytes that a device may need; by default what the machine has. Estimates are mostly within 15 %.
        machine: the machine; by default that of the devices of the mesh if it is known, or else an H100.
        in_specs: specs that are fixed: a tree prefix of the arguments with leaves as those of `pjit`'s in specs but
            FROM_ARRAY, of which UNSPECIFIED leaves an array to the partitioner, and `AUTO` for what is to be chosen.
        out_specs: the same for the results. A result that is an argument anew has the spec of that.
        constrain: whether activations may be constrained; or the names of those that may be, as
            `jax.ad_checkpoint.checkpoint_name` gives them.
        donate_argnums: the numbers of the arguments whose memory the program may reuse; those of a function of `pjit`
            or `jax.jit` are known.
        overlap: which part of the communication is hidden behind computation; see `estimate_time`.
        questions: how many different specs are asked about. The result is the same for the same number.
        time_limit: how many seconds to search, for results that may differ from one run to the next.
        methods: "descent", "annealing", or both, each with a share of the questions; see docs/search.md.
        progress: called with the questions so far, their limit and the seconds of the best step; True for a line on
            the standard error. By default that line is shown where the standard error is a terminal.
        isolated: whether other processes run the partitioner, which a failed check of it ends: such a question counts
            as one that cannot be answered, and the search goes on. They take some seconds to start. Another one also
            runs what is measured, on CPUs. Otherwise this process does.
        workers: how many processes answer at the same time, if they are other ones; by default as many as this process
            may use processors, at most 8. The result is the same for any number.
        measure: how many programs are compiled at the end, and take steps in turn on the devices of the mesh: what was
            found, the function's own specs, the best start of each kind, and the next best found. The fastest is
            returned, and `seconds` still is its estimate. Arguments are those given, or made up where types are. That
            needs the memory of the arguments twice, or on CPUs three times, and may give another result each time.

    Returns:
        The specs, as trees and as Python, with what they cost. At a prompt it shows all of that.

    Raises:
        MemoryLimitError: the function does not fit into the memory with any specs that were tried. It says by how
            much, and which arrays are in the way. It is a ValueError.
        ShardingError: specs that are fixed do not fit.
        WhatIfError: none of the starts could be tried, or none of the programs measured: each ended its process.
        TypeError, ValueError: an argument is wrong, tracing the function raises it, or the mesh has axes of type
            Explicit, along which specs are types; or the function or its arguments are on another mesh, or the machine
            lacks a link for one of the axes; or what is to be measured has effects, or devices that this process does
            not have.
        jax.errors.JaxRuntimeError: none of what was to be measured could be compiled and run.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np
        >>> from jax import ShapeDtypeStruct as S
        >>> from partjit import Mesh, P
        >>> from partjit.search import h100
        >>> def step(params, x):
        ...     grads = jax.grad(lambda p: jnp.mean(jnp.tanh(x @ p["up"]) @ p["down"]))(params)
        ...     return jax.tree.map(lambda p, g: p - g, params, grads)
        >>> mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
        >>> params = {"up": S((1024, 8192), jnp.float32), "down": S((8192, 1024), jnp.float32)}
        >>> args = params, S((512, 1024), jnp.float32)
        >>> found = search_specs(step, *args, mesh=mesh, machine=h100(mesh), donate_argnums=0, isolated=False)
        >>> found.in_specs[1], found.seconds <= min(start.seconds for start in found.starts)
        (P(...), True)
        >>> search_specs(step, *args, mesh=mesh, machine=h100(mesh), memory=1e6, isolated=False)
        Traceback (most recent call last):
            ...
        partjit.errors.MemoryLimitError: search_specs: step does not fit into 1.0 MB per device on data=4, model=2: ...

    Source: Alpa, https://arxiv.org/abs/2201.12023, and PartIR, https://arxiv.org/abs/2401.11202, for what is chosen;
    TOAST, https://arxiv.org/abs/2508.15010, for classes of dimensions.
    """
    where = "search_specs"
    given = ambient_or_abstract_mesh() if mesh is None else mesh
    on: Mesh = require_mesh_type(where, "mesh", given, or_abstract=True)
    if on.size < 2:
        raise wrong_value(where, "mesh", on, "a mesh of several devices", "give one, or set one with partjit.set_mesh")
    used: Machine = machine_of(on) if machine is None else require(where, "machine", machine, Machine, "a Machine")
    most = used.memory if memory is None else require_number(where, "memory", memory, "a number of bytes above 0")
    if most <= 0:
        raise wrong_value(where, "memory", memory, "a number of bytes above 0")
    overlap = require_number(where, "overlap", overlap, "a number between 0 and 1")
    if not 0 <= overlap <= 1:
        raise wrong_value(where, "overlap", overlap, "a number between 0 and 1")
    questions = require_integer(where, "questions", questions, 1)
    if time_limit is not None and require_number(where, "time_limit", time_limit, "a number of seconds above 0") <= 0:
        raise wrong_value(where, "time_limit", time_limit, "a number of seconds above 0")
    chosen = items_of(where, "methods", methods, f"some of {', '.join(METHODS)}")
    for method in chosen:
        if not isinstance(method, str) or method not in METHODS:
            raise wrong_value(where, "methods", method, f"some of {', '.join(METHODS)}")
    names = names_of(where, constrain)
    isolated = require_flag(where, "isolated", isolated)
    count, timed = workers_of(workers), require_measurable(where, measure, on)
    made = fun if hasattr(fun, "trace") or not callable(fun) else pjit(fun, donate_argnums=donate_argnums)
    with shown_progress(where, progress) as report:
        traced = trace_function(made, args, {}, on)
        require_auto_axes(where, traced, on)
        require_mesh_of(where, traced, on)
        program = SearchedProgram(traced, used, overlap, count if isolated else 0)
        try:
            positional, result = program.leaf_trees
            fixed = given_axes(in_specs, "in_specs", positional, on), given_axes(out_specs, "out_specs", result, on)
            space = Space(program, *fixed, names)
            ranking = find(program, space, bytes_of(most), questions, time_limit, chosen, report)
        finally:
            program.close()
        if timed:
            ranking = fastest(program, ranking, timed, jax.tree.leaves(args), where=where, isolated=isolated)
    return _found(fun, program, space, ranking, on, used, bytes_of(most), overlap)


def _found(
    fun: object,
    program: SearchedProgram,
    space: Space,
    ranking: Ranking,
    mesh: Mesh,
    machine: Machine,
    memory: int,
    overlap: float,
) -> FoundSpecs:
    question, answer = ranking.question, ranking.answer
    arguments = [spec_of(question.arguments.get(k) or axes) for k, axes in enumerate(answer.arguments)]
    results = [spec_of(question.results.get(k) or axes) for k, axes in enumerate(answer.results)]
    in_specs, _ = jax.tree.unflatten(program.in_tree, arguments)

    def candidate(one: Scored) -> Candidate:
        own = space.own if one.origin == OWN else space.question(one.choice)
        measured = None if own is None else ranking.measured.get(own.key)
        return Candidate(one.origin or "near", one.score.seconds, one.score.peak, not one.score.excess, measured)

    return FoundSpecs(
        program.unit.name,
        mesh,
        machine,
        memory,
        in_specs,
        jax.tree.unflatten(program.out_tree, results),
        tuple(_constraints(program, space, ranking.best)),
        ranking.best.score.seconds,
        ranking.best.score.peak,
        tuple(map(candidate, ranking.starts)),
        tuple(map(candidate, ranking.runners_up)),
        ranking.best.origin,
        ranking.method,
        ranking.questions,
        ranking.unanswered,
        ranking.seconds,
        ranking.measured.get(question.key),
        ranking.passed_over,
        program,
        fun,
        overlap,
    )


def _constraints(program: SearchedProgram, space: Space, best: Scored) -> Iterable[Constraint]:
    question = space.question(best.choice)
    makers = {
        value.number: equation for equation in program.partitioned.inlined.equations for value in equation.outputs
    }
    for k, numbers in question.uses.items():
        if numbers:
            value = program.inputs[k]
            yield Constraint(spec_of(question.values[numbers[0]]), value.path or "", value.shown_type, (), numbers)
    for family, extra in zip(space.families, best.choice.constraints, strict=True):
        if extra is not None:
            made = {number: makers[number] for number in family.numbers}
            forward = {number: one.site for number, one in made.items() if "transpose(" not in one.scope}
            array = next(iter(made.values())).outputs[0].shown_type
            spec = spec_of(question.values[family.numbers[0]])
            yield Constraint(spec, "", array, paths_by_number(forward), tuple(family.numbers))
