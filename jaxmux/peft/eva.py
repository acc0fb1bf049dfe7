"""EVA, an initialisation of LoRA from the task's own data (Paischer et al. 2024).

A holds the principal components of each linear's inputs. Linears whose components explain more of
the variance get more of them.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import scipy
from jaxtyping import Float

from jaxmux.models import FIRST_READERS, MODULES, Calibration

from .targets import LayerMask

# Smaller shares of the variance are rounding errors of float32, so their components are arbitrary.
_LEAST_SHARE = 1e-12


class Components(NamedTuple):
    """Principal components of inputs, the most important first.

    Attributes:
      directions: float32, orthonormal.
      shares: float64, the part of the inputs' variance that each one explains.
    """

    directions: Float[np.ndarray, "k components"]
    shares: Float[np.ndarray, " components"]


def eva_factors(
    calibration: Calibration, targets: Mapping[str, LayerMask], rank: int, largest_rank: int
) -> dict[str, dict[int, Float[np.ndarray, "k components"]]]:
    """The components with which A begins, by linear and layer.

    All linears together get `rank` components for each of them, at most `largest_rank` each: the
    components that explain the largest parts of their inputs' variances (Paischer et al. 2024,
    Algorithm 1). Of linears with equal inputs, or of components that explain equal parts, the one
    that the model computes first comes first. ValueError if the samples have too few labelled
    tokens for so many components.
    """
    labelled = int(calibration.labelled.sum())
    if labelled < largest_rank:
        raise ValueError(
            f"the calibration samples have {labelled} tokens that count in the loss, but a linear "
            f"may get {largest_rank} principal components of its inputs; raise calibration_tokens "
            "or lower the rank"
        )
    components: dict[tuple[int, str], Components] = {}
    for layer, inputs in enumerate(calibration.linear_inputs()):
        adapted = [module for module in MODULES if module in targets and targets[module][layer]]
        of_input = {
            first: principal_components(inputs[first], largest_rank)
            for first in dict.fromkeys(FIRST_READERS[module] for module in adapted)
        }
        components |= {(layer, module): of_input[FIRST_READERS[module]] for module in adapted}
    counts = _counts(
        {place: of_linear.shares for place, of_linear in components.items()}, rank * len(components)
    )
    return {
        module: {
            layer: of_linear.directions[:, : counts[layer, module]]
            for (layer, other), of_linear in components.items()
            if other == module
        }
        for module in targets
    }


def principal_components(x: Float[np.ndarray, "N k"], most: int) -> Components:
    """At most `most` principal components of the rows of a float32 matrix, without those that
    explain nothing. The largest value of each component is positive."""
    x = x - x.mean(axis=0, dtype=np.float64)
    # Both products have the same eigenvalues except for zeros, so the smaller one is used.
    wide = len(x) < x.shape[1]
    gram = x @ x.T if wide else x.T @ x
    most = min(most, len(gram))
    values, vectors = scipy.linalg.eigh(gram, subset_by_index=(len(gram) - most, len(gram) - 1))
    shares = values[::-1] / max(np.trace(gram), np.finfo(np.float64).tiny)
    kept = shares > _LEAST_SHARE
    directions = vectors[:, ::-1][:, kept]
    if wide:
        directions = x.T @ directions
        directions /= np.linalg.norm(directions, axis=0)
    largest = np.abs(directions).argmax(axis=0)
    signs = np.sign(directions[largest, np.arange(directions.shape[1])])
    return Components((directions * signs).astype(np.float32), shares[kept])


def _counts(
    shares: Mapping[tuple[int, str], Float[np.ndarray, " components"]], budget: int
) -> dict[tuple[int, str], int]:
    """The number of components that each linear gets; `budget` is the sum."""

    def every() -> Iterator[tuple[float, int, tuple[int, str]]]:
        for order, (place, of_linear) in enumerate(shares.items()):
            for share in of_linear.tolist():
                yield -share, order, place

    counts = dict.fromkeys(shares, 0)
    for _, _, place in sorted(every())[:budget]:
        counts[place] += 1
    return counts
