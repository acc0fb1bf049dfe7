"""A task's global batches, addressed by one integer."""

from collections.abc import Sequence

import grain

from .errors import DataError
from .samples import Sample


class GlobalBatches:
    """Random access to the global batches of one task.

    `batches[k]` is the k-th global batch since the task began, a list of samples that depends on
    (samples, batch_size, seed, k) alone: a task's whole data position is k. Every epoch holds each
    sample exactly once, in an order of its own, and keeps its short last batch.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        batch_size: int,
        seed: int,
        epochs: int | None = None,
        shuffle: bool = True,
    ):
        """Describes the batches; nothing is drawn yet.

        Args:
          samples: the task's samples, not empty.
          batch_size: samples per global batch; may exceed their number, then an epoch is one batch.
          seed: non-negative, decides the order.
          epochs: passes over the samples; None never ends.
          shuffle: False keeps the order of `samples` (evaluation).

        Raises:
          DataError: an argument is outside its range.
        """
        if not samples:
            raise DataError("global batches need at least one sample")
        if batch_size < 1:
            raise DataError(f"batch_size must be at least 1, found {batch_size}")
        if seed < 0:
            raise DataError(f"seed must not be negative, found {seed}")
        if epochs is not None and epochs < 1:
            raise DataError(f"epochs must be at least 1 or None, found {epochs}")
        dataset = grain.MapDataset.source(samples).seed(seed)
        if shuffle:
            dataset = dataset.shuffle()
        one_epoch = dataset.batch(batch_size, drop_remainder=False, batch_fn=list)
        self.batches_per_epoch: int = len(one_epoch)
        self._batches = one_epoch.repeat(epochs)

    def __len__(self) -> int:
        """Batches in all epochs; `sys.maxsize` where they never end."""
        return len(self._batches)

    def __getitem__(self, k: int) -> list[Sample]:
        """The k-th global batch, k from 0; IndexError past the last."""
        if not 0 <= k < len(self):
            raise IndexError(f"global batch {k} of {len(self)}")
        return self._batches[k]
