"""The cost models of replicas whose shape classes are chosen already."""

from collections.abc import Mapping

from ..costs.replica_costs import ReplicaCosts
from ..devices import Replica
from ..packing.shape_class import ShapeClass


class TokenCosts:
    """The `SequenceCosts` of replicas of which only the sizes are known: a sequence takes as long
    as it has tokens, divided by the number of devices."""

    def __init__(self, shapes: Mapping[Replica, ShapeClass]):
        """Creates the costs.

        Args:
          shapes: for each configuration, the shape class of its microbatches.
        """
        self._shapes = shapes

    def longest(self, configuration: Replica) -> int:
        """Returns the tokens of a row."""
        return self._shapes[configuration].row_len

    def sequence_seconds(self, configuration: Replica, length: int) -> float:
        """Returns the sequence's tokens for each device. The unit is not a second."""
        return length / configuration.devices

    def constant_seconds(self, configuration: Replica) -> float:
        """Returns the tokens during which an empty pipeline is filled, for each device."""
        fill = (configuration.pp - 1) * self._shapes[configuration].tokens
        return fill / configuration.devices


class ShapeCosts:
    """The `SequenceCosts` of replicas by their cost models: a sequence takes its share of the
    tokens of a microbatch in the replica's shape class."""

    def __init__(self, costs: Mapping[Replica, tuple[ReplicaCosts, ShapeClass]]):
        """Creates the costs.

        Args:
          costs: for each configuration, its cost model and the shape class of its microbatches.
        """
        self._costs = costs

    def longest(self, configuration: Replica) -> int:
        """Returns the tokens of a row."""
        _, shape = self._costs[configuration]
        return shape.row_len

    def sequence_seconds(self, configuration: Replica, length: int) -> float:
        """Returns the seconds that one more sequence adds to a replica's round."""
        _, shape = self._costs[configuration]
        return self._microbatch(configuration) * length / (shape.tokens * configuration.shards)

    def constant_seconds(self, configuration: Replica) -> float:
        """Returns the seconds in which the pipeline is filled and drained and the tasks updated."""
        costs, _ = self._costs[configuration]
        return (configuration.pp - 1) * self._microbatch(configuration) + costs.update()

    def _microbatch(self, configuration: Replica) -> float:
        """Seconds of both passes of a full microbatch on the slowest stage."""
        costs, shape = self._costs[configuration]
        return costs.microbatch(shape) + 2 * costs.permute(shape)
