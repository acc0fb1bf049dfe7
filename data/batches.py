"""The global batches of a task, numbered from 0."""

from collections.abc import Sequence
from functools import lru_cache

from .errors import DataError
from .stored_samples import Sample

# Number of global batches of a task whose indices are cached.
_REMEMBERED = 8


class GlobalBatches:
    """Random access to the global batches of one task: the samples of each optimizer update.

    `batches[k]` is the k-th global batch, a list of samples. `len(batches)` is the number of
    batches in all epochs, or `sys.maxsize` without a limit.

    A global batch depends only on k and the arguments of the constructor, so a checkpoint stores
    only k. Every epoch (one pass over the samples) holds each sample exactly once, in an order that
    is drawn for each epoch if `shuffle` is True. The last batch of an epoch may be short.

    Attributes:
      batches_per_epoch: number of global batches in one epoch.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        batch_size: int,
        seed: int,
        epochs: int | None = None,
        shuffle: bool = True,
    ):
        """Describes the batches without reading samples.

        Args:
          samples: the samples of the task, at least one, from `load_samples`.
          batch_size: samples in a global batch, at least 1. If it exceeds the number of samples,
            every epoch is one short batch.
          seed: seed of the random order, not negative.
          epochs: number of passes over the samples, at least 1; None for no limit.
          shuffle: True draws a random order for every epoch; False keeps the order of `samples`.

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
        # Imported here because grain imports JAX, which is too slow to import for help texts.
        import grain

        order = grain.MapDataset.range(len(samples)).seed(seed)
        if shuffle:
            order = order.shuffle()
        one_epoch = order.batch(batch_size, drop_remainder=False, batch_fn=tuple)
        self.batches_per_epoch: int = len(one_epoch)
        self._samples, self._batches = samples, one_epoch.repeat(epochs)
        # The next batches are read again whenever another task comes or goes, and computing the
        # shuffled index of one sample takes 1 ms if there are few samples.
        self._indices = lru_cache(_REMEMBERED)(self._batches.__getitem__)

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, k: int) -> list[Sample]:
        """The k-th global batch, from 0; IndexError if there is none."""
        if not 0 <= k < len(self):
            raise IndexError(f"global batch {k} of {len(self)}")
        return [self._samples[i] for i in self._indices(k)]
