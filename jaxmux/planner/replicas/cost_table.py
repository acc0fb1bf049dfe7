"""What a replica of each parallel configuration takes for sequences of each length (LobRA 2.2)."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ..devices import Replica
from ..errors import PlanningError


class SequenceCosts(Protocol):
    """LobRA's cost model of one replica, linear in the number of sequences.

    A replica that serves x_j sequences padded to s_j tokens, for each bucket j, takes
    T(x; S) = `constant_seconds`(S) + Σ_j `sequence_seconds`(S, s_j) · x_j
    for a step, forward and backward; every deployed replica takes the constant.
    """

    def longest(self, configuration: Replica) -> int:
        """Tokens of the longest sequence that a replica has the memory for; 0 for none."""

    def sequence_seconds(self, configuration: Replica, length: int) -> float:
        """Seconds that a replica takes for one more sequence of `length` tokens."""

    def constant_seconds(self, configuration: Replica) -> float:
        """Seconds of a step whatever a replica serves: filling the pipeline, the update."""


class CostTable(NamedTuple):
    """The cost model for S configurations and R buckets.

    Attributes:
      configurations: S of them.
      lengths: tokens that the sequences of each bucket are padded to, [R].
      constant: seconds of a step whatever a replica serves, float64 [S].
      per_sequence: seconds of a sequence, float64 [S, R]; inf where memory does not suffice.
    """

    configurations: tuple[Replica, ...]
    lengths: tuple[int, ...]
    constant: np.ndarray
    per_sequence: np.ndarray

    @property
    def gpus(self) -> np.ndarray:
        """n_i, the GPUs of a replica, int64 [S]."""
        return np.array([configuration.devices for configuration in self.configurations], np.int64)

    @property
    def alone(self) -> np.ndarray:
        """Seconds of a step in which a replica serves one sequence, [S, R]."""
        return self.constant[:, None] + self.per_sequence

    def of(self, rows: Sequence[int]) -> "CostTable":
        """The costs of some of the configurations."""
        configurations = tuple(self.configurations[i] for i in rows)
        return CostTable(configurations, self.lengths, self.constant[rows], self.per_sequence[rows])

    def loads(self, counts: np.ndarray) -> np.ndarray:
        """Seconds of the sequences `counts` [..., S, R], without the constant: [..., S]."""
        return (np.where(counts > 0, self.per_sequence, 0) * counts).sum(axis=-1)


def tabulate_costs(
    configurations: Sequence[Replica], lengths: Sequence[int], model: SequenceCosts
) -> CostTable:
    """Evaluates the cost model for every configuration and bucket length."""
    per_sequence = [
        [
            model.sequence_seconds(configuration, length)
            if length <= model.longest(configuration)
            else np.inf
            for length in lengths
        ]
        for configuration in configurations
    ]
    return CostTable(
        tuple(configurations),
        tuple(lengths),
        np.array([model.constant_seconds(c) for c in configurations], float),
        np.array(per_sequence, float).reshape(len(configurations), len(lengths)),
    )


def drop_dominated(
    costs: CostTable,
) -> tuple[CostTable, dict[Replica, Replica]]:
    """Leaves out configurations that another one makes needless (LobRA 4.2).

    The paper drops a configuration that is slower than another of as many GPUs. So does this, and
    one that is no faster than another of fewer GPUs: whatever plan had it is as good without.

    Returns:
      The costs of the others, and for each configuration left out the one that dominates it.
    """
    table = np.column_stack([costs.gpus, costs.constant, costs.per_sequence])
    kept: list[int] = []
    dominated = {}
    # In this order a configuration comes behind every one that dominates it.
    for row in np.lexsort(table.T[::-1]):
        better = next((k for k in kept if (table[k] <= table[row]).all()), None)
        if better is None:
            kept.append(int(row))
        else:
            dominated[costs.configurations[row]] = costs.configurations[better]
    return costs.of(sorted(kept)), dominated


def require_service(costs: CostTable, gpus: int) -> None:
    """Checks that every bucket has a configuration that serves it on `gpus` GPUs.

    Raises:
      PlanningError: one has none; the message says what would serve it.
    """
    if not len(costs.configurations):
        raise PlanningError("no parallel configurations to choose from")
    if not len(costs.lengths):
        raise PlanningError("no sequences to plan for")
    serves = np.isfinite(costs.per_sequence)
    unserved = ~serves[costs.gpus <= gpus].any(axis=0)
    if not unserved.any():
        return
    column = int(np.flatnonzero(unserved)[np.asarray(costs.lengths)[unserved].argmax()])
    length = costs.lengths[column]
    able = [
        c for c, serving in zip(costs.configurations, serves[:, column], strict=True) if serving
    ]
    if able:
        least = min(able, key=lambda c: c.devices)
        raise PlanningError(
            f"sequences of {length} tokens need tp*pp >= {least.devices} ({least}), "
            f"the mesh has {gpus} GPUs"
        )
    lengths = np.where(serves & (costs.gpus <= gpus)[:, None], costs.lengths, 0)
    longest, best = int(lengths.max()), costs.configurations[int(lengths.max(axis=1).argmax())]
    shorten = f"shorten them to {longest} tokens, which {best} serves, or " if longest else ""
    raise PlanningError(
        f"sequences of {length} tokens fit no configuration: {shorten}"
        f"offer a larger one than tp*pp = {int(costs.gpus.max())}"
    )
