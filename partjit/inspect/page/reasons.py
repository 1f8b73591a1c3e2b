"""Why values are sharded as they are, in the page of a report: a badge on each row, which leads to the reasons."""

from partjit.inspect.contents import Contents
from partjit.inspect.why.origins import known_origins
from partjit.inspect.why.why import why
from partjit.render.markup import Markup, element
from partjit.render.numbers import counted

__all__ = ["Reasons"]

_ASKED = 20_000  # equations

_UNKNOWN = element("small", "unknown", class_="pj-badge", title="how it is sharded is not known")
_LOCAL = element("small", "local", class_="pj-badge", title="in a shard_map: each device has a value of its own")


class Reasons:
    """The reasons for the shardings of the values of a program, equal ones once.

    Args:
        report: the report.
        prefix: of the ids in its part of the page.
        is_asked: whether the partitioner is asked for them, unless the program is so large that it takes long;
            otherwise there are some only if it was asked before.
    """

    def __init__(self, report: Contents, prefix: str, is_asked: bool) -> None:
        self._prefix = prefix
        self._numbers: dict[str, int] = {}  # of the reasons for a value, by its name
        self._texts: dict[str, int] = {}
        whole = report.whole
        is_asked = is_asked and len(report.equations) <= _ASKED
        if whole.lowered is None or not (is_asked or known_origins(whole) is not None):
            return
        for value in whole.tree.values:
            if value.is_array and not value.literal and value.name != "_":
                text = "\n".join(why(whole, value).reasons())
                if text:
                    self._numbers[value.name] = self._texts.setdefault(text, len(self._texts))

    def badge(self, name: str, spec: str, is_local: bool) -> Markup:
        """The badge of a value with this name and spec: "unknown", "local", or a link to the reasons."""
        number = self._numbers.get(name)
        if spec == "?":
            return _UNKNOWN
        if is_local:
            return _LOCAL
        if number is None:
            return Markup("")
        return Markup(f'<a class="pj-y" href="#{self._prefix}-y{number}" tabindex="-1">why</a>')

    def shown(self) -> Markup:
        """All reasons."""
        if not self._texts:
            return Markup("")
        head = element("summary", f"Why values are sharded so: {counted(len(self._texts), 'reason')}")
        listed = (
            element("p", text, id=f"{self._prefix}-y{number}", class_="pj-reason")
            for text, number in self._texts.items()
        )
        return element("details", head, element("div", *listed, class_="pj-reasons"), class_="pj-fold")
