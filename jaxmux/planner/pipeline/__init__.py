"""Plans which tasks share microbatches and when each stage of a pipeline runs each microbatch.

`make_plan` takes the lengths of the tasks' samples (`TaskLoad`), limits of the shape class and the
costs on a replica. It returns a `Plan`: the shape class, tasks fused into hTasks, hTasks grouped
into buckets, every microbatch with its samples, a schedule of all stages and the predicted times.

The parts, in the order in which `make_plan` uses them:

- `groupings` lists ways to group the tasks into hTasks and buckets, and estimates which of them are
  worth simulating.
- `pipeline_plan` packs the groups, puts their microbatches in a row, and takes the fastest of
  several groupings. Training groups and packs by it too.
- `schedules` makes, checks and simulates the schedule.
"""

from .make_plan import (
    Plan,
    SmallerMicrobatches,
    TaskLoad,
    make_plan,
    plan_with,
    shared_pool,
    try_smaller_microbatches,
)
from .pipeline_plan import grouping_of_share, grouping_of_tasks, pack_in_groups

__all__ = [
    "Plan",
    "SmallerMicrobatches",
    "TaskLoad",
    "grouping_of_share",
    "grouping_of_tasks",
    "make_plan",
    "pack_in_groups",
    "plan_with",
    "shared_pool",
    "try_smaller_microbatches",
]
