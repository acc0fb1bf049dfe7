"""Schedules by the names of `RunOptions.schedule` are legal, and differ as documented."""

from pathlib import Path

import numpy as np
import pytest

from jaxmux.planner import PlanningError
from jaxmux.planner.devices import SCHEDULES, Deployment, Replica
from jaxmux.planner.packing import ShapeClass
from jaxmux.planner.pipeline.pipeline_plan import PipelineCosts, grouping_of_tasks, plan_pipeline
from jaxmux.planner.pipeline.schedules import (
    ScheduledMicrobatch,
    microbatches_in_flight,
    schedule_rounds,
    simulate_asynchronous,
    uniform_workload,
    validate,
)

STAGES, ROUNDS = 3, 4


def parts_of(name: str) -> int:
    return Replica.uniform(STAGES).following(name).parts


def rounds_of(name: str, tasks: int, microbatches: int):
    """A stream of rounds with `microbatches` of each task, and the round of each microbatch. Tasks
    are updated by themselves or together, as with the schedule of this name."""
    stream, rounds = [], []
    for step in range(ROUNDS):
        for task in range(tasks):
            updated = (task,) if name in ("auto", "lorapp", "template") else tuple(range(tasks))
            steps = (step,) * len(updated)
            stream += [ScheduledMicrobatch(updated, steps, task)] * microbatches
            rounds += [step] * microbatches
    return uniform_workload(stream, [1.0] * STAGES, [2.0] * STAGES), rounds


def bubble_of(name: str, tasks: int, microbatches: int) -> float:
    workload, rounds = rounds_of(name, tasks, microbatches)
    parts = parts_of(name)
    schedule = schedule_rounds(name, workload, rounds, parts)
    return simulate_asynchronous(schedule, workload).bubble_ratio()


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("tasks, microbatches", [(1, 1), (2, 3), (5, 1), (4, 2)])
def test_every_schedule_is_legal_and_keeps_no_more_in_flight_than_memory_is_planned_for(
    name, tasks, microbatches
):
    workload, rounds = rounds_of(name, tasks, microbatches)
    parts = parts_of(name)
    schedule = schedule_rounds(name, workload, rounds, parts)
    validate(schedule)
    assert schedule.microbatches == workload.microbatches
    kept = schedule.virtual_peak_buffers().reshape(parts, STAGES).sum(axis=0) / parts
    planned = np.array(microbatches_in_flight(name, STAGES, parts))
    if name == "gpipe":
        assert kept.tolist() == [tasks * microbatches] * STAGES
    else:
        assert (kept <= planned).all()


def test_memory_is_planned_for_these_microbatches_in_flight():
    assert microbatches_in_flight("auto", 4) == microbatches_in_flight("1f1b", 4) == (4, 3, 2, 1)
    assert microbatches_in_flight("lorapp", 4) == (4, 3, 2, 1)
    assert microbatches_in_flight("template", 4) == (7, 7, 4, 1)
    # In halves of a stage: 4 + 2 of the first stage, 3 + 1 of the second one.
    assert microbatches_in_flight("interleaved", 2, 2) == (3, 2)


def test_groups_that_are_updated_one_after_another_keep_a_pipeline_busy():
    """And of the schedules that pack all tasks together, the interleaved one is idle least: its
    bubbles are those of 1F1B divided by the parts of a stage."""
    busy = {name: bubble_of(name, 6, 2) for name in SCHEDULES}
    assert busy["auto"] < 0.1 and busy["lorapp"] < 0.1
    assert busy["1f1b"] == pytest.approx(busy["gpipe"]) == pytest.approx(2 / (12 + 2))
    assert busy["interleaved"] == pytest.approx(1 / (12 + 1), rel=0.1)
    assert busy["auto"] < busy["interleaved"] < busy["template"] <= busy["1f1b"] * (1 + 1e-9)


def test_lorapp_passes_over_a_task_that_waits_for_its_update():
    """The next round begins with the task that came last; 1F1B waits for it."""
    tasks = [(0, 1, 2, 3), (3, 2, 1, 0)] * 2
    stream = [
        ScheduledMicrobatch((task,), (step,), task)
        for step, of_round in enumerate(tasks)
        for task in of_round
    ]
    rounds = [step for step, of_round in enumerate(tasks) for _ in of_round]
    workload = uniform_workload(stream, [1.0] * STAGES, [2.0] * STAGES)
    streamed, passed_over = (schedule_rounds(n, workload, rounds) for n in ("auto", "lorapp"))
    validate(passed_over)
    times = [simulate_asynchronous(s, workload).makespan for s in (streamed, passed_over)]
    assert times[1] < times[0]


def test_a_schedule_needs_a_pipeline_and_an_interleaved_one_enough_layers():
    with pytest.raises(PlanningError, match="schedule='gpipe' .* least pp2, found pp1,tp2"):
        Deployment.parse("pp2 + tp2").following("gpipe")
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 8}
    replica = Replica.uniform(pp=2).following("interleaved")
    assert replica.parts == 2 and replica.part_layers(10) == [3, 3, 2, 2]
    assert replica.stage_layers(10) == [5, 5]
    replica.require(4, sizes)
    with pytest.raises(PlanningError, match="needs at least 4 layers; the backbone has 3"):
        replica.require(3, sizes)
    assert Deployment.parse("tp2").following("auto") == Deployment.parse("tp2")


SHAPE = ShapeClass(rows=4, row_len=512, chunk_len=128, max_sequences=1)
# By column of the table in docs/plans.md: stages, and samples of a quarter of a microbatch in the
# global batch of each task.
TABLE = ((2, (64,)), (4, (64,)), (4, (16,) * 4), (4, (2,) * 16))


def planned(name: str, stages: int, samples: tuple[int, ...], rounds: int = 6):
    """The simulation of rounds in which a backward pass takes twice as long as a forward pass."""
    batches = [[[512] * count] * rounds for count in samples]
    grouping = grouping_of_tasks(batches, SHAPE, stages, schedule=name)
    seconds = np.full(stages, 1.0), np.full(stages, 2.0)
    costs = PipelineCosts(SHAPE, lambda _: seconds, 0.0, name, parts_of(name))
    lengths = [dict(enumerate(of_round)) for of_round in zip(*batches, strict=True)]
    return plan_pipeline(lengths, grouping, costs).simulation


@pytest.mark.long
def test_the_documentation_has_the_simulated_figures():
    page = (Path(__file__).resolve().parents[4] / "docs" / "plans.md").read_text()
    auto = [planned("auto", *case).makespan for case in TABLE]
    for name in SCHEDULES:
        found = [planned(name, *case) for case in TABLE]
        cells = [
            f"{simulation.bubble_ratio():.0%}, {simulation.makespan / least:.2f}"
            for simulation, least in zip(found, auto, strict=True)
        ]
        kept = f"{microbatches_in_flight(name, 4, parts_of(name))[0]:g}"
        kept = "all" if name == "gpipe" else kept
        assert f"| `{name}` | {' | '.join(cells)} | {kept} |" in page
