"""The time that replicas take per sequence, for each parallel configuration (LobRA 2.2).

A *parallel configuration* S_i is a `Replica`. A deployment has p_i equal replicas of it.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ..costs.replica_costs import ReplicaCosts
from ..devices import Replica
from ..errors import PlanningError
from ..packing.rows import ShapeClass


class TokenCosts:
    """The `SequenceCosts` of replicas for which only sizes are known, in arbitrary units: a
    sequence takes its number of tokens divided by the number of devices."""

    def __init__(self, shapes: Mapping[Replica, ShapeClass]):
        self._shapes = shapes

    def longest(self, configuration: Replica) -> int:
        return self._shapes[configuration].row_len

    def sequence_seconds(self, configuration: Replica, length: int) -> float:
        return length / configuration.devices

    def constant_seconds(self, configuration: Replica) -> float:
        """Returns the tokens that each device could process in the time in which the pipeline
        fills."""
        fill = (configuration.pp - 1) * self._shapes[configuration].tokens
        return fill / configuration.devices


class ShapeCosts:
    """The `SequenceCosts` of replicas with cost models: a sequence takes its share of the time of a
    microbatch, by its tokens."""

    def __init__(self, costs: Mapping[Replica, tuple[ReplicaCosts, ShapeClass]]):
        self._costs = costs

    def longest(self, configuration: Replica) -> int:
        _, shape = self._costs[configuration]
        return shape.row_len

    def sequence_seconds(self, configuration: Replica, length: int) -> float:
        _, shape = self._costs[configuration]
        return self._microbatch(configuration) * length / (shape.tokens * configuration.shards)

    def constant_seconds(self, configuration: Replica) -> float:
        """Returns the seconds for filling and draining the pipeline and for updating the tasks."""
        costs, _ = self._costs[configuration]
        return (configuration.pp - 1) * self._microbatch(configuration) + costs.update()

    def _microbatch(self, configuration: Replica) -> float:
        costs, shape = self._costs[configuration]
        return costs.microbatch(shape) + 2 * costs.permute(shape)


class SequenceCosts(Protocol):
    """LobRA's cost model: the time that one replica takes for the sequences of a round. A sequence
    is a training sample, padded to the upper boundary of its length bin.

    If a replica of configuration S serves x_j sequences of each length bin j, padded to s_j tokens,
    the forward and backward passes of a round take T(x; S) = constant_seconds(S) + Σ_j
    sequence_seconds(S, s_j) · x_j seconds. A deployed replica takes the constant even without
    sequences.
    """

    def longest(self, configuration: Replica) -> int:
        """Returns the tokens of the longest sequence that fits into memory; 0 if none fits."""

    def sequence_seconds(self, configuration: Replica, length: int) -> float:
        """Returns the seconds that one more sequence, padded to `length` tokens, adds to a
        round."""

    def constant_seconds(self, configuration: Replica) -> float:
        """Returns the seconds of a round that do not depend on its sequences."""


class CostTable(NamedTuple):
    """The cost model for S configurations and R length bins. `lengths` has the tokens to which each
    bin's sequences are padded. `constant`, float64 [S], is the seconds of a round that do not
    depend on its sequences. `per_sequence`, float64 [S, R], is the seconds of one sequence;
    infinite if memory does not suffice."""

    configurations: tuple[Replica, ...]
    lengths: tuple[int, ...]
    constant: np.ndarray
    per_sequence: np.ndarray

    @property
    def devices(self) -> np.ndarray:
        """int64 [S]: n_i, the number of devices of one replica of each configuration."""
        return np.array([configuration.devices for configuration in self.configurations], np.int64)

    @property
    def alone(self) -> np.ndarray:
        """float64 [S, R]: the seconds of a round in which a replica serves a single sequence."""
        return self.constant[:, None] + self.per_sequence

    def of(self, indices: Sequence[int]) -> "CostTable":
        configurations = tuple(self.configurations[i] for i in indices)
        constant, per_sequence = self.constant[indices], self.per_sequence[indices]
        return CostTable(configurations, self.lengths, constant, per_sequence)

    def seconds_of(self, counts: np.ndarray) -> np.ndarray:
        """Returns the seconds of `counts` sequences [..., S, R] without the constant, float64 [...,
        S]."""
        return (np.where(counts > 0, self.per_sequence, 0) * counts).sum(axis=-1)


def tabulate_costs(
    configurations: Sequence[Replica], lengths: Sequence[int], model: SequenceCosts
) -> CostTable:
    per_sequence = np.full((len(configurations), len(lengths)), np.inf)
    for i, configuration in enumerate(configurations):
        longest = model.longest(configuration)
        for j, length in enumerate(lengths):
            if length <= longest:
                per_sequence[i, j] = model.sequence_seconds(configuration, length)
    constant = np.array([model.constant_seconds(c) for c in configurations], float)
    return CostTable(tuple(configurations), tuple(lengths), constant, per_sequence)


def drop_dominated(costs: CostTable) -> tuple[CostTable, dict[Replica, Replica]]:
    """Removes dominated configurations (LobRA 4.2): a configuration is dominated if another one
    with at most as many devices is at least as fast. Also returns, for each removed configuration,
    one that dominates it."""
    table = np.column_stack([costs.devices, costs.constant, costs.per_sequence])
    kept: list[int] = []
    dominated = {}
    # In this order, every configuration comes after all that dominate it.
    for index in np.lexsort(table.T[::-1]):
        better = next((k for k in kept if (table[k] <= table[index]).all()), None)
        if better is None:
            kept.append(int(index))
        else:
            dominated[costs.configurations[index]] = costs.configurations[better]
    return costs.of(sorted(kept)), dominated


def require_service(costs: CostTable, devices: int) -> None:
    """Raises PlanningError if no configuration of at most `devices` devices serves some length bin.
    The message names a change that would help."""
    if not len(costs.configurations):
        raise PlanningError("no parallel configurations to choose from")
    if not len(costs.lengths):
        raise PlanningError("no sequences to plan for")
    serves = np.isfinite(costs.per_sequence)
    unserved = ~serves[costs.devices <= devices].any(axis=0)
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
            f"there are {devices} devices"
        )
    lengths = np.where(serves & (costs.devices <= devices)[:, None], costs.lengths, 0)
    longest, best = int(lengths.max()), costs.configurations[int(lengths.max(axis=1).argmax())]
    shorten = f"shorten them to {longest} tokens, which {best} serves, or " if longest else ""
    raise PlanningError(
        f"sequences of {length} tokens fit no configuration: {shorten}"
        f"offer a larger one than tp*pp = {int(costs.devices.max())}"
    )
