"""The findings of a report in the order of their costs, their suggestions tried out on the partitioner."""

import dataclasses
from collections.abc import Iterator, Sequence

from partjit.inspect.changes import Facts, facts_of
from partjit.inspect.collectives import Collective
from partjit.inspect.findings import Finding, grouped
from partjit.inspect.outcomes import Costs, outcome_of
from partjit.inspect.places import Known
from partjit.inspect.propagation import Partitioned
from partjit.inspect.proposals import Proposal, proposals
from partjit.render.numbers import shown_bytes, shown_flops

__all__ = ["is_gain", "tried_out"]

_MOST_TRIES = 6
_EQUATIONS = 20_000  # that are propagated again for a report
_SHARE = 0.01  # of what is sent, or of the memory: findings about less in all are left out
_MORE_MEMORY = 1.1  # as a factor, of a change for which less is sent
_TO_COMPUTE_LESS = 1.5  # of one for which less is computed
_GAIN = 0.01  # as a share of either; a change for less is not proposed
_OF_MEMORY = ("replicated", "optimizer state")


def tried_out(
    found: Sequence[Finding],
    partitioned: Partitioned,
    donated: Sequence[bool],
    collectives: Sequence[Collective],
    before: Costs,
    large: float,
) -> tuple[Finding, ...]:
    """These findings and those of `proposals` for a unit with such costs, with effects, what matters most first.

    The changes of the most costly ones are made, and propagated: these matter by what their change spares, the others
    by what they are about, each as a share of all that is sent, or of the memory. New findings whose change gains
    nothing are left out, as are all about a small share, and those that another one replaces.
    """
    candidates = sorted(proposals(partitioned, collectives, found, large), key=lambda one: -_cost(one.findings, before))
    tries = max(1, min(_MOST_TRIES, _EQUATIONS // max(1, len(partitioned.inlined.equations))))
    changed: dict[Finding, Finding] = {}
    left_out: set[Finding] = set()
    spared: dict[Finding, float] = {}
    if candidates and partitioned.lowered is not None:
        facts, known = facts_of(partitioned.unit, partitioned.inlined, donated), Known()
        for proposal in candidates[:tries]:
            of_it = [*_tried(proposal, partitioned, facts, known, before)]
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


def _tried(
    proposal: Proposal, partitioned: Partitioned, facts: Facts, known: Known, before: Costs
) -> Iterator[tuple[Finding, Finding, float]]:
    """The findings of a proposal, the same with the effect of its change, and the share that it spares."""
    if proposal.per_device is not None:
        yield from _tried_to_compute_less(proposal, proposal.per_device, partitioned, facts, known, before)
        return
    after = outcome_of(partitioned.lowered, facts, proposal.change, known).costs
    if (alternative := proposal.alternative) is not None:
        other = outcome_of(partitioned.lowered, facts, alternative.change, known).costs
        if other.sent + other.at_most < (1 - _GAIN) * (after.sent + after.at_most):
            proposal, after = alternative, other
    if proposal.is_required and not is_gain(before, after):
        return
    effect = _effect(before, after)
    of_sent = 1 - (after.sent + after.at_most) / max(before.sent + before.at_most, 1.0)
    share = max(of_sent, 1 - after.peak / max(before.peak, 1.0)) if is_gain(before, after) else 0.0
    for finding in proposal.findings:
        yield finding, dataclasses.replace(finding, effect=effect), share


def _tried_to_compute_less(
    proposal: Proposal, per_device: float, partitioned: Partitioned, facts: Facts, known: Known, before: Costs
) -> Iterator[tuple[Finding, Finding, float]]:
    """The same of a proposal that is to spare operations, of the first alternative that does; the last one says how."""
    while (alternative := proposal.alternative) is not None:
        (finding,) = proposal.findings
        outcome = outcome_of(partitioned.lowered, facts, proposal.change, known)
        computed, after = outcome.flops.per_device, outcome.costs
        if computed <= (1 - finding.share / 2) * per_device and after.peak <= _TO_COMPUTE_LESS * before.peak:
            computes = f"computes {shown_flops(computed)} instead of {shown_flops(per_device)}"
            effect = f"tried: a device {', '.join([computes, *_changed(before, after)])}"
            yield finding, dataclasses.replace(finding, effect=effect), 1 - computed / per_device
            return
        proposal = alternative
    (finding,) = proposal.findings
    yield finding, finding, finding.share


def is_gain(before: Costs, after: Costs) -> bool:
    """Whether a change of specs is worth to be proposed: it sends less, or needs less without sending much more."""
    sends_no_more = after.sent <= before.sent and after.at_most <= before.at_most
    sends_less = sends_no_more and after.sent + after.at_most < (1 - _GAIN) * (before.sent + before.at_most)
    if sends_less and after.peak <= _MORE_MEMORY * before.peak:
        return True
    return after.peak < (1 - _GAIN) * before.peak and after.at_most <= 1.5 * before.at_most


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
