"""Trees of a page that fold: modules with what they send, and arguments with their specs."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from partjit.render.markup import Markup, element, join
from partjit.render.numbers import counted, shown_bytes

__all__ = ["Leaf", "drawn_tree"]

_OPEN = 0.1  # a branch with at least this share of the bytes of the tree is not folded
_DEPTH = 2  # nor deeper than this


class Leaf(NamedTuple):
    """A leaf of a tree.

    Attributes:
        path: the names on the path to it.
        nbytes: its bytes, which add up along the path.
        text: what is shown beside its name.
    """

    path: tuple[str, ...]
    nbytes: float
    text: str


def drawn_tree(title: str, noun: str, leaves: Sequence[Leaf]) -> Markup:
    """A tree of leaves, which are counted by this noun; the branches of most bytes come first.

    Example:
        >>> tree = drawn_tree("sent", "array", [Leaf(("Block_0", "w"), 10, "a"), Leaf(("Block_0", "b"), 2, "c")])
        >>> tree.count("<details"), "12 B" in tree
        (1, True)
    """
    total = sum(leaf.nbytes for leaf in leaves) or 1.0
    return element("div", *_branches(noun, leaves, 0, total), class_="pj-tree", role="group", aria_label=title)


def _branches(noun: str, leaves: Sequence[Leaf], depth: int, total: float, level: int = 0) -> Iterator[Markup]:
    by_name: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        by_name.setdefault(leaf.path[depth], []).append(leaf)
    for name, own in sorted(by_name.items(), key=lambda item: -sum(leaf.nbytes for leaf in item[1])):
        names, below = [name], depth + 1
        # A branch that does not fork is one line.
        while len({leaf.path[below : below + 1] for leaf in own}) == 1 and len(own[0].path) > below:
            names.append(own[0].path[below])
            below += 1
        here = [leaf for leaf in own if len(leaf.path) == below]
        inner = [leaf for leaf in own if len(leaf.path) > below]
        nbytes = sum(leaf.nbytes for leaf in own)
        path = "/".join(names)
        if not inner and len(here) == 1:
            yield element("div", _line(path, here[0].text, nbytes, total), class_="pj-leaf")
            continue
        parts = [element("div", _line("", leaf.text, leaf.nbytes, total), class_="pj-leaf") for leaf in here]
        parts += _branches(noun, inner, below, total, level + 1)
        is_open = "" if nbytes / total >= _OPEN and level < _DEPTH and (len(by_name) > 1 or not level) else None
        head = element("summary", _line(path, counted(len(own), noun), nbytes, total))
        yield element("details", head, *parts, open=is_open)


def _line(name: str, text: str, nbytes: float, total: float) -> Markup:
    size = element("span", shown_bytes(nbytes), class_="pj-b", style=f"--w:{100 * nbytes / total:.0f}%")
    return join([element("b", name), " ", element("span", text, class_="pj-muted-text"), size])
