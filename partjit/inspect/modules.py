"""The module that an equation belongs to: `Block_3/Dense_0/kernel`.

Libraries of modules enter a scope of names for each module, and jax keeps it in the name stacks of equations. An
equation that reads a parameter, or computes its gradient, has the name of the parameter at the end. A model without
scopes has the paths of its parameters instead: `layers/3/w1`.
"""

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from partjit.inspect.annotated import AnnotatedEquation, AnnotatedJaxpr, AnnotatedValue
from partjit.inspect.why.dataflow import crossings
from partjit.inspect.why.key_paths import keys_of
from partjit.paths import folded_paths, pattern_of

__all__ = ["ModulePaths", "folded", "is_within", "module_of"]

_CALL = re.compile(r"\b[\w.]+\(")
# What jax and XLA add to the scopes of the user when they lower control flow and nested functions.
# fmt: off
_LOWERED = frozenset((
    "checkpoint", "closed_call", "custom_jvp_call", "custom_vjp_call", "eval_jaxpr", "rematted_computation", "remat",
    "shard_map",
))
# fmt: on
_PAIRS = re.compile(r"(?:^|/)(?:while/(?:body|body_pred|cond)|cond/branch_\d+_fun|scan/body)(?=/|$)")
_FUNCTION = re.compile(r"^p?jit\(.*\)$")


@functools.lru_cache(maxsize=4096)  # the equations of a module have one scope
def module_of(scope: str) -> str:
    """The module path in a name stack, or in the `op_name` of HLO without its last part.

    Example:
        >>> module_of("jit(step)/transpose(jvp(LanguageModel))/Block_3/while/body/Dense_0")
        'LanguageModel/Block_3/Dense_0'
        >>> module_of("jit(step)/jvp()/bqhd,bkhd->bhqk")
        ''
    """
    parts = (part for part in _PAIRS.sub("", scope).split("/") if not _FUNCTION.match(part))
    names = (_CALL.sub("", part).rstrip(")") for part in parts)
    return "/".join(name for name in names if name and name not in _LOWERED and not _is_jaxs(name))


def _is_jaxs(name: str) -> bool:
    return "->" in name or name.startswith("eqn:")  # jnp.einsum enters a scope named after its subscripts


def is_within(module: str, searched: str) -> bool:
    """Whether consecutive parts of a module path are those that are searched; `*` stands for any characters of one.

    Example:
        >>> is_within("LanguageModel/Block_3/Dense_0/kernel", "Block_3/Dense_0")
        True
        >>> is_within("LanguageModel/Block_3/Dense_0", "Block_*/Dense_0"), is_within("Block_31", "Block_3")
        (True, False)
    """
    own = module.split("/")
    patterns = [re.escape(part).replace(r"\*", ".*") for part in searched.strip("/").split("/")]
    return any(
        all(re.fullmatch(pattern, part) for pattern, part in zip(patterns, own[k:], strict=False))
        for k in range(len(own) - len(patterns) + 1)
    )


def folded(modules: Iterable[str]) -> str:
    """A text for the paths of modules, in which those that differ in numbers only are one.

    Example:
        >>> folded(["Block_0/Dense_1", "Block_1/Dense_1", "Block_2/Dense_1"])
        'Block_{0-2}/Dense_1'
        >>> folded(["layers/0/w", "layers/2/w"])
        'layers/{0,2}/w'
    """
    alike: dict[str, list[str]] = {}
    for module in dict.fromkeys(modules):
        alike.setdefault(pattern_of(module), []).append(module)
    texts = [*map(folded_paths, alike.values())]
    return ", ".join(texts[:_LISTED]) + (f" and {len(texts) - _LISTED} more" if texts[_LISTED:] else "")


_LISTED = 2


_Keys = tuple[str, ...]


class ModulePaths:
    """The module paths of the equations of a program, each of which is made when it is asked for."""

    def __init__(self) -> None:
        self._parameters: Mapping[int, _Keys] = {}
        self._gradients: Mapping[int, _Keys] = {}

    def read(
        self,
        tree: AnnotatedJaxpr,
        equations: Iterable[AnnotatedEquation],
        results: Sequence[tuple[str | None, AnnotatedValue]],
    ) -> None:
        """Reads the parameters and gradients in a complete program: all of its equations, its results with paths."""
        self._parameters = _parameters(tree, equations)
        self._gradients = _gradients(tree, results, self._parameters)

    def of(self, equation: AnnotatedEquation) -> str:
        """The module path of an equation."""
        module = module_of(equation.scope)
        if equation.bodies:
            return module
        parameters, gradients = self._parameters, self._gradients
        # Of a parameter and its optimizer state, which has a longer path, it is the parameter.
        read = min((parameters[v.number] for v in equation.inputs if v.number in parameters), key=len, default=None)
        keys = read or next((gradients[v.number] for v in equation.outputs if v.number in gradients), None)
        if keys is None:
            return module
        module = f"{module}/{keys[-1]}" if module and keys[-1] not in module.split("/") else module
        return module or "/".join(keys[1:])


# fmt: off
_MOVES = frozenset((
    "convert_element_type", "transpose", "reshape", "squeeze", "broadcast_in_dim", "sharding_constraint", "slice",
    "dynamic_slice", "copy", "copy_p", "reduce_precision", "expand_dims", "optimization_barrier",
))
# fmt: on


def _parameters(tree: AnnotatedJaxpr, equations: Iterable[AnnotatedEquation]) -> dict[int, _Keys]:
    """The keys of the parameters that values are, by the numbers of values: arguments inside of a tree of arguments."""
    found: dict[int, _Keys] = {}
    for value in tree.inputs:
        keys = keys_of(value.path or "") or ()
        keys = tuple(key for k, key in enumerate(keys) if not k or key != "params")  # Flax names a collection so
        if len(keys) > 1:
            found[value.number] = keys
    for equation in equations:
        if equation.bodies or equation.primitive in _MOVES:
            for source, target in _same(equation):
                if source.number in found:
                    found.setdefault(target.number, found[source.number])
    return found


def _same(equation: AnnotatedEquation) -> Iterator[tuple[AnnotatedValue, AnnotatedValue]]:
    """Pairs of values that are one parameter before and after a move, or outside and inside of a nested jaxpr."""
    if equation.bodies:
        inside = {value.number for body in equation.bodies.values() for value in body.inputs}
        yield from ((source, target) for source, target in crossings(equation) if target.number in inside)
    else:
        yield from zip(equation.inputs, equation.outputs, strict=False)


def _gradients(
    tree: AnnotatedJaxpr, results: Sequence[tuple[str | None, AnnotatedValue]], of_values: Mapping[int, _Keys]
) -> Mapping[int, _Keys]:
    """The keys of the parameters that values are gradients of, by the numbers of values.

    A result with the keys of a parameter at the end of its path, new parameters or gradients, is computed from the
    gradient through values of its shape.
    """
    found: dict[int, _Keys] = {}
    by_end: dict[tuple[_Keys, tuple[int, ...]], _Keys] = {}  # the first parameter of each last keys and shape
    for value in tree.inputs:
        if (keys := of_values.get(value.number)) is not None:
            for k in range(len(keys)):
                by_end.setdefault((keys[k:], value.aval.shape), keys)
    for path, value in results:
        own = (keys_of(path or "") or ()) if value.is_array else ()
        alike = next((by_end[end] for k in range(len(own)) if (end := (own[k:], value.aval.shape)) in by_end), None)
        if alike is not None:
            found.setdefault(value.number, alike)

    def note(number: int, keys: _Keys) -> None:
        if number not in found or len(keys) < len(found[number]):  # rather the parameter than its optimizer state
            found[number] = keys

    def visit(jaxpr: AnnotatedJaxpr) -> None:
        for equation in reversed(jaxpr.equations):
            if equation.bodies:
                pass_on(equation)
                for body in equation.bodies.values():
                    visit(body)
                pass_on(equation)
                continue
            for result in equation.outputs:
                if result.number in found:
                    pass_through(equation, found[result.number], result.aval.shape)
                    break

    def pass_through(equation: AnnotatedEquation, keys: _Keys, shape: tuple[int, ...]) -> None:
        is_move = equation.primitive in _MOVES
        for value in () if not is_move and "transpose(" in equation.scope else equation.inputs:
            if value.number >= 0 and value.is_array and (is_move or value.aval.shape == shape):
                note(value.number, keys)

    def pass_on(equation: AnnotatedEquation) -> None:
        for source, target in crossings(equation):
            if target.number in found:
                note(source.number, found[target.number])

    visit(tree)
    return found
