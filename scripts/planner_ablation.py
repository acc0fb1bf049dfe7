"""MuxTune's ablation in simulation: task fusion, operator orchestration and data alignment, each
switched off (MuxTune Fig. 16)."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, get_args

import numpy as np
from planner_costs import (
    ATTENTION_IN,
    ATTENTION_OUT,
    LAYERS,
    MLP_IN,
    MLP_OUT,
    adapter_seconds,
    all_reduce_seconds,
    attention_seconds,
    linear_seconds,
    permute_seconds,
)

from jaxmux.planner.pipeline.buckets import Buckets, choose_buckets
from jaxmux.planner.pipeline.fusion import HTask, fuse_tasks
from jaxmux.planner.pipeline.interleaving import priority_order, run_order, sequential_order
from jaxmux.planner.pipeline.schedules import (
    ScheduledMicrobatch,
    TickRule,
    Workload,
    one_forward_one_backward,
    simulate_lockstep,
    template,
    template_order,
)
from jaxmux.planner.pipeline.subgraphs import Block, Subgraph, graph_of, segment

# What MuxTune 5.1 pads or truncates SST2, OpenBookQA and RTE to, in tokens.
LENGTHS = (64, 128, 256)
MICROBATCHES = 4
STEPS = 4


class Setting(NamedTuple):
    """Tasks on a mesh.

    Attributes:
      lengths: tokens of each task's sequences.
      sequences: of a task in a microbatch; a global batch has 4 microbatches.
      stages, tp: of the mesh.
    """

    lengths: tuple[int, ...]
    sequences: int
    stages: int
    tp: int

    @property
    def tokens(self) -> int:
        """Original tokens of a step of all tasks."""
        return MICROBATCHES * self.sequences * sum(self.lengths)


class Parts(NamedTuple):
    """Which parts of MuxTune are on."""

    fusion: bool = True
    orchestration: bool = True
    alignment: bool = True


class Plan(NamedTuple):
    """hTasks, which of them share a clock of the pipeline, and the seconds of a step."""

    htasks: tuple[HTask, ...]
    buckets: Buckets
    seconds: float


def setting(tasks: int, sequences: int, stages: int, tp: int) -> Setting:
    """Tasks that take the three data sets in turns."""
    return Setting(tuple(LENGTHS[i % len(LENGTHS)] for i in range(tasks)), sequences, stages, tp)


def ablate(at: Setting) -> dict[str, float]:
    """Seconds of a step of all tasks with everything on, and with each part off.

    Without alignment, hTasks that were fused from tasks of unlike lengths are padded, as in the
    paper; a planner that knows it avoids most of that by fusing only like ones.
    """
    everything = plan_step(at, Parts())
    padded = _Costs(at, Parts(alignment=False))
    kept = _makespan(at, padded, everything.htasks, everything.buckets, STEPS) / STEPS
    return {
        "all on": everything.seconds,
        "without task fusion": plan_step(at, Parts(fusion=False)).seconds,
        "without orchestration": plan_step(at, Parts(orchestration=False)).seconds,
        "without alignment": kept,
        "without alignment, planned anew": plan_step(at, Parts(alignment=False)).seconds,
        "without any": plan_step(at, Parts(False, False, False)).seconds,
    }


def plan_step(at: Setting, parts: Parts) -> Plan:
    """The plan of least time in lockstep; a step's seconds are the mean over several."""
    costs = _Costs(at, parts)
    alone = tuple((task,) for task in range(len(at.lengths)))
    fusions = {alone}
    if parts.fusion:
        # What needs no padding is as good with alignment.
        fusions |= _fusions(at, costs) | _fusions(at, _Costs(at, Parts(alignment=False)))
    orchestrate = _interleaved if parts.orchestration else _one_after_another
    plans = [orchestrate(at, costs, htasks) for htasks in sorted(fusions)]
    return min(plans, key=lambda plan: plan.seconds)


def _fusions(at: Setting, costs: "_Costs") -> set[tuple[HTask, ...]]:
    """Eq. 6's hTasks under every bound on their length that tells partitions apart.

    Eq. 6 charges an hTask but the first L / S, less than the 2C clocks that it takes, and so leaves
    all but one task in one hTask, which then has no other to share the pipeline with. With bounds,
    the simulator finds how many hTasks there should be.
    """
    tokens = [at.sequences * length for length in at.lengths]
    order = sorted(range(len(tokens)), key=lambda task: tokens[task])
    ranges = [tuple(order[i:k]) for k in range(len(order) + 1) for i in range(k)]
    seconds = {htask: sum(costs.stage((htask,))) for htask in ranges}
    longest_task = max(seconds[(task,)] for task in order)
    return {
        fuse_tasks(
            tokens,
            costs.latency,
            at.stages,
            fits=lambda htask, limit=limit: seconds[htask] <= limit,
        ).htasks
        for limit in set(seconds.values())
        if limit >= longest_task
    }


def _one_after_another(at: Setting, costs: "_Costs", htasks: tuple[HTask, ...]) -> Plan:
    """Every hTask has the pipeline for itself."""
    seconds = sum(_makespan(at, costs, (htask,), ((0,),), 1) for htask in htasks)
    return Plan(htasks, tuple((i,) for i in range(len(htasks))), seconds)


def _interleaved(at: Setting, costs: "_Costs", htasks: tuple[HTask, ...]) -> Plan:
    def simulate(buckets: Buckets) -> float:
        return _makespan(at, costs, htasks, buckets, STEPS) / STEPS

    grouping = choose_buckets([costs.stage((htask,))[0] for htask in htasks], simulate)
    return Plan(htasks, grouping.buckets, grouping.latency)


def _makespan(
    at: Setting, costs: "_Costs", htasks: Sequence[HTask], buckets: Buckets, steps: int
) -> float:
    """Of the template; of 1F1B with a flush where there is one bucket and step."""
    members = [tuple(htasks[i] for i in bucket) for bucket in buckets]
    jobs = [
        ScheduledMicrobatch(tasks, (step,) * len(tasks), bucket)
        for step in range(steps)
        for bucket, own in enumerate(members)
        for tasks in [tuple(sorted(task for htask in own for task in htask))]
        for _ in range(MICROBATCHES)
    ]
    seconds = np.array([costs.stage(members[job.bucket]) for job in jobs])
    forward, backward = (np.repeat(seconds[:, [i]], at.stages, axis=1) for i in (0, 1))
    load = Workload(tuple(jobs), forward, backward)
    permute = max(permute_seconds(sum(map(costs.tokens, own))) for own in members)
    if len(jobs) == MICROBATCHES:
        candidates = [one_forward_one_backward(load, rule) for rule in get_args(TickRule)]
        return min(simulate_lockstep(s, load, permute).makespan for s in candidates)
    schedule = template(load, permute_time=permute)
    return simulate_lockstep(schedule, load.reorder(template_order(load)), permute).makespan


class _Costs:
    """Eq. 3-4 for one setting, with the collectives of a stage hidden or not."""

    def __init__(self, at: Setting, parts: Parts):
        self._at = at
        self._parts = parts
        self.stage = cache(self._stage)

    def latency(self, htask: HTask) -> float:
        """L of an hTask alone in the pipeline (Eq. 4), with its own forward and backward times."""
        return (self._at.stages - 1 + MICROBATCHES) * sum(self.stage((htask,)))

    def tokens(self, htask: HTask) -> int:
        """Of a microbatch, with what is padded."""
        return sum(self._task_tokens(htask))

    def _task_tokens(self, htask: HTask) -> list[int]:
        """Aligned, each task has as many chunks as it needs; else all get the longest's length."""
        longest = max(self._at.lengths[task] for task in htask)
        aligned = self._parts.alignment
        return [
            self._at.sequences * (self._at.lengths[task] if aligned else longest) for task in htask
        ]

    def _stage(self, htasks: tuple[HTask, ...]) -> tuple[float, float]:
        """Seconds of a bucket's microbatch on a stage, forward and backward."""
        return self._direction(htasks, 0), self._direction(htasks, 1)

    def _direction(self, htasks: tuple[HTask, ...], direction: int) -> float:
        subgraphs = self._subgraphs(htasks, direction)
        order = priority_order if self._parts.orchestration else sequential_order
        return run_order(subgraphs, order(subgraphs)).seconds

    def _subgraphs(self, htasks: tuple[HTask, ...], direction: int) -> list[Subgraph]:
        layers = LAYERS // self._at.stages
        return segment([graph_of(self._blocks(htask, direction) * layers) for htask in htasks])

    def _blocks(self, htask: HTask, direction: int) -> list[Block]:
        """A decoder layer; backward, the linears take the same time and attention more."""
        tp = self._at.tp
        tokens = self._task_tokens(htask)
        total = sum(tokens)
        sizes = [count // self._at.sequences for count in tokens for _ in range(self._at.sequences)]
        attention = float(attention_seconds(sizes, tp)[direction])
        reduce = all_reduce_seconds(total, tp)
        blocks = []
        for into, out, middle in (
            (ATTENTION_IN, ATTENTION_OUT, attention),
            (MLP_IN, MLP_OUT, 0.0),
        ):
            after = middle + linear_seconds(total, out, tp) + adapter_seconds(tokens, out, tp)
            blocks.append(
                Block(
                    linear_seconds(total, into, tp),
                    adapter_seconds(tokens, into, tp),
                    after,
                    reduce,
                )
            )
        return blocks
