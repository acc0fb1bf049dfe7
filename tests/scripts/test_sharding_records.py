"""The records of several devices, and their tables."""

import argparse

import benchmark_sharding
import pytest
from benchmark_sharding import records_of_mesh
from sharding_layouts import mix
from sharding_records import sharding_table
from sharding_runs import Measured, Prediction, Work, figure_of, prediction_errors

from jaxmux.models import BackboneConfig
from jaxmux.planner.devices import SCHEDULES
from jaxmux.planner.packing import ShapeClass

GIB = 2**30
SHAPE = ShapeClass(rows=4, row_len=2048, chunk_len=128, max_sequences=1)
ARGS = argparse.Namespace(tasks=4, tokens=8192, devices=4, rounds=2, context=16384)
CONFIG = BackboneConfig("LlamaForCausalLM", 512, 256, 512, 2, 2, 1, 128)


def run(seconds: float, peaks=(39, 23), idle=(), planned_idle=0.004) -> Measured:
    return Measured(
        times=[seconds, 9.0, seconds],
        tokens=16 * 8192,
        first=50.0,
        peaks=[peak * GIB for peak in peaks],
        predicted_peaks=[39 * GIB, 20 * GIB],
        device="H200",
        idle=list(idle),
        prediction=Prediction((SHAPE,), 4.0, planned_idle),
    )


def test_the_peak_of_every_device_counts():
    _, peak = prediction_errors(run(4.0), "8B shape, pp2, 4 tasks")
    assert peak["value"] == pytest.approx(23 / 20 - 1)
    assert peak["baselines"] == {"measured, GiB": [39, 23], "predicted, GiB": [39, 20]}


def test_a_mesh_is_compared_with_one_device_and_with_the_plan():
    found = records_of_mesh(ARGS, run(7.0), "pp2", 1, run(3.6, idle=(0.05, 0.01)))
    speed, seconds, _, idle = found
    assert speed["value"] == pytest.approx(7 / 3.6)
    assert speed["bound"] == pytest.approx(2 * 3.3 / 4)
    assert seconds["value"] == pytest.approx(0.1)
    assert (idle["value"], idle["bound"]) == (pytest.approx(0.03), pytest.approx(0.034))


def test_every_schedule_is_measured_beside_auto(monkeypatch):
    """The interleaved one on two parts of the backbone for each stage."""
    asked = []

    def measured(call):
        args, _, deployment = call.args
        asked.append((args.schedule, args.remat, deployment.replicas[0].parts))
        return run(4.0 + len(asked))

    monkeypatch.setattr(benchmark_sharding, "in_own_process", measured)
    options = {"devices": 2, "microbatches": 4, "length": 2048, "remat": "auto"}
    sizes = {"hidden": 256, "layers": 4, "vocab": 512}
    args = argparse.Namespace(**vars(ARGS) | options | sizes)
    records = list(benchmark_sharding.schedule_records(args))
    assert [schedule for schedule, _, _ in asked] == list(SCHEDULES)
    assert asked[2:4] == [("gpipe", "full", 1), ("interleaved", "auto", 2)]
    assert records[1]["name"] == "8B shape, pp2, 4 tasks, schedule 1f1b"
    assert records[1]["baselines"]["over auto"] == pytest.approx(6 / 5)


def test_replicas_should_scale_like_data_parallelism():
    speed, *_ = records_of_mesh(ARGS, run(7.0), "2*(tp1)", 1, run(3.6))
    assert speed["bound"] == pytest.approx(2 * 3.85 / 4)


def test_tables_have_every_record():
    records = [
        *records_of_mesh(ARGS, run(7.0), "pp2", 1, run(3.6, idle=(0.05, 0.01))),
        *prediction_errors(run(4.0), "70B shape, pp1,tp2, 4 tasks"),
        figure_of(run(4.0), "8B layers, tp4, hidden share", 0.5, 0.45, "at least", "share", {}),
    ]
    rows = sharding_table(records).splitlines()
    assert "| pp2 | round | 3.6 s | 4 s | **10.0%** | at most 8% |" in rows
    peak = "peak memory | 39, 23 GiB | 39, 20 GiB | **15.0%** | at most 5% |"
    assert f"| 70B shape, pp1,tp2 | {peak}" in rows
    assert "| 8B layers, tp4, hidden share | **0.5** | share | at least 0.45 |" in rows
    assert sum(row.startswith("|") for row in rows) == len(records) + 3 * 2


def test_tasks_of_long_documents_have_few_samples_in_a_global_batch():
    names = ("gsm8k", "dialogsum", "pubmedqa", "xsum", "squality", "qmsum")
    lengths = {name: [100, 120] for name in names} | {"qmsum": [12_000, 20_000]}
    work = mix(ARGS, CONFIG, lengths)
    assert list(work.batches) == [32, 32, 32, 32, 32, 1]
    assert max(work.lengths[-1]) <= ARGS.context
    assert work.tokens == pytest.approx(
        sum(b * sum(own) / len(own) for b, own in zip(work.batches, work.lengths, strict=True))
    )


def test_equal_tasks_fill_their_microbatches():
    args = argparse.Namespace(length=2048, tokens=8192)
    work = Work.uniform(CONFIG, args, 4, least=16, rounds=3)
    assert work.tokens == 16 * 8192
    assert [task.task.batch_size for task in work.tasks(rank=2)] == [16] * 4
