"""Plans which tasks share microbatches and which microbatch runs when on a pipeline's stages.

In go the tasks' global batches, limits of the shape class and the costs on a replica. Out comes a
`Plan`: the shape class, tasks fused into hTasks, hTasks in buckets, every microbatch with its
samples, a schedule of all stages and the predicted times.
"""

from .make_plan import (
    SmallerMicrobatches,
    TaskLoad,
    make_plan,
    shared_pool,
    try_smaller_microbatches,
)
from .plan_value import Plan

__all__ = [
    "Plan",
    "SmallerMicrobatches",
    "TaskLoad",
    "make_plan",
    "shared_pool",
    "try_smaller_microbatches",
]
