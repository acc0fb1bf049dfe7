"""Makes a plan: shape class, hTasks, buckets, microbatches and schedule of tasks on a replica.

`Plan.to_json` returns the content of `plan.json`, with a key for each attribute of the classes
below:

  {"format": "jaxmux.plan/3",
   "costs": {"kind": "estimated" or "measured", "text": "…", "device": "NVIDIA H200",
             "memory_bytes": 150754820096, "notes": ["…"]},
   "backbone": "LlamaForCausalLM",
   "replica": "pp4,tp2",
   "tasks": [{"name": "mood", "rank": 4, "batch_size": 16, "steps": 80, "samples": 400,
              "members": 1, "unit": "sample", "tokens": 9000, "longest": 31}, …],
   "shape": {"rows": 20, "row_len": 128, "chunk_len": 128, "max_sequences": 8},
   "remat": ["dots", …],
   "rounds": 8,
   "htasks": [[0, 1], …], "buckets": [[0], …],
   "microbatches": [[[slot, step, sample, row, offset, tokens], …], …],
   "forward_seconds": [0.01, …], "backward_seconds": [0.01, …],
   "hop_seconds": 0.0,
   "schedule": {"format": "jaxmux.schedule/2", …},
   "prediction": {"round_seconds": 0.1, "update_seconds": 0.001, "bubble_ratio": 0.04,
                  "microbatches": 3.5, "memory_bytes": 1e9},
   "baselines": [{"name": "1F1B per task", "round_seconds": 0.2, "bubble_ratio": 0.5,
                  "microbatches": 4.0}, …]}
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..costs.admission import Admission
from ..costs.cost_models import CostSource
from ..costs.pool_spec import PoolSpec, merge_pool_specs
from ..costs.replica_costs import ReplicaCosts
from ..devices import AUTO_SCHEDULE, Replica
from ..errors import PlanningError
from ..numbers import power_of_two
from ..packing.microbatches import RoundLengths
from ..packing.rows import ShapeClass, smallest_shape_class
from ..packing.shape_choice import Batches, ShapeRequest, choose_shape, sample_rounds
from .groupings import Grouping, Groups
from .pipeline_plan import (
    PipelineCosts,
    PipelinePlan,
    PlannedMicrobatch,
    grouping_of_tasks,
    one_htask,
    plan_pipeline,
)
from .schedules import PipelineSchedule, Simulation, Workload, simulate_asynchronous, validate
from .schedules.schedule import as_lists

FORMAT = "jaxmux.plan/3"


class PlannedTask(NamedTuple):
    """The facts about one task that a `Plan` reports. `tokens` counts all tokens of the samples, as
    `Task.max_length` does. `rank` is the size of the adapter if its kind has no rank. The longest
    sample may be a held-out one. A record is `members` samples, 2 for a pair of answers, and is
    called `unit`; `batch_size` counts records, and `samples` samples."""

    name: str
    rank: int
    batch_size: int
    steps: int
    samples: int
    tokens: int
    longest: int
    members: int = 1
    unit: str = "sample"

    @property
    def records(self) -> int:
        return self.samples // self.members


class PlacedSample(NamedTuple):
    """One sample and its position in a microbatch. `step` is the index of the round, `sample` the
    sample's index in the global batch, `offset` its first token in the row, and `tokens` its stream
    length."""

    slot: int
    step: int
    sample: int
    row: int
    offset: int
    tokens: int


class Prediction(NamedTuple):
    """The predicted costs of one round.

    Attributes:
      round_seconds: seconds of a round, including `update_seconds`.
      update_seconds: seconds of the optimizer updates, of the forward passes without gradients
        that objectives need, and of the fixed overhead of a round.
      bubble_ratio: fraction of the stages' time, between 0 and 1, in which they run no pass.
      microbatches: mean number of microbatches per round.
      memory_bytes: peak memory in bytes of the most loaded device.
    """

    round_seconds: float
    update_seconds: float
    bubble_ratio: float
    microbatches: float
    memory_bytes: float


class Baseline(NamedTuple):
    """The predicted costs of another way to train the same rounds on the same replica, with fields
    as in `Prediction`. `name` is "one task at a time", "1F1B per task" (one task after another) or
    "batch everything" (all tasks packed together)."""

    name: str
    round_seconds: float
    bubble_ratio: float
    microbatches: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """The microbatches and the schedule of some rounds on one replica, with the predicted times.

    An *hTask* (MuxTune 3.3) is a set of tasks that are faster in shared microbatches than in
    separate ones. A *bucket* is a group of hTasks whose tasks are packed into the same
    microbatches. In every round, the buckets enter the pipeline one after another.

    Attributes:
      tasks: the tasks in the order of their slots.
      remat: remat policy of each layer of the backbone.
      htasks: for each hTask, the slots of its tasks.
      buckets: for each bucket, in the order of the pipeline, the indices of its hTasks in `htasks`.
      microbatches: the samples of each microbatch, in the order of `schedule.microbatches`.
      forward_seconds: for each stage, seconds of the forward pass of any microbatch.
      backward_seconds: for each stage, seconds of the backward pass of any microbatch.
      hop_seconds: seconds from the end of a pass until its output is at the next stage.
      baselines: the predicted costs of simpler methods for these rounds.
    """

    costs: CostSource
    backbone: str
    replica: Replica
    tasks: tuple[PlannedTask, ...]
    shape: ShapeClass
    remat: tuple[str, ...]
    rounds: int
    htasks: tuple[tuple[int, ...], ...]
    buckets: tuple[tuple[int, ...], ...]
    microbatches: tuple[tuple[PlacedSample, ...], ...]
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    hop_seconds: float
    schedule: PipelineSchedule
    prediction: Prediction
    baselines: tuple[Baseline, ...]

    @property
    def groups(self) -> Groups:
        return Grouping(self.htasks, self.buckets).groups

    @property
    def tokens_by_microbatch(self) -> tuple[int, ...]:
        return tuple(sum(sample.tokens for sample in placed) for placed in self.microbatches)

    def simulate(self, unit: float = 1.0) -> Simulation:
        """Returns the predicted start and end of every pass, in units of `unit` seconds. A stage
        starts a pass as soon as the stage is free and the pass's input has arrived; updates take no
        time."""
        count = len(self.schedule.microbatches)
        forward, backward = (
            np.tile(seconds, (count, 1)) / unit
            for seconds in (self.forward_seconds, self.backward_seconds)
        )
        workload = Workload(self.schedule.microbatches, forward, backward)
        return simulate_asynchronous(self.schedule, workload, self.hop_seconds / unit)

    def to_json(self) -> dict[str, Any]:
        """Returns the content of plan.json for `json.dump`; `from_json` reads it."""
        fields = {name: getattr(self, name) for name in _NAMES}
        fields |= {
            "costs": self.costs._asdict(),
            "replica": str(self.replica),
            "tasks": [task._asdict() for task in self.tasks],
            "shape": dataclasses.asdict(self.shape),
            "schedule": self.schedule.to_json(),
            "prediction": self.prediction._asdict(),
            "baselines": [baseline._asdict() for baseline in self.baselines],
        }
        return {"format": FORMAT} | as_lists(fields)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Plan":
        """Returns the plan from the result of `to_json`.

        Raises:
          PlanningError: the dict has another format, or lacks a key.
        """
        if data.get("format") != FORMAT:
            raise PlanningError(f"not a plan: format is {data.get('format')!r}, not {FORMAT!r}")
        if missing := [name for name in _NAMES if name not in data]:
            raise PlanningError(f"the plan lacks {missing[0]!r}")
        fields = {name: _as_tuples(data[name]) for name in _NAMES}
        costs, schedule = data["costs"], PipelineSchedule.from_json(data["schedule"])
        replica = Replica.parse(data["replica"])._replace(parts=schedule.virtual_per_stage)
        fields |= {
            "costs": CostSource(**costs | {"notes": tuple(costs["notes"])}),
            "replica": replica,
            "tasks": tuple(PlannedTask(**task) for task in data["tasks"]),
            "shape": ShapeClass(**data["shape"]),
            "microbatches": tuple(
                tuple(PlacedSample(*sample) for sample in microbatch)
                for microbatch in data["microbatches"]
            ),
            "schedule": schedule,
            "prediction": Prediction(**data["prediction"]),
            "baselines": tuple(Baseline(**baseline) for baseline in data["baselines"]),
        }
        return cls(**fields)


_NAMES = tuple(field.name for field in dataclasses.fields(Plan))


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(entry) for entry in value) if isinstance(value, list) else value


def plan_with(
    grouping: Grouping, rounds: Sequence[RoundLengths], shape: ShapeClass, costs: ReplicaCosts
) -> PipelinePlan:
    """Returns the pipeline of rounds on a replica for this grouping of the tasks."""
    seconds = costs.stages(shape)
    pipeline = PipelineCosts(
        shape,
        lambda lengths: seconds,
        costs.permute(shape),
        costs.schedule,
        costs.replica.parts,
    )
    return plan_pipeline(rounds, grouping, pipeline)


def baselines(
    rounds: Sequence[RoundLengths], shape: ShapeClass, costs: ReplicaCosts, scoring: float = 0.0
) -> tuple[Baseline, ...]:
    """Returns the predicted costs of the methods with which a plan is compared. They use 1F1B and
    the plan's shape class. On one device, the plan itself packs all tasks together, so the only
    method is one task at a time."""
    # The methods keep `in_flight` of the plan's schedule, and with it the plan's remat policies.
    if costs.schedule != AUTO_SCHEDULE:
        costs = dataclasses.replace(costs, schedule=AUTO_SCHEDULE)
    separate = []
    for slot in rounds[0]:
        alone = [{slot: batches[slot]} for batches in rounds]
        separate.append(plan_with(one_htask([slot]), alone, shape, costs))
    if costs.replica.pp == 1:
        methods = {"one task at a time": separate}
    else:
        together = plan_with(one_htask(sorted(rounds[0])), rounds, shape, costs)
        methods = {"1F1B per task": separate, "batch everything": [together]}
    between = costs.update() + scoring
    return tuple(
        _baseline(name, plans, len(rounds), costs, between) for name, plans in methods.items()
    )


def _baseline(
    name: str, plans: Sequence[PipelinePlan], rounds: int, costs: ReplicaCosts, between: float
) -> Baseline:
    """The costs of plans that run one after another. `between` is the seconds of a round in which
    no microbatch is trained."""
    seconds = sum(plan.simulation.makespan for plan in plans)
    busy = sum(float(np.sum(plan.simulation.busy())) for plan in plans)
    return Baseline(
        name=name,
        round_seconds=seconds / rounds + between,
        bubble_ratio=1 - busy / (costs.replica.pp * seconds),
        microbatches=sum(len(plan.microbatches) for plan in plans) / rounds,
    )


class TaskLoad(NamedTuple):
    """The facts about one task that `make_plan` depends on. Lengths are stream lengths in tokens
    and include the virtual tokens of the adapter.

    Attributes:
      pool: sizes of the pool that the task needs alone.
      steps: number of global batches that the task trains.
      batches: stream lengths of the trained samples of each global batch, of all steps or at least
        of the first step. Pairs of answers that are trained in one pass count as samples.
      longest_pair: stream length of the longest of these pairs; 0 if there is none.
      only_read: lengths of the samples that are not trained, held-out ones and others, which must
        also fit into the rows of microbatches.
      dropped: number of records in the task's data that gave no sample; for reports only.
      virtual_tokens: number of virtual tokens in each length; for reports only.
      scored: tokens whose log-probabilities are computed before a global batch is trained, divided
        by its trained tokens: 0 for none, 1 if they are the same tokens.
      members, unit: number of trained samples of a record, and what it is called, as in
        `Objective`; for reports only.
    """

    name: str
    pool: PoolSpec
    batch_size: int
    steps: int
    lengths: Sequence[int]
    batches: Batches
    only_read: Sequence[int] = ()
    dropped: int = 0
    virtual_tokens: int = 0
    scored: float = 0.0
    members: int = 1
    unit: str = "sample"
    longest_pair: int = 0

    @property
    def in_rows(self) -> Sequence[int]:
        """The stream lengths that rows of microbatches must be able to hold."""
        return [*self.lengths, *self.only_read, *[self.longest_pair] * (self.longest_pair > 0)]

    @property
    def longest(self) -> int:
        """Stream length in tokens of the longest sample, those that are not trained included."""
        return max((*self.lengths, *self.only_read))


def shared_pool(tasks: Sequence[TaskLoad]) -> PoolSpec:
    """Returns the sizes of the pool that holds the adapters of all tasks."""
    return merge_pool_specs([task.pool for task in tasks])


def make_plan(
    tasks: Sequence[TaskLoad],
    request: ShapeRequest,
    costs: ReplicaCosts,
    source: CostSource,
    rounds: int,
    shape: ShapeClass | None = None,
) -> Plan:
    """Chooses how tasks train together on one replica and returns the plan of least predicted time.

    The shape class is chosen from rounds of the whole training run, as in training. On one device,
    all tasks are then packed together. On several pipeline stages, different groupings of the tasks
    are compared.

    Args:
      costs: times and memory on the replica, for the pool `shared_pool(tasks)`.
      rounds: number of rounds that the schedule covers; with at least 2, it shows how a round waits
        for updates. A task with fewer global batches in `TaskLoad.batches` repeats them.
      shape: the shape class, if it was chosen before, for example for these tasks and others that
        wait for a slot. Then no task is refused for lack of memory.

    Raises:
      PlanningError: there are no tasks, or they do not fit. The message lists changes that would
        help.
    """
    if not tasks:
        raise PlanningError("nothing to plan: there are no tasks; one with one sample would do")
    lengths = round_lengths(tasks, rounds)
    if shape is None:
        shape = choose_shape_class(tasks, request, costs)
        pools = {task.name: task.pool for task in tasks}
        Admission(costs, shape, request.tokens).require(pools)
        costs.require_full_pipeline(shape)
    grouping = grouping_of_tasks(
        [task.batches for task in tasks], shape, costs.replica.pp, schedule=costs.schedule
    )
    plan = plan_rounds(tasks, lengths, shape, grouping, costs, source)
    scoring = scoring_seconds(tasks, lengths, shape, costs)
    return dataclasses.replace(plan, baselines=baselines(lengths, shape, costs, scoring))


def scoring_seconds(
    tasks: Sequence[TaskLoad],
    rounds: Sequence[RoundLengths],
    shape: ShapeClass,
    costs: ReplicaCosts,
) -> float:
    """The seconds of a round in which log-probabilities are computed, without gradients, for the
    objectives of tasks: the forward passes of their samples in full microbatches."""
    forward, _ = costs.stages(shape)
    seconds = 0.0
    for batches in rounds:
        tokens = sum(tasks[slot].scored * sum(lengths) for slot, lengths in batches.items())
        if tokens:
            microbatches = math.ceil(tokens / (shape.tokens * costs.replica.shards))
            seconds += float(forward.sum() + (microbatches - 1) * forward.max())
    return seconds / len(rounds)


def plan_rounds(
    tasks: Sequence[TaskLoad],
    rounds: Sequence[RoundLengths],
    shape: ShapeClass,
    grouping: Grouping,
    costs: ReplicaCosts,
    source: CostSource,
    samples: Sequence[Mapping[int, Sequence[int]]] | None = None,
) -> Plan:
    """Returns the plan of given rounds on one replica, without baselines. Some rounds may be empty.
    `samples` has, for each round and slot, the indices of the trained samples in the task's global
    batch; None means all samples in order."""
    filled = [i for i, batches in enumerate(rounds) if batches]
    pipeline = plan_with(grouping, [rounds[i] for i in filled], shape, costs)
    validate(pipeline.schedule)
    forward, backward = costs.stages(shape)
    of_parts = pipeline.schedule.virtual_peak_buffers().reshape(costs.replica.parts, -1)
    in_flight = float(of_parts.sum(axis=0).max()) / costs.replica.parts
    update = costs.update() + scoring_seconds(tasks, rounds, shape, costs)

    def placed(i: int, microbatch: PlannedMicrobatch) -> tuple[PlacedSample, ...]:
        return tuple(
            PlacedSample(
                p.slot,
                i,
                samples[i][p.slot][p.sample] if samples else p.sample,
                p.row,
                p.offset,
                rounds[i][p.slot][p.sample],
            )
            for p in microbatch.placements(shape)
        )

    return Plan(
        costs=source,
        backbone=costs.times.backbone.name,
        replica=costs.replica,
        tasks=tuple(_planned_task(task) for task in tasks),
        shape=shape,
        remat=costs.policies(shape),
        rounds=len(rounds),
        htasks=grouping.htasks,
        buckets=grouping.buckets,
        microbatches=tuple(
            placed(filled[i], microbatch)
            for i, microbatch in zip(pipeline.rounds, pipeline.microbatches, strict=True)
        ),
        forward_seconds=tuple(forward.tolist()),
        backward_seconds=tuple(backward.tolist()),
        hop_seconds=costs.permute(shape),
        schedule=pipeline.schedule,
        prediction=Prediction(
            round_seconds=pipeline.simulation.makespan / len(rounds) + update,
            update_seconds=update,
            bubble_ratio=pipeline.simulation.bubble_ratio(),
            microbatches=len(pipeline.microbatches) / len(rounds),
            memory_bytes=costs.peak(shape, costs.policies(shape), in_flight),
        ),
        baselines=(),
    )


def round_lengths(tasks: Sequence[TaskLoad], rounds: int) -> list[RoundLengths]:
    """Returns the stream lengths in tokens of each task's global batch, for each round and slot. A
    task with fewer global batches than `rounds` repeats them."""
    return [
        {slot: list(task.batches[k % len(task.batches)]) for slot, task in enumerate(tasks)}
        for k in range(rounds)
    ]


def choose_shape_class(
    tasks: Sequence[TaskLoad], request: ShapeRequest, costs: ReplicaCosts
) -> ShapeClass:
    """Returns the shape class in which rounds of the whole training run take the least time. The
    gain of smaller microbatches in a pipeline is not considered (see
    `try_smaller_microbatches`)."""
    lengths = [length for task in tasks for length in task.in_rows]
    if request.row_len is not None:
        require_rows(tasks, request)
    rounds = sample_rounds([task.batches for task in tasks])
    return choose_shape(rounds, request, costs.microbatch, lengths).shape


def require_rows(tasks: Sequence[TaskLoad], request: ShapeRequest) -> None:
    """Raises PlanningError if the requested row length is not legal or is too short for a
    sample."""
    row_len = request.row_len
    smallest_shape_class([1], request.tokens, request.chunk_len, row_len)
    for task in tasks:
        if task.longest > row_len:
            needed = power_of_two(task.longest)
            raise PlanningError(
                f"task {task.name!r}: its longest sample takes {task.longest} places in a row, "
                f"and a row has row_len={row_len}; it would fit with row_len={needed} or "
                f"max_length={row_len}"
            )


def _planned_task(task: TaskLoad) -> PlannedTask:
    # Stream lengths leave out the last token of a sample and include virtual tokens.
    count, more = len(task.lengths), 1 - task.virtual_tokens
    return PlannedTask(
        name=task.name,
        rank=task.pool.largest_rank,
        batch_size=task.batch_size,
        steps=task.steps,
        samples=count,
        tokens=sum(task.lengths) + count * more,
        longest=task.longest + more,
        members=task.members,
        unit=task.unit,
    )


# Smaller microbatches are tried if less than this fraction of all devices' time is useful. They are
# reported if they shorten a round to less than this fraction of its time in the plan.
_NOTABLE = 0.95


class SmallerMicrobatches(NamedTuple):
    """A number of tokens per microbatch that is smaller than the plan's, for `ShapeRequest.tokens`,
    and the predicted times with it, as in `Prediction`."""

    tokens: int
    round_seconds: float
    bubble_ratio: float


def try_smaller_microbatches(
    plan: Plan, tasks: Sequence[TaskLoad], request: ShapeRequest, costs: ReplicaCosts
) -> SmallerMicrobatches | None:
    """Searches for a smaller number of tokens per microbatch that makes rounds at least 5% faster
    than in `plan`, because smaller microbatches fill a pipeline better. The other arguments are
    those of `make_plan`. Returns None if there is no such number. Does not search if bubbles and
    padding together take less than 5% of the devices' time."""
    if plan.replica.pp == 1 or _useful_share(plan) > _NOTABLE:
        return None
    lengths, predicted = round_lengths(tasks, plan.rounds), plan.prediction
    best = SmallerMicrobatches(request.tokens, predicted.round_seconds, predicted.bubble_ratio)
    tokens = request.tokens // 2
    while tokens >= max(task.longest for task in tasks):
        shape = choose_shape_class(tasks, request._replace(tokens=tokens), costs)
        if shape.tokens >= 2 * tokens:
            # Rounding up to whole rows and chunks makes this microbatch as large as the one before.
            break
        grouping = grouping_of_tasks(
            [task.batches for task in tasks], shape, plan.replica.pp, schedule=costs.schedule
        )
        simulation = plan_with(grouping, lengths, shape, costs).simulation
        seconds = simulation.makespan / plan.rounds + predicted.update_seconds
        if seconds > best.round_seconds:
            break
        best = SmallerMicrobatches(tokens, seconds, simulation.bubble_ratio())
        tokens //= 2
    return best if best.round_seconds < _NOTABLE * predicted.round_seconds else None


def _useful_share(plan: Plan) -> float:
    """The fraction of all devices' time that goes neither to bubbles nor to padding."""
    tokens = plan.tokens_by_microbatch
    return (1 - plan.prediction.bubble_ratio) * sum(tokens) / (len(tokens) * plan.shape.tokens)
