"""Chunk and row length are chosen by cost, and never worse than MuxTune's rule."""

import numpy as np
import pytest

from jaxmux.planner import PlanningError, ShapeClass
from jaxmux.planner.alignment import (
    align,
    choose_alignment,
    power_of_two_alignment,
    power_of_two_chunk_len,
)


def seconds_of(per_row_len: float, per_chunk: float):
    """A cost model: matrix products by tokens, attention by row length, kernels by chunk."""

    def seconds(shape: ShapeClass) -> float:
        return shape.tokens * (40e-6 + per_row_len * shape.row_len) + per_chunk * shape.chunks

    return seconds


def random_rounds(seed: int) -> list[dict[int, list[int]]]:
    rng = np.random.default_rng(seed)
    longest = rng.choice([30, 200, 900], 4)
    return [
        {slot: rng.integers(1, longest[slot] + 1, 16).tolist() for slot in range(4)}
        for _ in range(2)
    ]


@pytest.mark.parametrize(
    "lengths, chunk_len",
    [([512, 256, 128], 128), ([96, 160], 64), ([1024, 3072], 1024), ([100, 77], 64), ([48], 64)],
)
def test_power_of_two_rule_takes_the_greatest_divisor_above_the_least(lengths, chunk_len):
    assert power_of_two_chunk_len(lengths) == chunk_len


@pytest.mark.parametrize("seed", range(8))
def test_choice_never_loses_to_the_power_of_two_rule(seed):
    rounds = random_rounds(seed)
    seconds = seconds_of(10.0 ** -(6 + seed % 3), 10.0 ** -(3 + seed % 4))
    chosen = choose_alignment(rounds, 4096, seconds)
    baseline = power_of_two_alignment(rounds, 4096, seconds)
    assert chosen.seconds <= baseline.seconds
    assert chosen == align(rounds, chosen.shape, seconds)
    assert 0 <= chosen.padding < 1


def test_dear_attention_shortens_rows_and_dear_chunks_lengthen_chunks():
    rng = np.random.default_rng(0)
    rounds = [{slot: rng.integers(100, 480, 64).tolist() for slot in range(4)}]
    dear_rows = choose_alignment(rounds, 8192, seconds_of(1e-6, 0)).shape
    free_rows = choose_alignment(rounds, 8192, seconds_of(0, 0)).shape
    dear_chunks = choose_alignment(rounds, 8192, seconds_of(0, 1e-2)).shape
    assert dear_rows.row_len < free_rows.row_len
    assert dear_chunks.chunk_len > free_rows.chunk_len


def test_chunks_are_no_shorter_than_the_kernels_take():
    rounds = random_rounds(1)
    assert choose_alignment(rounds, 4096, seconds_of(0, 0), 128).shape.chunk_len >= 128


def test_rounds_without_samples_are_refused():
    with pytest.raises(PlanningError, match="no samples"):
        choose_alignment([{0: []}], 4096, seconds_of(0, 0))
