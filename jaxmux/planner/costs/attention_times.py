"""The time of attention, by the shape of its rows."""

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from .curve import Curve
from .device_profile import ProfileError


class AttentionTimes(NamedTuple):
    """Seconds of attention per token, as functions of the row length in tokens.

    Attributes:
      single: seconds per token in rows of one sequence; None if unknown.
      packed: seconds per token in rows that may hold several sequences, without the part that
        `sequence` adds; None if unknown.
      sequence: additional seconds per token for each sequence that a row may hold, even if the
        sequence is absent: kernels for packed rows launch thread blocks for all of them. None if it
        is 0.
    """

    single: Curve | None
    packed: Curve | None
    sequence: Curve | None

    def __call__(self, row_len: int, max_sequences: int) -> float:
        """Returns the seconds per token in rows of `row_len` tokens with at most `max_sequences`
        sequences.

        Raises:
          ProfileError: no rows of one sequence, or none of several sequences, were measured.
        """
        if max_sequences == 1:
            return _known(self.single, "one sequence")(row_len)
        packed = _known(self.packed, "several sequences")(row_len)
        return packed + max_sequences * (self.sequence(row_len) if self.sequence else 0.0)


def fit_attention_times(points: Iterable[tuple[int, int, float]]) -> AttentionTimes:
    """Returns the times through measured points.

    Consider two measured row lengths where a sequence costs nothing at the shorter one and
    something at the longer one. Another kernel begins between them; the fit assumes that it begins
    at twice the shorter length.

    Args:
      points: (row length, most sequences per row, seconds per token). The time per sequence needs
        points of one row length and different numbers of sequences.
    """
    single: list[tuple[float, float]] = []
    by_row_len: dict[int, list[tuple[int, float]]] = {}
    for row_len, max_sequences, seconds in points:
        if max_sequences == 1:
            single.append((row_len, seconds))
        else:
            by_row_len.setdefault(row_len, []).append((max_sequences, seconds))
    slopes = [
        (row_len, max(0.0, float(np.polyfit(*zip(*found, strict=True), 1)[0])))
        for row_len, found in by_row_len.items()
        if len({max_sequences for max_sequences, _ in found}) > 1
    ]
    jumps = [(2 * r0, s1) for (r0, s0), (_, s1) in pairwise(sorted(slopes)) if s0 < s1 / 10]
    slopes += [(row_len, seconds) for row_len, seconds in jumps if row_len not in by_row_len]
    sequence = Curve.through(slopes, rising=False) if slopes else None
    packed = [
        (row_len, seconds - max_sequences * (sequence(row_len) if sequence else 0.0))
        for row_len, found in by_row_len.items()
        for max_sequences, seconds in found
    ]
    curves = (Curve.through(pairs, rising=False) if pairs else None for pairs in (single, packed))
    return AttentionTimes(*curves, sequence)


def _known(curve: Curve | None, rows: str) -> Curve:
    if curve is None:
        raise ProfileError(f"the profile measures no attention over rows of {rows}")
    return curve
