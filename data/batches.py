"""The global batches of a task, numbered from 0."""

from collections.abc import Sequence

import grain

from .errors import DataError
from .samples import Sample


class GlobalBatches:
    """Random access to the global batches of one task.

    `batches[k]` is the task's k-th global batch, a list of samples. It depends on (samples,
    batch_size, seed, k) alone, so the number k is all that a checkpoint needs to store about the
    position in the data. Every epoch holds each sample exactly once, in its own random order, and
    its last batch may be short.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        batch_size: int,
        seed: int,
        epochs: int | None = None,
        shuffle: bool = True,
    ):
        """Describes the batches; no sample is drawn yet.

        Args:
          samples: the samples of the task; at least one.
          batch_size: samples per global batch. If it exceeds the number of samples, every epoch
            is one short batch.
          seed: seed of the order; not negative.
          epochs: passes over the samples; None for no limit.
          shuffle: False keeps the order of `samples`, for evaluation.

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
        """Number of batches in all epochs; `sys.maxsize` if the epochs have no limit."""
        return len(self._batches)

    def __getitem__(self, k: int) -> list[Sample]:
        """The k-th global batch, k from 0. Raises IndexError past the last batch."""
        if not 0 <= k < len(self):
            raise IndexError(f"global batch {k} of {len(self)}")
        return self._batches[k]
