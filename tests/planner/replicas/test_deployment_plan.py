"""The deployment is the best of all and is found in seconds."""

import math
import time
from itertools import product

import numpy as np
import pytest
from planner_replicas import A100_7B, A800_70B, PaperMachine
from scipy.optimize import linprog

from jaxmux.planner import PlanningError
from jaxmux.planner.devices import Replica
from jaxmux.planner.replicas import (
    LengthBins,
    candidate_replicas,
    plan_replicas,
    replan,
)
from jaxmux.planner.replicas.cost_table import drop_dominated, tabulate_costs
from jaxmux.planner.replicas.deployment_search import evaluate_replicas


def least_round(costs, number, demand) -> float:
    """Seconds of a round with these replicas, by a linear program for every possible limit on the
    seconds that a single sequence takes."""
    deployed = np.flatnonzero(number)
    costs, number = costs.of(deployed), number[deployed]
    least = np.inf
    for limit in np.unique(costs.alone[np.isfinite(costs.alone)]):
        row, column = np.nonzero(costs.alone <= limit)
        if limit >= least or len(set(column)) < len(demand):
            continue
        places = 1 + np.arange(len(row))
        busy = np.zeros((len(number), 1 + len(row)))
        busy[:, 0] = -1
        busy[row, places] = costs.per_sequence[row, column] / number[row]
        served = np.zeros((len(demand), 1 + len(row)))
        served[column, places] = 1
        answer = linprog(np.eye(1 + len(row))[0], busy, -costs.constant, A_eq=served, b_eq=demand)
        least = min(least, max(limit, answer.fun))
    return least


def exhaustive(costs, demand, devices) -> float:
    """The least seconds of all deployments to which no replica of a deployed configuration can be
    added."""
    best = np.inf
    sizes = costs.devices
    for number in product(*(range(devices // n + 1) for n in sizes)):
        idle = devices - sizes @ np.array(number)
        if 0 <= idle < min((n for n, p in zip(sizes, number, strict=True) if p), default=0):
            best = min(best, least_round(costs, np.array(number), demand))
    return best


@pytest.mark.parametrize(
    "devices, degrees",
    [
        (3, [(1, 1), (1, 2), (2, 1)]),
        (6, [(1, 1), (1, 2), (2, 1), (3, 1)]),
        (8, [(1, 1), (2, 1), (1, 3), (4, 1), (2, 2)]),
        (16, [(1, 1), (2, 1), (2, 2), (8, 1)]),
        (16, [(2, 1), (1, 4), (4, 1), (8, 1), (2, 8)]),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_the_plan_is_as_good_as_the_best_of_all(devices, degrees, seed, unrelated_costs):
    rng = np.random.default_rng([devices, len(degrees), seed])
    configurations = [Replica.uniform(pp=pp, tp=tp) for tp, pp in degrees]
    lengths = np.sort(rng.choice(np.arange(1, 40), 4, replace=False) * 10).tolist()
    model = unrelated_costs(rng, lengths, configurations)
    bins = LengthBins(tuple(lengths), tuple(rng.integers(1, 300, 4).tolist()), 0)
    found = plan_replicas(devices, configurations, bins, model, sampled_rounds=10, gap=1e-5)
    costs = tabulate_costs(configurations, bins.boundaries, model)
    least = exhaustive(costs, np.array(bins.counts) / 10, devices)
    assert found.round_seconds == pytest.approx(least, rel=2e-5)
    assert found.bound <= least * (1 + 1e-6)
    assert 0 < found.devices <= devices
    alone = evaluate_replicas(found.replicas, bins, model, sampled_rounds=10, gap=1e-5)
    assert alone.round_seconds == pytest.approx(least, rel=2e-5)


def test_a_configuration_that_is_worse_in_every_respect_is_left_out():
    costs = tabulate_costs(candidate_replicas(8), (256, 1024, 4096), A100_7B)
    slower = costs._replace(per_sequence=costs.per_sequence * 1.1)
    both = costs._replace(
        configurations=costs.configurations * 2,
        constant=np.concatenate([costs.constant, slower.constant]),
        per_sequence=np.concatenate([costs.per_sequence, slower.per_sequence]),
    )
    kept, dominated = drop_dominated(both)
    alone, _ = drop_dominated(costs)
    np.testing.assert_array_equal(kept.per_sequence, alone.per_sequence)
    assert dominated


def test_of_two_equal_configurations_one_stays():
    two = Replica.uniform(tp=2)
    costs = tabulate_costs([two, two], (256,), PaperMachine())
    kept, dominated = drop_dominated(costs)
    assert kept.configurations == (two,)
    assert dominated == {two: two}


@pytest.mark.long
@pytest.mark.parametrize(
    "devices, limit", [(64, 30), pytest.param(256, 60, marks=pytest.mark.slow)]
)
def test_many_devices_are_planned_in_seconds(devices, limit, skewed_bins):
    candidates = candidate_replicas(devices, (1, 2, 4, 8, 16), (1, 2, 4, 8))
    bins = skewed_bins(0, 50_000)
    start = time.perf_counter()
    rounds = 50_000 // (devices * 16)
    found = plan_replicas(devices, candidates, bins, A800_70B, sampled_rounds=rounds)
    assert time.perf_counter() - start < limit
    assert found.gap <= 1e-3
    assert len(found.replicas) > 1 and found.devices <= devices


def test_a_plan_out_of_time_has_a_bound_on_the_best(skewed_bins):
    bins = skewed_bins(0, 5_000)
    found = plan_replicas(16, candidate_replicas(16), bins, A100_7B, 20, time_limit=0)
    best = plan_replicas(16, candidate_replicas(16), bins, A100_7B, 20)
    assert found.bound <= best.round_seconds <= found.round_seconds
    assert len(found.replicas) == 1


LONG = LengthBins((256, 16_384), (20, 10), 0)
SHORT = LengthBins((256,), (300,), 0)


def replanned(current, bins, **horizon):
    return replan(current, 16, candidate_replicas(16), bins, A100_7B, **horizon)


def test_replicas_stay_while_the_gain_does_not_pay_for_the_switch():
    current = plan_replicas(16, candidate_replicas(16), LONG, A100_7B).replicas
    best = plan_replicas(16, candidate_replicas(16), SHORT, A100_7B)
    kept = evaluate_replicas(current, SHORT, A100_7B)
    rounds = math.ceil(180 / (kept.round_seconds - best.round_seconds))
    stays = replanned(current, SHORT, switch_seconds=180, horizon_rounds=rounds - 10)
    assert not stays.switch and stays.deployment.replicas == current and stays.saved_seconds < 0
    assert stays.deployment.gap > 0.1
    leaves = replanned(current, SHORT, switch_seconds=180, horizon_rounds=rounds + 10)
    assert leaves.switch and leaves.deployment.replicas == best.replicas
    assert leaves.saved_seconds > 0


def test_replicas_that_cannot_serve_a_new_task_are_replaced_at_any_cost():
    current = plan_replicas(16, candidate_replicas(16), SHORT, A100_7B).replicas
    forced = replanned(current, LONG, switch_seconds=1e9, horizon_rounds=1)
    assert forced.switch and forced.saved_seconds == math.inf


def test_replicas_on_more_devices_than_there_are_are_replaced():
    forced = replanned({Replica(): 32}, SHORT, switch_seconds=1e9, horizon_rounds=1)
    assert forced.switch and forced.deployment.devices <= 16


def test_a_bin_too_long_for_the_devices_names_how_many_it_needs():
    candidates = candidate_replicas(16)
    with pytest.raises(PlanningError, match=r"16384 tokens need tp\*pp >= 8 .*there are 4 devices"):
        plan_replicas(4, candidates, LONG, A100_7B)


def test_a_bin_too_long_for_every_configuration_names_the_longest_that_fits():
    with pytest.raises(PlanningError, match="shorten them to 256 tokens, which pp1,tp2 serves"):
        plan_replicas(16, [Replica.uniform(tp=2)], LONG, A100_7B)


@pytest.mark.parametrize("bins", [LengthBins((), (), 0), LengthBins((256,), (0,), 0)])
def test_no_sequences_are_refused(bins):
    with pytest.raises(PlanningError, match="no sequences"):
        plan_replicas(4, candidate_replicas(4), bins, A100_7B)
