"""Excerpts of the user's source code that a report refers to, as a part of a page."""

import linecache
from collections.abc import Iterator

from partjit.inspect.user_lines import Site, shown_file, shown_line, shown_site
from partjit.render.markup import Markup, element, join

__all__ = ["AROUND", "Excerpts"]

AROUND = 6
"""The number of lines that are shown before and after a line."""

_LONGEST = 240  # shown characters of a line


class Excerpts:
    """Collects lines of files, links to them, and in the end shows them; `prefix` begins their ids in the page.

    Example:
        >>> excerpts = Excerpts("p")
        >>> excerpts.link(("/nowhere/model.py", 12, "loss"))
        '<a href="#p-f0-12" title="/nowhere/model.py:12 in loss">model.py:12</a>'
        >>> "cannot be read" in excerpts.shown()
        True
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._files: dict[str, set[int]] = {}
        self._numbers: dict[str, int] = {}
        self._links: dict[Site, Markup] = {}

    def link(self, site: Site | None) -> Markup:
        """A link to a line; empty if the line is unknown."""
        if site is None:
            return Markup("")
        known = self._links.get(site)
        if known is not None:
            return known
        file, line, _ = site
        self._files.setdefault(file, set()).add(line)
        number = self._numbers.setdefault(file, len(self._numbers))
        self._links[site] = link = element(
            "a", shown_line(site), href=f"#{self._prefix}-f{number}-{line}", title=shown_site(site)
        )
        return link

    def shown(self) -> Markup:
        """The files, each with the lines that are linked and those around them."""
        return join(self._file(file, lines) for file, lines in self._files.items())

    def _file(self, file: str, wanted: set[int]) -> Markup:
        try:
            linecache.checkcache(file)
            lines = linecache.getlines(file)
        except ValueError:  # no file can have this name
            lines = []
        shown = shown_file(file)
        head = element("h3", shown if shown.startswith("In[") else file, class_="pj-mono")
        prefix = f"{self._prefix}-f{self._numbers[file]}"
        if not lines:
            anchors = (element("span", id=f"{prefix}-{line}") for line in sorted(wanted))
            reason = element("p", "The file cannot be read, so its lines cannot be shown.")
            return element("section", head, reason, *anchors, class_="pj-file pj-missing")
        body = join(self._lines(lines, wanted, prefix))
        return element("section", head, element("pre", body, class_="pj-mono"), class_="pj-file")

    def _lines(self, lines: list[str], wanted: set[int], prefix: str) -> Iterator[Markup]:
        near = {k for line in wanted for k in range(max(1, line - AROUND), min(len(lines), line + AROUND) + 1)}
        last = 0
        # A line beyond the end of the file has no text, but the links to it need a target.
        for k in sorted(near | wanted):
            if k != last + 1 and last:
                yield element("span", "⋮\n", class_="pj-gap")
            text = lines[k - 1].rstrip() if 0 < k <= len(lines) else "(the file no longer has this line)"
            text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"
            own = f"{prefix}-{k}" if k in wanted else None
            yield element("span", f"{text}\n", id=own, data_k=str(k), class_="pj-line")
            last = k
