"""Distributions from which sweeps draw values."""

import dataclasses
import math
import random
from typing import Any

from .errors import InputError
from .field_checks import check_fields, integer, number


@dataclasses.dataclass(frozen=True)
class Uniform:
    """Numbers drawn from an interval, all equally likely.

    Attributes:
      low: the smallest number.
      high: the largest number, above `low`.

    Raises:
      ValueError: a value is outside its range.
    """

    low: float = number()
    high: float = number()

    def __post_init__(self):
        _check_interval(self)

    def draw(self, source: random.Random) -> float:
        """A number of the interval.

        Args:
          source: the source of randomness.
        """
        return source.uniform(self.low, self.high)


@dataclasses.dataclass(frozen=True)
class LogUniform:
    """Positive numbers drawn from an interval, whose logarithms are equally likely: as many between
    1e-5 and 1e-4 as between 1e-4 and 1e-3.

    Attributes:
      low: the smallest number, above 0.
      high: the largest number, above `low`.

    Raises:
      ValueError: a value is outside its range.
    """

    low: float = number(above=0)
    high: float = number(above=0)

    def __post_init__(self):
        _check_interval(self)

    def draw(self, source: random.Random) -> float:
        """A number of the interval.

        Args:
          source: the source of randomness.
        """
        drawn = math.exp(source.uniform(math.log(self.low), math.log(self.high)))
        return min(max(drawn, self.low), self.high)


@dataclasses.dataclass(frozen=True)
class Integers:
    """Integers drawn from a range, all equally likely.

    Attributes:
      low: the smallest integer.
      high: the largest integer, above `low`.

    Raises:
      ValueError: a value is outside its range.
    """

    low: int = integer(least=-(2**53))
    high: int = integer(least=-(2**53))

    def __post_init__(self):
        _check_interval(self)

    def draw(self, source: random.Random) -> int:
        """An integer of the range.

        Args:
          source: the source of randomness.
        """
        return source.randint(self.low, self.high)


DISTRIBUTIONS = (Uniform, LogUniform, Integers)


def _check_interval(own: Any) -> None:
    kind = type(own).__name__
    check_fields(own, lambda message: InputError(f"{kind}: {message}"))
    if own.low >= own.high:
        raise InputError(f"{kind}: high should be above low, found {own.low:g} and {own.high:g}")
