"""A lower bound on the rows of a round, from a linear program over all layouts (Gilmore and Gomory,
A linear programming approach to the cutting-stock problem, 1961). The bound is near the optimum but
takes about 0.1 s per round, so planning does not compute it."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array

from .rows import ShapeClass, least_rows_of_samples

# The program assigns a price to every sample and to every number of chunks. The samples in a span
# must not cost more than the span's chunks, and the chunks in a row must not cost more than 1. Then
# the samples of a round cost at most as much as it has rows, so the sum of their prices is a lower
# bound on the number of rows. The best prices solve the dual of a relaxed packing, which may use a
# fraction of a span or of a row. There are too many spans and rows to list all constraints. The
# program therefore begins with few, and adds those that its prices violate most.
_MOST_ROUNDS = 60
# After each solution, at most this many spans of a task are added to the program.
_SPANS = 3
# Prices with a smaller difference count as equal. A bound that exceeds a whole number by less than
# this counts as that number.
_TOLERANCE = 1e-6


class _Task(NamedTuple):
    """The samples of a task, grouped by length: the different lengths (ascending), the number of
    samples of each length, and the index of the task's first length in the prices of all tasks."""

    lengths: np.ndarray
    counts: np.ndarray
    first: int


class _Constraint(NamedTuple):
    """An upper limit on a weighted sum of prices. `places` are the indices of the prices, `factors`
    their weights. The prices of the lengths of all tasks come first, then those of the numbers of
    chunks."""

    places: np.ndarray
    factors: np.ndarray
    limit: float


def least_rows_by_prices(
    lengths: Mapping[int, Sequence[int]], shape: ShapeClass, enough: int | None = None
) -> int:
    """Returns a lower bound on the number of rows of any layout in which each chunk belongs to one
    task. The bound is at least `least_rows_of_samples`. The search for better prices stops when the
    bound reaches `enough`, for example the number of rows of a known packing; None means that it
    goes on until the best prices are found."""
    bound = least_rows_of_samples(lengths, shape)
    most = shape.row_len // shape.chunk_len
    enough = math.inf if enough is None else enough
    if not most or bound >= enough:
        return bound
    tasks, places = [], 0
    for sizes in filter(len, lengths.values()):
        tasks.append(_Task(*np.unique(sizes, return_counts=True), places))
        places += len(tasks[-1].lengths)
    constraints = [
        _span(task, np.eye(len(task.lengths))[i], -(-int(length) // shape.chunk_len), places)
        for task in tasks
        for i, length in enumerate(task.lengths)
    ]
    constraints += [
        _row(np.eye(most)[chunks - 1] * (most // chunks), places) for chunks in range(1, most + 1)
    ]
    demand = np.concatenate([*(task.counts for task in tasks), np.zeros(most)])
    for _ in range(_MOST_ROUNDS):
        prices, best = _best_prices(demand, constraints)
        # More chunks can hold the same samples and more, so their price must not be lower.
        of_chunks = np.maximum.accumulate(prices[places:])
        dearest, content = _dearest_row(of_chunks)
        violated = [_row(content, places)] if dearest > 1 + _TOLERANCE else []
        # Prices are scaled down until no row and no span costs too much. Then the sum of the prices
        # is a bound.
        of_chunks_scaled = of_chunks / max(1.0, dearest)
        total = 0.0
        for task in tasks:
            of_lengths = prices[task.first : task.first + len(task.lengths)]
            values, content_of = _dearest_spans(task, of_lengths, shape)
            ratios = values / np.maximum(of_chunks_scaled, 1e-12)
            total += of_lengths @ task.counts / max(1.0, ratios.max())
            excess = values - of_chunks
            violated += [
                _span(task, content_of(int(i) + 1), int(i) + 1, places)
                for i in np.argsort(-excess)[:_SPANS]
                if excess[i] > _TOLERANCE
            ]
        bound = max(bound, math.ceil(total - _TOLERANCE))
        if bound >= min(enough, best - _TOLERANCE) or not violated:
            break
        constraints += violated
    return bound


def _span(task: _Task, content: np.ndarray, chunks: int, places: int) -> _Constraint:
    """The constraint that samples cost at most as much as the `chunks` chunks that hold them.
    `content` has the number of samples of each length."""
    used = np.flatnonzero(content)
    factors = np.append(content[used].astype(float), -1.0)
    return _Constraint(np.append(task.first + used, places + chunks - 1), factors, 0.0)


def _row(content: np.ndarray, places: int) -> _Constraint:
    """The constraint that a row costs at most 1. `content` has the number of its spans of each
    number of chunks."""
    used = np.flatnonzero(content)
    return _Constraint(places + used, content[used].astype(float), 1.0)


def _best_prices(
    demand: np.ndarray, constraints: Sequence[_Constraint]
) -> tuple[np.ndarray, float]:
    starts = np.cumsum([0, *(len(constraint.places) for constraint in constraints)])
    factors = np.concatenate([constraint.factors for constraint in constraints])
    columns = np.concatenate([constraint.places for constraint in constraints])
    matrix = csr_array((factors, columns, starts), shape=(len(constraints), len(demand)))
    limits = [constraint.limit for constraint in constraints]
    answer = linprog(-demand, A_ub=matrix, b_ub=limits, bounds=(0, None), method="highs")
    return answer.x, -answer.fun


def _dearest_row(of_chunks: np.ndarray) -> tuple[float, np.ndarray]:
    """The highest price of the spans in a row, and the number of spans of 1, 2, ... chunks at which
    it is reached."""
    most = len(of_chunks)
    best, last = np.zeros(most + 1), np.zeros(most + 1, np.int64)
    for chunks in range(1, most + 1):
        values = of_chunks[:chunks] + best[:chunks][::-1]
        last[chunks], best[chunks] = values.argmax() + 1, values.max()
    content, left = np.zeros(most, np.int64), most
    while left:
        content[last[left] - 1] += 1
        left -= last[left]
    return float(best[most]), content


def _dearest_spans(
    task: _Task, prices: np.ndarray, shape: ShapeClass
) -> tuple[np.ndarray, Callable[[int], np.ndarray]]:
    """The highest prices of a task's samples in 1, 2, ... chunks of a row, and a function from a
    number of chunks to the number of samples of each length with which this price is reached. This
    is a knapsack problem; samples of equal length are taken in groups of 1, 2, 4, ..."""
    best, steps = np.zeros(shape.row_len + 1), []
    for i, (length, count) in enumerate(zip(task.lengths, task.counts, strict=True)):
        left, group = min(int(count), shape.row_len // int(length)), 1
        while left:
            group = min(group, left)
            left -= group
            size = group * int(length)
            taken = best[:-size] + group * prices[i]
            better = taken > best[size:] + 1e-12
            steps.append((i, group, size, better))
            np.copyto(best[size:], taken, where=better)
            group *= 2

    def content_of(chunks: int) -> np.ndarray:
        room, content = chunks * shape.chunk_len, np.zeros(len(task.lengths), np.int64)
        for i, group, size, better in reversed(steps):
            if room >= size and better[room - size]:
                content[i] += group
                room -= size
        return content

    return best[shape.chunk_len :: shape.chunk_len], content_of
