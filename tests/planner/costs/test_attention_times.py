"""The fit of attention's time to rows of several sequences."""

import pytest

from jaxmux.planner.costs.time_model import fit_attention_times


def test_sequences_take_time_from_the_first_row_length_of_another_kernel():
    """The measured rows have 128 tokens, where sequences take no time, and 512, where they do."""
    points = [
        (row_len, sequences, 1e-9 + (row_len >= 512) * 2e-10 * sequences)
        for row_len in (64, 128, 512, 2048)
        for sequences in (1, 4, 16)
    ]
    times = fit_attention_times(points)
    assert times(128, 16) == pytest.approx(1e-9)
    for row_len in (256, 512, 1024):
        assert times(row_len, 16) - times(row_len, 4) == pytest.approx(12 * 2e-10)
