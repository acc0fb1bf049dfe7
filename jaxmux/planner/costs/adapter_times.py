"""The time of fused adapters (the second line of MuxTune Eq. 3), fitted to measurements."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy

_MOST_FITS = 10


class AdapterLoad(NamedTuple):
    """The work of the fused adapters of one layer, on all its linears, for one microbatch.

    Attributes:
      tokens: n_k, tokens of each task k.
      slots: T, slots of the pool.
      rank: R, rank of the pool.
      chunk_len: tokens of a chunk.
      dropout: whether adapters apply dropout to their input.
    """

    tokens: Sequence[float]
    slots: int
    rank: int
    chunk_len: int
    dropout: bool


class AdapterTimes(NamedTuple):
    """Non-negative coefficients of the adapters' time in seconds, forward and backward.

    The adapters of a task with n tokens keep the whole device busy for
    u_a(n) · t_a(n) = per_task + per_token · n + … seconds. Alone they take t_a(n), which is `floor`
    longer, because the device is mostly idle while small kernels are launched and drain. By
    default, adapters cost nothing.
    """

    floor: float = 0.0
    per_task: float = 0.0
    per_token: float = 0.0
    per_token_rank: float = 0.0
    per_task_rank: float = 0.0
    per_chunk_rank: float = 0.0
    per_dropped_token: float = 0.0
    per_slot_rank: float = 0.0

    def seconds(self, load: AdapterLoad) -> float:
        """Returns the forward and backward seconds of the fused adapters.

        They are max(Σ_k u_a · t_a(n_k), max_k t_a(n_k)), plus the time to prepare the factors of
        all slots for the kernels.
        """
        if not load.tokens or not load.rank:
            return 0.0
        rank, dropped = load.rank, self.per_dropped_token * load.dropout
        of_token = self.per_token + rank * (
            self.per_token_rank + self.per_chunk_rank / load.chunk_len
        )
        of_task = self.per_task + rank * self.per_task_rank
        busy = of_task * len(load.tokens) + (of_token + dropped) * sum(load.tokens)
        longest = self.floor + of_task + (of_token + dropped) * max(load.tokens)
        return self.per_slot_rank * load.slots * rank + max(busy, longest)


def fit_adapter_times(
    loads: Sequence[AdapterLoad], seconds: Sequence[float], weights: Sequence[float]
) -> AdapterTimes:
    """Returns the coefficients that fit measured seconds best (non-negative least squares).

    For a load of several tasks, the coefficients decide which term of the maximum is larger. The
    fit is therefore repeated until that term changes for no load.

    Args:
      loads: the measured loads.
      seconds: measured time of each load.
      weights: weight of each load's residual, for example one over the time of the whole layer.
    """
    weights = np.asarray(weights, float)[:, None]
    target = np.asarray(seconds, float) * weights[:, 0]
    bound_by_one = np.array([len(load.tokens) == 1 for load in loads])
    times = AdapterTimes()
    for _ in range(_MOST_FITS):
        rows = [_features(*pair) for pair in zip(loads, bound_by_one, strict=True)]
        features = weights * np.array(rows)
        size = np.linalg.norm(features, axis=0)
        size[size == 0] = 1
        times = AdapterTimes(*map(float, scipy.optimize.nnls(features / size, target)[0] / size))
        sides = np.array([_is_bound_by_one(times, load) for load in loads])
        if (sides == bound_by_one).all():
            break
        bound_by_one = sides
    return times


def _features(load: AdapterLoad, bound_by_one: bool) -> list[float]:
    """The factor of each coefficient, in the order of the fields of `AdapterTimes`."""
    tasks, tokens = len(load.tokens), sum(load.tokens)
    if bound_by_one:
        tasks, tokens = 1, max(load.tokens)
    rank = load.rank
    return [
        float(bound_by_one),
        tasks,
        tokens,
        tokens * rank,
        tasks * rank,
        tokens * rank / load.chunk_len,
        tokens * load.dropout,
        load.slots * rank,
    ]


def _is_bound_by_one(times: AdapterTimes, load: AdapterLoad) -> bool:
    together = np.dot(_features(load, False), times)
    return len(load.tokens) == 1 or np.dot(_features(load, True), times) > together
