"""Rounds: one global batch of every live task, planned and packed ahead of the device."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxmux.data import Sample, fill_microbatch
from jaxmux.data.microbatch import Microbatch
from jaxmux.models import SlotTable
from jaxmux.planner.packing import Placement, ShapeClass, pack_round

from .prepared_task import PreparedTask

# From the stream lengths of the samples of a round, by slot, to where they lie, by microbatch.
Packing = Callable[[Mapping[int, Sequence[int]], ShapeClass], Sequence[Sequence[Placement]]]


class Round(NamedTuple):
    """What the device needs for one round.

    Attributes:
      steps: by slot, the task's step whose global batch this is.
      microbatches: on the device.
      slots: per-slot data of the round.
      tokens, target_tokens: by slot, of the global batch.
    """

    steps: dict[int, int]
    microbatches: list[Microbatch]
    slots: SlotTable
    tokens: dict[int, int]
    target_tokens: dict[int, int]


def pack_tightly(
    lengths: Mapping[int, Sequence[int]], shape: ShapeClass
) -> Sequence[Sequence[Placement]]:
    """The engine's packing: the same on every machine, however fast."""
    return pack_round(lengths, shape, solver_seconds=0).microbatches()


def training_rounds(
    tasks: Mapping[int, PreparedTask],
    steps: Mapping[int, int],
    slots: int,
    shape: ShapeClass,
    packing: Packing = pack_tightly,
) -> Iterator[Round]:
    """The rounds that remain until every task has trained its last step.

    Args:
      tasks: live tasks by slot.
      steps: by slot, the step each begins at.
      slots: number of slots T.
    """
    steps = dict(steps)
    while live := {slot: t for slot, t in tasks.items() if steps[slot] < t.steps}:
        batches = {slot: t.batches[steps[slot]] for slot, t in live.items()}
        yield Round(
            {slot: steps[slot] for slot in live},
            [jax.device_put(m) for m in fill_microbatches(batches, shape, packing)],
            slot_table(live, steps, slots),
            {slot: sum(s.stream_length for s in batch) for slot, batch in batches.items()},
            {slot: sum(s.target_tokens for s in batch) for slot, batch in batches.items()},
        )
        for slot in live:
            steps[slot] += 1


def fill_microbatches(
    batches: Mapping[int, Sequence[Sample]], shape: ShapeClass, packing: Packing = pack_tightly
) -> Iterator[Microbatch]:
    """Microbatches, as NumPy arrays, that hold every sample of the batches once."""
    lengths = {slot: [s.stream_length for s in batch] for slot, batch in batches.items()}
    for placements in packing(lengths, shape):
        yield fill_microbatch(
            placements, batches, rows=shape.rows, row_len=shape.row_len, chunk_len=shape.chunk_len
        )


def slot_table(
    tasks: Mapping[int, PreparedTask], steps: Mapping[int, int] | None, slots: int
) -> SlotTable:
    """Scales, dropout rates and keys of the live slots; zeros elsewhere. No `steps`: no dropout."""
    scale, rate = np.zeros(slots, np.float32), np.zeros(slots, np.float32)
    key = np.zeros(slots, np.uint32)
    for slot, prepared in tasks.items():
        scale[slot] = prepared.task.adapter.scale
        if steps is not None:
            rate[slot] = prepared.task.adapter.dropout
            key[slot] = prepared.dropout_key(steps[slot])
    return SlotTable(scale, rate, key)
