"""The pipeline schedule as a value: what every stage does in every tick."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from .workload import ScheduledMicrobatch

FORMAT = "jaxmux.schedule/1"
NONE = -1


class Update(NamedTuple):
    """A task's optimizer step: stage s applies it to its adapters at the end of tick `ticks[s]`."""

    task: int
    step: int
    ticks: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class PipelineSchedule:
    """A pipeline schedule of M jobs (microbatches) over S stages and T ticks.

    The contract with the executor. All stages go through the ticks in lockstep. In a tick a stage
    first takes in what its neighbours sent at the end of the tick before, then runs its backward,
    then its forward (either may be missing), then sends the activation right and the gradient left,
    both around the ring. So whatever an op produces can be used one tick later at the earliest, and
    a forward can take the residual slot that a backward of the same tick frees. The loss of a job
    is computed between the tick of its last forward and the next one: its gradient reaches the last
    virtual stage like any other message.

    Virtual stage v = chunk · S + stage is a chunk of consecutive layers (see `Workload`). In the
    ordinary case chunk is 0 everywhere and the virtual stages are the stages.

    Slots say where a job waits on a virtual stage, in three rings that each stage has: residuals
    from forward to backward, an activation or gradient from its arrival to the op that consumes it.
    A job takes the slots from its own to its own + `ScheduledMicrobatch.buffers` − 1.

    Attributes:
      jobs: the microbatches; ticks refer to them by index.
      forward_mb: int32[S, T], the job that runs forward, −1 for none.
      backward_mb: int32[S, T], the job that runs backward, −1 for none.
      forward_chunk: int32[S, T], the chunk whose layers run forward; 0 where nothing runs.
      backward_chunk: int32[S, T], likewise.
      residual_slot: int32[V, M].
      activation_slot: int32[V, M], −1 on virtual stage 0, whose input is the token ids.
      gradient_slot: int32[V, M].
      updates: one for each global batch of each task, in order of time.
    """

    jobs: tuple[ScheduledMicrobatch, ...]
    forward_mb: np.ndarray
    backward_mb: np.ndarray
    forward_chunk: np.ndarray
    backward_chunk: np.ndarray
    residual_slot: np.ndarray
    activation_slot: np.ndarray
    gradient_slot: np.ndarray
    updates: tuple[Update, ...]

    @property
    def stages(self) -> int:
        return self.forward_mb.shape[0]

    @property
    def ticks(self) -> int:
        return self.forward_mb.shape[1]

    @property
    def virtual_stages(self) -> int:
        return self.residual_slot.shape[0]

    @property
    def chunks(self) -> int:
        return self.virtual_stages // self.stages

    def forward_ticks(self) -> np.ndarray:
        """int32[V, M]: the tick in which a job runs forward on a virtual stage."""
        return self._ticks(self.forward_mb, self.forward_chunk)

    def backward_ticks(self) -> np.ndarray:
        """int32[V, M]: the tick in which a job runs backward on a virtual stage."""
        return self._ticks(self.backward_mb, self.backward_chunk)

    def _ticks(self, table: np.ndarray, chunk: np.ndarray) -> np.ndarray:
        ticks = np.full((self.virtual_stages, len(self.jobs)), NONE, np.int32)
        stage, tick = np.nonzero(table != NONE)
        ticks[chunk[stage, tick] * self.stages + stage, table[stage, tick]] = tick
        return ticks

    def ring_sizes(self) -> tuple[int, int, int]:
        """Slots that the residual, activation and gradient rings need, the same on all stages."""
        buffers = np.array([job.buffers for job in self.jobs])
        rings = (self.residual_slot, self.activation_slot, self.gradient_slot)
        return tuple(int(np.max(np.where(ring == NONE, 0, ring + buffers))) for ring in rings)

    def peak_buffers(self) -> np.ndarray:
        """int64[S]: most residual slots in use at a time on each stage."""
        change = np.zeros((self.stages, self.ticks), int)
        stage = np.arange(self.virtual_stages)[:, None] % self.stages
        buffers = np.array([job.buffers for job in self.jobs])
        # The backward comes first in its tick: what it frees is free within the tick.
        np.add.at(change, (stage, self.forward_ticks()), buffers)
        np.subtract.at(change, (stage, self.backward_ticks()), buffers)
        return np.max(np.cumsum(change, axis=1), axis=1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PipelineSchedule) and self.to_json() == other.to_json()

    def __str__(self) -> str:
        """The grid: a row a stage, a column a tick, `F3` or `B0` or both; chunk after a dot."""
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
        for letter, table, chunk in (
            ("B", self.backward_mb, self.backward_chunk),
            ("F", self.forward_mb, self.forward_chunk),
        ):
            if table[stage, tick] != NONE:
                suffix = f".{chunk[stage, tick]}" if self.chunks > 1 else ""
                parts.append(f"{letter}{table[stage, tick]}{suffix}")
        return " ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """A plain dict for `json.dump`: the attributes under their own names, arrays as lists."""
        arrays = {name: getattr(self, name).tolist() for name in _ARRAYS}
        return {
            "format": FORMAT,
            "jobs": [
                {
                    "tasks": list(job.tasks),
                    "steps": list(job.steps),
                    "bucket": job.bucket,
                    "buffers": job.buffers,
                }
                for job in self.jobs
            ],
            **arrays,
            "updates": [
                {"task": u.task, "step": u.step, "ticks": list(u.ticks)} for u in self.updates
            ],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Schedule":
        """The inverse of `to_json`. It does not validate: see `validate`.

        Raises:
          ValueError: the dict is of another format.
        """
        if data.get("format") != FORMAT:
            raise ValueError(f"not a schedule: format is {data.get('format')!r}, not {FORMAT!r}")
        jobs = tuple(
            ScheduledMicrobatch(tuple(j["tasks"]), tuple(j["steps"]), j["bucket"], j["buffers"])
            for j in data["jobs"]
        )
        arrays = {name: np.array(data[name], np.int32) for name in _ARRAYS}
        updates = tuple(Update(u["task"], u["step"], tuple(u["ticks"])) for u in data["updates"])
        return cls(jobs=jobs, updates=updates, **arrays)


_ARRAYS = (
    "forward_mb",
    "backward_mb",
    "forward_chunk",
    "backward_chunk",
    "residual_slot",
    "activation_slot",
    "gradient_slot",
)
