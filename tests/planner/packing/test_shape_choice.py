"""The shape class is chosen by cost, and never worse than MuxTune's rule or the plain one."""

import dataclasses

import numpy as np
import pytest
from packings import muxtune_chunk_len, muxtune_shape

from jaxmux.planner import PlanningError
from jaxmux.planner.packing import ShapeClass, pack_round
from jaxmux.planner.packing.shape_choice import (
    ShapeRequest,
    choose_shape,
    plain_shape,
    price_shape,
    with_fewer_rows,
)


def seconds_of(
    per_row_len: float,
    per_chunk: float,
    packed: float = 1.0,
    each: float = 0.0,
    per_sequence: float = 0.0,
):
    """A cost model, in seconds of a microbatch.

    Matrix products take time by tokens, half as much where chunks are empty.

    Args:
      per_row_len: seconds of attention per token and token of the row.
      per_chunk: seconds of a chunk.
      packed: factor of attention's time in rows of several sequences.
      each: seconds of a microbatch, however small.
      per_sequence: seconds of attention per token and sequence that a row has room for.
    """

    def seconds(shape: ShapeClass, owned: float) -> float:
        attention = per_row_len * shape.row_len * (packed if shape.max_sequences > 1 else 1)
        attention += per_sequence * shape.max_sequences
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
def test_a_shape_class_that_is_not_packed_is_never_the_best(seed):
    """The choice by bounds is no worse than any of these shape classes, packed and priced."""
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
                            priced = price_shape(rounds, shape, seconds)
                            assert chosen.seconds <= priced.seconds + 1e-12


@pytest.mark.long
def test_expensive_attention_shortens_rows_and_expensive_chunks_lengthen_chunks():
    rng = np.random.default_rng(0)
    rounds = [{slot: rng.integers(100, 480, 64).tolist() for slot in range(4)}]
    request = ShapeRequest(8192, fewer_tokens=False)
    short_rows = choose_shape(rounds, request, seconds_of(1e-6, 0)).shape
    long_rows = choose_shape(rounds, request, seconds_of(0, 0)).shape
    long_chunks = choose_shape(rounds, request, seconds_of(0, 1e-2)).shape
    assert short_rows.row_len < long_rows.row_len
    assert long_chunks.chunk_len > long_rows.chunk_len


def test_rows_hold_one_sequence_where_packed_attention_is_expensive():
    rounds = [{0: [90, 100, 110, 60] * 8, 1: [50, 120, 100, 110] * 8}]
    request = ShapeRequest(1024)
    dense = choose_shape(rounds, request, seconds_of(1e-6, 0, packed=3)).shape
    assert (dense.row_len, dense.max_sequences) == (128, 1)
    assert choose_shape(rounds, request, seconds_of(1e-8, 0)).shape.max_sequences > 1


def test_microbatches_are_as_large_as_the_rounds_need():
    """Rounds a little larger than one microbatch get two of half the size, or one larger microbatch
    where every microbatch takes long."""
    rounds = [{0: [256] * 36}, {0: [256] * 35}]
    request = ShapeRequest(8192)
    assert choose_shape(rounds, request, seconds_of(0, 0)).padding == pytest.approx(0, abs=0.03)
    small = [{0: [256] * 9}]
    single = choose_shape(small, request, seconds_of(0, 0, each=1.0))
    assert single.microbatches == 1 and single.shape.tokens == 2560
    fixed = choose_shape(small, request._replace(fewer_tokens=False), seconds_of(0, 0))
    assert fixed.shape.tokens == 8192


def test_rows_have_room_for_few_more_sequences_than_they_hold():
    rounds = [{0: [100] * 20, 1: [300] * 6}]
    chosen = choose_shape(rounds, ShapeRequest(2048), seconds_of(1e-8, 0)).shape
    most = max(
        sum(len(span.samples) for _, span in row)
        for rows in pack_round(rounds[0], chosen).contents()
        for row in rows
    )
    assert most <= chosen.max_sequences < 2 * most


def test_short_sequences_are_spread_over_rows_where_room_for_sequences_is_expensive():
    rng = np.random.default_rng(0)
    rounds = [{0: [20] * 64, 1: rng.integers(300, 1000, 16).tolist()} for _ in range(4)]
    request = ShapeRequest(8192)
    many, few = (
        choose_shape(rounds, request, seconds_of(1e-8, 0, per_sequence=each)).shape
        for each in (0.0, 1e-6)
    )
    assert many.row_len == few.row_len
    assert many.max_sequences >= 32 > 8 >= few.max_sequences > 1


def test_given_lengths_are_kept():
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


def test_where_no_shape_class_fits_the_one_that_needs_least_memory_is_returned():
    rounds, request = random_rounds(0), ShapeRequest(4096)
    never = seconds_of(0, 0, each=np.inf)
    plain = plain_shape(rounds, request, never).shape
    chosen = choose_shape(rounds, request, never).shape
    assert chosen == dataclasses.replace(plain, max_sequences=1)


def test_room_for_sequences_is_reduced_until_the_shape_class_fits():
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


@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_no_other_number_of_rows_is_faster_for_the_tasks_that_are_left(seed, stages):
    rounds = [{0: batches[0]} for batches in random_rounds(seed)]
    shape = ShapeClass(rows=24, row_len=1024, chunk_len=64, max_sequences=16)
    seconds = seconds_of(per_row_len=1e-9, per_chunk=1e-5, each=1e-3)

    def round_seconds(rows: int) -> float:
        """Each round takes the time of `stages` - 1 microbatches more, in its last stage."""
        own = [price_shape([r], dataclasses.replace(shape, rows=rows), seconds) for r in rounds]
        return sum(o.seconds * (1 + (stages - 1) / o.microbatches) for o in own)

    found = with_fewer_rows(rounds, shape, seconds, stages).shape
    assert found == dataclasses.replace(shape, rows=found.rows)
    assert round_seconds(found.rows) <= 1.01 * min(map(round_seconds, range(1, 25)))


def test_one_small_task_gets_the_rows_that_it_needs():
    shape = ShapeClass(rows=32, row_len=128, chunk_len=64, max_sequences=2)
    found = with_fewer_rows([{0: [64] * 6}, {0: [60] * 5}], shape, seconds_of(0, 0, each=1.0))
    assert (found.shape.rows, found.microbatches) == (3, 2)
    chunks_of_rows = dataclasses.replace(shape, chunk_len=512)
    found = with_fewer_rows([{0: [64] * 6}], chunks_of_rows, seconds_of(0, 0, each=1.0))
    assert found.shape.rows == 4
