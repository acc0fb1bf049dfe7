"""The packing that `pack_round` is compared with by benchmarks and tests."""

import dataclasses

from jaxmux.planner.packing import PackedRound, RoundLengths, ShapeClass, pack_round
from jaxmux.planner.packing.rows import RowShape, fill_rows_greedily


def pack_greedily(lengths: RoundLengths, shape: ShapeClass) -> PackedRound:
    """Packs one round more simply than `pack_round`, to compare with it.

    Each row takes the longest of the tasks' next spans that fits, until none fits. Arguments,
    result and errors are as in `pack_round`.
    """
    packed = pack_round(lengths, shape)
    return dataclasses.replace(packed, rows=fill_rows_greedily(packed.spans, RowShape.of(shape)))
