"""Assigns each sample of a round to a replica."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from ..devices import Replica
from ..packing.shape_class import MIN_CHUNK_LEN
from .cost_table import SequenceCosts
from .length_bins import LengthBins, choose_length_bins
from .sample_dispatch import dispatch_samples

# R, the most length bins of a round (LobRA takes 16).
_BINS = 16
# The solver is stopped by the size of its search and not by the clock, so that the division of a
# round can be repeated. It hardly ever takes more than ten nodes and 0.03 seconds.
_NODES, _SECONDS = 50, 60.0


def round_bins(lengths: Sequence[int]) -> LengthBins:
    """Sorts the samples of a round into length bins, whose boundaries are whole multiples of the
    shortest chunk.

    Args:
      lengths: stream lengths of the samples, in tokens.
    """
    tops = sorted({-(-length // MIN_CHUNK_LEN) * MIN_CHUNK_LEN for length in lengths})
    return choose_length_bins(lengths, tops, _BINS)


def assign_samples(
    replicas: Sequence[Replica],
    costs: SequenceCosts,
    lengths: Mapping[int, Sequence[int]],
) -> list[dict[int, list[int]]]:
    """Divides the samples of a round among replicas so that the slowest takes as little time as
    possible, by `dispatch_samples` (LobRA Eq. 3).

    Samples of one length bin are interchangeable. They are dealt evenly, so that the samples of a
    task go to all replicas that serve their bin. Equal calls have equal results.

    Args:
      replicas: the configuration of each replica.
      costs: times of the configurations.
      lengths: by task, the stream lengths in tokens of the samples in its global batch.

    Returns:
      For each replica, by task, indices of its samples, ascending. A task without samples on a
      replica is left out.

    Raises:
      PlanningError: a sample fits no replica.
    """
    every = [(length, task, i) for task, own in lengths.items() for i, length in enumerate(own)]
    bins = round_bins([length for length, *_ in every])
    found = dispatch_samples(
        Counter(replicas),
        bins,
        costs,
        time_limit=_SECONDS,
        single_replicas=False,
        node_limit=_NODES,
    )
    rows = {configuration: iter(counts) for configuration, counts in found.counts.items()}
    # [replica, bin]: number of samples.
    shares = np.array([next(rows[configuration]) for configuration in replicas])
    assigned: list[dict[int, list[int]]] = [{} for _ in replicas]
    of_bin = np.searchsorted(bins.boundaries, [length for length, *_ in every])
    for j in range(len(bins.boundaries)):
        members = [sample for sample, at in zip(every, of_bin, strict=True) if at == j]
        for replica, (_, task, i) in zip(_dealt(shares[:, j]), members, strict=True):
            assigned[replica].setdefault(task, []).append(i)
    return [{task: sorted(own) for task, own in each.items()} for each in assigned]


def _dealt(counts: Sequence[int]) -> list[int]:
    """Every replica as often as its count says, as evenly mixed as possible."""
    turns = [((turn + 0.5) / n, replica) for replica, n in enumerate(counts) for turn in range(n)]
    return [replica for _, replica in sorted(turns)]
