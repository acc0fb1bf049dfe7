"""The exact packing that the tests compare the planner's heuristics with: a two-stage mixed-integer
program (LoRAFusion Eq. 3-4).

Eq. 3 assigns each sample to a bin, so every permutation of equal bins or of equal samples is
another solution. This program has neither symmetry. Its bins are rows in a fixed order, in which
each task's spans keep their order. Equal spans of a task that follow each other are one *group*,
and a variable counts how many spans of a group lie in the first b rows. Counting up to row b
instead of in row b makes the constraints on the order of groups tight, and the first and the last
row that a group can lie in fix most variables.

The fewest microbatches (Eq. 3) are the smallest number, from the lower bound on, for which the
program has a solution. The least-full last microbatch (Eq. 4) is the program's objective.
"""

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import pulp

from jaxmux.planner.packing.microbatches import (
    PackedRound,
    RoundLengths,
    pack_round,
    rows_of_microbatch,
)
from jaxmux.planner.packing.rows import (
    Queues,
    Row,
    RowShape,
    ShapeClass,
    last_chunks,
    row_chunks,
    spans_of_rows,
)

# Building a program takes about 20 µs per variable. A program with more variables than this per
# second of the time limit takes more than half of the limit to build.
_VARIABLES_PER_SECOND = 25_000


class Answer(NamedTuple):
    """Result of the solver.

    Attributes:
      rows: a packing; None if none was found.
      infeasible: whether it is proven that there is none.
      least_last: no packing has fewer chunks in its last microbatch; 0 if nothing was proven.
    """

    rows: list[Row] | None
    infeasible: bool
    least_last: int


def pack_exactly(
    lengths: RoundLengths, shape: ShapeClass, seconds: float
) -> tuple[PackedRound, int]:
    """Packs one round into the fewest microbatches, with the fewest chunks in the last one.

    Args:
      lengths: by slot, the stream lengths in tokens of the samples of the task's global batch.
      shape: shape class of the microbatches.
      seconds: time limit of each program; without a solution in time, the heuristic packing stays.

    Returns:
      The packed round and the number of microbatches that no packing of its spans is proven to be
      below.
    """
    packed = pack_round(lengths, shape)
    queues = {slot: queue for slot, queue in packed.spans.items() if queue}
    row_shape, height = RowShape.of(shape), rows_of_microbatch(shape)
    rows, bound = packed.rows, packed.isolated_bound
    while bound < -(-len(rows) // height):
        answer = solve_rows(queues, row_shape, bound * height, (bound - 1) * height, seconds)
        if answer.rows is not None:
            rows = answer.rows
        elif not answer.infeasible:
            break
        else:
            bound += 1
    last = (len(rows) - 1) // height * height
    in_last = last_chunks(queues, rows, height)
    if in_last > max(1, sum(row_chunks(queues, rows)) - last * row_shape.chunks):
        answer = solve_rows(queues, row_shape, last + height, last, seconds)
        if answer.rows is not None and last_chunks(queues, answer.rows, height) < in_last:
            rows = answer.rows
    return dataclasses.replace(packed, rows=rows), bound


class _Group(NamedTuple):
    slot: int
    spans: int
    chunks: int
    sequences: int


def solve_rows(queues: Queues, shape: RowShape, rows: int, last: int, seconds: float) -> Answer:
    """Packs all spans into `rows` rows with the fewest chunks in the rows from `last` on.

    Args:
      queues: by slot, the spans in the order in which they must be laid down.
      shape: limits of a row.
      rows: number of rows.
      last: first row of the last microbatch.
      seconds: time limit. A program whose building takes most of it is not tried.
    """
    begun = time.monotonic()
    chains = _chains(queues, shape)
    chunks = sum(group.spans * group.chunks for chain in chains for group in chain)
    if chunks > rows * shape.chunks:
        return Answer(None, True, 0)
    windows = [_windows(chain, shape.chunks, rows) for chain in chains]
    if any(first > final for window in windows for first, final in window):
        return Answer(None, True, 0)
    variables = sum(final - first for window in windows for first, final in window)
    if variables > _VARIABLES_PER_SECOND * seconds:
        return Answer(None, False, 0)
    problem = pulp.LpProblem("rows", pulp.LpMaximize)
    counts = [
        [_count_up_to(problem, f"c{c}g{g}", group, window, rows)
         for g, (group, window) in enumerate(zip(chain, windows[c], strict=True))]
        for c, chain in enumerate(chains)
    ]  # fmt: skip
    in_first_rows = [
        (group.chunks, counts[c][g][last])
        for c, chain in enumerate(chains)
        for g, group in enumerate(chain)
    ]
    problem.setObjective(_linear(in_first_rows))
    _add_capacities(problem, chains, counts, rows, shape)
    for c, chain in enumerate(chains):
        for g in range(len(chain) - 1):
            _add_order(problem, f"c{c}g{g}", chain[g : g + 2], counts[c][g : g + 2], rows)
    if not problem.variables():
        plan = _read(chains, counts, rows)
        for spans in spans_of_rows(queues, plan):
            if sum(span.chunks for _, span in spans) > shape.chunks:
                return Answer(None, True, 0)
            if sum(span.sequences for _, span in spans) > shape.max_sequences:
                return Answer(None, True, 0)
        return Answer(plan, False, chunks - sum(c * count for c, count in in_first_rows))
    left = seconds - (time.monotonic() - begun)
    if left <= 0:
        return Answer(None, False, 0)
    stats = problem.solve(pulp.HiGHS(msg=False, timeLimit=left))
    if not stats.has_solution:
        return Answer(None, stats.status == pulp.LpSolveStatus.Infeasible, 0)
    proven = stats.objective if stats.best_bound is None else stats.best_bound
    return Answer(_read(chains, counts, rows), False, chunks - math.floor(proven + 1e-6))


def _chains(queues: Queues, shape: RowShape) -> list[list[_Group]]:
    """The groups of each task. Sequences are left out where the limit on chunks implies theirs."""
    spans = [span for queue in queues.values() for span in queue]
    crowd = max(span.sequences / span.chunks for span in spans)
    implied = crowd * shape.chunks <= shape.max_sequences
    chains = []
    for slot, queue in queues.items():
        chain: list[_Group] = []
        for span in queue:
            sequences = 0 if implied else span.sequences
            if chain and chain[-1][2:] == (span.chunks, sequences):
                chain[-1] = chain[-1]._replace(spans=chain[-1].spans + 1)
            else:
                chain.append(_Group(slot, 1, span.chunks, sequences))
        chains.append(chain)
    return chains


def _windows(chain: Sequence[_Group], capacity: int, rows: int) -> list[tuple[int, int]]:
    """First and last row that each group can lie in, given the chunks of the groups before and
    after it."""
    sizes = [group.spans * group.chunks for group in chain]
    windows = []
    for g, group in enumerate(chain):
        before, after = sum(sizes[:g]), sum(sizes[g + 1 :])
        first = -(-(before + group.chunks) // capacity) - 1
        final = rows - -(-(after + group.chunks) // capacity)
        windows.append((first, final))
    return windows


def _count_up_to(problem, name, group, window, rows) -> list:
    """For b = 0 to `rows`, the number of the group's spans in the first b rows: a known integer or
    a variable."""
    first, final = window
    counts = [0] * (first + 1)
    for b in range(first + 1, final + 1):
        counts.append(problem.add_variable(f"{name}b{b}", 0, group.spans, "Integer"))
        if b > first + 1:
            problem.addConstraint(_linear([(1, counts[b - 1]), (-1, counts[b])]) <= 0)
    return counts + [group.spans] * (rows - final)


def _add_capacities(problem, chains, counts, rows, shape) -> None:
    pairs = [
        (group, counts[c][g]) for c, chain in enumerate(chains) for g, group in enumerate(chain)
    ]
    for unit, capacity in (("chunks", shape.chunks), ("sequences", shape.max_sequences)):
        if not any(getattr(group, unit) for group, _ in pairs):
            continue
        for b in range(1, rows + 1):
            held = [
                (sign * getattr(group, unit), up_to[end])
                for group, up_to in pairs
                for sign, end in ((1, b), (-1, b - 1))
                if up_to[b] is not up_to[b - 1]
            ]
            problem.addConstraint(_linear(held) <= capacity)


def _add_order(problem, name, groups, counts, rows) -> None:
    """Lets the second group lie only in rows up to which the first group is complete."""
    (leader, follower), (leading, following) = groups, counts
    for b in range(1, rows + 1):
        if _is_number(following[b], 0) or _is_number(leading[b], leader.spans):
            continue
        if leader.spans == 1:
            complete = leading[b]
        else:
            complete = problem.add_variable(f"{name}done{b}", cat="Binary")
            problem.addConstraint(_linear([(leader.spans, complete), (-1, leading[b])]) <= 0)
        problem.addConstraint(_linear([(1, following[b]), (-follower.spans, complete)]) <= 0)


def _is_number(count, value: int) -> bool:
    return isinstance(count, int) and count == value


def _linear(terms: Sequence[tuple[int, object]]) -> pulp.LpAffineExpression:
    """Sum of coefficient times count over the terms; each count is an integer or a variable."""
    variables = [(count, c) for c, count in terms if c and isinstance(count, pulp.LpVariable)]
    constant = sum(c * count for c, count in terms if not isinstance(count, pulp.LpVariable))
    return pulp.lpSum_vars_coefs(variables) + constant


def _read(chains, counts, rows) -> list[Row]:
    plan: list[Row] = [{} for _ in range(rows)]
    for c, chain in enumerate(chains):
        for g, group in enumerate(chain):
            up_to = [
                count if isinstance(count, int) else round(count.varValue) for count in counts[c][g]
            ]
            for b in range(rows):
                if up_to[b + 1] > up_to[b]:
                    plan[b][group.slot] = plan[b].get(group.slot, 0) + up_to[b + 1] - up_to[b]
    return [row for row in plan if row]
