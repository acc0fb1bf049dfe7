"""Whole numbers: powers of two, and counts and sizes in messages."""


def power_of_two(least: int) -> int:
    """The smallest power of two that is at least `least`."""
    return 1 << (least - 1).bit_length()


def numbered(count: int, noun: str) -> str:
    """A count with its noun in the singular or plural: `1 row`, `2 rows`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def size_text(size: float) -> str:
    """A number of bytes as a text: `24.3 GiB`, or less than one GiB as `81.0 MiB`."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
