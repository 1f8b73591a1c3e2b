"""Findings that repeat from layer to layer, as one."""

import dataclasses
from collections.abc import Iterable, Sequence

from partjit.inspect.findings import Finding, grouped
from partjit.inspect.modules import folded
from partjit.inspect.user_lines import Site, shown_site
from partjit.paths import pattern_of

__all__ = ["FoldedFinding", "folded_findings"]


@dataclasses.dataclass(frozen=True)
class FoldedFinding:
    """Findings that differ in the names of their values and the numbers of their modules only.

    Attributes:
        findings: these; most are alone.
    """

    findings: tuple[Finding, ...]

    @property
    def kind(self) -> str:
        """See `Finding`."""
        return self.findings[0].kind

    @property
    def text(self) -> str:
        """What they say, with how many there are: "24 x the argument params['layers'][{0-23}]['w'], 1.0 MB, ...".

        Of values, which have names in `jaxpr`, it has that of the first one.
        """
        first = self.findings[0]
        if len(self.findings) == 1:
            return first.text
        is_named = first.text.startswith(_name(first))
        return f"{len(self.findings):,} x {first.text if is_named else folded(one.text for one in self.findings)}"

    @property
    def suggestion(self) -> str:
        """A remedy for all of them."""
        return self.findings[0].suggestion

    @property
    def effect(self) -> str:
        """What the suggestion changes if it is followed for all of them."""
        return self.findings[0].effect

    @property
    def nbytes(self) -> int:
        """The bytes per device that are concerned, of all of them."""
        return sum(finding.nbytes for finding in self.findings)

    @property
    def site(self) -> Site | None:
        """The line of the user's code, which they share."""
        return self.findings[0].site

    @property
    def module(self) -> str:
        """The paths of their modules: "layers/{0-23}/w"; empty if there are none."""
        return folded(finding.module for finding in self.findings)

    @property
    def where(self) -> str:
        """The modules and the line, ", in layers/{0-23}/w, at model.py:12 in loss"; empty if both are unknown."""
        module = f", in {self.module}" if self.module else ""
        return module + ("" if self.site is None else f", at {shown_site(self.site)}")

    def __str__(self) -> str:
        lines = [f"{self.kind}: {self.text}", self.where[2:], self.suggestion, self.effect]
        return "\n  ".join(filter(None, lines))


def folded_findings(findings: Iterable[Finding]) -> tuple[FoldedFinding, ...]:
    """Findings in their order, those of one kind and suggestion together and of these the ones of most bytes first.

    Example:
        >>> advice = "give it a spec"
        >>> texts = [f"the argument w[{k}], f32[2], is replicated" for k in range(3)]
        >>> found = [Finding("replicated", 8, text, advice, module=text[15]) for text in texts]
        >>> [(one.text, one.module, one.nbytes) for one in folded_findings(found)]
        [('3 x the argument w[{0-2}], f32[2], is replicated', '{0-2}', 24)]
    """
    return tuple(one for group in grouped(findings).values() for one in _folded(group))


def _folded(group: Sequence[Finding]) -> list[FoldedFinding]:
    alike: dict[object, list[Finding]] = {}
    for one in group:
        text = pattern_of(one.text.removeprefix(_name(one)))
        alike.setdefault((text, one.nbytes, one.site, pattern_of(one.module)), []).append(one)
    return sorted((FoldedFinding(tuple(found)) for found in alike.values()), key=lambda one: -one.nbytes)


def _name(finding: Finding) -> str:
    """How a text begins that is about a value in the jaxpr."""
    return f"{finding.value}, "
