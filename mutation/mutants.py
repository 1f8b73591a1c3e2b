"""Which mutants a source file has, and which of them are sampled.

cosmic-ray finds and makes them; what is left out here says nothing about the tests: annotations, code that does not
compile, spellings of the same comparison, and decorators that only cache.
"""

import dataclasses
import functools
import itertools
import random
import re
from collections.abc import Iterator
from pathlib import Path

import cosmic_ray.plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.ast.ast_query import ASTQuery
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from parso.tree import NodeOrLeaf

from mutation.operators import OPERATORS

LEFT_OUT = re.compile(
    r"_(Is|IsNot)_(?!Is)"  # `x is y` as `x == y` or `x < y`
    r"|_Is(Not)?$(?<!_Is_IsNot)(?<!_IsNot_Is)"  # `x == y` as `x is y`
    r"|BinaryOperator_(?!Add_Sub|Sub_Add|Mul_FloorDiv|FloorDiv_Mul|FloorDiv_Mod|Mod_FloorDiv|Mod_Mul|Pow_Mul|Div_Mul"
    r"|LShift_RShift|RShift_LShift|BitOr_BitAnd|BitAnd_BitOr|BitXor_BitOr|Add_Mul|Mul_Add)"
    r"|UnaryOperator_(?!Delete|USub_UAdd)"
)
"""Operators of cosmic-ray that are no use: what they make is the same in other words, or raises a TypeError always."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of one source file.

    Attributes:
        path: the source file, relative to the root of the repository.
        operator: the name of the operator.
        occurrence: how many places of the file the operator can change before this one.
        line: the first line that differs, counted from 1.
        function: the function or class it is in, or the empty string.
        before: the changed lines, stripped and joined by blanks.
        after: the same lines after the change.
    """

    path: str
    operator: str
    occurrence: int
    line: int
    function: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.operator}\n    - {self.before}\n    + {self.after}"


@functools.cache
def operators() -> dict[str, type[Operator]]:
    """Every operator that is used, by name, in an order that does not change."""
    names = [name.partition("/")[2] for name in cosmic_ray.plugins.operator_names()]
    theirs = {name: cosmic_ray.plugins.get_operator(f"core/{name}") for name in names if not LEFT_OUT.search(name)}
    used = {name: operator for name, operator in theirs.items() if not operator.arguments()}
    return dict(sorted((used | OPERATORS).items()))


@dataclasses.dataclass(frozen=True)
class Place:
    """One place of a source file, and the changes of one kind that can be made there.

    Attributes:
        path: the source file, relative to the root of the repository.
        function: the function or class it is in, or the empty string.
        changes: the operators, each with its `occurrence` (see `Mutant`).
    """

    path: str
    function: str
    changes: tuple[tuple[str, int], ...]


def places(root: Path, path: str) -> list[Place]:
    """Where the file `path` can be changed."""
    source = (root / path).read_text(encoding="utf-8")
    nodes = [*ast_nodes(get_ast(source))]
    changes: dict[tuple[object, str], list[tuple[str, int]]] = {}
    functions = {}
    for name, operator in operators().items():
        positions = ((node, position) for node in nodes for position in operator().mutation_positions(node))
        for occurrence, (node, position) in enumerate(positions):
            if not _says_nothing(node, _between(source, *position)):
                key = position, name.split("_")[0]
                changes.setdefault(key, []).append((name, occurrence))
                functions[key] = ASTQuery(node).get_definition_name() or ""
    return [Place(path, functions[key], tuple(found)) for key, found in changes.items()]


def mutants(root: Path, place: Place) -> Iterator[Mutant]:
    """The mutants of a place that compile."""
    source = (root / place.path).read_text(encoding="utf-8")
    for name, occurrence in place.changes:
        try:
            mutated = mutate_code(source, operators()[name](), occurrence)
        except AttributeError:  # cosmic-ray cannot replace an exception with a dotted name
            continue
        if mutated is not None and mutated != source and _compiles(mutated):
            line, before, after = _difference(source, mutated)
            yield Mutant(place.path, name, occurrence, line, place.function, before, after)


def sample(root: Path, path: str, size: int, seed: str) -> list[Mutant]:
    """Mutants of `size` places of a file, the same ones for the same seed."""
    chance = random.Random(f"{seed} {path}")
    shuffled = places(root, path)
    chance.shuffle(shuffled)
    # One mutant of each place: an operator that can be replaced by many is not looked at more often than a call.
    one_each = (chance.choice(found) for place in shuffled if (found := [*mutants(root, place)]))
    return [*itertools.islice(one_each, size)]


def _says_nothing(node: NodeOrLeaf, code: str) -> bool:
    # `zip(..., strict=True)` is an assertion.
    if code == "strict=True":
        return True
    if node.type == "keyword" and node.parent is not None and node.parent.get_code().strip() == "strict=True":
        return True
    child = node
    while (parent := child.parent) is not None:
        if child.type == "decorator" and "cache" in child.get_code():  # it only caches
            return True
        is_return = parent.type == "funcdef" and parent.annotation is child
        if is_return or parent.type == "tfpdef" or (parent.type == "annassign" and parent.children[1] is child):
            return True
        child = parent
    return False


def _between(source: str, start: tuple[int, int], end: tuple[int, int]) -> str:
    lines = source.splitlines(keepends=True)[start[0] - 1 : end[0]]
    lines[-1] = lines[-1][: end[1]]
    return "".join(lines)[start[1] :]


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


def _difference(before: str, after: str) -> tuple[int, str, str]:
    old, new = before.splitlines(), after.splitlines()
    start = next(at for at, (left, right) in enumerate(zip(old, new, strict=False)) if left != right)
    end = next(at for at, (left, right) in enumerate(zip(old[::-1], new[::-1], strict=False)) if left != right)
    end = min(end, len(old) - start, len(new) - start)
    return start + 1, _joined(old[start : len(old) - end]), _joined(new[start : len(new) - end])


def _joined(lines: list[str]) -> str:
    return " ".join(line.strip() for line in lines)
