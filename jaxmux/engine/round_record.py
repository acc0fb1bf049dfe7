"""What a round held, and the order in which the stages of a pipeline got its passes."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .replica_input import ReplicaInput
from .rounds import RoundPlan


class DispatchedPass(NamedTuple):
    """A pass that the host has given to a stage.

    Attributes:
      seconds: when, by `time.perf_counter`. The stage may run the pass later.
      replica: index of the replica.
      stage: index of the stage.
      part: index of the part of the backbone; several parts may lie on a stage.
      microbatch: index of the microbatch in its round.
      forward: True for a forward pass, False for a backward pass.
      steps: the `RoundPlan.steps` of the round, which tell the rounds apart.
    """

    seconds: float
    replica: int
    stage: int
    part: int
    microbatch: int
    forward: bool
    steps: Mapping[int, int]


class TaskTokens(NamedTuple):
    """The tokens of a task in a microbatch.

    Attributes:
      chunks: tokens of the task's chunks, with padding.
      read: tokens that the model reads, without padding.
    """

    chunks: int
    read: int


class MicrobatchRecord(NamedTuple):
    """What a microbatch held.

    Attributes:
      replica: index of the replica that trained it.
      capacity: tokens of the microbatches of all data shards together, with padding.
      tasks: by name, the tokens of each task in it.
    """

    replica: int
    capacity: int
    tasks: dict[str, TaskTokens]


class RoundRecord(NamedTuple):
    """What a dispatched round held.

    Attributes:
      index: number of the round, from 0.
      microbatches: its microbatches, but those that an earlier process had trained.
      passes: the passes that the host has given to the stages of pipelines since the round before,
        in this order; empty on one device. With schedules in which rounds follow each other, some
        of them belong to the following round.
      steps: the `RoundPlan.steps` of the round.
    """

    index: int
    microbatches: list[MicrobatchRecord]
    passes: Sequence[DispatchedPass]
    steps: Mapping[int, int]

    @classmethod
    def of(
        cls,
        index: int,
        plan: RoundPlan,
        names: Mapping[int, str],
        replicas: Sequence[ReplicaInput],
        passes: Sequence[DispatchedPass],
    ) -> "RoundRecord":
        """The record of a round.

        Args:
          index: number of the round, from 0.
          plan: the round.
          names: by slot, the name of each of its tasks.
          replicas: the replicas that have trained it.
          passes: as for `RoundRecord`.
        """
        microbatches = [
            MicrobatchRecord(
                own.replica,
                replicas[own.replica].tokens,
                {
                    names[slot]: TaskTokens(own.trained_tokens[slot], read)
                    for slot, read in own.read_tokens.items()
                },
            )
            for own in plan.microbatches
        ]
        return cls(index, microbatches, passes, plan.steps)
