"""Whole numbers: powers of two, and counts in messages."""


def power_of_two(least: int) -> int:
    """The smallest power of two that is at least `least`."""
    return 1 << (least - 1).bit_length()


def numbered(count: int, noun: str) -> str:
    """A count with its noun in the singular or plural: `1 row`, `2 rows`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
