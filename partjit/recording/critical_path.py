"""The chain of spans that determined how long a recorded run took."""

from collections.abc import Iterable

from partjit.recording.spans import Span

__all__ = ["critical_path", "ended_before", "has_duration"]


def critical_path(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The chain that ends last; see `Timeline.critical_path`.

    Example:
        >>> load = Span("call", "load", 0.0, 0.25, "stream io", "step", 0)
        >>> log = Span("call", "log", 0.0, 0.125, "stream log", "step", 0)
        >>> fragment = Span("fragment", "fragment_0", 0.25, 0.5, "devices", "step", 0)
        >>> [span.name for span in critical_path([load, log, fragment])]
        ['load', 'fragment_0']
    """
    by_end = sorted(filter(has_duration, spans), key=lambda span: (span.start + span.seconds, -span.start))
    chain: list[Span] = []
    # A span that ends too late for one span ends too late for those before it, so one pass is enough.
    while by_end:
        span = by_end.pop()
        if not chain or ended_before(span, chain[-1]):
            chain.append(span)
    return tuple(reversed(chain))


def has_duration(span: Span) -> bool:
    """Whether a span may be in the chain: it took time, as otherwise it would follow itself, and is no program or wait.

    Example:
        >>> has_duration(Span("call", "load", 0.0, 0.25, "stream io", "step", 0))
        True
    """
    return span.kind not in ("program", "wait") and span.seconds > 0


def ended_before(span: Span, after: Span) -> bool:
    """Whether a span had ended when another began.

    The thread that waits for the devices may see later than others that they are done, so a short overlap is ignored.

    Example:
        >>> load = Span("call", "load", 0.0, 0.25, "stream io", "step", 0)
        >>> ended_before(load, Span("fragment", "fragment_0", 0.25, 0.5, "devices", "step", 0))
        True
    """
    return span.start + span.seconds - after.start <= 0.25 * min(span.seconds, after.seconds)
