"""The findings of a report in the order of their costs, their suggestions tried out on the partitioner."""

import dataclasses
from collections.abc import Iterator, Sequence

from partjit.inspect.changes import Change, Facts, facts_of
from partjit.inspect.findings import Finding, grouped
from partjit.inspect.outcomes import Costs, Outcome, outcome_of
from partjit.inspect.places import Known
from partjit.inspect.predicted import Prediction
from partjit.inspect.propagation import Partitioned
from partjit.inspect.proposals import Proposal, proposals
from partjit.render.numbers import shown_bytes, shown_flops

__all__ = ["is_gain", "sends_less", "tried_out"]

_MOST_TRIES = 6
_EQUATIONS = 20_000  # that are propagated again for a report
_SHARE = 0.01  # of what is sent, or of the memory: findings about less in all are left out
_MORE_MEMORY = 1.1  # as a factor, of a change for which less is sent
_TO_COMPUTE_LESS = 1.5  # of one for which less is computed
_CLEARLY = 0.05
_GAIN = 0.01  # as a share of either; a change for less is not proposed
_TURNS = {"redundant": 0, "other spec": 2}  # the order in which kinds are tried; others are in between
_OF_MEMORY = ("replicated", "optimizer state")


def tried_out(
    found: Sequence[Finding],
    partitioned: Partitioned,
    donated: Sequence[bool],
    prediction: Prediction,
    before: Costs,
    large: float,
) -> tuple[Finding, ...]:
    """These findings and those of `proposals` for a unit with such costs, with effects, what matters most first.

    The changes of the most costly ones are made, and propagated: these matter by what their change spares, the others
    by what they are about, each as a share of all that is sent, or of the memory. New findings whose change gains
    nothing are left out, as are all about a small share, and those that another one replaces.
    """
    made = proposals(partitioned, prediction, found, large)
    candidates = sorted(made, key=lambda one: (_TURNS.get(one.findings[0].kind, 1), -_cost(one.findings, before)))
    changed: dict[Finding, Finding] = {}
    left_out: set[Finding] = set()
    spared: dict[Finding, float] = {}
    if candidates and partitioned.lowered is not None:
        trials = _Trials(partitioned, facts_of(partitioned.unit, partitioned.inlined, donated), before)
        for proposal in candidates:
            if trials.left <= 0:
                break
            of_it = [*trials.tried(proposal)]
            for finding, tried, share in of_it:
                changed[finding], spared[tried] = tried, share
            left_out.update(proposal.replaces if of_it else proposal.findings)
    every = (finding for finding in dict.fromkeys((*found, *changed)) if finding not in left_out)
    everything = [changed.get(finding, finding) for finding in every]
    groups = [group for group in grouped(everything).values() if _cost(group, before) >= _SHARE]

    def matters(group: Sequence[Finding]) -> float:
        return max((spared[finding] for finding in group if finding in spared), default=_cost(group, before))

    return tuple(finding for group in sorted(groups, key=matters, reverse=True) for finding in group)


def _cost(findings: Sequence[Finding], before: Costs) -> float:
    """The share of findings of one kind in all that is sent, in the memory, or in the operations of a device."""
    if not findings:
        return 0.0
    if findings[0].share:
        return max(finding.share for finding in findings)
    whole = before.peak if findings[0].kind in _OF_MEMORY else before.at_most
    return sum(finding.nbytes for finding in findings) / max(whole, 1.0)


class _Trials:
    """Changes that are made in copies of a program, and propagated.

    Attributes:
        left: how many more there may be.
    """

    def __init__(self, partitioned: Partitioned, facts: Facts, before: Costs) -> None:
        self._lowered, self._facts, self._known, self._before = partitioned.lowered, facts, Known(), before
        self.left = max(1, min(_MOST_TRIES, _EQUATIONS // max(1, len(partitioned.inlined.equations))))

    def _outcome(self, change: Change) -> Outcome:
        self.left -= 1
        return outcome_of(self._lowered, self._facts, change, self._known)

    def tried(self, proposal: Proposal) -> Iterator[tuple[Finding, Finding, float]]:
        """The findings of a proposal, the same with the effect of its change, and the share that it spares."""
        if proposal.per_device is not None:
            yield self._tried_to_compute_less(proposal, proposal.per_device)
            return
        before, after = self._before, self._outcome(proposal.change).costs
        alternative = proposal.alternative
        while alternative is not None and self.left > 0:
            other = self._outcome(alternative.change).costs
            if other.sent + other.at_most < (1 - _GAIN) * (after.sent + after.at_most):
                proposal, after = alternative, other
            alternative = alternative.alternative
        gains = sends_less if proposal.findings[0].kind == "other spec" else is_gain
        if proposal.is_required and not gains(before, after):
            return
        effect = _effect(before, after)
        of_sent = 1 - (after.sent + after.at_most) / max(before.sent + before.at_most, 1.0)
        share = max(of_sent, 1 - after.peak / max(before.peak, 1.0)) if gains(before, after) else 0.0
        for finding in proposal.findings:
            yield finding, dataclasses.replace(finding, effect=effect), share

    def _tried_to_compute_less(self, proposal: Proposal, per_device: float) -> tuple[Finding, Finding, float]:
        """The same of a proposal that is to spare operations: of the first alternative that does, or of the last."""
        while (alternative := proposal.alternative) is not None:
            (finding,) = proposal.findings
            outcome = self._outcome(proposal.change) if self.left > 0 else None
            if outcome is not None:
                computed, after = outcome.flops.per_device, outcome.costs
                is_less = computed <= (1 - finding.share / 2) * per_device
                if is_less and after.peak <= _TO_COMPUTE_LESS * self._before.peak:
                    computes = f"computes {shown_flops(computed)} instead of {shown_flops(per_device)}"
                    effect = f"tried: a device {', '.join([computes, *_changed(self._before, after)])}"
                    return finding, dataclasses.replace(finding, effect=effect), 1 - computed / per_device
            proposal = alternative
        (finding,) = proposal.findings
        return finding, finding, finding.share


def is_gain(before: Costs, after: Costs) -> bool:
    """Whether a change of specs is worth to be proposed: it sends less, or needs less without sending much more."""
    if _is_less(before, after, _GAIN):
        return True
    return after.peak < (1 - _GAIN) * before.peak and after.at_most <= 1.5 * before.at_most


def sends_less(before: Costs, after: Costs) -> bool:
    """Whether it sends clearly less: no bound rises, which would leave it open."""
    return _is_less(before, after, _CLEARLY)


def _is_less(before: Costs, after: Costs, share: float) -> bool:
    sends_no_more = after.sent <= before.sent and after.at_most <= before.at_most
    is_less = after.sent + after.at_most < (1 - share) * (before.sent + before.at_most)
    return sends_no_more and is_less and after.peak <= _MORE_MEMORY * before.peak


def _shown_sent(effect: Costs) -> str:
    sent, most = shown_bytes(effect.sent), shown_bytes(effect.at_most)
    return sent if sent == most else f"between {sent} and {most}"


def _effect(before: Costs, after: Costs) -> str:
    parts = _changed(before, after)
    return f"tried: a device {' and '.join(parts)}" if parts else "tried: it sends and needs as much"


def _changed(before: Costs, after: Costs) -> list[str]:
    return [
        f"{what} {new} instead of {old}"
        for what, old, new in (
            ("sends", _shown_sent(before), _shown_sent(after)),
            ("needs about", shown_bytes(before.peak), shown_bytes(after.peak)),
        )
        if new != old
    ]
