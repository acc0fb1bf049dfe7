"""The samples of an epoch, the global batches of a task, and the arrays of a microbatch."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from .errors import DataError
from .sources import Source, stable_hash
from .stored_samples import Sample, StoredSamples, target_tokens

# Number of global batches of a task whose indices are cached.
_REMEMBERED = 8
# An epoch is a list of samples in memory, with 20 bytes for each.
_MOST_SAMPLES = 2**27
# A number of samples that is above every limit.
_ENDLESS = 2.0**40


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
        members: int = 1,
    ):
        """Describes the batches without reading samples.

        Args:
          samples: the samples of the task, at least one, from `load_samples`.
          batch_size: samples in a global batch, at least 1; with `members`, groups of samples. If
            it exceeds the number of samples, every epoch is one short batch.
          seed: seed of the random order, not negative.
          epochs: number of passes over the samples, at least 1; None for no limit.
          shuffle: True draws a random order for every epoch; False keeps the order of `samples`.
          members: number of consecutive samples that stay together, as the two answers of a pair.

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

        order = grain.MapDataset.range(len(samples) // members).seed(seed)
        if shuffle:
            order = order.shuffle()
        one_epoch = order.batch(batch_size, drop_remainder=False, batch_fn=tuple)
        self.batches_per_epoch: int = len(one_epoch)
        self._samples, self._batches = samples, one_epoch.repeat(epochs)
        self._members = members
        # The next batches are read again whenever another task comes or goes, and computing the
        # shuffled index of one sample takes 1 ms if there are few samples.
        self._groups = lru_cache(_REMEMBERED)(self._batches.__getitem__)

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, k: int) -> list[Sample]:
        """The k-th global batch, from 0; IndexError if there is none."""
        return [self._samples[i] for i in self.indices(k)]

    def indices(self, k: int) -> list[int]:
        """The indices of the samples of the k-th global batch; IndexError if there is none."""
        if not 0 <= k < len(self):
            raise IndexError(f"global batch {k} of {len(self)}")
        firsts = (group * self._members for group in self._groups(k))
        return [first + i for first in firsts for i in range(self._members)]


class GivenBatches:
    """The global batches of a task that gets each one when it is due. Only the last one is kept."""

    # There are no samples before the first batch is given.
    batches_per_epoch = 0

    def __init__(self, k: int = -1, samples: Sequence[Sample] = ()):
        """Has the k-th global batch, from 0; the default has none."""
        self._k, self._samples = k, samples

    def __len__(self) -> int:
        return self._k + 1

    def __getitem__(self, k: int) -> Sequence[Sample]:
        """The k-th global batch; IndexError if it is not the given one."""
        if k != self._k:
            raise IndexError(f"global batch {k}, and the given one is {self._k}")
        return self._samples

    def indices(self, k: int) -> list[int]:
        return list(range(len(self[k])))


def epoch_counts(sizes: Sequence[int], sources: Sequence[Source]) -> list[int]:
    """The number of samples of each source in an epoch.

    With `Source.weight`, the source that has the most samples for its weight is used once in an
    epoch, and the samples of other sources are repeated in proportion to the weights.

    Args:
      sizes: number of samples of each source, at least 1.
      sources: only `path`, `repeat` and `weight` are used.

    Raises:
      DataError: an epoch has no sample of a source, or too many samples for memory.
    """
    if sources[0].weight is not None:
        weights = [source.weight for source in sources]
        per_weight = max(size / weight for size, weight in zip(sizes, weights, strict=True))
        counts = [
            # Without this limit, weights of very different sizes would give infinity.
            max(size, round(min(weight * per_weight, _ENDLESS)))
            for size, weight in zip(sizes, weights, strict=True)
        ]
    else:
        counts = [_repeated(n, source) for n, source in zip(sizes, sources, strict=True)]
    if sum(counts) > _MOST_SAMPLES:
        source, count = max(zip(sources, counts, strict=True), key=lambda pair: pair[1])
        what = "repeat" if source.weight is None else "weight"
        raise DataError(
            f"{source.path}: with {what}={getattr(source, what):g} an epoch would have {count:,} "
            f"samples of this source; all sources together may have {_MOST_SAMPLES:,}"
        )
    return counts


def copies(samples: StoredSamples, count: int, seed: int, members: int = 1) -> StoredSamples:
    """Repeats samples, or groups of `members` consecutive ones, to `count` in all. Each occurs
    equally often, up to a difference of one; `seed` decides which of them occur once more than the
    others."""
    every = np.arange(len(samples)).reshape(-1, members)
    whole, rest = divmod(count, len(every))
    if not rest:
        return samples if whole == 1 else samples.take(np.tile(every, (whole, 1)).ravel())
    first_ids = samples.sample_ids[::members].tolist()
    hashes = [stable_hash(seed, "repeat", sample_id) for sample_id in first_ids]
    chosen = np.sort(np.argsort(np.array(hashes, np.uint64), kind="stable")[:rest])
    return samples.take(np.concatenate([np.tile(every, (whole, 1)), every[chosen]]).ravel())


def _repeated(size: int, source: Source) -> int:
    if source.repeat is None:
        return size
    whole = int(source.repeat)
    count = whole * size + round((source.repeat - whole) * size)
    if not count:
        raise DataError(f"{source.path}: repeat={source.repeat:g} of {size} samples is none")
    return count


class Microbatch(NamedTuple):
    """The input arrays of one forward and backward pass, with samples of one or more tasks.

    It has `rows` rows of `row_len` tokens. A row may hold several samples one after another;
    attention stays within a sample. All rows in order form a stream of N = rows · row_len tokens,
    divided into *chunks* of equal length, each of which belongs to one task.

    Attributes:
      tokens: int32, the tokens that the model reads; 0 on padding; -1 - i at virtual token i of a
        sample, from 0.
      targets: int32, the token to predict at each position; 0 on padding.
      loss_weight: float32, the weight of each position's loss, 0 where the target does not count:
        1 / n for n targets that count in the task's whole global batch (the samples of one
        optimizer update), unless the task's objective says otherwise.
      positions: int32, position in the sample, from 0; 0 on padding.
      segment_ids: int32, number of the sample within its row, from 0; -1 on padding.
      sample_id: uint32, `Sample.sample_id` of each token's sample; 0 on padding. Dropout masks
        depend on it.
      chunk_slot: int32, the slot of each chunk's task, which is the index of the task's adapter in
        the stacked adapters of all tasks; -1 for a chunk without tokens.
      sampled, advantage, reference: float32, the other terms of each position's loss
        (`jaxmux.objectives.token_losses.TokenTerms`); 0 where there are none. None if the
        microbatch is not for training.
      pair_spans: int32, for each row the pairs whose losses depend on both answers: position in the
        row of the first token, and number of tokens of both answers together, which follow each
        other; 0 tokens where there is no pair. None if rows cannot hold pairs.
    """

    tokens: Int[Array, "rows row_len"]
    targets: Int[Array, "rows row_len"]
    loss_weight: Float[Array, "rows row_len"]
    positions: Int[Array, "rows row_len"]
    segment_ids: Int[Array, "rows row_len"]
    sample_id: UInt32[Array, "rows row_len"]
    chunk_slot: Int[Array, " chunks"]
    sampled: Float[Array, "rows row_len"] | None = None
    advantage: Float[Array, "rows row_len"] | None = None
    reference: Float[Array, "rows row_len"] | None = None
    pair_spans: Int[Array, "rows pairs 2"] | None = None


# The terms of the losses of a batch's target tokens: the fields of
# `jaxmux.objectives.token_losses.TokenTerms`. Each has an array for every sample.
BatchTerms = Sequence[Sequence[Float[np.ndarray, " targets"]]]


def fill_microbatch(
    placements: Iterable[tuple[int, int, int, int]],
    batches: Mapping[int, Sequence[Sample]],
    terms: Mapping[int, BatchTerms] = MappingProxyType({}),
    *,
    rows: int,
    row_len: int,
    chunk_len: int,
    max_pairs: int = 0,
    paired: Collection[int] = (),
) -> Microbatch:
    """Copies the samples of one microbatch to their positions in NumPy arrays and pads the rest.

    A sample of n tokens takes n - 1 positions: the model reads all but its last token, and predicts
    all but its first one. The positions of its virtual tokens come before them.

    Args:
      placements: for every sample of this microbatch, a tuple (slot, sample, row, offset), as in
        `planner.packing.Placement`: the slot of the sample's task, the index of the sample in the
        task's global batch, the row, and the position in the row of the sample's first token. The
        samples of a row come in ascending order of their offsets. Samples of two slots must not
        share a chunk, and samples must not overlap or exceed their row; this is not checked.
      batches: by slot, the whole global batch of the task, even if other microbatches hold a part
        of it. The loss is divided by the number of target tokens in the whole global batch.
      terms: by slot, what the losses of that batch depend on; other slots have only weights.
      chunk_len: tokens of a chunk; it divides rows · row_len. A chunk covers a part of a row or
        several whole rows.
      max_pairs: most pairs of a row.
      paired: slots whose losses are those of pairs. Of two samples of their batches, which follow
        each other and begin with an even index, either both are placed, one after the other, or
        none.
    """
    shape = (rows, row_len)
    tokens, targets, positions = (np.zeros(shape, np.int32) for _ in range(3))
    loss_terms = [np.zeros(shape, np.float32) for _ in range(4)]
    segment_ids = np.full(shape, -1, np.int32)
    sample_id = np.zeros(shape, np.uint32)
    chunk_slot = np.full(rows * row_len // chunk_len, -1, np.int32)
    weight = {slot: 1 / target_tokens(batch) for slot, batch in batches.items()}
    sequences = [0] * rows
    pair_spans = np.zeros((rows, max_pairs, 2), np.int32) if max_pairs else None
    pairs = [0] * rows

    for slot, index, row, offset in placements:
        sample = batches[slot][index]
        span = slice(offset, offset + sample.stream_length)
        virtual = slice(offset, offset + sample.virtual_tokens)
        tokens[row, virtual] = -1 - np.arange(sample.virtual_tokens)
        text = slice(virtual.stop, span.stop)
        tokens[row, text] = sample.input_ids[:-1]
        targets[row, text] = sample.input_ids[1:]
        if slot in terms:
            for of_row, of_batch in zip(loss_terms, terms[slot], strict=True):
                of_row[row, text][sample.target_mask[1:]] = of_batch[index]
        else:
            loss_terms[0][row, text] = np.where(sample.target_mask[1:], weight[slot], 0)
        positions[row, span] = np.arange(sample.stream_length)
        segment_ids[row, span] = sequences[row]
        sample_id[row, span] = sample.sample_id
        start, stop = row * row_len + span.start, row * row_len + span.stop
        chunk_slot[start // chunk_len : -(-stop // chunk_len)] = slot
        sequences[row] += 1
        if slot in paired and index % 2 == 0:
            both = sample.stream_length + batches[slot][index + 1].stream_length
            pair_spans[row, pairs[row]] = offset, both
            pairs[row] += 1
    loss_weight, *others = loss_terms
    return Microbatch(
        tokens,
        targets,
        loss_weight,
        positions,
        segment_ids,
        sample_id,
        chunk_slot,
        *others,
        pair_spans=pair_spans,
    )
