"""The files that show a schedule: JSON that reads back, a trace and a picture."""

import json

import numpy as np
import pytest
from matplotlib.image import imread

from jaxmux.cli.plan_picture import draw_schedule
from jaxmux.cli.plan_trace import chrome_trace
from jaxmux.planner.pipeline.schedules import (
    PipelineSchedule,
    interleaved,
    lorapp,
    round_robin_microbatches,
    simulate_lockstep,
    template,
    uniform_workload,
    validate,
)


@pytest.fixture(scope="module")
def workload():
    return uniform_workload(round_robin_microbatches(3, 2, microbatches=2), [1.0] * 3, [1.2] * 3)


@pytest.mark.parametrize("generate", [template, lorapp, lambda workload: interleaved(workload, 2)])
def test_json_reads_back_as_the_same_schedule(workload, generate):
    schedule = generate(workload)
    read = PipelineSchedule.from_json(json.loads(json.dumps(schedule.to_json())))
    assert read == schedule
    assert read.forward_microbatch.dtype == read.backward_virtual_stage.dtype == np.int32
    validate(read)


def test_other_json_is_refused():
    with pytest.raises(ValueError, match="format is None"):
        PipelineSchedule.from_json({"microbatches": []})


@pytest.mark.parametrize("virtual_per_stage", [1, 2])
def test_trace_holds_every_op_and_update_on_its_stage(workload, virtual_per_stage):
    schedule = interleaved(workload, virtual_per_stage)
    simulation = simulate_lockstep(schedule, workload)
    events = json.loads(json.dumps(chrome_trace(schedule, simulation)))["traceEvents"]
    ops = [e for e in events if e["ph"] == "X"]
    assert len(ops) == 2 * 3 * virtual_per_stage * len(workload.microbatches)
    for stage in range(3):
        busy = sum(e["dur"] for e in ops if e["tid"] == stage) / 1000
        assert busy == pytest.approx(simulation.busy()[stage])
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in ops if e["tid"] == stage)
        assert all(a[1] <= b[0] + 1e-6 for a, b in zip(own, own[1:], strict=False))
    assert len([e for e in events if e["ph"] == "i"]) == 3 * len(schedule.updates)


@pytest.mark.long
def test_picture_is_drawn(workload, tmp_path):
    schedule = interleaved(workload, 2)
    simulation = simulate_lockstep(schedule, workload)
    path = tmp_path / "schedule.png"
    labels = {microbatch.bucket: "mood" for microbatch in schedule.microbatches}
    draw_schedule(schedule, simulation, path, "interleaved", labels, "s")
    assert len(np.unique(imread(path).reshape(-1, 4), axis=0)) > 10
