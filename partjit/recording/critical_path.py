"""The chain of work that a recorded run took as long as."""

from collections.abc import Iterable

from partjit.recording.spans import Span

__all__ = ["critical_path"]


def critical_path(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The chain that ends last; what it is says `Timeline.critical_path`.

    Example:
        >>> from partjit.recording.critical_path import critical_path
        >>> from partjit.recording.spans import Span
        >>> load = Span("call", "load", 0.0, 0.25, "stream io", "step", 0)
        >>> log = Span("call", "log", 0.0, 0.125, "stream log", "step", 0)
        >>> fragment = Span("fragment", "fragment_0", 0.25, 0.5, "devices", "step", 0)
        >>> [span.name for span in critical_path([load, log, fragment])]
        ['load', 'fragment_0']
    """
    # What takes no time ends where it begins, so it would follow itself.
    work = [span for span in spans if span.kind not in ("program", "wait") and span.seconds > 0]
    by_end = sorted(work, key=lambda span: (span.start + span.seconds, -span.start))
    chain: list[Span] = []
    # What comes too late for one span comes too late for those before it, so looking at each once is enough.
    while by_end:
        span = by_end.pop()
        if not chain or _ended_before(span, chain[-1]):
            chain.append(span)
    return tuple(reversed(chain))


def _ended_before(span: Span, after: Span) -> bool:
    """Whether a span had ended when another began.

    That the devices are ready is seen by a thread that waits for them, while another may go on already. So an overlap
    that is short for both is taken for none.
    """
    return span.start + span.seconds - after.start <= 0.25 * min(span.seconds, after.seconds)
