"""Types of options: numbers in a range, and places of files."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path


def in_range(kind: type, least: float, most: float, expected: str) -> Callable[[str], int | float]:
    """A type of argparse: a number in [least, most].

    Args:
      kind: int or float.
      least: the smallest permitted number.
      most: the largest permitted number.
      expected: what the message of an error says is expected.
    """

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
    """The path of a file or folder. An empty one, of a variable of the shell that is not set, would
    be the present folder."""
    if not text:
        raise argparse.ArgumentTypeError("should be a path, found nothing")
    return Path(text)
