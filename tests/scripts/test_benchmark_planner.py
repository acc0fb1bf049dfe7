"""The planner's benchmark writes complete records within their bounds, from sensible costs."""

import json

import benchmark_planner
import numpy as np
import pytest
from benchmark_records import read_records
from planner_bubbles import (
    EQUAL_STAGES,
    HEAD_ON_LAST_STAGE,
    HEAD_SPLIT,
    draw_rounds,
    jaxmux_plan,
    jaxmux_result,
    lorafusion,
    mlora,
    nearest_sets,
    one_task_at_a_time,
    shape_of,
)
from planner_costs import (
    LAYERS,
    SOURCE,
    all_reduce_seconds,
    attention_seconds,
    cost_models,
    llama,
    stage_seconds,
)
from planner_parts import packing_of_mixes, packing_of_unusual_lengths
from planner_replicas import CONTEXT, SIX_TASKS, cases, most_gain, simulate, small_case

from jaxmux.planner.costs.pool_spec import PoolSpec
from jaxmux.planner.packing.rows import ShapeClass

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def lengths():
    rng = np.random.default_rng(0)
    means = {"tiny": 40, "news": 500, "longer": 900, "wiki": 1600, "books": 6000}
    return {
        name: np.clip(rng.lognormal(np.log(mean), 0.4, 300), 16, 4096).astype(int).tolist()
        for name, mean in means.items()
    }


@pytest.fixture(scope="module")
def records(lengths, tmp_path_factory):
    folder = tmp_path_factory.mktemp("planner")
    (folder / "lengths.json").write_text(json.dumps({"lengths": lengths}))
    arguments = [
        *("--lengths", str(folder / "lengths.json"), "--out", str(folder / "planner.json")),
        *("--samples", "32", "--tokens", "4096", "--microbatches", "60"),
        *("--ablation_tasks", "4", "--plan_tasks", "8"),
        *("--parts", "bubbles", "ablation", "overlap", "parts", "predictions"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        # The benchmark packs 120 mixes of data sets.
        patch.setattr(
            benchmark_planner,
            "packing_of_mixes",
            lambda lengths, mixes, seed: packing_of_mixes(lengths, 30, seed),
        )
        patch.setattr(
            benchmark_planner,
            "packing_of_unusual_lengths",
            lambda mixes, seed: packing_of_unusual_lengths(12, seed),
        )
        benchmark_planner.main(arguments)
    return read_records(folder / "planner.json")


def test_records_have_all_fields_and_one_name_each(records):
    fields = ["name", "value", "unit", "bound", "baselines", "command"]
    assert all(list(record) == fields for record in records)
    assert len({record["name"] for record in records}) == len(records)
    assert all(np.isfinite(record["value"]) for record in records)


def test_bubbles_are_recorded_beside_all_baselines_and_the_floor(records):
    found = [record for record in records if record["name"].startswith("bubble ratio")]
    assert [record["bound"] for record in found] == [0.05, 0.15, 0.05]
    floors = [record["baselines"]["floor of the imbalance"] for record in found]
    assert floors == pytest.approx([0, 0.125, 0])
    for record in found:
        others = record["baselines"]
        assert record["value"] < others["mLoRA's LoRAPP"] < others["1F1B per task"]
        assert others["1F1B per task, reported by LoRAFusion"] == 0.4879


def test_gaps_to_optima_are_within_their_bounds(records):
    others = ("bubble", "fusion of 64 tasks", "packing")
    gaps = [r for r in records if r["bound"] and not r["name"].startswith(others)]
    assert len(gaps) >= 5
    assert all(r["value"] <= r["bound"] for r in gaps)


def task_lengths() -> dict[str, list[int]]:
    """By data set, the tokens of samples; those of most data sets are short."""
    rng = np.random.default_rng(1)
    names = sorted({task for case in cases() for task in case.tasks})
    means = {name: 150 for name in names} | {"squality": 6000, "qmsum": 12_000}
    return {
        name: np.clip(rng.lognormal(np.log(mean), 0.4, 200), 16, CONTEXT).astype(int).tolist()
        for name, mean in means.items()
    }


def test_replicas_take_less_than_like_replicas_and_no_less_than_the_floor():
    lengths = task_lengths()
    for case in list(cases())[:3]:
        found = simulate(case, lengths, seed=0, rounds=3)
        assert found.floor < found.ours < min(found.fused, found.sequential)
        assert found.ours <= 1.02 * found.balanced_fused


def test_short_tasks_alone_gain_nothing_from_different_replicas():
    (case, *_) = cases()
    lengths = {task: [100, 200] * 50 for task in SIX_TASKS}
    found = simulate(case, lengths, seed=0, rounds=3)
    assert len(found.deployment.replicas) == 1
    assert found.ours == pytest.approx(found.balanced_fused, rel=0.01)


def test_no_deployment_of_few_devices_gains_more_than_is_proven():
    found = most_gain(small_case(), task_lengths(), seed=0, rounds=3)
    assert len(found.like.counts) == 1 < len(found.unlike.counts)
    assert found.gain <= found.most <= 1.01 * found.gain
    assert found.deployments == 3


def test_interleaving_exposes_less_than_one_htask_after_another(records):
    found = [r for r in records if r["name"].startswith("exposed all-reduces")]
    assert len(found) == 3
    assert all(r["value"] < r["baselines"]["Alg. 1 alone"] + 1e-9 for r in found)
    assert all(r["value"] < 0.2 * r["baselines"]["one hTask after another"] for r in found)


def test_nearest_sets_are_distinct_and_in_the_order_of_their_originals(lengths):
    assert nearest_sets(lengths) == ("news", "longer", "wiki")


def test_rounds_hold_a_task_for_each_set_and_one_for_their_mix(lengths):
    rounds = draw_rounds(lengths, ("tiny", "news", "wiki"), samples=8, tokens=50_000, seed=0)
    assert sum(sum(map(sum, batches.values())) for batches in rounds) >= 50_000
    for batches in rounds:
        assert {slot: len(sizes) for slot, sizes in batches.items()} == dict.fromkeys(range(4), 8)
        assert set(batches[0]) <= set(lengths["tiny"])
        assert set(batches[3]) <= {s for name in ("tiny", "news", "wiki") for s in lengths[name]}


def test_bubbles_of_a_stream_of_100_microbatches_are_within_the_limits(lengths):
    rounds = draw_rounds(lengths, nearest_sets(lengths), samples=64, tokens=100 * 4096, seed=1)
    shape = shape_of(rounds, 4096)
    for scale, limit in ((EQUAL_STAGES, 0.05), (HEAD_ON_LAST_STAGE, 0.15), (HEAD_SPLIT, 0.05)):
        ours = jaxmux_result(jaxmux_plan(rounds, shape, scale))
        assert ours.microbatches >= 100
        assert ours.ratio <= limit
        others = [run(rounds, shape, scale) for run in (lorafusion, mlora, one_task_at_a_time)]
        assert ours.ratio < min(other.ratio for other in others)


def test_stages_together_take_the_cost_models_time_of_all_layers():
    models = cost_models(llama())
    assert models.source.kind == SOURCE.kind
    shape = ShapeClass(rows=4, row_len=2048, chunk_len=128, max_sequences=1)
    layer = models.times.layer(shape, (8192,), PoolSpec(1, 16))
    forward, backward = stage_seconds([2048] * 4, 8192, EQUAL_STAGES)
    assert (forward + backward).sum() == pytest.approx(LAYERS * layer.total)
    # Forward and backward passes differ only in attention here.
    assert forward.sum() == pytest.approx(LAYERS * layer.forward, rel=0.05)
    head = stage_seconds([512], 4096, HEAD_ON_LAST_STAGE)[0]
    assert head[-1] == pytest.approx(1.2 * head[0]) and LAYERS % len(head) == 0


@pytest.mark.skipif(SOURCE.kind != "estimated", reason="a profile ships")
def test_estimates_are_near_the_times_they_come_from():
    assert attention_seconds([512] * 16) * 1e3 == pytest.approx([0.15, 0.62], rel=0.1)
    assert all_reduce_seconds(8192, tp=4) == pytest.approx(0.27e-3)
