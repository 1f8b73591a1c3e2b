"""Mutation operators that cosmic-ray does not have: a statement, a keyword argument or a condition is lost."""

from collections.abc import Iterator
from typing import ClassVar

import parso
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Example, Operator
from parso.tree import BaseNode, NodeOrLeaf

Position = tuple[int, int]


class DropStatement(Operator):
    """Replaces a call made for its effect, an assignment to a part of a value, a `raise` or a `del` by `pass`."""

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[tuple[Position, Position]]:
        """The statement, where `node` is one that binds no name: without it every later read would be a NameError."""
        if node.type != "simple_stmt" or not isinstance(node, BaseNode):
            return
        statement = node.children[0]
        is_call = statement.type in ("power", "atom_expr") and _is_call(statement.children[-1])
        is_part = statement.type == "expr_stmt" and statement.children[0].type in ("power", "atom_expr")
        is_augmented = (
            statement.type == "expr_stmt"
            and statement.children[1].type == "operator"
            and len(statement.children[1].value) > 1
        )
        if is_call or is_part or is_augmented or statement.type in ("raise_stmt", "del_stmt"):
            yield statement.start_pos, statement.end_pos

    def mutate(self, node: BaseNode, index: int) -> BaseNode:
        """The statement as `pass`."""
        node.children[0] = _parsed("pass", like=node.children[0])
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        """What it does, checked whenever mutants are sampled."""
        return (
            Example("f(x)\n", "pass\n"),
            Example("a[0] = x\n", "pass\n"),
            Example("n += 1\n", "pass\n"),
            Example("raise ValueError\n", "pass\n"),
        )


class ReturnNone(Operator):
    """Returns None in place of a value."""

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[tuple[Position, Position]]:
        """The value of a `return`."""
        if node.type == "return_stmt" and node.children[1].get_code().strip() != "None":
            yield node.start_pos, node.end_pos

    def mutate(self, node: BaseNode, index: int) -> BaseNode:
        """The same `return`, of None."""
        node.children[1] = _parsed("None", like=node.children[1])
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        """What it does, checked whenever mutants are sampled."""
        return (Example("def f(): return 1", "def f(): return None"),)


class DropKeywordArgument(Operator):
    """Leaves out a keyword argument of a call."""

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[tuple[Position, Position]]:
        """Every `name=value` that is not the only argument (the one alone is `f(a=1)`, an `argument` by itself)."""
        if node.type == "arglist":
            for child in node.children:
                if _is_keyword(child):
                    yield child.start_pos, child.end_pos

    def mutate(self, node: BaseNode, index: int) -> BaseNode:
        """The call without the keyword argument and the comma behind it."""
        keywords = [at for at, child in enumerate(node.children) if _is_keyword(child)]
        del node.children[keywords[index] : keywords[index] + 2]
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        """What it does, checked whenever mutants are sampled."""
        return (Example("f(a, b=1)", "f(a,)"), Example("f(a=1, b=2)", "f( b=2)"))


class NegateCondition(Operator):
    """Negates what cosmic-ray's AddNot leaves alone: the `if` of a comprehension, `in` and `not in`."""

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[tuple[Position, Position]]:
        """The condition of a comprehension, or the membership operators of a comparison."""
        if node.type == "comp_if":
            yield node.start_pos, node.end_pos
        elif node.type == "comparison":
            for child in node.children[1::2]:
                if child.get_code().split() in (["in"], ["not", "in"]):
                    yield child.start_pos, child.end_pos

    def mutate(self, node: BaseNode, index: int) -> BaseNode:
        """The condition, negated."""
        if node.type == "comp_if":
            node.children[1] = _parsed(f"not ({node.children[1].get_code().strip()})", like=node.children[1])
            return node
        places = [at for at, child in enumerate(node.children) if child.get_code().split() in (["in"], ["not", "in"])]
        place = places[index]
        negated = self.NEGATED[" ".join(node.children[place].get_code().split())]
        node.children[place] = _parsed(negated, like=node.children[place])
        return node

    NEGATED: ClassVar = {"in": "not in", "not in": "in"}

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        """What it does, checked whenever mutants are sampled."""
        return (
            Example("[x for x in y if x > 1]", "[x for x in y if not (x > 1)]"),
            Example("a in b", "a not in b"),
            Example("a not in b", "a in b"),
        )


OPERATORS = {
    operator.__name__: operator for operator in (DropStatement, ReturnNone, DropKeywordArgument, NegateCondition)
}
"""The operators of this file by name."""


def check_operators() -> None:
    """Checks each operator of this file on its examples.

    Raises:
        AssertionError: one does something else.
    """
    for operator in OPERATORS.values():
        for example in operator.examples():
            mutated = mutate_code(example.pre_mutation_code, operator(), example.occurrence)
            assert mutated == example.post_mutation_code, (operator.__name__, mutated, example)


def _parsed(code: str, *, like: NodeOrLeaf) -> NodeOrLeaf:
    return parso.python.tree.Name(code, like.start_pos, like.get_first_leaf().prefix)


def _is_call(trailer: NodeOrLeaf) -> bool:
    return trailer.type == "trailer" and trailer.children[0].value == "("


def _is_keyword(child: NodeOrLeaf) -> bool:
    is_keyword = child.type == "argument" and child.children[1].get_code().strip() == "="
    return is_keyword and child.get_code().strip() != "strict=False"  # the default of zip, said for readers
