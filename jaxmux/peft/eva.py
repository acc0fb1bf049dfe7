"""EVA, an initialisation of LoRA from the task's own data (Paischer et al. 2024).

A begins with the principal components of each linear's inputs. A linear gets more components if
they explain more of its inputs' variance.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import scipy
from jaxtyping import Float

from jaxmux.models import FIRST_READERS, MODULES, Calibration

from .targets import LayerMask

# A smaller share of the variance is a rounding error of float32, so its component is arbitrary.
_LEAST_SHARE = 1e-12


class Components(NamedTuple):
    """Principal components of inputs, most important first. `directions` is float32 with
    orthonormal columns; `shares` is float64, the fraction of the inputs' variance that each
    component explains."""

    directions: Float[np.ndarray, "k components"]
    shares: Float[np.ndarray, " components"]


def eva_factors(
    calibration: Calibration, targets: Mapping[str, LayerMask], rank: int, largest_rank: int
) -> dict[str, dict[int, Float[np.ndarray, "k components"]]]:
    """Returns the components with which A begins, by linear and layer.

    The linears together get `rank` times their number of components, each linear at most
    `largest_rank`. These are the components that explain the largest fractions of their inputs'
    variances (Paischer et al. 2024, Algorithm 1). If linears have equal inputs, or components
    explain equal fractions, the linear that the model computes first comes first. Raises ValueError
    if the samples have too few labelled tokens for the components.
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
    explain nothing. The entry of each component with the largest absolute value is positive."""
    x = x - x.mean(axis=0, dtype=np.float64)
    # Both products have the same eigenvalues except for zeros, so the smaller product is used.
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
    """The number of components that each linear gets. The numbers add up to `budget`."""

    def every() -> Iterator[tuple[float, int, tuple[int, str]]]:
        for order, (place, of_linear) in enumerate(shares.items()):
            for share in of_linear.tolist():
                yield -share, order, place

    counts = dict.fromkeys(shares, 0)
    for _, _, place in sorted(every())[:budget]:
        counts[place] += 1
    return counts
