"""Numbers with units, for people."""

__all__ = ["readable_duration", "readable_size"]


def readable_duration(seconds: float) -> str:
    """A duration.

    Example:
        >>> from partjit.render.units import readable_duration
        >>> readable_duration(2.5), readable_duration(0.00125)
        ('2.50 s', '1.25 ms')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds * 1e6:.2f} us"


def readable_size(nbytes: float) -> str:
    """A number of bytes.

    Example:
        >>> from partjit.render.units import readable_size
        >>> readable_size(512), readable_size(16384), readable_size(7.9e6)
        ('512 B', '16.4 kB', '7.9 MB')
    """
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    for unit in ("kB", "MB"):
        nbytes /= 1000
        if nbytes < 1000:
            return f"{nbytes:.1f} {unit}"
    return f"{nbytes / 1000:.1f} GB"
