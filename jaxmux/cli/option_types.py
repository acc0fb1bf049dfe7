"""Types of options: numbers in a range, and paths."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path


def in_range(kind: type, least: float, most: float, expected: str) -> Callable[[str], int | float]:
    """An argparse type for numbers in [least, most]. `expected` describes these numbers in
    the error message."""

    def parse(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"should be {expected}, found {text!r}")
        return value

    return parse


count = in_range(int, 1, 2**31, "an integer of at least 1")
not_negative_integer = in_range(int, 0, 2**31, "an integer of at least 0")
port = in_range(int, 0, 2**16 - 1, "a port in [0, 65535]")
seed = in_range(int, 0, 2**32 - 1, "an integer in [0, 4294967295]")
not_negative = in_range(float, 0, 1e9, "a number of at least 0")


def path(text: str) -> Path:
    """The path of a file or folder. An empty text, for example from an unset shell variable, is
    refused because it would mean the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("should be a path, found nothing")
    return Path(text)
