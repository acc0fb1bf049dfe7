"""What attention takes, by the rows that it looks at."""

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from .curve import Curve
from .profile import ProfileError


class AttentionTimes(NamedTuple):
    """Seconds of attention for each token, over row lengths.

    Attributes:
      single: in rows of one sequence; None if unknown.
      packed: in rows of several, less what their seats take; None if unknown.
      seat: what each sequence that a row has room for adds, there or not: kernels for packed rows
        launch thread blocks for all of them.
    """

    single: Curve | None
    packed: Curve | None
    seat: Curve | None

    def __call__(self, row_len: int, max_sequences: int) -> float:
        """Seconds a token.

        Raises:
          ProfileError: no such rows were measured.
        """
        if max_sequences == 1:
            return _known(self.single, "one sequence")(row_len)
        packed = _known(self.packed, "several sequences")(row_len)
        return packed + max_sequences * (self.seat(row_len) if self.seat else 0.0)


def fit_attention_times(points: Iterable[tuple[int, int, float]]) -> AttentionTimes:
    """The times through measured points (row length, sequences that a row has room for, seconds a
    token). Row lengths of a single packed point tell nothing of seats. Where seats begin to cost,
    between two measured lengths, they cost from twice the shorter one on: another kernel begins."""
    single: list[tuple[float, float]] = []
    by_row_len: dict[int, list[tuple[int, float]]] = {}
    for row_len, max_sequences, seconds in points:
        if max_sequences == 1:
            single.append((row_len, seconds))
        else:
            by_row_len.setdefault(row_len, []).append((max_sequences, seconds))
    seats = [
        (row_len, max(0.0, float(np.polyfit(*zip(*found, strict=True), 1)[0])))
        for row_len, found in by_row_len.items()
        if len({max_sequences for max_sequences, _ in found}) > 1
    ]
    jumps = [(2 * r0, s1) for (r0, s0), (_, s1) in pairwise(sorted(seats)) if s0 < s1 / 10]
    seats += [(row_len, seconds) for row_len, seconds in jumps if row_len not in by_row_len]
    seat = Curve.through(seats, rising=False) if seats else None
    packed = [
        (row_len, seconds - max_sequences * (seat(row_len) if seat else 0.0))
        for row_len, found in by_row_len.items()
        for max_sequences, seconds in found
    ]
    return AttentionTimes(
        *(Curve.through(pairs, rising=False) if pairs else None for pairs in (single, packed)), seat
    )


def _known(curve: Curve | None, rows: str) -> Curve:
    if curve is None:
        raise ProfileError(f"the profile measures no attention over rows of {rows}")
    return curve
