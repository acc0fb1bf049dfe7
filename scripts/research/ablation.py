"""MuxTune's ablation in simulation (MuxTune 5.3, Fig. 16).

Task fusion, operator orchestration and data alignment are switched off one by one. All times are in
seconds.

MuxTune takes the partition into hTasks of least latency (`fuse_tasks`, Eq. 6), and then the fastest
buckets of these hTasks (`choose_buckets`, 3.4). The planner instead simulates the best partition
into every number of hTasks.
"""

from collections.abc import Callable, Sequence
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
from research.interleaving import (
    Block,
    Subgraph,
    graph_of,
    priority_order,
    run_order,
    segment,
    sequential_order,
)

from jaxmux.planner import PlanningError
from jaxmux.planner.pipeline.groupings import (
    Buckets,
    Fusion,
    HTask,
    balance_gap,
    candidate_buckets,
    fusions,
)
from jaxmux.planner.pipeline.schedules import (
    ScheduledMicrobatch,
    TickRule,
    Workload,
    one_forward_one_backward,
    simulate_lockstep,
    template,
    template_order,
)

# Lengths in tokens to which MuxTune 5.1 pads or truncates SST2, OpenBookQA and RTE.
LENGTHS = (64, 128, 256)
# By load, the part of the throughput that MuxTune reports to lose without each part (Fig. 16).
_LOST = ("lost without task fusion", "lost without orchestration", "lost without alignment")
REPORTED_LOSSES = {
    load: dict(zip([f"{part} (MuxTune)" for part in _LOST], lost, strict=True))
    for load, lost in (("light", (0.361, 0.303, 0.225)), ("heavy", (0.0625, 0.251, 0.343)))
}
# Microbatches of a global batch, and steps over which the time is averaged.
MICROBATCHES = 4
STEPS = 4


class Setting(NamedTuple):
    """Tasks on a replica.

    Attributes:
      lengths: for each task, tokens of its sequences.
      sequences: sequences of each task in a microbatch.
      stages: number of pipeline stages.
      tp: tensor-parallel devices of each stage.
    """

    lengths: tuple[int, ...]
    sequences: int
    stages: int
    tp: int

    @property
    def tokens(self) -> int:
        """Tokens of a step of all tasks, without padding."""
        return MICROBATCHES * self.sequences * sum(self.lengths)


class Parts(NamedTuple):
    """The parts of MuxTune that are switched on."""

    fusion: bool = True
    orchestration: bool = True
    alignment: bool = True


class Plan(NamedTuple):
    """A plan of the tasks.

    Attributes:
      htasks: for each hTask, its tasks.
      buckets: for each bucket, its hTasks.
      seconds: time of a step of all tasks.
    """

    htasks: tuple[HTask, ...]
    buckets: Buckets
    seconds: float


def setting(tasks: int, sequences: int, stages: int, tp: int) -> Setting:
    """Returns a setting in which the tasks take their lengths from the three data sets in turn."""
    return Setting(tuple(LENGTHS[i % len(LENGTHS)] for i in range(tasks)), sequences, stages, tp)


def ablate(at: Setting) -> dict[str, float]:
    """Returns the time of a step of all tasks with all parts on, and with each part off.

    Without alignment, an hTask of tasks of different lengths is padded, as in the paper. A planner
    that knows this avoids most of the padding by fusing only tasks of equal length ("without
    alignment, planned anew").
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
    """Returns the plan of least lockstep time."""
    costs = _Costs(at, parts)
    alone = tuple((task,) for task in range(len(at.lengths)))
    partitions = {alone}
    if parts.fusion:
        # hTasks that need no padding are candidates with alignment too.
        partitions |= _partitions(at, costs) | _partitions(at, _Costs(at, Parts(alignment=False)))
    orchestrate = _interleaved if parts.orchestration else _one_after_another
    plans = [orchestrate(at, costs, htasks) for htasks in sorted(partitions)]
    return min(plans, key=lambda plan: plan.seconds)


def _partitions(at: Setting, costs: "_Costs") -> set[tuple[HTask, ...]]:
    """The hTasks of Eq. 6 under every limit on their time that makes a difference.

    Eq. 6 charges an hTask after the first only L / S, less than the 2C clocks that it takes. So it
    puts nearly all tasks into one hTask, which then has no other to share the pipeline with. With
    limits, the simulator finds the best number of hTasks.
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
    """Every hTask has the pipeline to itself."""
    seconds = sum(_makespan(at, costs, (htask,), ((0,),), 1) for htask in htasks)
    return Plan(htasks, tuple((i,) for i in range(len(htasks))), seconds)


def _interleaved(at: Setting, costs: "_Costs", htasks: tuple[HTask, ...]) -> Plan:
    """The hTasks are grouped into buckets, which take turns in the pipeline."""

    def simulate(buckets: Buckets) -> float:
        return _makespan(at, costs, htasks, buckets, STEPS) / STEPS

    choice = choose_buckets([costs.stage((htask,))[0] for htask in htasks], simulate)
    return Plan(htasks, choice.buckets, choice.latency)


def _makespan(
    at: Setting, costs: "_Costs", htasks: Sequence[HTask], buckets: Buckets, steps: int
) -> float:
    """Lockstep time of MuxTune's template, or of 1F1B if there is one bucket and one step."""
    members = [tuple(htasks[i] for i in bucket) for bucket in buckets]
    microbatches = [
        ScheduledMicrobatch(tasks, (step,) * len(tasks), bucket)
        for step in range(steps)
        for bucket, own in enumerate(members)
        for tasks in [tuple(sorted(task for htask in own for task in htask))]
        for _ in range(MICROBATCHES)
    ]
    seconds = np.array([costs.stage(members[microbatch.bucket]) for microbatch in microbatches])
    forward, backward = (np.repeat(seconds[:, [i]], at.stages, axis=1) for i in (0, 1))
    workload = Workload(tuple(microbatches), forward, backward)
    permute = max(permute_seconds(sum(map(costs.tokens, own))) for own in members)
    if len(microbatches) == MICROBATCHES:
        schedules = [one_forward_one_backward(workload, rule) for rule in get_args(TickRule)]
        return min(simulate_lockstep(s, workload, permute).makespan for s in schedules)
    schedule = template(workload, permute_time=permute)
    ordered = workload.reorder(template_order(workload))
    return simulate_lockstep(schedule, ordered, permute).makespan


class _Costs:
    """The costs of Eq. 3-4 in one setting, with or without hidden collectives."""

    def __init__(self, at: Setting, parts: Parts):
        self._at = at
        self._parts = parts
        self.stage = cache(self._stage)

    def latency(self, htask: HTask) -> float:
        """L of an hTask alone in the pipeline (Eq. 4), with its own forward and backward times."""
        return (self._at.stages - 1 + MICROBATCHES) * sum(self.stage((htask,)))

    def tokens(self, htask: HTask) -> int:
        """Tokens of a microbatch of the hTask, including padding."""
        return sum(self._task_tokens(htask))

    def _task_tokens(self, htask: HTask) -> list[int]:
        """Tokens of each task in a microbatch; without alignment all have the longest's length."""
        longest = max(self._at.lengths[task] for task in htask)
        aligned = self._parts.alignment
        return [
            self._at.sequences * (self._at.lengths[task] if aligned else longest) for task in htask
        ]

    def _stage(self, htasks: tuple[HTask, ...]) -> tuple[float, float]:
        """Forward and backward time of a bucket's microbatch on a stage."""
        return self._direction(htasks, 0), self._direction(htasks, 1)

    def _direction(self, htasks: tuple[HTask, ...], direction: int) -> float:
        """Time of a forward (direction 0) or backward (1) pass."""
        subgraphs = self._subgraphs(htasks, direction)
        order = priority_order if self._parts.orchestration else sequential_order
        return run_order(subgraphs, order(subgraphs)).seconds

    def _subgraphs(self, htasks: tuple[HTask, ...], direction: int) -> list[Subgraph]:
        layers = LAYERS // self._at.stages
        return segment([graph_of(self._blocks(htask, direction) * layers) for htask in htasks])

    def _blocks(self, htask: HTask, direction: int) -> list[Block]:
        """A decoder layer. Backward, the linears take the same time and attention takes more."""
        tp = self._at.tp
        tokens = self._task_tokens(htask)
        total = sum(tokens)
        sizes = [count // self._at.sequences for count in tokens for _ in range(self._at.sequences)]
        attention = float(attention_seconds(sizes, tp)[direction])
        blocks = []
        for into, out, middle in (
            (ATTENTION_IN, ATTENTION_OUT, attention),
            (MLP_IN, MLP_OUT, 0.0),
        ):
            rest = middle + linear_seconds(total, out, tp) + adapter_seconds(tokens, out, tp)
            blocks.append(
                Block(
                    projection=linear_seconds(total, into, tp),
                    adapter=adapter_seconds(tokens, into, tp),
                    rest=rest,
                    all_reduce=all_reduce_seconds(total, tp),
                )
            )
        return blocks


def fuse_tasks(
    tokens: Sequence[int],
    latency: Callable[[HTask], float],
    stages: int,
    fits: Callable[[HTask], bool] = lambda htask: True,
) -> Fusion:
    """Returns the partition of least latency, F* = min_n F(M, n) (Eq. 6).

    `latency` and `fits` are called once for each of the M(M+1)/2 hTasks that are contiguous in
    tokens, and `fits` once more for each task alone.

    Args:
      tokens: n_i, tokens of a microbatch of each of the M tasks.
      latency: L, end-to-end latency in seconds of an hTask alone in the pipeline.
      stages: S, the number of pipeline stages.
      fits: whether the memory suffices for an hTask (Eq. 5).

    Raises:
      PlanningError: a task does not fit even alone, or there are no tasks.
    """
    for task, count in sorted(enumerate(tokens), key=lambda pair: pair[1]):
        if not fits((task,)):
            raise PlanningError(
                f"task {task} with {count} tokens a microbatch does not fit in memory even alone"
            )

    def allowed_latency(htask: HTask) -> float:
        return latency(htask) if fits(htask) else np.inf

    return min(fusions(tokens, allowed_latency, stages), key=lambda fusion: fusion.latency)


class BucketChoice(NamedTuple):
    """The buckets that `choose_buckets` chose.

    Attributes:
      buckets: every hTask once.
      latency: simulated end-to-end latency in seconds.
      gap: bound on how far the largest bucket is above the smallest possible largest bucket, as a
        fraction of it (see `balance_gap`); 0.01 is 1%.
    """

    buckets: Buckets
    latency: float
    gap: float


def choose_buckets(
    latencies: Sequence[float], simulate: Callable[[Buckets], float]
) -> BucketChoice:
    """Returns the balanced buckets, of any number P, of least simulated latency.

    Args:
      latencies: L⁽¹⁾(H_i), seconds of a microbatch of each hTask on the first stage.
      simulate: returns the end-to-end latency in seconds with the given buckets.

    Raises:
      PlanningError: there are no hTasks, or a latency is not positive and finite.
    """
    candidates = candidate_buckets(latencies)
    simulated = [simulate(buckets) for buckets in candidates]
    best = int(np.argmin(simulated))
    gap = balance_gap(latencies, candidates[best])
    return BucketChoice(candidates[best], float(simulated[best]), gap)
