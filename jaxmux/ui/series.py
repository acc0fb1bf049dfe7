"""Long series of numbers with a bounded number of points."""

import math
from collections.abc import Sequence


class Series:
    """Means of consecutive values. When there are too many points, neighbours are merged. So a long
    series has between `most` and 2 `most` points, and fits into memory.

    Attributes:
      stride: number of values of a point; the last point may have fewer.
    """

    def __init__(self, columns: int, most: int = 256):
        """Creates an empty series, each value of which has `columns` numbers."""
        self.stride = 1
        self._columns, self._most = columns, most
        # By point: x of the last value, number of values, sums of the columns, and the least and
        # largest value of the first column.
        self._points: list[list[float]] = []

    def __len__(self) -> int:
        return len(self._points)

    def add(self, x: float, values: Sequence[float]) -> None:
        """Adds a value of finite numbers, one per column. `x` must ascend from call to call."""
        if self._points and self._points[-1][1] < self.stride:
            self._points[-1] = _merged(self._points[-1], [x, 1, *values, values[0], values[0]])
        else:
            self._points.append([x, 1, *values, values[0], values[0]])
        if len(self._points) > 2 * self._most:
            pairs = zip(self._points[::2], self._points[1::2], strict=False)
            odd = self._points[-1:] if len(self._points) % 2 else []
            self._points = [*(_merged(*pair) for pair in pairs), *odd]
            self.stride *= 2

    def points(self) -> list[list[float]]:
        """By point: x, the means of all columns, and the least and largest value of the first."""
        return [
            [point[0]]
            + [short(total / point[1]) for total in point[2 : 2 + self._columns]]
            + [short(point[-2]), short(point[-1])]
            for point in self._points
        ]


def short(value: float) -> float:
    """A number rounded to six significant digits, which suffice for a picture."""
    if value == 0 or not math.isfinite(value):
        return value
    return round(value, 5 - math.floor(math.log10(abs(value))))


def _merged(first: list[float], second: list[float]) -> list[float]:
    sums = [a + b for a, b in zip(first[1:-2], second[1:-2], strict=True)]
    return [second[0], *sums, min(first[-2], second[-2]), max(first[-1], second[-1])]
