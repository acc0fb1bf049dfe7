"""The time of a round of tasks that share a GPU, fast enough for a million placements.

`choose_shape` packs rounds of samples to find the shape class in which tasks train fastest, which
takes a tenth of a second and more. `RoundTimes` cuts a few global batches of every kind of task
into spans once, in every layout of rows, with the function that training uses. For tasks together
it then adds up the chunks of their spans instead of laying them into rows, because packed rows are
nearly always full. Microbatches take the time that `ReplicaCosts` predicts, as in `choose_shape`.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from ..costs.pool_spec import PoolSpec, merge_pool_specs
from ..costs.replica_costs import ReplicaCosts
from ..errors import PlanningError
from ..packing.rows import RowShape
from ..packing.shape_class import ShapeClass
from ..packing.spans import cut_spans
from .replay import Tasks

# The shape classes among which a round takes the fastest: tokens of a row, tokens of a chunk, and
# the most sequences of a row. Microbatches grow in steps of `_STEP` tokens, as in `choose_shape`.
_ROW_LENS, _CHUNK_LENS, _SEQUENCES, _STEP = (64, 128, 256, 512), (128, 256), (1, 4, 8, 16, 32), 512
# A row has room for at most one sequence per this number of tokens, as in `smallest_shape_class`.
_SHORTEST_AVERAGE = 16


class TaskKind(NamedTuple):
    """What a task needs of a GPU. Tasks of one kind differ only in the number of their rounds.

    Attributes:
      name: the kind in words, for error messages.
      pool: sizes of the pool that a task of this kind needs alone.
      batches: stream lengths in tokens of the samples of a few typical global batches.
      longest: most tokens of a sample of the task.
    """

    name: str
    pool: PoolSpec
    batches: tuple[tuple[int, ...], ...]
    longest: int

    @property
    def tokens(self) -> float:
        """Mean tokens of a global batch, without padding."""
        return sum(map(sum, self.batches)) / len(self.batches)


class _PoolCosts(NamedTuple):
    """Predicted costs with one pool.

    Attributes:
      half: float64 [shapes], seconds of a microbatch of which half of the chunks are empty.
      full: float64 [shapes], seconds of a microbatch without empty chunks.
      fits: bool [shapes], whether a microbatch fits into memory.
      update: seconds of a round besides its microbatches.
    """

    half: np.ndarray
    full: np.ndarray
    fits: np.ndarray
    update: float


class RoundTimes:
    """Predicts the seconds of a round of any tasks together on one GPU.

    A round is one global batch of every task with the optimizer updates, in the shape class in
    which it takes the least time. Answers are kept, because replays ask for the same tasks again.

    Attributes:
      kinds: the kinds of tasks. Tasks are given as the indices of their kinds.
    """

    def __init__(
        self,
        kinds: Sequence[TaskKind],
        costs: ReplicaCosts,
        tokens: int = 8192,
        least_chunk_len: int = 128,
    ):
        """Cuts the global batches of all kinds into spans.

        Args:
          kinds: the kinds of tasks, at least one.
          costs: cost model of the GPU. Its pool is ignored.
          tokens: N, the most tokens of a microbatch, at least 512.
          least_chunk_len: tokens of the shortest chunk that the kernels accept, at most 256.

        Raises:
          PlanningError: a sample is longer than the longest rows, which have 512 tokens.
        """
        self.kinds = tuple(kinds)
        for kind in self.kinds:
            if kind.longest > _ROW_LENS[-1]:
                longest = f"samples of up to {kind.longest} tokens"
                raise PlanningError(f"{kind.name}: {longest}; rows have at most {_ROW_LENS[-1]}")
        self._model = costs
        layouts = list(_layouts(least_chunk_len))
        sized = [
            (i, dataclasses.replace(layout, rows=layout.rows * steps))
            for i, layout in enumerate(layouts)
            for steps in range(1, tokens // _STEP + 1)
        ]
        self._layout = np.array([i for i, _ in sized])
        self._shapes = [shape for _, shape in sized]
        self._row_len = np.array([shape.row_len for shape in self._shapes])
        self._chunks = np.array([shape.chunks for shape in self._shapes])
        # [chunks or sequences, shapes]
        self._room = np.array([_room(shape) for shape in self._shapes]).T
        # Kinds of different ranks often share their batches, and cutting takes a while.
        needs = functools.cache(functools.partial(_needs, layouts))
        # [kinds, mean or variance, chunks or sequences, layouts]
        self._needs = np.array([needs(kind.batches, kind.longest) for kind in self.kinds])
        self._longest = np.array([kind.longest for kind in self.kinds])
        self._pools: dict[PoolSpec, _PoolCosts] = {}
        self._rounds: dict[Tasks, tuple[float, int]] = {}

    def seconds(self, tasks: Tasks) -> float:
        """Returns the seconds of a round of these tasks, at least one; infinite if they do not fit
        into memory together in any shape class."""
        if tasks not in self._rounds:
            self._rounds[tasks] = self._fastest(tasks)
        return self._rounds[tasks][0]

    def shape(self, tasks: Tasks) -> ShapeClass:
        """Returns the shape class in which a round of these tasks takes the least time."""
        self.seconds(tasks)
        return self._shapes[self._rounds[tasks][1]]

    def pool(self, tasks: Tasks) -> PoolSpec:
        """Returns the sizes of the pool that holds these tasks, at least one."""
        return merge_pool_specs([self.kinds[task].pool for task in tasks])

    def _fastest(self, tasks: Tasks) -> tuple[float, int]:
        """Returns the seconds of a round, and the index of its shape class."""
        members = np.bincount(tasks, minlength=len(self.kinds))
        mean, variance = np.tensordot(members, self._needs, axes=1)[..., self._layout]
        microbatches = _expected_ceil(mean, variance, self._room).max(axis=0)
        costs = self._costs(self.pool(tasks))
        owned = mean[0] / (microbatches * self._chunks)
        one = costs.half + (2 * owned - 1) * (costs.full - costs.half)
        possible = costs.fits & (self._row_len >= self._longest[list(tasks)].max())
        total = np.where(possible, microbatches * one, math.inf)
        best = int(total.argmin())
        return float(total[best]) + costs.update, best

    def _costs(self, pool: PoolSpec) -> _PoolCosts:
        if pool not in self._pools:
            model = dataclasses.replace(self._model, pool=pool)
            half, full = np.array(
                [
                    [model.microbatch(shape, part * shape.tokens) for shape in self._shapes]
                    for part in (0.5, 1.0)
                ]
            )
            fits = np.isfinite(full)
            half[~fits] = full[~fits] = 0.0
            self._pools[pool] = _PoolCosts(half, full, fits, model.update())
        return self._pools[pool]


def _layouts(least_chunk_len: int) -> Iterator[ShapeClass]:
    """Yields the layouts of rows, as shape classes of the smallest microbatches."""
    for row_len, chunk_len, sequences in product(_ROW_LENS, _CHUNK_LENS, _SEQUENCES):
        # Longer rows of one task do as well as chunks that cover several rows, except for the
        # shortest chunk.
        if chunk_len < least_chunk_len or chunk_len > max(row_len, least_chunk_len):
            continue
        if sequences * _SHORTEST_AVERAGE <= row_len:
            yield ShapeClass(_STEP // row_len, row_len, chunk_len, sequences)


def _room(shape: ShapeClass) -> tuple[int, int]:
    """Returns the chunks and the sequences for which a microbatch has room."""
    row = RowShape.of(shape)
    rows = shape.rows // row.block
    return rows * row.chunks, rows * row.max_sequences


def _needs(
    layouts: Sequence[ShapeClass], batches: Sequence[Sequence[int]], longest: int
) -> np.ndarray:
    """Returns the mean and the variance of the chunks and of the sequences of the spans of a global
    batch: float64 [mean or variance, chunks or sequences, layouts]. They are 0 in rows that are too
    short for the longest sample."""
    counts = np.zeros((len(batches), 2, len(layouts)))
    for i, layout in enumerate(layouts):
        if layout.row_len < longest:
            continue
        for batch, lengths in enumerate(batches):
            spans = cut_spans(lengths, layout)
            chunks, sequences = (sum(sizes) for sizes in zip(*(s[1:] for s in spans), strict=True))
            counts[batch, :, i] = chunks, sequences
    return np.stack([counts.mean(axis=0), counts.var(axis=0)])


def _expected_ceil(mean: np.ndarray, variance: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Returns the expected number of microbatches with this room for a number of chunks that
    varies from round to round.

    A whole number x needs ceil(x / room) microbatches, as does every number in (x - 1, x]. The
    numbers are taken to be uniform over an interval with the given mean and variance, shifted by
    half a chunk; the variance of (x - 1, x] is 1/12.
    """
    # A round has at least one chunk; layouts with too short rows count none.
    middle, half_width = np.maximum(mean, 1.0) - 0.5, np.sqrt(3 * (variance + 1 / 12))
    low, high = np.maximum(0.0, middle - half_width) / room, (middle + half_width) / room
    return np.maximum(1.0, (_ceil_integral(high) - _ceil_integral(low)) / (high - low))


def _ceil_integral(x: np.ndarray) -> np.ndarray:
    """Returns the integral of ceil from 0 to x."""
    whole = np.floor(x)
    return (whole + 1) * (x - whole / 2)
