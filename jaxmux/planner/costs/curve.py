"""Interpolation of measurements."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import scipy

from ..errors import PlanningError


class Curve(NamedTuple):
    """A piecewise linear function through points; beyond the points it keeps the outermost slopes.

    Attributes:
      x: float64 [points], ascending.
      y: float64 [points], the values at `x`, in any unit.
    """

    x: np.ndarray
    y: np.ndarray

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]], rising: bool = True) -> "Curve":
        """Returns the curve through measurements (x, y).

        Args:
          points: measurements (x, y) in any order; several measurements at one x count as their
            mean.
          rising: whether to replace the values by the nearest rising ones (least squares). More
            work never takes less time, so falling measurements are noise.

        Raises:
          PlanningError: there are no points.
        """
        points = sorted(points)
        if not points:
            raise PlanningError("a curve needs at least one point")
        x, index = np.unique([float(x) for x, _ in points], return_inverse=True)
        y = np.bincount(index, [y for _, y in points]) / np.bincount(index)
        falls = (np.diff(y) < 0).any()
        return cls(x, scipy.optimize.isotonic_regression(y).x if rising and falls else y)

    def __call__(self, x: float) -> float:
        """Returns the value at `x`, never negative.

        A single point gives a line through the origin.
        """
        if len(self.x) == 1:
            return max(0.0, float(self.y[0] * x / self.x[0]))
        right = min(max(int(np.searchsorted(self.x, x)), 1), len(self.x) - 1)
        x0, x1, y0, y1 = *self.x[right - 1 : right + 1], *self.y[right - 1 : right + 1]
        return max(0.0, float(y0 + (x - x0) * (y1 - y0) / (x1 - x0)))
