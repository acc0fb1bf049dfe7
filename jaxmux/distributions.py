"""Distributions from which sweeps draw values."""

import math
import random
from typing import Annotated

from pydantic import Field

from .errors import InputError
from .field_checks import EXACT, Number, Positive, checked_dataclass

_Integer = Annotated[int, Field(ge=-(2**53)), EXACT]


class _Interval:
    """Checks the ends of an interval."""

    def __post_init__(self):
        if self.low >= self.high:
            raise self._error(f"high should be above low, found {self.low:g} and {self.high:g}")

    def _error(self, message: str) -> InputError:
        return InputError(f"{type(self).__name__}: {message}")


@checked_dataclass
class Uniform(_Interval):
    """Numbers drawn from an interval, all equally likely.

    Attributes:
      low: the smallest number.
      high: the largest number, above `low`.

    Raises:
      ValueError: a value is outside its range.
    """

    low: Number
    high: Number

    def draw(self, source: random.Random) -> float:
        return source.uniform(self.low, self.high)


@checked_dataclass
class LogUniform(_Interval):
    """Positive numbers drawn from an interval so that all their logarithms are equally likely. As
    many numbers lie between 1e-5 and 1e-4 as between 1e-4 and 1e-3.

    Attributes:
      low: the smallest number, above 0.
      high: the largest number, above `low`.

    Raises:
      ValueError: a value is outside its range.
    """

    low: Positive
    high: Positive

    def draw(self, source: random.Random) -> float:
        drawn = math.exp(source.uniform(math.log(self.low), math.log(self.high)))
        return min(max(drawn, self.low), self.high)


@checked_dataclass
class Integers(_Interval):
    """Integers drawn from a range, all equally likely.

    Attributes:
      low: the smallest integer.
      high: the largest integer, above `low`.

    Raises:
      ValueError: a value is outside its range.
    """

    low: _Integer
    high: _Integer

    def draw(self, source: random.Random) -> int:
        return source.randint(self.low, self.high)


DISTRIBUTIONS = (Uniform, LogUniform, Integers)
