"""The two-stage mixed-integer program behind microbatch packing (LoRAFusion Eq. 3-4).

Eq. 3 assigns each sample to a bin, which leaves the solver every permutation of equal bins and of
equal samples. Here neither is left: the bins are rows in their order, in which each task's runs
keep theirs, and a variable counts how many of a *group*, equal runs that follow each other, lie in
the first rows. Counting up to a row instead of in it gives the order of groups tight constraints,
and a group's first and last possible row fixes most variables.

Fewest microbatches (Eq. 3) is then the least number for which a packing exists, tried from the
lower bound on; the least-full last microbatch (Eq. 4) is that program's objective.
"""

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import pulp

from .rows import Queues, Row, RowShape, spans_of_rows

# Building a program takes some 20 µs for each variable: one larger than this for each second of the
# limit would take more than half of it.
_VARIABLES_PER_SECOND = 25_000


class Answer(NamedTuple):
    """What the solver found.

    Attributes:
      rows: a packing; None if none was found.
      infeasible: proven that there is none.
      least_last: no packing has fewer chunks in its last microbatch; 0 if nothing was proven.
    """

    rows: list[Row] | None
    infeasible: bool
    least_last: int


class _Group(NamedTuple):
    slot: int
    runs: int
    chunks: int
    seats: int


def solve_rows(queues: Queues, shape: RowShape, rows: int, last: int, seconds: float) -> Answer:
    """Packs all runs into `rows` rows with the fewest chunks in the rows from `last` on.

    Args:
      queues: by slot, the runs in the order in which they must be laid down.
      shape: what a row holds.
      rows: number of rows.
      last: first row of the last microbatch.
      seconds: time limit. A program that takes long to build is not tried.
    """
    begun = time.monotonic()
    chains = _chains(queues, shape)
    chunks = sum(group.runs * group.chunks for chain in chains for group in chain)
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
        for runs in spans_of_rows(queues, plan):
            if sum(run.chunks for _, run in runs) > shape.chunks:
                return Answer(None, True, 0)
            if sum(run.seats for _, run in runs) > shape.seats:
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
    """By task, its runs as groups. Seats are left out where chunks already bound them."""
    runs = [run for queue in queues.values() for run in queue]
    bounded = max(run.seats / run.chunks for run in runs) * shape.chunks <= shape.seats
    chains = []
    for slot, queue in queues.items():
        chain: list[_Group] = []
        for run in queue:
            seats = 0 if bounded else run.seats
            if chain and chain[-1][2:] == (run.chunks, seats):
                chain[-1] = chain[-1]._replace(runs=chain[-1].runs + 1)
            else:
                chain.append(_Group(slot, 1, run.chunks, seats))
        chains.append(chain)
    return chains


def _windows(chain: Sequence[_Group], capacity: int, rows: int) -> list[tuple[int, int]]:
    """First and last row that each group may touch, for what lies before and behind it."""
    sizes = [group.runs * group.chunks for group in chain]
    windows = []
    for g, group in enumerate(chain):
        ahead, behind = sum(sizes[:g]), sum(sizes[g + 1 :])
        first = -(-(ahead + group.chunks) // capacity) - 1
        final = rows - -(-(behind + group.chunks) // capacity)
        windows.append((first, final))
    return windows


def _count_up_to(problem, name, group, window, rows) -> list:
    """For b = 0 to `rows`, how many of the group lie in the first b rows: a number or variable."""
    first, final = window
    counts = [0] * (first + 1)
    for b in range(first + 1, final + 1):
        counts.append(problem.add_variable(f"{name}b{b}", 0, group.runs, "Integer"))
        if b > first + 1:
            problem.addConstraint(_linear([(1, counts[b - 1]), (-1, counts[b])]) <= 0)
    return counts + [group.runs] * (rows - final)


def _add_capacities(problem, chains, counts, rows, shape) -> None:
    pairs = [
        (group, counts[c][g]) for c, chain in enumerate(chains) for g, group in enumerate(chain)
    ]
    for unit, capacity in (("chunks", shape.chunks), ("seats", shape.seats)):
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
    """The second group enters no row before the first is complete there."""
    (leader, follower), (leading, following) = groups, counts
    for b in range(1, rows + 1):
        if _is_number(following[b], 0) or _is_number(leading[b], leader.runs):
            continue
        if leader.runs == 1:
            complete = leading[b]
        else:
            complete = problem.add_variable(f"{name}done{b}", cat="Binary")
            problem.addConstraint(_linear([(leader.runs, complete), (-1, leading[b])]) <= 0)
        problem.addConstraint(_linear([(1, following[b]), (-follower.runs, complete)]) <= 0)


def _is_number(count, value: int) -> bool:
    return isinstance(count, int) and count == value


def _linear(terms: Sequence[tuple[int, object]]) -> pulp.LpAffineExpression:
    """Sum of coefficients times counts, each a number or a variable."""
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
