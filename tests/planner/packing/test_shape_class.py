"""Shape classes: powers of two, wide enough for the longest sample."""

import pytest

from jaxmux.planner import PlanningError
from jaxmux.planner.packing import ShapeClass, smallest_shape_class


@pytest.mark.parametrize(
    ("longest", "row_len"),
    [(1, 64), (63, 64), (64, 64), (65, 128), (128, 128), (129, 256), (2048, 2048), (2049, 4096)],
)
def test_row_is_the_least_power_of_two_that_holds_the_longest_sample(longest, row_len):
    assert smallest_shape_class([1, longest, 1], tokens=8192).row_len == row_len


@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (256, 1), (257, 2), (1024, 4), (1025, 5)])
def test_tokens_are_rounded_up_to_whole_rows(tokens, rows):
    shape = smallest_shape_class([200], tokens)
    assert (shape.rows, shape.row_len, shape.tokens) == (rows, 256, 256 * rows)


def test_given_lengths_are_kept():
    shape = smallest_shape_class([10, 90], tokens=4096, chunk_len=128, row_len=1024)
    assert (shape.rows, shape.row_len, shape.chunk_len, shape.chunks) == (4, 1024, 128, 32)


def test_a_chunk_longer_than_a_row_spans_several():
    shape = smallest_shape_class([10], tokens=512, chunk_len=256)
    assert (shape.rows, shape.row_len, shape.chunk_len, shape.chunks) == (8, 64, 256, 2)


def test_rows_are_dense_exactly_where_no_two_samples_fit():
    assert smallest_shape_class([33, 64], tokens=256).max_sequences == 1
    assert smallest_shape_class([32, 64], tokens=256).max_sequences >= 2
    assert smallest_shape_class([512, 300, 257], tokens=1024).max_sequences == 1


@pytest.mark.parametrize("lengths", [[16] * 8, [1, 256], [100, 200]])
def test_a_row_of_average_samples_fits_the_permitted_sequences(lengths):
    shape = smallest_shape_class(lengths, tokens=1024)
    assert shape.max_sequences >= max(2, shape.row_len // 16)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"row_len": 96}, "row_len=96 is not a power of two"),
        ({"row_len": 32}, "row_len=32 is not a power of two of at least 64"),
        ({"chunk_len": 100}, "chunk_len=100 is not a power of two"),
        ({"chunk_len": 32}, "chunk_len=32 is not a power of two of at least 64"),
        ({"chunk_len": 1024}, "2 rows of row_len=256 are no multiple of chunk_len=1024"),
        ({"rows": 0}, "at least one row"),
        ({"max_sequences": 0}, "max_sequences"),
    ],
)
def test_values_out_of_range_are_named(change, problem):
    fields = {"rows": 2, "row_len": 256, "chunk_len": 64, "max_sequences": 4} | change
    with pytest.raises(PlanningError, match=problem):
        ShapeClass(**fields)


def test_a_sample_longer_than_the_given_row_is_refused():
    with pytest.raises(PlanningError, match=r"longest sample, which takes 200 places"):
        smallest_shape_class([5, 200], tokens=1024, row_len=128)


def test_no_tokens_are_refused():
    with pytest.raises(PlanningError, match="at least one row"):
        smallest_shape_class([5], tokens=0)
