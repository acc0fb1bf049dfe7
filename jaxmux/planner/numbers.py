"""Whole numbers: powers of two, and counts and sizes in messages."""


def power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def numbered(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def size_text(size: float) -> str:
    """A number of bytes as text: `24.3 GiB`, or `81.0 MiB` for less than one GiB."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
