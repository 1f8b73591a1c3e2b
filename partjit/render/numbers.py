"""Human-readable numbers."""

__all__ = ["counted", "shown_bytes", "shown_count", "shown_duration", "shown_flops"]


def counted(count: int, noun: str) -> str:
    """A number with its noun, in the plural if need be.

    Example:
        >>> counted(1, "call"), counted(0, "branch")
        ('1 call', '0 branches')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith('ch') else 's'}"


def shown_bytes(nbytes: float) -> str:
    """A number of bytes, in decimal units.

    Example:
        >>> shown_bytes(512), shown_bytes(16_384)
        ('512 B', '16.4 kB')
    """
    return f"{nbytes:.0f} B" if nbytes < 1000 else f"{_scaled(nbytes)}B"


def shown_count(count: float) -> str:
    """A count, rounded to about three digits.

    Example:
        >>> shown_count(999), shown_count(2.5e9)
        ('999', '2.5 G')
    """
    return f"{count:.0f}" if count < 1000 else _scaled(count).rstrip()


def shown_flops(count: float) -> str:
    """A number of floating point operations.

    Example:
        >>> shown_flops(7), shown_flops(675.7e6)
        ('7 flop', '675.7 Mflop')
    """
    return f"{count:.0f} flop" if count < 1000 else f"{_scaled(count)}flop"


def shown_duration(seconds: float) -> str:
    """A duration.

    Example:
        >>> shown_duration(2.5), shown_duration(0.00125)
        ('2.50 s', '1.25 ms')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds * 1e6:.2f} us"


def _scaled(number: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if number < 1000:
            return f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} P"
