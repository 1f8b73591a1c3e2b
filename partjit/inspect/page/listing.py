"""The annotated jaxpr as a part of a page: a line for each value, folding bodies, marked collectives."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from partjit.inspect.listing import Line
from partjit.inspect.page.excerpts import Excerpts
from partjit.inspect.page.table import colored_spec
from partjit.render.markup import Markup, element, escape, join
from partjit.render.numbers import shown_bytes

__all__ = ["drawn_lines"]

_LONG = 500  # lines that a browser lays out at once
_CHUNK = 60  # lines of a longer program that it lays out together when they scroll into view
_FOLDED = 16  # bodies with fewer lines are folded
_WIDEST = (44, 30)  # columns, in characters
_BADGE = 9  # characters
_LITERAL = re.compile(r"\bLiteral\(([^()]*)\)")


def drawn_lines(
    lines: Sequence[Line],
    axes: Sequence[str],
    excerpts: Excerpts,
    moved: Mapping[int, str],
    flagged: Mapping[str, str],
    badge: Callable[[str, str, bool], str] = lambda *_: "",
) -> Markup:
    """The lines of `Report.jaxpr`.

    Args:
        lines: the lines.
        axes: the axes of the mesh.
        excerpts: where links to the user's code lead.
        moved: by the number of an equation, the collectives that it needs.
        flagged: by the name of a value, the findings about it.
        badge: what is beside a spec, from the name of the value, its spec, and whether it is one of a `shard_map`.
    """
    largest = max((n for line in lines for n in line.nbytes), default=0) or 1
    drawing = _Drawing(axes, excerpts, moved, flagged, badge, largest)
    top = [*drawing.nested(lines, 0, len(lines), 0)]
    chunks = [
        element("div", join(top[k : k + _CHUNK]), class_="pj-chunk", style=f"--n:{min(_CHUNK, len(top) - k)}")
        for k in range(0, len(top), _CHUNK)
    ]
    named = [
        (2 * line.depth + len(name) + len(type_), len(spec))
        for line in lines
        for name, type_, spec in zip(line.values, line.types, line.specs, strict=True)
    ]
    widths = (max((sizes[k] for sizes in named), default=0) + 3 for k in range(2))
    first, second = (min(width, most) for width, most in zip(widths, _WIDEST, strict=True))
    beside = (
        badge(name, spec, line.is_local) for line in lines for name, spec in zip(line.values, line.specs, strict=True)
    )
    second += _BADGE if any(beside) else 0
    long = " pj-long" if len(lines) > _LONG else ""
    return element("div", *chunks, class_=f"pj-listing pj-mono{long}", style=f"--c1:{first}ch;--c2:{second}ch")


@dataclasses.dataclass(frozen=True)
class _Drawing:
    """The arguments of `drawn_lines`, the bytes of the largest value, and the columns of values of equal types."""

    axes: Sequence[str]
    excerpts: Excerpts
    moved: Mapping[int, str]
    flagged: Mapping[str, str]
    badge: Callable[[str, str, bool], str]
    largest: int
    typed: dict[tuple[str, str, int], tuple[Markup, Markup, Markup]] = dataclasses.field(default_factory=dict)

    def nested(self, lines: Sequence[Line], start: int, stop: int, depth: int) -> Iterator[Markup]:
        """The lines from `start` to `stop` at this depth; deeper ones fold into the line before them."""
        k = start
        while k < stop:
            end = k + 1
            while end < stop and lines[end].depth > depth:
                end += 1
            if end == k + 1:
                yield self._line(lines[k])
            else:
                head = element("summary", self._line(lines[k]))
                inside = self.nested(lines, k + 1, end, depth + 1)
                is_open = "" if end - k - 1 >= _FOLDED else None
                yield element("details", head, *inside, open=is_open)
            k = end

    def _line(self, line: Line) -> Markup:
        # A program has thousands of these, so they are formatted directly instead of built from elements.
        depth = f' style="--d:{line.depth}"' if line.depth else ""
        text, link = self._text(line), self.excerpts.link(line.site)
        if line.module:
            link = Markup(f'{link}<small title="{escape(line.module)}">{escape(line.module)}</small>')
        if not line.values:
            return Markup(f'<div class="pj-l"{depth}>{text}{link}</div>')
        first, *more = (
            self._value(*value, line.is_local)
            for value in zip(line.values, line.types, line.specs, line.nbytes, strict=True)
        )
        rest = "".join(f'<div class="pj-l pj-more"{depth}>{cells}</div>' for cells in more)
        return Markup(f'<div class="pj-l"{depth}>{first}{text}{link}</div>{rest}')

    def _value(self, name: str, type_: str, spec: str, nbytes: int, is_local: bool) -> str:
        typed = self.typed.get((type_, spec, nbytes))
        if typed is None:
            size = Markup("<span></span>")
            if spec:
                part = round(100 * nbytes / self.largest)
                style = f"--w:{part}%" if part else None
                size = element("span", shown_bytes(nbytes), class_="pj-b", style=style)
            typed = self.typed[type_, spec, nbytes] = element("i", type_), colored_spec(spec, self.axes), size
        found = self.flagged.get(name)
        mark = "" if found is None else element("em", "!", title=found)
        beside = self.badge(name, spec, is_local) if spec else ""
        return f"<span><b>{escape(name)}</b>{typed[0]}{mark}</span><span>{typed[1]}{beside}</span>{typed[2]}"

    def _text(self, line: Line) -> str:
        text, class_ = _LITERAL.sub(r"\1", line.text), "pj-t" if line.values else "pj-t pj-alone"
        equation = re.match(r"= (\w+)", text)
        if equation is None:
            return f'<span class="{class_}">{escape(text)}</span>'
        moved = None if line.number is None else self.moved.get(line.number)
        mark = "" if moved is None else element("em", moved, class_="pj-moves")
        params, inputs = _split_params(text[equation.end() :])
        shown = f"<b>{escape(equation[1])}</b>{escape(inputs)} {escape(params)}".rstrip()
        return f'<span class="{class_}">{shown}</span>{mark}'


def _split_params(text: str) -> tuple[str, str]:
    """Splits off the parameters in brackets, possibly nested, at the beginning of a text."""
    depth = 0
    for bracket in re.finditer(r"[][]", text) if text.startswith("[") else ():
        depth += 1 if bracket[0] == "[" else -1
        if not depth:
            return text[: bracket.end()], text[bracket.end() :]
    return "", text
