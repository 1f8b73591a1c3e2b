"""The stages of a program with colocated calls that a user can hold: traced, planned and lowered, compiled.

They offer what jax's stages of a program without calls offer; what those say of one executable, these say of all of the
plan's.
"""

import collections
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.interpreters.mlir import LoweringParameters

from partjit._jax.compiling import output_shardings
from partjit._jax.meshes import is_other_mesh_set, under_mesh
from partjit._jax.refusal import refuse
from partjit._jax.shardings import UnspecifiedValue, or_none
from partjit._jax.tracing import abstractify, refuse_high_types
from partjit._jax.types import PyTree
from partjit.arguments import abstract_argument, require_values
from partjit.calls import names_of_calls, streams_of
from partjit.colocated.ir.eager import DefaultSharding
from partjit.colocated.runtime.streams import current_stream
from partjit.compile import Program, Traced, own_sharding
from partjit.devices import no_devices
from partjit.host_objects import HostReference, given
from partjit.mesh import is_abstract_mesh
from partjit.plan.plan import Plan
from partjit.plan.run.agreed import failing_everywhere
from partjit.plan.run.link import compile_fragments, link
from partjit.plan.run.program import default_sharding_for, lower_plan, placing_of, plan_of, runnable_of
from partjit.plan.run.run import Run
from partjit.primitive import shardings_of
from partjit.structures import ANY_ARRAY, differing_nodes, kind_of

__all__ = ["PlannedCompiled", "PlannedLowered", "PlannedTraced"]


class PlannedTraced(Traced):
    """A traced program that is run by a plan."""

    @property
    def plan(self) -> Plan:
        """What the program does when it is called from the current stream."""
        refuse_high_types(self.jaxpr, self.fun_name, "planned")
        return plan_of(self.leaves, **self.program.params)

    def _repr_html_(self) -> str:
        return self.plan._repr_html_()

    def lower(
        self,
        *,
        lowering_platforms: tuple[str, ...] | None = None,
        _private_parameters: LoweringParameters | None = None,
    ) -> Any:
        """Lowers its fragments.

        Raises:
            ValueError: the function closes over values of an outer trace; or it is lowered for other platforms than
                that of the mesh, as by `jax.export`.
        """
        self._check_closed()
        if lowering_platforms is not None or _private_parameters is not None:
            names = names_of_calls([self.jaxpr.jaxpr])
            raise ValueError(
                f"{self.fun_name} cannot be exported or lowered for another platform: it calls the colocated "
                f"function{'s' if len(names) > 1 else ''} {', '.join(names)}, and there is no place for a Python "
                "function in an exported program. Export the functions between the calls, each by itself: a pjit "
                "without calls can be exported"
            )
        plan = plan_of(self.leaves, **self.program.params, is_for_caller=False)
        structs = [_struct(leaf) for leaf in self.leaves]
        return PlannedLowered(plan, self.program, structs, self.args_info, self.out_info)


class _Stage:
    """A stage of a planned program after its plan was made.

    Attributes:
        plan: the plan of calls from any stream that the program does not name.
        args_info, out_info: trees like the arguments and the result, of what is known of them.
        in_tree, out_tree: their structures.
    """

    def __init__(
        self, plan: Plan, program: Program, structs: Sequence[jax.ShapeDtypeStruct], args_info: PyTree, out_info: PyTree
    ) -> None:
        self.plan = plan
        self.args_info = args_info
        self.out_info = out_info
        self.in_tree = program.in_tree
        self.out_tree = program.out_tree
        self._program = program
        self._structs = structs
        self._fragments = lower_plan(plan, program.mesh)

    @property
    def in_avals(self) -> PyTree:
        """A tree like `(args, kwargs)` of abstract values."""
        return jax.tree.unflatten(self.in_tree, self._program.jaxpr.in_avals)

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """The numbers of the flat arguments that are donated."""
        return tuple(i for i, donated in enumerate(self._program.donated_invars) if donated)

    def _repr_html_(self) -> str:
        return self.plan._repr_html_()


class PlannedLowered(_Stage):
    """A planned program whose fragments are lowered; mirrors `jax.stages.Lowered`."""

    def __repr__(self) -> str:
        return f"<lowered {repr(self.plan)[1:]}"

    def as_text(self, dialect: str | None = None, *, debug_info: bool = False) -> str:
        """The text of all fragments, each under its name."""
        return _titled(
            (lowered.fragment.name, lowered.lowering.as_text(dialect, debug_info=debug_info))
            for lowered in self._fragments
        )

    def cost_analysis(self) -> dict[str, float]:
        """Estimates before compilation, summed over the fragments; calls count for nothing."""
        return _summed([lowered.lowering.cost_analysis() for lowered in self._fragments])

    def compile(self, compiler_options: Mapping[str, object] | None = None) -> "PlannedCompiled":
        """Compiles the fragments.

        Raises:
            ValueError: options are given: each fragment would take them for its own.
            MissingMeshError: the mesh is abstract.
        """
        if is_abstract_mesh(self._program.mesh):
            raise no_devices(f"{self.plan.name} cannot be compiled", self._program.mesh)
        if compiler_options:
            raise ValueError("a program with colocated calls is several executables and takes no compiler_options")
        return PlannedCompiled(self.plan, self._program, self._structs, self.args_info, self.out_info)


class PlannedCompiled(_Stage):
    """A compiled plan, to be called with arguments like those it was made for; mirrors `jax.stages.Compiled`."""

    def __init__(
        self, plan: Plan, program: Program, structs: Sequence[jax.ShapeDtypeStruct], args_info: PyTree, out_info: PyTree
    ) -> None:
        super().__init__(plan, program, structs, args_info, out_info)
        self._default = default_sharding_for(plan, structs).sharding
        self._executables = compile_fragments(self._fragments, program.mesh)
        self._runnables: dict[DefaultSharding, Run] = {}

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Runs the plan.

        Raises:
            TypeError: the structure or the types of the arguments are not those it was compiled for.
            ValueError: a committed array has another sharding than it was compiled for.
            RuntimeError: it is called by a function with `uses_jax=False`.
        """
        with self.failing_everywhere():
            refuse()
            return self._run(args, kwargs)

    def failing_everywhere(self) -> contextlib.AbstractContextManager[None]:
        """A block in which what is raised before the plan runs ends the call in all processes."""
        return failing_everywhere(self._plan_of_caller())

    def _run(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> PyTree:
        objects = _host_objects(self._program, args, kwargs)
        host = {key for key, _ in self._program.host}
        args = tuple(arg for i, arg in enumerate(args) if i not in host)
        kwargs = {name: value for name, value in kwargs.items() if name not in host}
        leaves, tree = jax.tree.flatten((args, kwargs))
        if tree != self.in_tree:
            expected = jax.tree.unflatten(self.in_tree, [ANY_ARRAY] * self.in_tree.num_leaves)
            raise TypeError(
                f"{self.plan.name} was compiled for arguments of another structure: "
                f"{'; '.join(_differing(expected, (args, kwargs)))}"
            )
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            raise TypeError(
                f"Cannot apply JAX transformations to {self.plan.name}, which was lowered and compiled for a "
                "particular signature: transform the function instead"
            )
        for leaf, value, path in zip(leaves, self.plan.inputs, self._program.arg_paths, strict=True):
            aval = abstract_argument(leaf, path, self.plan.name)
            if (aval.shape, aval.dtype) != (value.aval.shape, value.aval.dtype):
                raise TypeError(
                    f"Argument types differ from the types for which {self.plan.name} was compiled: {path} was "
                    f"{value.aval.str_short()} and is {aval.str_short()}"
                )
        require_values(leaves, self._program.arg_paths, self.plan.name)
        self._check_shardings(leaves)
        plan, mesh = self._plan_of_caller(), self._program.mesh
        with under_mesh(mesh) if is_other_mesh_set(mesh) else contextlib.nullcontext(), given(objects):
            runnable = self._runnable(leaves) if plan is self.plan else runnable_of(plan, leaves, mesh)
            return runnable(placing_of(plan, leaves, mesh).apply(leaves), self.out_tree)

    def __repr__(self) -> str:
        return f"<compiled {repr(self.plan)[1:]}"

    def _runnable(self, leaves: Sequence[object]) -> Run:
        """The plan with what was compiled for it, in whatever context it is called."""
        default = default_sharding_for(self.plan, leaves)
        if default not in self._runnables:
            mesh = self._program.mesh
            self._runnables[default] = link(self.plan, self._fragments, self._executables, default, mesh)
        return self._runnables[default]

    def _check_shardings(self, leaves: Sequence[object]) -> None:
        wrong = []
        for leaf, value, path in zip(leaves, self.plan.inputs, self._program.arg_paths, strict=True):
            given = own_sharding(leaf)
            if isinstance(given, UnspecifiedValue):
                continue
            if value.sharding is None:
                fits = given.device_set == self._default.device_set
            else:
                fits = given.is_equivalent_to(value.sharding, value.aval.ndim)
            if not fits:
                wrong.append(
                    f"Argument {path} with shape {value.aval.str_short()}:\n  Passed sharding: {given}\n  "
                    f"Required sharding: {value.sharding or self._default}"
                )
        if wrong:
            raise ValueError(
                "Computation was compiled for input shardings that disagree with the shardings of arguments passed to "
                f"it. Here are the {len(wrong)} mismatches:\n" + "\n".join(wrong)
            )

    def _plan_of_caller(self) -> Plan:
        """The plan, or another one from a stream that the program names, so that both are one order."""
        if current_stream() not in streams_of(self._program.jaxpr.jaxpr):
            return self.plan
        return plan_of(self._structs, **self._program.params)

    @property
    def input_shardings(self) -> PyTree:
        """Trees like `(args, kwargs)` of the shardings in which the arguments are taken; None where any will do."""
        return jax.tree.unflatten(self.in_tree, [value.sharding for value in self.plan.inputs])

    @property
    def output_shardings(self) -> PyTree:
        """A tree like the result of the shardings of its arrays."""
        known = {
            value: sharding
            for lowered, executable in zip(self._fragments, self._executables, strict=True)
            for value, sharding in zip(lowered.fragment.outputs, output_shardings(executable), strict=True)
        }
        requested = shardings_of(self._program.out_specs, self._program.mesh)
        return jax.tree.unflatten(
            self.out_tree,
            [known.get(v, v.sharding or sharding) for v, sharding in zip(self.plan.outputs, requested, strict=True)],
        )

    def as_text(self) -> str:
        """The optimized text of all fragments, each under its name."""
        return _titled(
            (lowered.fragment.name, executable.as_text())
            for lowered, executable in zip(self._fragments, self._executables, strict=True)
        )

    def cost_analysis(self) -> dict[str, float]:
        """XLA's estimates, summed over the fragments; calls count for nothing."""
        return _summed([executable.cost_analysis() for executable in self._executables])

    def memory_analysis(self) -> dict[str, Any]:
        """XLA's memory statistics of each fragment, by name, in bytes per device."""
        return {
            lowered.fragment.name: executable.memory_analysis()
            for lowered, executable in zip(self._fragments, self._executables, strict=True)
        }


def _host_objects(
    program: Program, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> dict[HostReference, object]:
    """What the host arguments of a call are."""
    objects = {}
    for key, reference in program.host:
        if not (key in kwargs if isinstance(key, str) else key < len(args)):
            raise TypeError(f"{program.name} was compiled with its host argument {reference.path} and called without")
        objects[reference] = kwargs[key] if isinstance(key, str) else args[key]
    return objects


def _struct(leaf: object) -> jax.ShapeDtypeStruct:
    """What is known of an argument without its value."""
    aval = abstractify(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=or_none(own_sharding(leaf)))


def _titled(texts: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"// {name}\n{text}" for name, text in texts)


def _summed(analyses: Iterable[Any]) -> dict[str, float]:
    total: collections.Counter[str] = collections.Counter()
    for analysis in analyses:
        total.update(analysis[0] if isinstance(analysis, list) else analysis or {})
    return dict(total)


def _differing(expected: PyTree, given: PyTree) -> Iterable[str]:
    """Where the arguments of a call, as `(args, kwargs)`, have another structure than those of a compiled program."""
    for path, then, now in differing_nodes(expected, given, is_prefix=False):
        was, found = kind_of(then), kind_of(now)
        if was == found:  # they differ in what a class of the user's says of itself
            was, found = (f"of the structure {jax.tree.structure(node)}" for node in (then, now))
        where = ("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:]) if path else "(args, kwargs)"
        yield f"{where} was {was} and is {found}"
