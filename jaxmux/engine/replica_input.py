"""What a replica of the backbone trains at a time."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxmux.data.microbatch import Microbatch
from jaxmux.planner.devices import ONE_DEVICE, Replica
from jaxmux.planner.packing import ShapeClass

# The microbatches of all data shards where an executor reads them: arrays on one device, or on the
# devices of each stage.
PlacedMicrobatch = Any


class ReplicaInput(NamedTuple):
    """What a replica (a copy of the backbone on its devices) trains at a time.

    Attributes:
      shape: shape class of its microbatches.
      replica: its devices. Each data shard of a stage trains a microbatch of its own.
      streams: whether rounds follow each other in its pipeline without a gap.
      task_by_task: whether every task has microbatches and an update of its own.
      place: copies the microbatches of all data shards to where the replica reads them.
    """

    shape: ShapeClass
    replica: Replica = ONE_DEVICE
    streams: bool = False
    task_by_task: bool = False
    place: Callable[[Sequence[Microbatch]], PlacedMicrobatch] = list

    @property
    def tokens(self) -> int:
        """Tokens of the microbatches of all data shards together, with padding."""
        return self.replica.shards * self.shape.tokens
