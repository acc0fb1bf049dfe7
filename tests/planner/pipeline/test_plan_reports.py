"""The tables, the picture and the trace that show a plan."""

import numpy as np
import pytest
from matplotlib.axes import Axes
from rich.table import Table

from jaxmux.cli.plan_picture import draw_schedule
from jaxmux.cli.plan_tables import TrainingFacts, bucket_labels, plan_tables
from jaxmux.cli.plan_trace import chrome_trace
from jaxmux.planner.devices import Replica


def test_dropped_records_are_counted_by_task(plan):
    parts = plan_tables(plan, None, {"task1": 12}, TrainingFacts("cpu"))
    lines = [part for part in parts if isinstance(part, str)]
    (line,) = [line for line in lines if "dropped" in line]
    assert line.startswith("task task1: 12 of 140 records dropped")


@pytest.mark.long
def test_tokens_of_a_task_are_those_of_its_samples(plan_of, tasks, request_4096):
    lengths = [140, 155, 130]
    prompt = tasks[0]._replace(lengths=lengths, only_read=[161], virtual_tokens=20)
    (found, *_) = plan_of((prompt, *tasks[1:]), Replica.uniform(2, 1), request_4096).tasks
    assert (found.samples, found.tokens, found.longest) == (3, 121 + 136 + 111, 142)


def test_buckets_are_shown_with_the_tokens_of_their_own_tasks(plan, tasks):
    (table,) = [
        part
        for part in plan_tables(plan, None, {}, TrainingFacts("cpu"))
        if isinstance(part, Table) and part.columns[0].header == "bucket"
    ]
    shown = [int(cell.replace(",", "")) for cell in table.columns[2].cells]
    own = [
        sum(sum(map(sum, tasks[slot].batches)) for h in bucket for slot in plan.htasks[h])
        for bucket in plan.buckets
    ]
    assert len(own) > 1
    np.testing.assert_allclose(shown, [*own, sum(own)] / np.float64(plan.rounds), atol=0.5)


def test_picture_shows_the_bubble_ratio_of_a_pipeline_only(
    plan, plan_of_one_device, tmp_path, monkeypatch
):
    titles = []
    monkeypatch.setattr(Axes, "set_title", lambda _, title, **__: titles.append(title))
    for own in (plan, plan_of_one_device):
        labels = bucket_labels(own)
        draw_schedule(own.schedule, own.simulate(), tmp_path / "schedule.png", "title", labels, "s")
    ratio = f"{plan.prediction.bubble_ratio:.1%}"
    assert titles == [f"title: bubble ratio {ratio}", "title"]


@pytest.mark.parametrize("unit", [1, 1e-3, 3e-5])
def test_trace_begins_at_0_whatever_the_rounding(plan, unit):
    events = chrome_trace(plan.schedule, plan.simulate(unit=unit))["traceEvents"]
    assert min(event["ts"] for event in events if "ts" in event) == 0
    assert min(event["dur"] for event in events if "dur" in event) > 0
