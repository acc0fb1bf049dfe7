"""What a schedule generator is given: the microbatches to pipeline and what they cost."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...errors import PlanningError


class ScheduledMicrobatch(NamedTuple):
    """One microbatch as the pipeline sees it.

    Attributes:
      tasks: indices of the tasks that have samples in it; empty for a no-op microbatch.
      steps: for each of `tasks`, which of its global batches those samples belong to. All the jobs
        of one (task, step) together are that global batch.
      bucket: the MuxTune bucket or hTask it was made from. Groups jobs of one shape.
      buffers: consecutive ring-buffer slots that its residuals take between forward and backward.
    """

    tasks: tuple[int, ...]
    steps: tuple[int, ...]
    bucket: int = 0
    buffers: int = 1

    @property
    def batches(self) -> tuple[tuple[int, int], ...]:
        """The (task, step) pairs that have samples in it."""
        return tuple(zip(self.tasks, self.steps, strict=True))


@dataclasses.dataclass(frozen=True, eq=False)
class Workload:
    """Jobs in the order of the stream, with their times on every stage.

    A virtual stage is one chunk of consecutive layers. The ordinary pipeline has one chunk a stage,
    and the two are the same. With more, virtual stage v lies on stage v % S, as in Megatron's
    interleaved schedule, so that activations always go to the right neighbour.

    Attributes:
      jobs: the microbatches.
      forward: float64[jobs, virtual stages], forward time of a job, any unit.
      backward: float64[jobs, virtual stages], backward time, in the same unit.
      buffer_limit: residual slots that each stage has; None for no limit.
      chunks: virtual stages of one stage.
    """

    jobs: tuple[ScheduledMicrobatch, ...]
    forward: np.ndarray
    backward: np.ndarray
    buffer_limit: tuple[int, ...] | None = None
    chunks: int = 1

    def __post_init__(self):
        shape = np.shape(self.forward)
        if not self.jobs:
            raise PlanningError("a workload needs at least one job")
        if len(shape) != 2 or shape != np.shape(self.backward) or shape[0] != len(self.jobs):
            raise PlanningError(
                f"forward times {shape} and backward times {np.shape(self.backward)} must both be "
                f"[jobs={len(self.jobs)}, virtual stages]"
            )
        if shape[1] == 0 or shape[1] % self.chunks:
            raise PlanningError(f"{shape[1]} virtual stages do not make {self.chunks} equal chunks")
        if min(np.min(self.forward), np.min(self.backward)) <= 0:
            raise PlanningError("stage times must be positive")
        if self.buffer_limit is not None and len(self.buffer_limit) != self.stages:
            raise PlanningError(
                f"buffer_limit has {len(self.buffer_limit)} entries for {self.stages} stages"
            )
        self._check_buffers()

    def _check_buffers(self) -> None:
        for j, job in enumerate(self.jobs):
            if job.buffers < 1:
                raise PlanningError(f"job {j} takes {job.buffers} buffers, expected at least 1")
            for stage, limit in enumerate(self.buffer_limit or ()):
                if job.buffers > limit:
                    raise PlanningError(
                        f"job {j} takes {job.buffers} buffers, stage {stage} has {limit}"
                    )

    @property
    def stages(self) -> int:
        return np.shape(self.forward)[1] // self.chunks

    @property
    def virtual_stages(self) -> int:
        return np.shape(self.forward)[1]

    def reorder(self, order: Sequence[int]) -> "Workload":
        """The same jobs as another stream: job i of the result is job `order[i]` of this one."""
        order = np.asarray(order)
        return dataclasses.replace(
            self,
            jobs=tuple(self.jobs[j] for j in order),
            forward=self.forward[order],
            backward=self.backward[order],
        )

    def split_layers(self, chunks: int) -> "Workload":
        """The same jobs with the layers of every stage cut into `chunks` equally long chunks."""
        if self.chunks != 1:
            raise PlanningError(f"the layers are already split into {self.chunks} chunks")
        return dataclasses.replace(
            self,
            forward=np.tile(self.forward / chunks, chunks),
            backward=np.tile(self.backward / chunks, chunks),
            chunks=chunks,
        )


def uniform_workload(
    jobs: Sequence[ScheduledMicrobatch],
    forward: Sequence[float],
    backward: Sequence[float],
    buffer_limit: Sequence[int] | None = None,
) -> Workload:
    """A workload whose jobs all take the same times.

    Args:
      jobs: the microbatches.
      forward: forward time of each stage. A last stage that also holds the head is longer than the
        others; a head split over the stages adds its share to each.
      backward: backward time of each stage.
      buffer_limit: residual slots of each stage.
    """
    return Workload(
        tuple(jobs),
        np.tile(np.asarray(forward, float), (len(jobs), 1)),
        np.tile(np.asarray(backward, float), (len(jobs), 1)),
        None if buffer_limit is None else tuple(buffer_limit),
    )


def round_robin_microbatches(
    tasks: int, steps: int, microbatches: int = 1
) -> tuple[ScheduledMicrobatch, ...]:
    """The stream in which every task in turn contributes one global batch of `microbatches` jobs,
    `steps` times over: the order of mLoRA's pipeline."""
    return tuple(
        ScheduledMicrobatch((task,), (step,), bucket=task)
        for step in range(steps)
        for task in range(tasks)
        for _ in range(microbatches)
    )


def microbatch_groups(load: Workload, longest: int | None = None) -> list[list[int]]:
    """The stream cut, as late as possible, into runs of at most `longest` consecutive jobs of which
    none needs the update of a task in the same run."""
    runs: list[list[int]] = [[]]
    steps: dict[int, int] = {}
    for j, job in enumerate(load.jobs):
        needs_update = any(steps.get(task, step) != step for task, step in job.batches)
        if needs_update or len(runs[-1]) == longest:
            runs.append([])
            steps = {}
        runs[-1].append(j)
        steps.update(job.batches)
    return runs
