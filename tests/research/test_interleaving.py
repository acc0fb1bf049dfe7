"""Interleaved hTasks keep their dependencies and hide collectives."""

import numpy as np
import pytest
from research.interleaving import (
    Block,
    Operator,
    Subgraph,
    graph_of,
    interleave,
    priority_order,
    run_order,
    segment,
    sequential_order,
)

from jaxmux.planner import PlanningError


def chain(htask: int, times, first: int) -> list[Subgraph]:
    """Subgraphs of (compute, communication) pairs, each of which depends on the one before.

    `first` is the index of the first subgraph.
    """
    return [
        Subgraph(htask, *pair, after=(first + i - 1,) if i else ()) for i, pair in enumerate(times)
    ]


def alike(htasks: int, layers: int, compute: float, communication: float) -> list[Subgraph]:
    subgraphs: list[Subgraph] = []
    for htask in range(htasks):
        subgraphs += chain(htask, [(compute, communication)] * layers, len(subgraphs))
    return subgraphs


def random_subgraphs(seed: int, most: int) -> list[Subgraph]:
    """Two or three hTasks with short and long collectives and a few dependencies between hTasks."""
    rng = np.random.default_rng(seed)
    subgraphs: list[Subgraph] = []
    htasks = int(rng.integers(2, 4))
    for htask in range(htasks):
        first = len(subgraphs)
        for index in range(first, first + int(rng.integers(2, most // htasks + 1))):
            earlier = range(first, index)
            count = min(len(earlier), int(rng.integers(1, 3)))
            after = set(rng.choice(earlier, size=count, replace=False))
            if first and rng.random() < 0.1:
                after.add(int(rng.integers(first)))
            communication = float(rng.random() * rng.choice([0, 0.3, 1, 2]))
            times = 0.2 + float(rng.random()), communication
            subgraphs.append(Subgraph(htask, *times, tuple(sorted(map(int, after)))))
    return subgraphs


def all_orders(subgraphs, begun=()):
    if len(begun) == len(subgraphs):
        yield begun
    for index, subgraph in enumerate(subgraphs):
        if index not in begun and set(subgraph.after) <= set(begun):
            yield from all_orders(subgraphs, (*begun, index))


def test_every_order_keeps_the_dependencies():
    for seed in range(60):
        subgraphs = random_subgraphs(seed, most=24)
        for order in (
            sequential_order(subgraphs),
            priority_order(subgraphs),
            interleave(subgraphs).order,
        ):
            place = {index: n for n, index in enumerate(order)}
            assert sorted(order) == list(range(len(subgraphs)))
            assert all(place[a] < place[i] for i, s in enumerate(subgraphs) for a in s.after)


@pytest.mark.long
def test_interleaving_is_never_worse_than_one_htask_after_another():
    for seed in range(60):
        subgraphs = random_subgraphs(seed, most=24)
        found = interleave(subgraphs)
        assert found.overlap == run_order(subgraphs, found.order)
        assert found.sequential == run_order(subgraphs, sequential_order(subgraphs))
        assert found.overlap.seconds <= found.sequential.seconds
        assert -1e-12 <= found.overlap.exposed <= sum(s.communication for s in subgraphs) + 1e-12


def test_interleaving_is_near_the_best_of_all_orders():
    gaps = []
    for seed in range(60):
        subgraphs = random_subgraphs(seed, most=8)
        best = min(run_order(subgraphs, order).seconds for order in all_orders(subgraphs))
        gaps.append(interleave(subgraphs).overlap.seconds / best - 1)
    assert min(gaps) >= -1e-9
    assert np.mean(gaps) <= 0.005 and max(gaps) <= 0.06


@pytest.mark.parametrize("htasks", [2, 3, 4])
def test_collectives_of_like_htasks_are_hidden_except_the_last(htasks):
    found = interleave(alike(htasks, layers=6, compute=1.0, communication=0.4))
    assert found.overlap.exposed == pytest.approx(0.4)
    assert found.sequential.exposed == pytest.approx(0.4 * (6 * htasks - htasks + 1))


def test_algorithm_1_takes_least_depth_and_of_those_the_longest():
    subgraphs = chain(0, [(1, 0.1), (3, 0.1)], 0) + chain(1, [(2, 0.1), (1, 0.1)], 2)
    assert priority_order(subgraphs) == [2, 0, 1, 3]


def test_a_single_htask_exposes_every_collective():
    found = interleave(alike(1, layers=4, compute=1.0, communication=0.4))
    assert found.overlap == found.sequential
    assert found.overlap.exposed == pytest.approx(1.6)


def test_collectives_run_one_at_a_time_in_the_order_of_issue():
    subgraphs = [Subgraph(0, 1.0, 5.0), Subgraph(1, 1.0, 5.0)]
    assert run_order(subgraphs, [0, 1]).seconds == 11.0


def test_compute_is_clustered_up_to_its_collective_and_adapters_are_apart():
    layers = graph_of([Block(1.0, 0.25, 2.0, 0.5)] * 2)
    assert segment([layers, layers])[:6] == [
        Subgraph(0, 1.0, 0.0, ()),
        Subgraph(0, 0.25, 0.0, ()),
        Subgraph(0, 2.0, 0.5, (0, 1)),
        Subgraph(0, 1.0, 0.0, (2,)),
        Subgraph(0, 0.25, 0.0, (2,)),
        Subgraph(0, 2.0, 0.5, (3, 4)),
    ]
    backbone = [Operator(1.0), Operator(2.0, (0,)), Operator(0.5, (1,), is_collective=True)]
    assert segment([backbone]) == [Subgraph(0, 3.0, 0.5, ())]


def test_segmenting_keeps_all_time_and_every_dependency_points_back():
    rng = np.random.default_rng(0)
    graphs = [graph_of([Block(*rng.random(4)) for _ in range(4)]) for _ in range(3)]
    subgraphs = segment(graphs)
    operators = [operator for graph in graphs for operator in graph]
    for kind, total in (
        (True, sum(s.communication for s in subgraphs)),
        (False, sum(s.compute for s in subgraphs)),
    ):
        assert total == pytest.approx(sum(o.seconds for o in operators if o.is_collective == kind))
    assert all(source < i for i, s in enumerate(subgraphs) for source in s.after)
    assert {s.htask for s in subgraphs} == {0, 1, 2}


def test_malformed_graphs_are_named():
    with pytest.raises(PlanningError, match="hTask 0, operator 0: a collective takes"):
        segment([[Operator(1.0, is_collective=True)]])
    with pytest.raises(PlanningError, match="hTask 1, operator 0: takes"):
        segment([[Operator(1.0)], [Operator(1.0, (1,)), Operator(1.0)]])
    with pytest.raises(PlanningError, match=r"\[0, 1\] depend on each other"):
        interleave([Subgraph(0, 1.0, 0.0, (1,)), Subgraph(0, 1.0, 0.0, (0,))])
    with pytest.raises(PlanningError, match="subgraph 1 comes before"):
        run_order(alike(1, 2, 1.0, 0.0), [1, 0])
