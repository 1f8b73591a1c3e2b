"""The arguments and results in the page of a report, with pictures of their shardings."""

import math
from collections.abc import Sequence
from typing import TypeAlias

from partjit.inspect.annotated import AnnotatedValue
from partjit.inspect.arrays import picture_of
from partjit.inspect.contents import Contents
from partjit.inspect.page.reasons import Reasons
from partjit.inspect.page.table import colored_spec, nbytes, rows_table
from partjit.inspect.page.trees import Leaf, drawn_tree
from partjit.inspect.tiles import tiles_of
from partjit.inspect.why.key_paths import keys_of
from partjit.render.markup import Markup, element, join
from partjit.render.numbers import counted
from partjit.render.theme import STYLESHEET
from partjit.shardy import TensorSharding

__all__ = ["arrays"]

_Key: TypeAlias = tuple[tuple[int, ...], TensorSharding | None]

_PIECES = 16  # of a picture at most; of more, neighbours are one cell
_CELLS = 8  # in that case: as many as pictures for one host of devices have
_PICTURES = 400_000  # characters of pictures in a page; the largest arrays come first


def arrays(report: Contents, prefix: str, reasons: Reasons) -> Markup:
    """The arguments and results, with pictures of their shardings."""
    listed = [
        (what, value)
        for what, values in (("argument", report.whole.tree.inputs), ("result", report.whole.results))
        for value in values
        if value.is_array
    ]
    pictures = _Pictures([value for _, value in listed], prefix)
    rows = [
        (
            what,
            pictures.link(value),
            element("span", value.shown_type, class_="pj-mono"),
            element(
                "span",
                colored_spec(value.shown_spec, report.mesh.axis_names),
                # A result may be returned in another sharding than the value that it is.
                reasons.badge(value.name if what == "argument" else "", value.shown_spec, False),
                class_="pj-mono pj-spec",
            ),
            element("span", f"[{','.join(map(str, value.shard_shape))}]", class_="pj-mono"),
            nbytes(value.nbytes),
            nbytes(value.nbytes_per_device),
        )
        for what, value in listed
    ]
    columns = ("what", "path", "type", "spec", "shard", "bytes", "per device")
    table = rows_table("arguments and results", columns, rows, filters=(0,), total=6)
    leaves = [
        Leaf(keys_of(value.path or "") or (value.path or value.name,), value.nbytes_per_device, _leaf(value))
        for what, value in listed
        if what == "argument"
    ]
    tree = element("details", element("summary", "The tree of arguments"), drawn_tree("arguments", "array", leaves))
    return join([table, element("div", tree, class_="pj-fold") if leaves else "", pictures.shown()])


def _leaf(value: AnnotatedValue) -> str:
    return f"{value.shown_type} {value.shown_spec}{', replicated' if value.is_replicated and value.aval.shape else ''}"


class _Pictures:
    """One picture for all arrays of equal shape and sharding, the largest first, as long as there is room."""

    def __init__(self, values: Sequence[AnnotatedValue], prefix: str) -> None:
        self._drawn: dict[_Key, tuple[str, Markup]] = {}  # the id and the picture
        self._like: dict[_Key, list[AnnotatedValue]] = {}
        for value in values:
            self._like.setdefault(_key(value), []).append(value)
        room = _PICTURES
        for key, alike in sorted(self._like.items(), key=lambda item: -item[1][0].nbytes):
            value = alike[0]
            if value.mesh.empty or value.sharding is None or not value.sharding.is_of_whole_axes or room <= 0:
                continue
            # The page has the stylesheet that every picture brings along.
            tiles = tiles_of(value.aval.shape, value.spec, value.mesh)
            count = math.prod(map(len, tiles.cuts))
            drawn = picture_of(value.aval.shape, None, tiles, _PIECES if count <= _PIECES else _CELLS).to_svg()
            bare = Markup(drawn.replace(f"<style>{STYLESHEET}</style>", "", 1))
            self._drawn[key] = f"{prefix}-p{len(self._drawn)}", bare
            room -= len(bare)

    def link(self, value: AnnotatedValue) -> Markup:
        """The path of an array, which opens its picture."""
        path, found = value.path or value.name, self._drawn.get(_key(value))
        if found is None:
            return element("span", path, class_="pj-mono pj-wrap")
        return element("a", path, href=f"#{found[0]}", class_="pj-mono pj-wrap")

    def shown(self) -> Markup:
        """All pictures."""
        if not self._drawn:
            return Markup("")
        figures = [
            element("figure", element("figcaption", _names(self._like[key])), drawn, id=own_id)
            for key, (own_id, drawn) in self._drawn.items()
        ]
        head = element("summary", f"Pictures of {counted(len(figures), 'sharding')}")
        left_out = len(self._like) - len(figures)
        rest = f"{left_out} more: partjit.inspect.draw_array draws any array." if left_out else ""
        return element(
            "details", head, element("div", *figures, element("p", rest), class_="pj-figures"), class_="pj-fold"
        )


def _key(value: AnnotatedValue) -> _Key:
    return value.aval.shape, value.sharding


def _names(values: Sequence[AnnotatedValue]) -> str:
    first = ", ".join(value.path or value.name for value in values[:3])
    return first if len(values) <= 3 else f"{first} and {len(values) - 3} more"
