"""A plan as a value: what is trained together, in which microbatches, when, and what it takes.

`Plan.to_json` is what `plan.json` holds, one key for each attribute of the classes below:

  {"format": "jaxmux.plan/1",
   "costs": {"kind": "estimated" or "measured", "text": "…", "device": "NVIDIA H200",
             "memory_bytes": 150754820096, "notes": ["…"]},
   "backbone": "LlamaForCausalLM",
   "replica": "pp4,tp2",
   "tasks": [{"name": "mood", "rank": 4, "batch_size": 16, "steps": 80, "samples": 400,
              "tokens": 9000, "longest": 31}, …],    a task's slot is its index here
   "shape": {"rows": 20, "row_len": 128, "chunk_len": 128, "max_sequences": 8},
   "remat": ["dots", …],                             by layer
   "rounds": 8,                                      that the schedule covers
   "htasks": [[0, 1], …], "buckets": [[0], …],       slots of each hTask, hTasks of each bucket
   "microbatches": [[[slot, step, sample, row, offset, tokens], …], …],
   "forward_seconds": [0.01, …], "backward_seconds": [0.01, …],        of a microbatch, by stage
   "permute_seconds": 0.0,                           between ticks
   "schedule": {"format": "jaxmux.schedule/1", …},   see `schedules.Schedule`
   "prediction": {"step_seconds": 0.1, "update_seconds": 0.001, "bubble_ratio": 0.04,
                  "microbatches": 3.5, "memory_bytes": 1e9},
   "baselines": [{"name": "1F1B per task", "step_seconds": 0.2, "bubble_ratio": 0.5,
                  "microbatches": 4.0}, …]}

Microbatch i is job i of the schedule. A sample is the index within the task's global batch of that
step; it lies in that row of the microbatch, `tokens` from `offset` on.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from ..costs.cost_models import CostSource
from ..devices import Replica
from ..errors import PlanningError
from ..packing.shape_class import ShapeClass
from .schedules import PipelineSchedule, Simulation, Workload, simulate_lockstep

FORMAT = "jaxmux.plan/1"


class PlannedTask(NamedTuple):
    """A task of the plan; `tokens` and `longest` are those of all its samples, as a stream.

    Attributes:
      steps: that it trains.
      samples: that it has.
    """

    name: str
    rank: int
    batch_size: int
    steps: int
    samples: int
    tokens: int
    longest: int


class PlacedSample(NamedTuple):
    """Where a sample of a task's global batch lies in its microbatch, and its tokens there."""

    slot: int
    step: int
    sample: int
    row: int
    offset: int
    tokens: int


class Prediction(NamedTuple):
    """What a step, a global batch of every task, is predicted to take.

    Attributes:
      step_seconds: all in all.
      update_seconds: of these, what is not the microbatches'.
      bubble_ratio: of the schedule, warm-up and drain included.
      microbatches: of a step, the mean over the rounds.
      memory_bytes: peak, of a device.
    """

    step_seconds: float
    update_seconds: float
    bubble_ratio: float
    microbatches: float
    memory_bytes: float


class Baseline(NamedTuple):
    """Another way to train the same rounds on the same mesh; fields as in `Prediction`."""

    name: str
    step_seconds: float
    bubble_ratio: float
    microbatches: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """A plan; the module tells the meaning of the fields."""

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
        """The slots of each bucket."""
        return tuple(
            tuple(sorted(slot for htask in bucket for slot in self.htasks[htask]))
            for bucket in self.buckets
        )

    @property
    def tokens_by_microbatch(self) -> tuple[int, ...]:
        """Tokens of the samples in each, without padding."""
        return tuple(sum(sample.tokens for sample in placed) for placed in self.microbatches)

    def simulate(self, unit: float = 1.0) -> Simulation:
        """When every op of the schedule runs, in units of so many seconds."""
        times = (self.forward_seconds, self.backward_seconds)
        jobs = self.schedule.jobs
        forward, backward = (np.tile(seconds, (len(jobs), 1)) / unit for seconds in times)
        load = Workload(jobs, forward, backward)
        return simulate_lockstep(self.schedule, load, self.permute_seconds / unit)

    def to_json(self) -> dict[str, Any]:
        """A plain dict for `json.dump`."""
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
        """The inverse of `to_json`, also of what went through a file.

        Raises:
          PlanningError: the dict is of another format, or lacks a key.
        """
        if data.get("format") != FORMAT:
            raise PlanningError(f"not a plan: format is {data.get('format')!r}, not {FORMAT!r}")
        if missing := [name for name in _NAMES if name not in data]:
            raise PlanningError(f"the plan lacks {missing[0]!r}")
        fields = {name: _as_tuples(data[name]) for name in _NAMES}
        costs = data["costs"]
        return cls(
            **fields
            | {
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
        )


_NAMES = tuple(field.name for field in dataclasses.fields(Plan))


def _as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_lists(entry) for key, entry in value.items()}
    return [_as_lists(entry) for entry in value] if isinstance(value, list | tuple) else value


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(entry) for entry in value) if isinstance(value, list) else value
