"""The pipeline schedule as a value: a table of the ops that every stage runs in every tick."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from .workload import ScheduledMicrobatch

FORMAT = "jaxmux.schedule/2"
NONE = -1


class Update(NamedTuple):
    """The optimizer update of one task after one step, in a `PipelineSchedule`.

    A step is one global batch of the task with the update after it.

    Attributes:
      task: index of the task.
      step: number of the step whose global batch has run completely.
      ticks: for each of the S stages, the tick (column of the schedule) at whose end the stage
        updates its part of the task's adapter. It differs between stages, because they finish their
        backward passes in different ticks.
    """

    task: int
    step: int
    ticks: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class PipelineSchedule:
    """The order in which S stages run M microbatches: a table with one column per tick.

    A generator such as `one_forward_one_backward` makes a schedule from a `Workload`; the schedule
    itself holds no times. `validate` checks it, `simulate_lockstep` and `simulate_asynchronous`
    predict its time, and `print` shows its table.

    A *tick* is one column of the table. There are T ticks. In a tick a stage runs at most one
    backward and one forward pass, the backward pass first. A pass uses only outputs of passes of
    earlier ticks. Stages may run all together, tick by tick, or each stage may run its row in order
    at its own pace. The loss of a microbatch is part of its forward pass on the last virtual stage.

    A buffer is a unit of memory for the activations that a forward pass keeps for its backward
    pass. A microbatch takes `ScheduledMicrobatch.buffers` buffers on a stage from its forward to
    its backward pass there. A forward pass can take buffers that the backward pass of the same tick
    frees.

    In an interleaved pipeline a stage holds several parts of the model, called virtual stages:
    virtual stage v lies on stage v mod S. In an ordinary pipeline the virtual stages are the
    stages.

    Attributes:
      microbatches: the M microbatches; the tables refer to them by index.
      forward_microbatch: int32 [S, T], index of the microbatch that stage s runs forward in tick t;
        -1 where stage s runs no forward pass.
      backward_microbatch: int32 [S, T], index of the microbatch that stage s runs backward in tick
        t; -1 where stage s runs no backward pass.
      forward_virtual_stage: int32 [S, T], the virtual stage, between 0 and V - 1, of the forward
        pass of stage s in tick t; -1 where stage s runs no forward pass.
      backward_virtual_stage: int32 [S, T], the virtual stage of the backward pass of stage s in
        tick t; -1 where stage s runs no backward pass.
      updates: one update for each task and step (global batch), ordered by its tick on the first
        stage.
      virtual_per_stage: number of virtual stages of one stage, 1 for an ordinary pipeline; V = S ·
        virtual_per_stage.
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
        """Returns int32 [V, M]: the tick of each forward pass, by virtual stage and microbatch."""
        return self._ticks(self.forward_microbatch, self.forward_virtual_stage)

    def backward_ticks(self) -> np.ndarray:
        """Returns int32 [V, M]: the tick of each backward pass, by virtual stage and microbatch."""
        return self._ticks(self.backward_microbatch, self.backward_virtual_stage)

    def _ticks(self, microbatch: np.ndarray, virtual_stage: np.ndarray) -> np.ndarray:
        ticks = np.full((self.virtual_stages, len(self.microbatches)), NONE, np.int32)
        stage, tick = np.nonzero(microbatch != NONE)
        ticks[virtual_stage[stage, tick], microbatch[stage, tick]] = tick
        return ticks

    def peak_buffers(self) -> np.ndarray:
        """Returns int64 [S]: the most buffers that are in use at the same time on each stage."""
        return self._peaks(np.arange(self.virtual_stages) % self.stages)

    def virtual_peak_buffers(self) -> np.ndarray:
        """Returns int64 [V]: the most buffers that each virtual stage uses at the same time."""
        return self._peaks(np.arange(self.virtual_stages))

    def _peaks(self, group: np.ndarray) -> np.ndarray:
        """Returns int64 [G]: the most buffers that are in use at the same time in each group of
        virtual stages. The group of each virtual stage is given, int64 [V]."""
        change, group = np.zeros((group.max() + 1, self.ticks), int), group[:, None]
        buffers = np.array([microbatch.buffers for microbatch in self.microbatches])
        # The backward pass comes first in its tick, so its buffers are free within the tick.
        np.add.at(change, (group, self.forward_ticks()), buffers)
        np.subtract.at(change, (group, self.backward_ticks()), buffers)
        return np.max(np.cumsum(change, axis=1), axis=1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PipelineSchedule) and self.to_json() == other.to_json()

    def __str__(self) -> str:
        """Returns the table as text: a row for each stage, a column for each tick.

        `F3` is the forward pass of microbatch 3, `B0` is the backward pass of microbatch 0. In an
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
        """Returns a plain dict for `json.dump`: each attribute under its name, arrays as lists.

        Each microbatch and each update is a dict of its fields. The key "format" holds the version
        of the format. `from_json` reads the dict.
        """
        fields = {
            "format": FORMAT,
            "microbatches": [microbatch._asdict() for microbatch in self.microbatches],
            **{name: getattr(self, name).tolist() for name in _TABLES},
            "updates": [update._asdict() for update in self.updates],
            "virtual_per_stage": self.virtual_per_stage,
        }
        return as_lists(fields)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "PipelineSchedule":
        """Returns the schedule that `to_json` was called on. It does not call `validate`.

        Args:
          data: a dict from `to_json`, also after it was written to a JSON file and read again.

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


def as_lists(value: Any) -> Any:
    """Returns a value for JSON with lists in place of all tuples, also within dicts and lists."""
    if isinstance(value, dict):
        return {key: as_lists(entry) for key, entry in value.items()}
    return [as_lists(entry) for entry in value] if isinstance(value, list | tuple) else value
