"""The cluster replay's records: they compare policies on the same jobs."""

import json

import numpy as np
import pytest
import replay_cluster
from cluster_records import (
    ALONE,
    COMPLETION,
    FINISHED,
    FIRST_FIT,
    GPU_SECONDS,
    OURS,
    POLICIES,
    policy_values,
    replay_table,
)

FIELDS = ["name", "value", "bound", "sense", "unit", "command", "device", "versions", "baselines"]
FIGURES = (FINISHED, COMPLETION, GPU_SECONDS)


@pytest.fixture(scope="module")
def records():
    """The records of a few jobs on two GPUs."""
    rng = np.random.default_rng(0)
    lengths = {name: rng.integers(8, 200, 300).tolist() for name in replay_cluster.DATA_SETS}
    day = replay_cluster.Day("a short day", 0.005, (8,), required=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay_cluster, "GPUS", 2)
        patch.setattr(replay_cluster, "RANKS", (8,))
        patch.setattr(replay_cluster, "BATCHES_OF_A_KIND", 2)
        times = replay_cluster.round_times(lengths, (8,), seed=0)
        return list(replay_cluster.day_records(day, times, seed=0))


def test_a_day_has_a_record_of_every_figure(records):
    assert [r["name"] for r in records] == [f"cluster replay, a short day, {f}" for f in FIGURES]
    for r in records:
        assert list(r)[: len(FIELDS)] == FIELDS and set(policy_values(r)) == set(POLICIES)
        assert json.loads(json.dumps(r)) == r


def test_the_bound_is_the_better_baseline(records):
    for r in records:
        baselines = [r["baselines"][name] for name in (ALONE, FIRST_FIT)]
        better = {"at least": max, "at most": min}[r["sense"]]
        assert r["bound"] == better(baselines)
        assert r["sense"] == ("at least" if r["unit"] == "jobs" else "at most")


def test_the_last_hour_has_the_jobs_finished_in_the_day(records):
    counts = records[0]["finished by hour"]
    assert {name: found[-1] for name, found in counts.items()} == policy_values(records[0])
    assert all(found == sorted(found) and len(found) == 25 for found in counts.values())


def test_small_tasks_gain_by_sharing_gpus_but_no_more_than_possible(records):
    seconds = policy_values(records[2])
    least = records[2]["baselines"]["every job beside enough jobs of its kind"]
    assert 0.9 * least < seconds[OURS] < seconds[ALONE]


def test_the_table_has_a_row_for_each_record_and_skips_other_benchmarks(records):
    table = replay_table([{"name": "another benchmark"}, *records])
    assert table.count("\n| ") == 2 + len(records)
    assert f"| a short day | jobs finished in the day | {records[0]['baselines'][ALONE]} |" in table
    missed = records[0] | {"bound": 10**6}
    assert "| at least 1,000,000, missed |" in replay_table([missed])
    assert replay_table([{"name": "another benchmark"}]) == "Not measured yet.\n"
