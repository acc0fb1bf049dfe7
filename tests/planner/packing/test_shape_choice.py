"""The shape class is chosen by cost, and never worse than MuxTune's rule or the plain one."""

import dataclasses

import numpy as np
import pytest

from jaxmux.planner import PlanningError
from jaxmux.planner.packing import ShapeClass, pack_round
from jaxmux.planner.packing.shape_choice import (
    ShapeRequest,
    align,
    choose_shape,
    plain_shape,
    muxtune_shape,
    muxtune_chunk_len,
)


def seconds_of(
    per_row_len: float,
    per_chunk: float,
    packed: float = 1.0,
    each: float = 0.0,
    per_seat: float = 0.0,
):
    """A cost model: matrix products by tokens, half of them skipped where chunks are empty,
    attention by row length and more where rows hold several sequences, kernels by chunk, and what a
    microbatch takes however small."""

    def seconds(shape: ShapeClass, owned: float) -> float:
        attention = per_row_len * shape.row_len * (packed if shape.max_sequences > 1 else 1)
        attention += per_seat * shape.max_sequences
        products = 20e-6 * (owned + shape.tokens)
        return each + products + shape.tokens * attention + per_chunk * shape.chunks

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
    assert muxtune_chunk_len(lengths) == chunk_len


@pytest.mark.parametrize("fewer_tokens", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_choice_never_loses_to_a_simple_rule(seed, fewer_tokens):
    rounds = random_rounds(seed)
    request = ShapeRequest(4096, fewer_tokens=fewer_tokens)
    seconds = seconds_of(10.0 ** -(6 + seed % 3), 10.0 ** -(3 + seed % 4), 1 + seed % 2, 0.01)
    chosen = choose_shape(rounds, request, seconds)
    for rule in (muxtune_shape, plain_shape):
        assert chosen.seconds <= rule(rounds, request, seconds).seconds
    assert chosen == price_shape(rounds, chosen.shape, seconds)
    assert 0 <= chosen.padding < 1
    assert chosen.shape.tokens == 4096 or fewer_tokens and chosen.shape.tokens < 4096


@pytest.mark.parametrize("seed", range(3))
def test_what_is_not_packed_could_not_have_been_the_best(seed):
    """Every shape class with two rows or more, packed, against the choice by bounds."""
    rounds = random_rounds(seed)
    longest = max(size for batches in rounds for sizes in batches.values() for size in sizes)
    seconds = seconds_of(1e-7, 1e-4, 1.5, 0.01)
    chosen = choose_shape(rounds, ShapeRequest(2048), seconds)
    for row_len in (64, 128, 256, 512, 1024, 2048):
        for chunk_len in (64, 128, 256, 512):
            for max_sequences in (1, row_len // 16):
                for tokens in (512, 1024, 1536, 2048):
                    if longest <= row_len <= tokens and chunk_len <= row_len:
                        shape = ShapeClass(tokens // row_len, row_len, chunk_len, max_sequences)
                        if not shape.tokens % 512:
                            assert chosen.seconds <= price_shape(rounds, shape, seconds).seconds + 1e-12


def test_dear_attention_shortens_rows_and_dear_chunks_lengthen_chunks():
    rng = np.random.default_rng(0)
    rounds = [{slot: rng.integers(100, 480, 64).tolist() for slot in range(4)}]
    request = ShapeRequest(8192, fewer_tokens=False)
    dear_rows = choose_shape(rounds, request, seconds_of(1e-6, 0)).shape
    free_rows = choose_shape(rounds, request, seconds_of(0, 0)).shape
    dear_chunks = choose_shape(rounds, request, seconds_of(0, 1e-2)).shape
    assert dear_rows.row_len < free_rows.row_len
    assert dear_chunks.chunk_len > free_rows.chunk_len


def test_rows_hold_one_sequence_where_packed_attention_is_dear():
    rounds = [{0: [90, 100, 110, 60] * 8, 1: [50, 120, 100, 110] * 8}]
    request = ShapeRequest(1024)
    dear = choose_shape(rounds, request, seconds_of(1e-6, 0, packed=3)).shape
    assert (dear.row_len, dear.max_sequences) == (128, 1)
    assert choose_shape(rounds, request, seconds_of(1e-8, 0)).shape.max_sequences > 1


def test_microbatches_are_as_large_as_the_rounds_need():
    """A little more than one microbatch: two of half the size, or one where each is dear."""
    rounds = [{0: [256] * 36}, {0: [256] * 35}]
    request = ShapeRequest(8192)
    assert choose_shape(rounds, request, seconds_of(0, 0)).padding == pytest.approx(0, abs=0.03)
    small = [{0: [256] * 9}]
    dear = choose_shape(small, request, seconds_of(0, 0, each=1.0))
    assert dear.microbatches == 1 and dear.shape.tokens == 2560
    fixed = choose_shape(small, request._replace(fewer_tokens=False), seconds_of(0, 0))
    assert fixed.shape.tokens == 8192


def test_room_for_sequences_is_what_rows_need():
    rounds = [{0: [100] * 20, 1: [300] * 6}]
    chosen = choose_shape(rounds, ShapeRequest(2048), seconds_of(1e-8, 0)).shape
    most = max(
        sum(len(run.samples) for _, run in row)
        for rows in pack_round(rounds[0], chosen, solver_seconds=0).contents()
        for row in rows
    )
    assert most <= chosen.max_sequences < 2 * most


def test_short_sequences_are_spread_over_rows_where_seats_are_dear():
    rng = np.random.default_rng(0)
    rounds = [{0: [20] * 64, 1: rng.integers(300, 1000, 16).tolist()} for _ in range(4)]
    request = ShapeRequest(8192)
    free, dear = (
        choose_shape(rounds, request, seconds_of(1e-8, 0, per_seat=each)).shape
        for each in (0.0, 1e-6)
    )
    assert free.row_len == dear.row_len
    assert free.max_sequences >= 32 > 8 >= dear.max_sequences > 1


def test_what_is_given_is_kept():
    rounds, seconds = random_rounds(3), seconds_of(1e-7, 1e-5)
    given = ShapeRequest(4096, row_len=1024)
    assert choose_shape(rounds, given, seconds).shape.row_len == 1024
    given = ShapeRequest(4096, chunk_len=256)
    assert choose_shape(rounds, given, seconds).shape.chunk_len == 256
    both = ShapeRequest(4096, row_len=1024, chunk_len=256)
    chosen = choose_shape(rounds, both, seconds)
    plain = plain_shape(rounds, both, seconds)
    assert chosen.shape.max_sequences < plain.shape.max_sequences
    shape = dataclasses.replace(chosen.shape, max_sequences=plain.shape.max_sequences)
    assert chosen._replace(shape=shape) == plain


def test_rows_hold_the_longest_sample_of_all():
    rounds, seconds = [{0: [100, 200]}], seconds_of(1e-7, 0)
    assert choose_shape(rounds, ShapeRequest(4096), seconds, [3000, 10]).shape.row_len == 4096
    with pytest.raises(PlanningError, match="row_len=1024 is shorter"):
        choose_shape(rounds, ShapeRequest(4096, row_len=1024), seconds, [3000, 10])


def test_where_nothing_fits_what_needs_least_memory_remains():
    rounds, request = random_rounds(0), ShapeRequest(4096)
    never = seconds_of(0, 0, each=np.inf)
    plain = plain_shape(rounds, request, never).shape
    chosen = choose_shape(rounds, request, never).shape
    assert chosen == dataclasses.replace(plain, max_sequences=1)


def test_seats_are_given_up_until_it_fits():
    rounds, request = [{0: [60] * 80, 1: [500] * 4}], ShapeRequest(4096)
    plenty = seconds_of(0, 0)

    def little(shape: ShapeClass, owned: float) -> float:
        return plenty(shape, owned) if shape.max_sequences <= 4 else np.inf

    assert choose_shape(rounds, request, plenty).shape.max_sequences > 8
    chosen = choose_shape(rounds, request, little)
    assert chosen.shape.max_sequences == 4 and np.isfinite(chosen.seconds)


def test_chunks_are_no_shorter_than_the_kernels_take():
    request = ShapeRequest(4096, least_chunk_len=128)
    assert choose_shape(random_rounds(1), request, seconds_of(0, 0)).shape.chunk_len >= 128


def test_rounds_without_samples_are_refused():
    with pytest.raises(PlanningError, match="no samples"):
        choose_shape([{0: []}], ShapeRequest(4096), seconds_of(0, 0))
