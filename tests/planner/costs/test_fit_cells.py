"""What fits is what the memory model predicts, and what `Admission` admits."""

import itertools

import pytest
from backbone_sizes import llama_8b

from jaxmux.planner import PlanningError
from jaxmux.planner.costs.admission import (
    Admission,
    FitCell,
    fastest_fitting,
    fit_cells,
    largest_fitting,
)
from jaxmux.planner.costs.cost_models import estimated_memory, estimated_times
from jaxmux.planner.costs.pool_spec import PoolSpec
from jaxmux.planner.costs.replica_costs import ReplicaCosts
from jaxmux.planner.devices import ONE_DEVICE
from jaxmux.planner.packing import ShapeClass

GIB = 2**30
TASKS = (1, 4, 16, 64)
SHAPES = [ShapeClass(rows, 1024, 128, 1) for rows in (1, 2, 4, 8, 16, 32)]
POOL = PoolSpec(1, 16)


def costs(gib: float, remat: str = "auto", pool: PoolSpec = POOL) -> ReplicaCosts:
    size = llama_8b()
    memory = estimated_memory(size, int(gib * GIB))
    return ReplicaCosts(estimated_times(size), memory, pool, ONE_DEVICE, remat)


def by_size(found: tuple[FitCell, ...]) -> dict[tuple[int, int], FitCell]:
    return {(cell.tokens, cell.tasks): cell for cell in found}


def test_cells_are_those_of_the_memory_model():
    own = costs(32)
    cells = by_size(fit_cells(own, SHAPES, TASKS))
    assert len(cells) == len(SHAPES) * len(TASKS)
    for shape, tasks in itertools.product(SHAPES, TASKS):
        cell, pool = cells[shape.tokens, tasks], PoolSpec(tasks, 16)
        assert cell.fits == own.memory.fits(shape, pool)
        policies = own.memory.policies(shape, pool)
        assert cell.peak_bytes == own.memory.peak(shape, pool, policies)
        assert cell.remat == {p: policies.count(p) for p in policies}
        # The engine gives the leaner policy to the first layers.
        assert next(iter(cell.remat)) == policies[0]
    assert {cell.fits for cell in cells.values()} == {True, False}


@pytest.mark.parametrize("remat", ["auto", "lean", "full"])
def test_more_tokens_or_tasks_never_fit_better(remat):
    cells = by_size(fit_cells(costs(32, remat), SHAPES, TASKS))
    tokens = [shape.tokens for shape in SHAPES]
    steps = [((n, t), (m, t)) for n, m in itertools.pairwise(tokens) for t in TASKS]
    steps += [((n, t), (n, u)) for n in tokens for t, u in itertools.pairwise(TASKS)]
    for less, more in ((cells[a], cells[b]) for a, b in steps):
        assert less.fits or not more.fits
        if not less.fits or remat != "auto":
            assert more.peak_bytes > less.peak_bytes


def test_one_policy_holds_for_all_layers_if_it_is_given():
    cells = fit_cells(costs(32, "lean"), SHAPES, TASKS)
    assert all(cell.remat == {"lean": 32} for cell in cells)
    assert all(cell.fits == (cell.peak_bytes <= 0.97 * 32 * GIB) for cell in cells)


@pytest.mark.parametrize("tasks", [1, 4, 16])
def test_the_largest_fitting_cell_is_admitted_and_the_next_is_refused(tasks):
    own = costs(28)
    largest = largest_fitting(fit_cells(own, SHAPES, TASKS), tasks)
    index = [shape.tokens for shape in SHAPES].index(largest.tokens)
    named = {f"task{i}": POOL for i in range(tasks)}
    Admission(own, SHAPES[index]).require(named)
    with pytest.raises(PlanningError, match="does not fit"):
        Admission(own, SHAPES[index + 1]).require(named)


def test_the_fastest_cell_fits_and_no_other_is_faster():
    own = costs(24)
    cells = fit_cells(own, SHAPES, TASKS)
    fastest = fastest_fitting(cells, 4)
    (shape,) = (shape for shape in SHAPES if shape.tokens == fastest.tokens)
    pool = PoolSpec(4, 16)
    seconds = own.times.microbatch(
        shape, (shape.tokens / 4,) * 4, pool, own.memory.policies(shape, pool)
    )
    assert fastest.tokens_per_second == pytest.approx(shape.tokens / seconds)
    speeds = [cell.tokens_per_second for cell in cells if cell.tasks == 4]
    assert max(speed for speed in speeds if speed) == fastest.tokens_per_second
    # More recomputation makes larger microbatches slower.
    assert fastest.tokens < largest_fitting(cells, 4).tokens
    assert [cell.fits for cell in cells] == [bool(c.tokens_per_second) for c in cells]


def test_nothing_is_largest_where_nothing_fits():
    cells = fit_cells(costs(8), SHAPES, TASKS)
    assert largest_fitting(cells, 1) is None and fastest_fitting(cells, 1) is None


def test_the_slots_of_the_pool_are_allocated_for_fewer_tasks():
    cells = by_size(fit_cells(costs(64, "full", POOL._replace(slots=16)), SHAPES[:1], TASKS))
    peaks = [cells[1024, tasks].peak_bytes for tasks in TASKS]
    assert peaks[0] == peaks[1] == peaks[2] < peaks[3]
