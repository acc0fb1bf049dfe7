"""trace.json: a simulated schedule in Chrome's trace format, which ui.perfetto.dev shows."""

from typing import Any

from jaxmux.planner.pipeline.schedules import PipelineSchedule, Simulation

# Traces are in microseconds, simulations in milliseconds.
_MICROSECONDS = 1000.0


def chrome_trace(schedule: PipelineSchedule, simulation: Simulation) -> dict[str, Any]:
    """The trace as a dict for `json.dump`: one thread per stage, with a slice for every pass of a
    microbatch and a mark for every update. The simulation's times are in milliseconds."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": s, "args": {"name": f"stage {s}"}}
        for s in range(schedule.stages)
    ]
    for kind, starts, ends in (
        ("forward", simulation.forward_start, simulation.forward_end),
        ("backward", simulation.backward_start, simulation.backward_end),
    ):
        for v in range(schedule.virtual_stages):
            for m, microbatch in enumerate(schedule.microbatches):
                events.append(
                    {
                        "ph": "X",
                        "name": f"{kind[0].upper()}{m}",
                        "cat": kind,
                        "pid": 0,
                        "tid": v % schedule.stages,
                        "ts": float(starts[v, m]) * _MICROSECONDS,
                        "dur": float(ends[v, m] - starts[v, m]) * _MICROSECONDS,
                        "args": {
                            "microbatch": m,
                            "tasks": list(microbatch.tasks),
                            "steps": list(microbatch.steps),
                            "bucket": microbatch.bucket,
                            "virtual_stage": v,
                        },
                    }
                )
    events += _update_marks(schedule, simulation)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _update_marks(schedule: PipelineSchedule, simulation: Simulation) -> list[dict[str, Any]]:
    """Marks on each stage at the end of the last backward pass of a task's global batch."""
    backward_end = simulation.backward_end
    ends = backward_end.reshape(schedule.virtual_per_stage, schedule.stages, -1).max(axis=0)
    marks = []
    for update in schedule.updates:
        members = [
            m
            for m, microbatch in enumerate(schedule.microbatches)
            if (update.task, update.step) in microbatch.global_batches
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
                    "ts": float(ends[stage, members].max()) * _MICROSECONDS,
                }
            )
    return marks
