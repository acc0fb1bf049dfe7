"""The input of every schedule generator: the microbatches to pipeline and their times."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...errors import PlanningError

# Times of the passes where none are given: a backward pass takes about twice as long as a forward
# pass.
FORWARD, BACKWARD = 1.0, 2.0


class ScheduledMicrobatch(NamedTuple):
    """The facts about one microbatch that its order in the pipeline depends on.

    A *step* of a task is one global batch of the task and the optimizer update after it. Samples of
    a task's next step may run forward only after that update. The step numbers of a task ascend but
    need not start at 0.

    Attributes:
      tasks: indices of the tasks that have samples in the microbatch, and of those that are updated
        together with them; empty for a no-op microbatch, which holds no samples.
      steps: for each entry of `tasks`, the step of this task. All microbatches that name one (task,
        step) together make up its global batch.
      bucket: index of the bucket (a group of tasks that are packed together) that the microbatch
        comes from. Only `template` and `template_order` use it.
      buffers: number of buffers that the microbatch takes on each stage (in an interleaved
        pipeline: for each virtual stage, that is, for each part of the model on the stage). A
        buffer is a unit of memory for residuals, the activations that a forward pass keeps for its
        backward pass. The microbatch takes its buffers from the forward pass to the backward pass.
    """

    tasks: tuple[int, ...]
    steps: tuple[int, ...]
    bucket: int = 0
    buffers: int = 1

    @property
    def global_batches(self) -> tuple[tuple[int, int], ...]:
        """The (task, step) pairs that have samples in the microbatch."""
        return tuple(zip(self.tasks, self.steps, strict=True))


@dataclasses.dataclass(frozen=True, eq=False)
class Workload:
    """The input of schedule generators: M microbatches in order, with their times on every stage.

    The microbatches and their order are called the stream. In an ordinary pipeline a stage is one
    virtual stage. In an interleaved pipeline (Narayanan et al. 2021, 2.2) a stage holds several
    parts of the model, and each part is a virtual stage. Of S stages, stage s holds the virtual
    stages s, s + S, s + 2S and so on, so that the output of a virtual stage always goes to the next
    stage.

    `uniform_workload` makes a workload in which all microbatches take the same time.

    Attributes:
      microbatches: the M microbatches in the order of the stream.
      forward: float64 [M, V], time of the forward pass of each microbatch on each of V virtual
        stages. The unit is free; simulations return their times in this unit.
      backward: float64 [M, V], time of the backward pass of each microbatch on each virtual stage,
        in the unit of `forward`.
      buffer_limit: for each of the S stages, its number of buffers for residuals (see
        `ScheduledMicrobatch.buffers`); None for no limit.
      virtual_per_stage: number of virtual stages of one stage, 1 for an ordinary pipeline; V = S ·
        virtual_per_stage.

    Raises:
      PlanningError: there are no microbatches, an array has another shape, a time is not positive,
        `buffer_limit` has not one entry per stage, or a microbatch takes less than one buffer or
        more than a stage has.
    """

    microbatches: tuple[ScheduledMicrobatch, ...]
    forward: np.ndarray
    backward: np.ndarray
    buffer_limit: tuple[int, ...] | None = None
    virtual_per_stage: int = 1

    def __post_init__(self):
        count, shape = len(self.microbatches), np.shape(self.forward)
        if not count:
            raise PlanningError("a workload needs at least one microbatch")
        if len(shape) != 2 or shape != np.shape(self.backward) or shape[0] != count:
            raise PlanningError(
                f"forward times {shape} and backward times {np.shape(self.backward)} must both be "
                f"[microbatches={count}, virtual stages]"
            )
        if shape[1] == 0 or shape[1] % self.virtual_per_stage:
            raise PlanningError(
                f"{shape[1]} virtual stages cannot be divided into stages of "
                f"{self.virtual_per_stage}"
            )
        if min(np.min(self.forward), np.min(self.backward)) <= 0:
            raise PlanningError("stage times must be positive")
        if self.buffer_limit is not None and len(self.buffer_limit) != self.stages:
            raise PlanningError(
                f"buffer_limit has {len(self.buffer_limit)} entries for {self.stages} stages"
            )
        self._check_buffers()

    def _check_buffers(self) -> None:
        for index, microbatch in enumerate(self.microbatches):
            if microbatch.buffers < 1:
                raise PlanningError(
                    f"microbatch {index} takes {microbatch.buffers} buffers, expected at least 1"
                )
            for stage, limit in enumerate(self.buffer_limit or ()):
                if microbatch.buffers > limit:
                    raise PlanningError(
                        f"microbatch {index} takes {microbatch.buffers} buffers, stage {stage} "
                        f"has {limit}"
                    )

    @property
    def stages(self) -> int:
        """S, the number of pipeline stages."""
        return np.shape(self.forward)[1] // self.virtual_per_stage

    @property
    def virtual_stages(self) -> int:
        """V, the number of virtual stages of all stages together."""
        return np.shape(self.forward)[1]

    def reorder(self, order: Sequence[int]) -> "Workload":
        """Returns a new workload with these microbatches, and their times, in another order.

        Args:
          order: a permutation of the M indices. Microbatch i of the new workload is microbatch
            `order[i]` of this workload.
        """
        order = np.asarray(order)
        return dataclasses.replace(
            self,
            microbatches=tuple(self.microbatches[index] for index in order),
            forward=self.forward[order],
            backward=self.backward[order],
        )

    def with_virtual_stages(self, virtual_per_stage: int) -> "Workload":
        """Returns a new workload in which every stage is divided into equal virtual stages.

        Each virtual stage takes 1 / virtual_per_stage of its stage's times.

        Args:
          virtual_per_stage: number of virtual stages of each stage in the new workload.

        Raises:
          PlanningError: this workload has more than one virtual stage per stage already.
        """
        if self.virtual_per_stage != 1:
            raise PlanningError(
                f"every stage is already divided into {self.virtual_per_stage} virtual stages"
            )
        return dataclasses.replace(
            self,
            forward=np.tile(self.forward / virtual_per_stage, virtual_per_stage),
            backward=np.tile(self.backward / virtual_per_stage, virtual_per_stage),
            virtual_per_stage=virtual_per_stage,
        )


def uniform_workload(
    microbatches: Sequence[ScheduledMicrobatch],
    forward: Sequence[float],
    backward: Sequence[float],
    buffer_limit: Sequence[int] | None = None,
) -> Workload:
    """Returns a workload in which all microbatches take equal times on a stage.

    Args:
      microbatches: the microbatches in order, for example from `round_robin_microbatches`.
      forward: for each of S stages, the time of a microbatch's forward pass, in any unit.
      backward: for each stage, the time of a microbatch's backward pass, in the unit of `forward`.
      buffer_limit: for each stage, its number of buffers for residuals (see
        `ScheduledMicrobatch.buffers`); None for no limit.

    Raises:
      PlanningError: there are no microbatches, `forward`, `backward` and `buffer_limit` are not of
        equal lengths, a time is not positive, or a microbatch takes less than one buffer or more
        than a stage has.
    """
    return Workload(
        tuple(microbatches),
        np.tile(np.asarray(forward, float), (len(microbatches), 1)),
        np.tile(np.asarray(backward, float), (len(microbatches), 1)),
        None if buffer_limit is None else tuple(buffer_limit),
    )


def round_robin_microbatches(
    tasks: int, steps: int, microbatches: int = 1
) -> tuple[ScheduledMicrobatch, ...]:
    """Returns microbatches in an order in which tasks take turns, as in mLoRA's pipeline (3.2.1).

    Use it to make a `Workload` with `uniform_workload`. A step is one global batch of a task with
    its update. Step 0 of every task comes first, in the order of the tasks, then step 1 of every
    task, and so on. The microbatches of one global batch are consecutive. Each microbatch holds
    samples of one task and takes one buffer; its bucket (see `ScheduledMicrobatch`) is the index of
    its task.

    Args:
      tasks: number of tasks.
      steps: number of steps of each task.
      microbatches: number of microbatches of each global batch.

    Returns:
      A tuple of tasks · steps · microbatches entries.
    """
    return tuple(
        ScheduledMicrobatch((task,), (step,), bucket=task)
        for step in range(steps)
        for task in range(tasks)
        for _ in range(microbatches)
    )


def independent_series(workload: Workload, longest: int | None = None) -> list[list[int]]:
    """Cuts the stream, as late as possible, into series of independent microbatches.

    Microbatches are independent if none of them needs an update that another one of the series
    contributes to.

    Args:
      workload: the stream.
      longest: most microbatches of a series; None for no limit.

    Returns:
      The indices of the consecutive microbatches of each series.
    """
    series: list[list[int]] = [[]]
    steps: dict[int, int] = {}
    for index, microbatch in enumerate(workload.microbatches):
        batches = microbatch.global_batches
        needs_update = any(steps.get(task, step) != step for task, step in batches)
        if needs_update or len(series[-1]) == longest:
            series.append([])
            steps = {}
        series[-1].append(index)
        steps.update(batches)
    return series
