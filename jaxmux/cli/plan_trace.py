"""trace.json: a simulated schedule in Chrome's trace format, which ui.perfetto.dev opens."""

from typing import Any

from jaxmux.planner.pipeline.schedules.schedule import PipelineSchedule
from jaxmux.planner.pipeline.schedules.simulate import Simulation


def chrome_trace(
    schedule: PipelineSchedule, simulation: Simulation, microseconds: float = 1000.0
) -> dict[str, Any]:
    """The trace, for `json.dump`: a thread a stage, a slice an op, a mark an update.

    Args:
      schedule: the schedule.
      simulation: when its ops run.
      microseconds: how long one unit of the workload's times is; 1000 where they are milliseconds.
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": s, "args": {"name": f"stage {s}"}}
        for s in range(schedule.stages)
    ]
    for kind, starts, ends in (
        ("forward", simulation.forward_start, simulation.forward_end),
        ("backward", simulation.backward_start, simulation.backward_end),
    ):
        for v in range(schedule.virtual_stages):
            for j, job in enumerate(schedule.jobs):
                events.append(
                    {
                        "ph": "X",
                        "name": f"{kind[0].upper()}{j}",
                        "cat": kind,
                        "pid": 0,
                        "tid": v % schedule.stages,
                        "ts": float(starts[v, j]) * microseconds,
                        "dur": float(ends[v, j] - starts[v, j]) * microseconds,
                        "args": {
                            "microbatch": j,
                            "tasks": list(job.tasks),
                            "steps": list(job.steps),
                            "bucket": job.bucket,
                            "chunk": v // schedule.stages,
                        },
                    }
                )
    events += _update_marks(schedule, simulation, microseconds)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _update_marks(
    schedule: PipelineSchedule, simulation: Simulation, microseconds: float
) -> list[dict[str, Any]]:
    """An instant on each stage where the last backward of a task's global batch ends."""
    ends = simulation.backward_end.reshape(schedule.chunks, schedule.stages, -1).max(axis=0)
    marks = []
    for update in schedule.updates:
        members = [
            j for j, job in enumerate(schedule.jobs) if (update.task, update.step) in job.batches
        ]
        for stage in range(schedule.stages):
            marks.append(
                {
                    "ph": "i",
                    "s": "t",
                    "name": f"update of task {update.task}, step {update.step}",
                    "cat": "update",
                    "pid": 0,
                    "tid": stage,
                    "ts": float(ends[stage, members].max()) * microseconds,
                }
            )
    return marks
