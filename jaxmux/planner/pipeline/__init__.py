"""Plans which tasks share microbatches and when each stage of a pipeline runs each microbatch.

`make_plan` takes the lengths of the tasks' samples (`TaskLoad`), limits of the shape class and the
costs on a replica. It returns a `Plan`: the shape class, tasks fused into hTasks, hTasks grouped
into buckets, every microbatch with its samples, a schedule of all stages and the predicted times.

The parts, in the order in which `make_plan` uses them:

- `groupings` lists ways to group the tasks; it uses `fusion` (hTasks), `buckets` and
  `adapter_groups`. `grouping_estimates` chooses those that are worth simulating.
- `bubble_lemma` puts the packed microbatches of the groups in a row; `schedules` makes, checks and
  simulates the schedule.
- `pipeline_plan` does both for several groupings, and takes the fastest. Training groups and packs
  by it too. `pipeline_choice` adds the costs of a replica.
- `smaller_microbatches` tries whether fewer tokens per microbatch would be faster.
"""

from .make_plan import (
    SmallerMicrobatches,
    TaskLoad,
    make_plan,
    plan_with,
    shared_pool,
    try_smaller_microbatches,
)
from .pipeline_plan import grouping_of_share, grouping_of_tasks, pack_in_groups
from .plan_value import Plan

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
