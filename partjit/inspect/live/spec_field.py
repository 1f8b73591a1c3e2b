"""The text of a field as a spec, without running it as Python. Whether the spec fits is not decided here."""

import ast

from jax.sharding import PartitionSpec as P

from partjit._jax.shardings import UNSPECIFIED
from partjit.checks import shown

__all__ = ["spec_in", "text_of"]

_HOW = (
    "a spec is written as P('data', None, ('x', 'y')): an axis, several, or None for each dimension; None alone is "
    "replicated, UNSPECIFIED is what the partitioner chooses"
)


def spec_in(name: str, text: object) -> object:
    """The spec that a text says: `P(...)`, what is in its parentheses, `None` or `UNSPECIFIED`. Axes need no quotes.

    Args:
        name: the argument or result whose field it is, for messages.
        text: the text.

    Raises:
        TypeError: it is no text.
        ValueError: it says no spec.

    Example:
        >>> spec_in("x", "P('data', (model, seq))"), spec_in("x", "data, None"), spec_in("x", "None")
        (P('data', ('model', 'seq')), P('data', None), None)
        >>> spec_in("x", "P(3)")
        Traceback (most recent call last):
            ...
        ValueError: x: a spec is written as P('data', None, ('x', 'y')): ... UNSPECIFIED is what the partitioner
        chooses. It is 'P(3)'
    """
    if not isinstance(text, str):
        raise TypeError(f"{name}: its field must have a text such as \"P('data')\", but has {shown(text)}")
    wrong = ValueError(f"{name}: {_HOW}. It is {text!r}")
    try:
        tree = ast.parse(" ".join(text.split()) or "()", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise wrong from None
    if isinstance(tree, ast.Constant) and tree.value is None:
        return None
    if _last_name(tree) == "UNSPECIFIED":
        return UNSPECIFIED
    if isinstance(tree, ast.Call):
        if _last_name(tree.func) not in ("P", "PartitionSpec") or tree.keywords:
            raise wrong
        entries = tree.args
    else:
        entries = tree.elts if isinstance(tree, ast.Tuple) else [tree]
    return P(*(_entry(node, wrong) for node in entries))


def text_of(spec: object) -> str:
    """A spec, as it is written in a field.

    Example:
        >>> text_of(P("data", None)), text_of(None)
        ("P('data', None)", 'None')
    """
    if spec is UNSPECIFIED:
        return "UNSPECIFIED"
    return f"P({', '.join(map(repr, spec))})" if isinstance(spec, P) else "None"


def _entry(node: ast.expr, wrong: ValueError) -> object:
    if isinstance(node, ast.Constant) and node.value is None:
        return None
    if isinstance(node, ast.Tuple | ast.List):
        return tuple(_axis(one, wrong) for one in node.elts)
    if _last_name(node) == "UNCONSTRAINED":
        return P.UNCONSTRAINED  # which `pjit` refuses in its own words
    return _axis(node, wrong)


def _axis(node: ast.expr, wrong: ValueError) -> str:
    name = node.id if isinstance(node, ast.Name) else node.value if isinstance(node, ast.Constant) else None
    if not isinstance(name, str):
        raise wrong
    return name


def _last_name(node: ast.expr) -> str:
    """`c` of `a.b.c`, the name itself, or nothing."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
