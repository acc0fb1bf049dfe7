"""Non-negative least squares that learns from one observation at a time."""

from typing import NamedTuple

import numpy as np
import scipy

# Ridge penalty of the first coefficient; each later coefficient is penalised ten times as much. It
# decides between features that the observations cannot tell apart and is negligible elsewhere.
_TIE_BREAK = 1e-7


class OnlineFit(NamedTuple):
    """A linear model y = β · x with β >= 0, with a summary of all its observations.

    Attributes:
      triangle: float64 [features + 1, features + 1], R of the QR decomposition of the rows (x, y)
        observed so far. ‖R (β, -1)‖ is the norm of their residuals, so the coefficients are those
        of a fit to all observations at once, in memory that does not grow.
      observations: number of observations.
    """

    triangle: np.ndarray
    observations: int = 0

    @classmethod
    def of_features(cls, features: int) -> "OnlineFit":
        """A model without observations: all coefficients are zero."""
        return cls(np.zeros((features + 1, features + 1)))

    def observe(self, x: np.ndarray, y: float, weight: float = 1.0) -> "OnlineFit":
        """Returns a new model with one more observation.

        Args:
          x: the features, float64 [features].
          y: the observed value.
          weight: weight of the observation's squared residual.
        """
        row = np.sqrt(weight) * np.append(x, y)
        triangle = np.linalg.qr(np.vstack([self.triangle, row]), mode="r")
        return OnlineFit(triangle, self.observations + 1)

    def coefficients(self) -> np.ndarray:
        """β, float64 [features]."""
        features, target = self.triangle[:, :-1], self.triangle[:, -1]
        size = np.linalg.norm(features, axis=0)
        size[size == 0] = 1
        tie_break = np.diag(_TIE_BREAK * 10.0 ** np.arange(len(size)))
        rows = np.vstack([features / size, tie_break])
        return scipy.optimize.nnls(rows, np.append(target, np.zeros(len(size))))[0] / size
