"""Replicas of different sizes beat replicas that are all alike."""

import json

import numpy as np
import pytest
from planner_replicas import A100_7B, A800_70B, BINS, BOUNDARIES, CONTEXT, PaperMachine
from research.replicas import plan_fused, plan_sequential, simulate_uniform_dispatch

from jaxmux.planner import PlanningError
from jaxmux.planner.devices import Replica
from jaxmux.planner.replicas import (
    LengthBins,
    candidate_replicas,
    choose_length_bins,
    plan_replicas,
)
from jaxmux.planner.replicas.deployment_search import simulate_rounds

ONE = Replica()


def binned(lengths) -> LengthBins:
    return choose_length_bins(lengths, BOUNDARIES, BINS)


def skewed_bins(seed: int, sequences: int) -> LengthBins:
    """Length bins of sequences of which most are short and a few are long."""
    lengths = np.random.default_rng(seed).lognormal(5.7, 1.3, sequences).astype(int) + 1
    return binned(np.minimum(lengths, CONTEXT))


def test_the_fused_plan_is_the_best_single_configuration():
    rounds = [skewed_bins(seed, 400) for seed in range(3)]
    fused = plan_fused(16, candidate_replicas(16), rounds, A100_7B)
    ((best, count),) = fused.replicas.items()
    longest = max(max(bins.boundaries) for bins in rounds)
    for configuration in candidate_replicas(16):
        if A100_7B.longest(configuration) >= longest:
            like = {configuration: 16 // configuration.devices}
            other = simulate_rounds(like, 16, rounds, A100_7B)
            assert fused.device_seconds <= other
    assert count == 16 // best.devices


@pytest.fixture(scope="module")
def task_lengths(shared_dir) -> dict[str, list[int]]:
    """Tasks from question answering to summaries of meetings, as in the paper's mix."""
    file = shared_dir / "data" / "lengths.json"
    if not file.is_file():
        pytest.skip(f"no {file}")
    lengths = json.loads(file.read_text())["lengths"]
    return {task: np.minimum(sizes, CONTEXT).tolist() for task, sizes in lengths.items()}


# A benchmark.
@pytest.mark.slow
@pytest.mark.parametrize(
    "model, devices, batch, fused_reduction, sequential_reduction",
    [
        pytest.param(A100_7B, 16, 128, 0.3, -0.15, id="7B on 16 GPUs"),
        pytest.param(A800_70B, 64, 256, 0.45, 0.1, id="70B on 64 GPUs"),
    ],
)
def test_real_tasks_take_fewer_device_seconds_than_on_like_replicas(
    task_lengths, model, devices, batch, fused_reduction, sequential_reduction
):
    rng = np.random.default_rng(0)
    # Tasks of long documents have few sequences in a global batch.
    sizes = {task: batch // (1 + int(np.mean(lens)) // 256) for task, lens in task_lengths.items()}
    draws = {t: rng.choice(lens, (10, sizes[t])) for t, lens in task_lengths.items()}
    by_task = {t: [binned(drawn_round) for drawn_round in drawn] for t, drawn in draws.items()}
    together = [binned(np.concatenate([d[i] for d in draws.values()])) for i in range(10)]
    candidates = candidate_replicas(devices, (1, 2, 4, 8, 16))
    sample = np.concatenate([rng.choice(lens, 100 * sizes[t]) for t, lens in task_lengths.items()])
    planned = plan_replicas(devices, candidates, binned(sample), model, sampled_rounds=100)
    ours = simulate_rounds(planned.replicas, devices, together, model)
    assert ours == pytest.approx(devices * planned.round_seconds, rel=0.1)
    fused = plan_fused(devices, candidates, together, model).device_seconds
    plans = plan_sequential(devices, candidates, by_task, model).values()
    sequential = sum(plan.device_seconds for plan in plans)
    # On 16 GPUs the replica for the longest sequences takes half of the devices, and only the
    # sequential plan can use all of them for short sequences.
    assert 1 - ours / fused > fused_reduction
    assert 1 - ours / sequential > sequential_reduction


def test_uniform_dispatch_deals_equal_numbers_whatever_the_lengths():
    model = PaperMachine()
    alike = LengthBins((256,), (12,), 0)
    rng = np.random.default_rng(0)
    dealt = simulate_uniform_dispatch(ONE, 4, [alike], model, rng)
    assert dealt == pytest.approx(4 * (3 * model.sequence_seconds(ONE, 256) + 0.02))
    unlike = [LengthBins((256, 2048), (60, 4), 0)] * 20
    balanced = simulate_rounds({ONE: 4}, 4, unlike, model)
    assert simulate_uniform_dispatch(ONE, 4, unlike, model, rng) > balanced


def test_a_bin_too_long_for_the_devices_names_how_many_it_needs():
    long = LengthBins((256, 16_384), (20, 10), 0)
    with pytest.raises(PlanningError, match=r"16384 tokens need tp\*pp >= 8 .*there are 4 devices"):
        plan_fused(4, candidate_replicas(16), [long], A100_7B)
