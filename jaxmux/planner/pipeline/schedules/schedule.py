"""The pipeline schedule as a value: a table of what every stage runs in every tick."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from .workload import ScheduledMicrobatch

FORMAT = "jaxmux.schedule/2"
NONE = -1


class Update(NamedTuple):
    """The optimizer update of a task after one step.

    Attributes:
      task: index of the task.
      step: the step whose global batch is complete.
      ticks: for each stage, the tick at whose end the stage updates its part of the adapters.
    """

    task: int
    step: int
    ticks: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class PipelineSchedule:
    """A schedule of M microbatches over S stages and T ticks.

    A stage runs at most one forward and one backward pass in a tick, the backward pass first. The
    output of a pass can be used one tick later at the earliest. A stage that runs its row of the
    table in order, at its own pace, therefore finds all its inputs sooner or later. The loss of a
    microbatch is part of its forward pass on the last virtual stage.

    The residuals of a microbatch take `ScheduledMicrobatch.buffers` buffers on a stage from its
    forward to its backward pass there. A forward pass can take the buffers that the backward pass
    of the same tick frees.

    Virtual stage v lies on stage v mod S (see `Workload`). In an ordinary pipeline the virtual
    stages are the stages.

    Attributes:
      microbatches: the M microbatches; the tables refer to them by index.
      forward_microbatch: int32 [S, T], the microbatch that runs forward, -1 for none.
      backward_microbatch: int32 [S, T], the microbatch that runs backward, -1 for none.
      forward_virtual_stage: int32 [S, T], the virtual stage on which it runs forward, -1 for none.
      backward_virtual_stage: int32 [S, T], the virtual stage on which it runs backward, -1 for
        none.
      updates: one update for each global batch of each task, in order of time.
      virtual_per_stage: number of virtual stages of one stage.
    """

    microbatches: tuple[ScheduledMicrobatch, ...]
    forward_microbatch: np.ndarray
    backward_microbatch: np.ndarray
    forward_virtual_stage: np.ndarray
    backward_virtual_stage: np.ndarray
    updates: tuple[Update, ...]
    virtual_per_stage: int = 1

    @property
    def stages(self) -> int:
        """S, the number of pipeline stages."""
        return self.forward_microbatch.shape[0]

    @property
    def ticks(self) -> int:
        """T, the number of ticks."""
        return self.forward_microbatch.shape[1]

    @property
    def virtual_stages(self) -> int:
        """V, the number of virtual stages of all stages together."""
        return self.stages * self.virtual_per_stage

    def forward_ticks(self) -> np.ndarray:
        """int32 [V, M]: the tick in which each microbatch runs forward on each virtual stage."""
        return self._ticks(self.forward_microbatch, self.forward_virtual_stage)

    def backward_ticks(self) -> np.ndarray:
        """int32 [V, M]: the tick in which each microbatch runs backward on each virtual stage."""
        return self._ticks(self.backward_microbatch, self.backward_virtual_stage)

    def _ticks(self, microbatch: np.ndarray, virtual_stage: np.ndarray) -> np.ndarray:
        ticks = np.full((self.virtual_stages, len(self.microbatches)), NONE, np.int32)
        stage, tick = np.nonzero(microbatch != NONE)
        ticks[virtual_stage[stage, tick], microbatch[stage, tick]] = tick
        return ticks

    def peak_buffers(self) -> np.ndarray:
        """int64 [S]: the most buffers for residuals that are in use at a time on each stage."""
        change = np.zeros((self.stages, self.ticks), int)
        stage = np.arange(self.virtual_stages)[:, None] % self.stages
        buffers = np.array([microbatch.buffers for microbatch in self.microbatches])
        # The backward pass comes first in its tick, so its buffers are free within the tick.
        np.add.at(change, (stage, self.forward_ticks()), buffers)
        np.subtract.at(change, (stage, self.backward_ticks()), buffers)
        return np.max(np.cumsum(change, axis=1), axis=1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PipelineSchedule) and self.to_json() == other.to_json()

    def __str__(self) -> str:
        """The table as text: a row for each stage, a column for each tick.

        `F3` is the forward pass of microbatch 3, `B0` the backward pass of microbatch 0. In an
        interleaved pipeline `F3.1` runs on the second virtual stage of its stage.
        """
        cells = [
            [self._cell(stage, tick) for tick in range(self.ticks)] for stage in range(self.stages)
        ]
        width = max(len(cell) for row in cells for cell in row)
        return "\n".join(
            f"stage {stage} |" + "|".join(cell.center(width) for cell in row) + "|"
            for stage, row in enumerate(cells)
        )

    def _cell(self, stage: int, tick: int) -> str:
        parts = []
        for letter, microbatch, virtual_stage in (
            ("B", self.backward_microbatch, self.backward_virtual_stage),
            ("F", self.forward_microbatch, self.forward_virtual_stage),
        ):
            if microbatch[stage, tick] != NONE:
                part = virtual_stage[stage, tick] // self.stages
                suffix = f".{part}" if self.virtual_per_stage > 1 else ""
                parts.append(f"{letter}{microbatch[stage, tick]}{suffix}")
        return " ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Returns a plain dict for `json.dump`: each attribute under its name, arrays as lists."""
        return {
            "format": FORMAT,
            "microbatches": [
                microbatch._asdict()
                | {"tasks": list(microbatch.tasks), "steps": list(microbatch.steps)}
                for microbatch in self.microbatches
            ],
            **{name: getattr(self, name).tolist() for name in _TABLES},
            "updates": [
                update._asdict() | {"ticks": list(update.ticks)} for update in self.updates
            ],
            "virtual_per_stage": self.virtual_per_stage,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "PipelineSchedule":
        """Returns the schedule that `to_json` was called on; it does not `validate` it.

        Raises:
          ValueError: the dict is of another format.
        """
        if data.get("format") != FORMAT:
            raise ValueError(f"not a schedule: format is {data.get('format')!r}, not {FORMAT!r}")
        microbatches = tuple(
            ScheduledMicrobatch(tuple(m["tasks"]), tuple(m["steps"]), m["bucket"], m["buffers"])
            for m in data["microbatches"]
        )
        tables = {name: np.array(data[name], np.int32) for name in _TABLES}
        updates = tuple(Update(u["task"], u["step"], tuple(u["ticks"])) for u in data["updates"])
        return cls(
            microbatches=microbatches,
            updates=updates,
            virtual_per_stage=data["virtual_per_stage"],
            **tables,
        )


_TABLES = (
    "forward_microbatch",
    "backward_microbatch",
    "forward_virtual_stage",
    "backward_virtual_stage",
)
