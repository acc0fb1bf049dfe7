"""The plan as a value: hTasks, buckets, microbatches, their schedule and the predicted times.

`Plan.to_json` returns the content of `plan.json`, with a key for each attribute of the classes
below:

  {"format": "jaxmux.plan/3",
   "costs": {"kind": "estimated" or "measured", "text": "…", "device": "NVIDIA H200",
             "memory_bytes": 150754820096, "notes": ["…"]},
   "backbone": "LlamaForCausalLM",
   "replica": "pp4,tp2",
   "tasks": [{"name": "mood", "rank": 4, "batch_size": 16, "steps": 80, "samples": 400,
              "tokens": 9000, "longest": 31}, …],
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
from typing import Any, NamedTuple

import numpy as np

from ..costs.cost_models import CostSource
from ..devices import Replica
from ..errors import PlanningError
from ..packing.shape_class import ShapeClass
from .groupings import Grouping, Groups
from .schedules import PipelineSchedule, Simulation, Workload, simulate_asynchronous
from .schedules.schedule import as_lists

FORMAT = "jaxmux.plan/3"


class PlannedTask(NamedTuple):
    """The facts about one task that a `Plan` reports.

    Tokens are all of a sample's, as `Task.max_length` counts them; in a row, a sample takes one
    place less (see `make_plan.TaskLoad`).

    Attributes:
      name: name of the task.
      rank: rank of its adapter, or what else its kind calls its size; 0 if it has none.
      batch_size: number of samples of one global batch.
      steps: number of steps (global batches) that the task trains for.
      samples: number of its training samples.
      tokens: tokens of all its training samples together.
      longest: tokens of its longest sample, held-out samples included.
    """

    name: str
    rank: int
    batch_size: int
    steps: int
    samples: int
    tokens: int
    longest: int


class PlacedSample(NamedTuple):
    """One sample and its place in a microbatch.

    Attributes:
      slot: slot of the sample's task.
      step: the task's step to whose global batch the sample belongs, counted from 0 at the start of
        the plan. It equals the index of the round.
      sample: index of the sample within that global batch.
      row: index of the row of the microbatch.
      offset: position in the row, in tokens, at which the sample begins.
      tokens: stream length of the sample in tokens.
    """

    slot: int
    step: int
    sample: int
    row: int
    offset: int
    tokens: int


class Prediction(NamedTuple):
    """The predicted costs of one round, that is, of one global batch of every task.

    Attributes:
      round_seconds: seconds of a round, including `update_seconds`.
      update_seconds: the part of the round in which no microbatch runs: seconds of the optimizer
        updates and of the fixed overhead of a round.
      bubble_ratio: fraction of the stages' time, between 0 and 1, in which they run no pass;
        warm-up and drain of the pipeline are included.
      microbatches: number of microbatches per round, the mean over the rounds of the plan.
      memory_bytes: peak memory in bytes of the most loaded device.
    """

    round_seconds: float
    update_seconds: float
    bubble_ratio: float
    microbatches: float
    memory_bytes: float


class Baseline(NamedTuple):
    """The predicted costs of another way to train the same rounds on the same replica.

    Attributes:
      name: name of the method: "one task at a time", "1F1B per task" (the tasks one after another)
        or "batch everything" (all tasks packed together).
      round_seconds: seconds of one global batch of every task, including the optimizer updates.
      bubble_ratio: fraction of the stages' time, between 0 and 1, in which they run no pass.
      microbatches: number of microbatches per round, the mean over the rounds of the plan.
    """

    name: str
    round_seconds: float
    bubble_ratio: float
    microbatches: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """How some rounds of tasks train on one replica, with the predicted times; made by `make_plan`.

    A *round* is one global batch of every task. A *slot* is a task's place in the pool of adapters.
    A *chunk* is a series of consecutive tokens in a microbatch that belong to one task. An *hTask*
    (MuxTune 3.3) is a set of tasks that were found to train faster in shared microbatches than in
    microbatches of their own. A *bucket* is a group of hTasks whose tasks are packed into the same
    microbatches. In every round the buckets enter the pipeline one after another.

    Attributes:
      costs: where the predicted costs come from.
      backbone: architecture of the backbone, for example "LlamaForCausalLM".
      replica: the devices: pipeline stages and tensor-parallel devices of each stage.
      tasks: name, rank, batch size, steps and token counts of each task. The slot of a task is its
        index here.
      shape: shape class of the microbatches: rows, tokens of a row and of a chunk, most sequences
        of a row.
      remat: remat policy of each layer of the backbone, from the first to the last. It tells the
        values that the layer keeps for its backward pass: "norms", "dots", "lean" or "full", in the
        order of increasing recomputation.
      rounds: number of rounds that the schedule covers.
      htasks: for each hTask, the slots of its tasks.
      buckets: for each bucket, the indices of its hTasks in `htasks`. The buckets are in the order
        in which they enter the pipeline.
      microbatches: for each microbatch, in the order of `schedule.microbatches`, its samples: each
        with its slot, step (round), index in the global batch, row, offset in the row and number of
        tokens.
      forward_seconds: for each stage, seconds of one microbatch's forward pass. All microbatches
        have one shape and count as equally long.
      backward_seconds: for each stage, seconds of one microbatch's backward pass.
      hop_seconds: seconds from the end of a pass until its output is at the next stage.
      schedule: the passes of every stage, in order.
      prediction: the predicted costs of one round: seconds, bubble ratio, microbatches and peak
        memory.
      baselines: the predicted costs of simpler methods for these rounds, such as one task after
        another.
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
        """For each bucket, the slots of its tasks in ascending order."""
        return Grouping(self.htasks, self.buckets).groups

    @property
    def tokens_by_microbatch(self) -> tuple[int, ...]:
        """For each microbatch, the tokens of its samples. Padding is not counted."""
        return tuple(sum(sample.tokens for sample in placed) for placed in self.microbatches)

    def simulate(self, unit: float = 1.0) -> Simulation:
        """Returns the predicted start and end of every forward and backward pass.

        A stage starts a pass as soon as it is free and the pass's input is there. The optimizer
        updates take no time here.

        Args:
          unit: seconds of one unit of the returned times: 1.0 for seconds, 1e-3 for milliseconds.
        """
        count = len(self.schedule.microbatches)
        forward, backward = (
            np.tile(seconds, (count, 1)) / unit
            for seconds in (self.forward_seconds, self.backward_seconds)
        )
        workload = Workload(self.schedule.microbatches, forward, backward)
        return simulate_asynchronous(self.schedule, workload, self.hop_seconds / unit)

    def to_json(self) -> dict[str, Any]:
        """Returns a plain dict for `json.dump`, the content of plan.json.

        The dict has a key for each attribute of `Plan`, and the key "format" with the version of
        the format. Tuples become lists, and objects become dicts of their fields, except that each
        sample of a microbatch is a list [slot, step, sample, row, offset, tokens] and `replica` a
        text such as "pp4,tp2". `Plan.from_json` reads the dict.
        """
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
        """Returns the plan that `to_json` was called on.

        Args:
          data: a dict from `to_json`, also after it was written to a JSON file and read again.

        Raises:
          PlanningError: the dict is of another format, or lacks a key.
        """
        if data.get("format") != FORMAT:
            raise PlanningError(f"not a plan: format is {data.get('format')!r}, not {FORMAT!r}")
        if missing := [name for name in _NAMES if name not in data]:
            raise PlanningError(f"the plan lacks {missing[0]!r}")
        fields = {name: _as_tuples(data[name]) for name in _NAMES}
        costs = data["costs"]
        fields |= {
            "costs": CostSource(**costs | {"notes": tuple(costs["notes"])}),
            "replica": Replica.parse(data["replica"]),
            "tasks": tuple(PlannedTask(**task) for task in data["tasks"]),
            "shape": ShapeClass(**data["shape"]),
            "microbatches": tuple(
                tuple(PlacedSample(*sample) for sample in microbatch)
                for microbatch in data["microbatches"]
            ),
            "schedule": PipelineSchedule.from_json(data["schedule"]),
            "prediction": Prediction(**data["prediction"]),
            "baselines": tuple(Baseline(**baseline) for baseline in data["baselines"]),
        }
        return cls(**fields)


_NAMES = tuple(field.name for field in dataclasses.fields(Plan))


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(entry) for entry in value) if isinstance(value, list) else value
