"""The plan as a value: hTasks, buckets, microbatches, their schedule and the predicted times.

`Plan.to_json` returns the content of `plan.json`, with a key for each attribute of the classes
below:

  {"format": "jaxmux.plan/2",
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
   "permute_seconds": 0.0,
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
from .schedules import PipelineSchedule, Simulation, Workload, simulate_lockstep

FORMAT = "jaxmux.plan/2"


class PlannedTask(NamedTuple):
    """A task of the plan.

    Attributes:
      name: name of the task.
      rank: rank of its adapter.
      batch_size: samples of a global batch.
      steps: steps that the task trains for.
      samples: number of its training samples.
      tokens: tokens of all its training samples.
      longest: tokens of its longest training sample.
    """

    name: str
    rank: int
    batch_size: int
    steps: int
    samples: int
    tokens: int
    longest: int


class PlacedSample(NamedTuple):
    """A sample and its place in a microbatch.

    Attributes:
      slot: slot of the task.
      step: step of the task to whose global batch the sample belongs.
      sample: index of the sample in that global batch.
      row: row of the microbatch.
      offset: first token of the sample in the row.
      tokens: length of the sample in tokens.
    """

    slot: int
    step: int
    sample: int
    row: int
    offset: int
    tokens: int


class Prediction(NamedTuple):
    """The predicted costs of a round, that is, of one global batch of every task.

    Attributes:
      round_seconds: time of a round, its update included.
      update_seconds: part of it in which no microbatch runs: the optimizer update and the overhead
        of a round.
      bubble_ratio: bubble ratio of the schedule, including warm-up and drain.
      microbatches: number of microbatches, the mean over the rounds.
      memory_bytes: peak memory of a device.
    """

    round_seconds: float
    update_seconds: float
    bubble_ratio: float
    microbatches: float
    memory_bytes: float


class Baseline(NamedTuple):
    """Another way to train the same rounds on the same replica, for comparison.

    Attributes:
      name: name of the method.
      round_seconds, bubble_ratio, microbatches: as in `Prediction`.
    """

    name: str
    round_seconds: float
    bubble_ratio: float
    microbatches: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """A plan for some rounds of tasks on one replica.

    Attributes:
      costs: the origin of the predicted costs.
      backbone: architecture of the backbone.
      replica: the devices.
      tasks: the tasks; a task's slot is its index here.
      shape: shape class of the microbatches.
      remat: remat policy of each layer.
      rounds: number of rounds that the schedule covers.
      htasks: for each hTask, the slots of its tasks.
      buckets: for each bucket, the indices of its hTasks.
      microbatches: for each microbatch of the schedule, in its order, the samples that it holds.
      forward_seconds: for each stage, the time of a microbatch's forward pass.
      backward_seconds: for each stage, the time of a microbatch's backward pass.
      permute_seconds: time of the messages between stages at the end of a tick.
      schedule: what each stage runs in each tick.
      prediction: the predicted costs of a round.
      baselines: the predicted costs of other methods.
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
    permute_seconds: float
    schedule: PipelineSchedule
    prediction: Prediction
    baselines: tuple[Baseline, ...]

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """For each bucket, the slots of its tasks."""
        return tuple(
            tuple(sorted(slot for htask in bucket for slot in self.htasks[htask]))
            for bucket in self.buckets
        )

    @property
    def tokens_by_microbatch(self) -> tuple[int, ...]:
        """For each microbatch, the tokens of its samples, without padding."""
        return tuple(sum(sample.tokens for sample in placed) for placed in self.microbatches)

    def simulate(self, unit: float = 1.0) -> Simulation:
        """Returns the times at which every op of the schedule runs in lockstep.

        Args:
          unit: seconds of one unit of the returned times; 1e-3 for milliseconds.
        """
        count = len(self.schedule.microbatches)
        forward, backward = (
            np.tile(seconds, (count, 1)) / unit
            for seconds in (self.forward_seconds, self.backward_seconds)
        )
        workload = Workload(self.schedule.microbatches, forward, backward)
        return simulate_lockstep(self.schedule, workload, self.permute_seconds / unit)

    def to_json(self) -> dict[str, Any]:
        """Returns a plain dict for `json.dump`; the module's docstring shows its keys."""
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
        return {"format": FORMAT} | _as_lists(fields)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Plan":
        """Returns the plan that `to_json` was called on, also after the dict was in a file.

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


def _as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_lists(entry) for key, entry in value.items()}
    return [_as_lists(entry) for entry in value] if isinstance(value, list | tuple) else value


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(entry) for entry in value) if isinstance(value, list) else value
