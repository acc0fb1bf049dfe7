"""The lengths of the samples in a task's global batches, for planners."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from jaxmux.data import GlobalBatches

# The lengths of global batches that have been read, by step.
_LENGTHS: WeakKeyDictionary[GlobalBatches, dict[int, list[int]]] = WeakKeyDictionary()


class BatchLengths(Sequence[list[int]]):
    """By step, the stream lengths in tokens of the samples of a task's global batch.

    The stream length of a sample is its number of tokens minus 1, because the model does not read
    the last token. A global batch is read only when its lengths are requested.

    Attributes:
      batches: global batches of the task.
      steps: number of steps that the task trains.
    """

    def __init__(self, batches: GlobalBatches, steps: int):
        self.batches, self.steps = batches, steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> list[int]:
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step} of {self.steps}")
        # The choice of a mesh asks for the same steps again and again.
        known = _LENGTHS.setdefault(self.batches, {})
        if step not in known:
            known[step] = [sample.stream_length for sample in self.batches[step]]
        return known[step]
