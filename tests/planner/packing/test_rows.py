"""Spans laid into rows: the heuristics and the exact program, compared with exhaustive search."""

from functools import cache
from itertools import product

import numpy as np
import pytest
from exact_rows import solve_rows

from jaxmux.planner.packing.row_prices import least_rows_by_prices
from jaxmux.planner.packing.rows import (
    RowShape,
    ShapeClass,
    Span,
    fill_rows,
    fill_rows_greedily,
    last_chunks,
    least_rows,
    least_rows_of_samples,
    row_chunks,
)

ROW = RowShape(chunks=8, max_sequences=6, block=1)


def random_queues(seed: int) -> dict[int, tuple[Span, ...]]:
    """Spans of up to four tasks; some tasks have spans of one length, some have spans with several
    sequences."""
    rng = np.random.default_rng(seed)
    queues = {}
    for slot in range(rng.integers(1, 5)):
        longest = int(rng.choice([2, 5, 8]))
        crowd = int(rng.choice([1, 1, 3]))
        queues[slot] = tuple(
            Span(
                (),
                int(rng.integers(max(1, longest // 2), longest + 1)),
                int(rng.integers(crowd) + 1),
            )
            for _ in range(rng.integers(1, 4))
        )
    return queues


def next_states(queues, state, shape) -> set[tuple[int, ...]]:
    """The states that one more row can lead to; a state is the number of spans of each task that
    are laid down."""
    choices = [range(at, len(queue) + 1) for at, queue in zip(state, queues.values(), strict=True)]
    found = []
    # A state with no more spans of any task than another one leads to nothing better: leave it out.
    for then in sorted(product(*choices), key=sum, reverse=True):
        if any(all(map(int.__le__, then, other)) for other in found):
            continue
        taken = [
            span
            for at, to, queue in zip(state, then, queues.values(), strict=True)
            for span in queue[at:to]
        ]
        chunks = sum(span.chunks for span in taken)
        sequences = sum(span.sequences for span in taken)
        if chunks <= shape.chunks and sequences <= shape.max_sequences:
            found.append(then)
    return set(found)


def fewest_rows(queues, shape, start=None) -> int:
    states = {start or (0,) * len(queues)}
    end = tuple(map(len, queues.values()))
    rows = 0
    while end not in states:
        states = set().union(*(next_states(queues, state, shape) for state in states))
        rows += 1
    return rows


def least_chunks_from(queues, shape, rows: int, last: int) -> int:
    """Fewest chunks in the rows from `last` on, of `rows` in all."""
    states = {(0,) * len(queues)}
    for _ in range(last):
        states = set().union(*(next_states(queues, state, shape) for state in states))
    left = {
        state: sum(r.chunks for at, q in zip(state, queues.values(), strict=True) for r in q[at:])
        for state in states
    }
    return min(
        chunks for state, chunks in left.items() if fewest_rows(queues, shape, state) <= rows - last
    )


def assert_legal(queues, rows, shape):
    position = dict.fromkeys(queues, 0)
    for row in rows:
        taken = []
        for slot, count in row.items():
            taken += queues[slot][position[slot] : position[slot] + count]
            position[slot] += count
        assert sum(span.chunks for span in taken) <= shape.chunks
        assert sum(span.sequences for span in taken) <= shape.max_sequences
    assert position == {slot: len(queue) for slot, queue in queues.items()}


@pytest.mark.parametrize("seed", range(40))
def test_rows_lie_between_the_bound_and_greedy_and_close_to_the_optimum(seed):
    queues = random_queues(seed)
    greedy, full = fill_rows_greedily(queues, ROW), fill_rows(queues, ROW, height=1)
    for rows in (greedy, full):
        assert_legal(queues, rows, ROW)
    optimum = fewest_rows(queues, ROW)
    assert least_rows(queues, ROW) <= optimum <= len(full) <= len(greedy)
    assert len(full) <= optimum + 1


@pytest.mark.long
@pytest.mark.parametrize("seed", range(40))
def test_exact_program_finds_the_fewest_rows_and_the_least_full_last_rows(seed):
    queues = random_queues(seed)
    optimum = fewest_rows(queues, ROW)
    for last in {optimum - 1, max(0, optimum - 2)}:
        answer = solve_rows(queues, ROW, optimum, last, seconds=20)
        assert_legal(queues, answer.rows, ROW)
        least = least_chunks_from(queues, ROW, optimum, last)
        assert sum(row_chunks(queues, answer.rows + [{}] * optimum)[last:]) == least
        assert answer.least_last == least
    if optimum > 1:
        refused = solve_rows(queues, ROW, optimum - 1, 0, seconds=20)
        assert refused.rows is None and refused.infeasible


def test_equal_spans_of_a_task_are_one_group_for_the_exact_program():
    """Groups leave few variables, so the program is solved within its time limit."""
    queues = {0: (Span((), 3, 1),) * 40, 1: (Span((), 2, 1),) * 20}
    answer = solve_rows(queues, ROW, 20, 19, seconds=20)
    assert_legal(queues, answer.rows, ROW)
    assert len(answer.rows) == 20 == least_rows(queues, ROW)


def test_a_program_too_large_for_its_time_is_not_begun():
    queues = {slot: (Span((), 1 + slot % 3, 1), Span((), 4, 2)) * 40 for slot in range(8)}
    answer = solve_rows(queues, ROW, 300, 299, seconds=0.01)
    assert answer == (None, False, 0)


def test_last_microbatch_counts_only_its_own_rows():
    queues = {0: (Span((), 8, 1),) * 5}
    rows = fill_rows(queues, ROW, height=2)
    assert [last_chunks(queues, rows, height) for height in (1, 2, 3, 5)] == [8, 8, 16, 40]


def fewest_rows_of_samples(lengths: dict[int, list[int]], shape: ShapeClass) -> int:
    """The fewest rows of all layouts in which each chunk belongs to one task."""
    samples = [(slot, size) for slot, sizes in lengths.items() for size in sizes]

    def fits(row: tuple[int, ...]) -> bool:
        tokens = dict.fromkeys(lengths, 0)
        for i in row:
            tokens[samples[i][0]] += samples[i][1]
        chunks = sum(-(-size // shape.chunk_len) for size in tokens.values())
        return chunks <= shape.row_len // shape.chunk_len and len(row) <= shape.max_sequences

    @cache
    def needed(left: frozenset[int]) -> int:
        if not left:
            return 0
        first, *rest = sorted(left)
        choices = product(*[((), (i,)) for i in rest])
        rows = [(first, *(i for part in choice for i in part)) for choice in choices]
        return 1 + min(needed(left - set(row)) for row in rows if fits(row))

    return needed(frozenset(range(len(samples))))


@pytest.mark.parametrize("seed", range(60))
def test_the_bound_of_samples_holds_for_every_layout(seed):
    rng = np.random.default_rng(seed)
    chunks, most = int(rng.choice([1, 2, 4])), int(rng.integers(1, 5))
    shape = ShapeClass(rows=1, row_len=64 * chunks, chunk_len=64, max_sequences=most)
    longest = int(rng.choice([30, 64, 64 * chunks]))
    lengths = {
        slot: rng.integers(1, longest + 1, rng.integers(1, 4)).tolist()
        for slot in range(rng.integers(1, 4))
    }
    fewest = fewest_rows_of_samples(lengths, shape)
    assert least_rows_of_samples(lengths, shape) <= least_rows_by_prices(lengths, shape) <= fewest


def test_prices_bound_rows_where_the_chunks_of_two_tasks_do_not_fit_together():
    shape = ShapeClass(rows=1, row_len=1024, chunk_len=128, max_sequences=64)
    # 5 chunks and 4 chunks do not fit into 8, though 513 and 385 tokens fit into 1,024. So the
    # samples of 513 tokens take a row each, and two of 385 tokens share one.
    lengths = {0: [513] * 3, 1: [385] * 3}
    assert fewest_rows_of_samples(lengths, shape) == least_rows_by_prices(lengths, shape) == 5
    assert least_rows_of_samples(lengths, shape) == 4
    assert least_rows_by_prices(lengths, shape, enough=4) == 4


def test_the_bound_of_samples_counts_chunks_that_samples_cannot_share():
    shape = ShapeClass(rows=1, row_len=256, chunk_len=64, max_sequences=16)
    # Samples of 45 tokens: a chunk holds one, and n chunks hold n as far as a row goes, except that
    # 4 chunks hold 5. So 10 of them take 8 chunks.
    assert least_rows_of_samples({0: [45] * 10, 1: [64] * 4}, shape) == 3
    # Samples above half a row take 3 chunks each, with 10 tokens to spare; the short ones of their
    # own task fill these.
    assert least_rows_of_samples({0: [182] * 4, 1: [64] * 8}, shape) == 5
    assert least_rows_of_samples({0: [182] * 4 + [10] * 4, 1: [64] * 4}, shape) == 4
    # Rows of one chunk belong to one task.
    shape = ShapeClass(rows=1, row_len=64, chunk_len=64, max_sequences=16)
    assert least_rows_of_samples({0: [40], 1: [20]}, shape) == 2
