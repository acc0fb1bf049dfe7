"""What is recorded of a task beside the adapter that its training has given."""

from collections.abc import Mapping
from typing import NamedTuple

from jaxmux.data import Rendering
from jaxmux.tasks import Task

from .prepared_task import PreparedTask
from .progress import TaskProgress


class TrainedTask(NamedTuple):
    """A task that has been trained, without its data.

    Attributes:
      task: the task.
      progress: its progress, which does not change any more.
      samples: number of training samples.
      held_out_samples: number of held-out samples.
      fingerprints: hashes of the data, from `PreparedTask.fingerprints`.
      rendering: how the records of its training data became text.
    """

    task: Task
    progress: TaskProgress
    samples: int
    held_out_samples: int
    fingerprints: Mapping[str, str]
    rendering: Rendering

    @classmethod
    def of(
        cls, prepared: PreparedTask, progress: TaskProgress, fingerprints: Mapping[str, str]
    ) -> "TrainedTask":
        """A task with the number of its samples.

        Args:
          prepared: the task with its data.
          progress: its progress.
          fingerprints: hashes of its data.
        """
        counts = len(prepared.samples.samples), len(prepared.eval_samples)
        rendering = prepared.samples.rendering
        return cls(prepared.task, progress, *counts, fingerprints, rendering)
