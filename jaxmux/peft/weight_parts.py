"""Parts of weights with which LoRA may begin: singular vectors (PiSSA) or orthonormal columns
(OLoRA).

Weights are [n, k], as in checkpoints. The parts are computed in float64.
"""

import numpy as np
from jaxtyping import Float

from jaxmux.pallas_kernels.grouped_lora import Factors


def principal_part(weight: Float[np.ndarray, "n k"], rank: int) -> Factors:
    """The factors of PiSSA (Meng et al. 2024, Eq. 2 and 3). Their product is the part of the
    transposed weight that belongs to its `rank` largest singular values; each factor contains the
    square roots of these values. The singular vectors are computed as eigenvectors of W Wᵀ or Wᵀ W,
    whichever is smaller. Only the `rank` largest are computed, which takes a small part of the time
    of a whole decomposition.

    Returns:
      a [k, r] and b [r, n], by descending singular values.
    """
    # Imported here because the import takes 0.2 s and few tasks need it.
    from scipy.linalg import eigh

    is_tall = weight.shape[0] > weight.shape[1]
    wide = np.float64(weight.T if is_tall else weight)
    size = len(wide)
    squares, left = eigh(wide @ wide.T, subset_by_index=(size - rank, size - 1))
    left, values = left[:, ::-1], np.sqrt(np.maximum(squares[::-1], 0))
    right = wide.T @ left
    right /= np.where(values > 0, values, 1)
    return _shared_out(*((right, left) if is_tall else (left, right)), values)


def approximate_principal_part(
    weight: Float[np.ndarray, "n k"],
    rank: int,
    iterations: int,
    rng: np.random.Generator,
) -> Factors:
    """`principal_part` by a randomised decomposition (Halko et al. 2011, Algorithms 4.4 and 5.1)
    with `iterations` power iterations, as `torch.svd_lowrank` computes it."""
    is_tall = weight.shape[0] >= weight.shape[1]
    tall = np.float64(weight if is_tall else weight.T)
    basis, _ = np.linalg.qr(tall @ rng.standard_normal((tall.shape[1], rank)))
    for _ in range(iterations):
        basis, _ = np.linalg.qr(tall.T @ basis)
        basis, _ = np.linalg.qr(tall @ basis)
    left, values, right = np.linalg.svd(basis.T @ tall, full_matrices=False)
    left, right = basis @ left, right.T
    return _shared_out(*((left, right) if is_tall else (right, left)), values)


def orthonormal_part(weight: Float[np.ndarray, "n k"], rank: int) -> Factors:
    """The factors a [k, r] and b [r, n] of OLoRA (Büyükakyüz 2024): the first columns of Q and the
    first rows of R, where W = Q R. These columns of Q depend only on the same columns of W, and R
    is Qᵀ W."""
    weight = np.float64(weight)
    columns, _ = np.linalg.qr(weight[:, :rank])
    return Factors(weight.T @ columns, columns.T)


def _shared_out(
    left: Float[np.ndarray, "n r"],
    right: Float[np.ndarray, "k r"],
    values: Float[np.ndarray, " r"],
) -> Factors:
    """Multiplies both factors by the square roots of the singular values. The sign of a singular
    vector is arbitrary; the largest entry of each left one is made positive, so that all machines
    agree."""
    largest = np.take_along_axis(left, np.abs(left).argmax(axis=0)[None], axis=0)
    share = np.where(largest < 0, -1, 1) * np.sqrt(values)
    return Factors(right * share, (left * share).T)
