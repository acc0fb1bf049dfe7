"""Devices as values: a stage is a mesh of devices, a replica a list of stages, a deployment a list
of replicas.

The planner, the profiler and the executors of several devices describe devices with these three
types and no others.
"""

import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from .errors import PlanningError


class Stage(NamedTuple):
    """The devices of one pipeline stage, by axis of their mesh.

    Attributes:
      dp: devices that hold the same weights and train different samples.
      fsdp: devices that share the weights and train different samples.
      tp: devices that share each linear and train the same samples.
    """

    dp: int = 1
    fsdp: int = 1
    tp: int = 1

    @property
    def devices(self) -> int:
        """Number of devices of the stage."""
        return self.dp * self.fsdp * self.tp


class Replica(NamedTuple):
    """One copy of the backbone: pipeline stages in the order in which a microbatch passes them.

    `str(replica)` is "pp4,tp2" for four stages of two tensor-parallel devices each; stages that
    differ are listed, as in "tp2/tp2/tp4".

    Attributes:
      stages: at least one.
    """

    stages: tuple[Stage, ...] = (Stage(),)

    @classmethod
    def uniform(cls, pp: int = 1, tp: int = 1) -> "Replica":
        """The replica of `pp` equal stages of `tp` tensor-parallel devices each."""
        return cls((Stage(tp=tp),) * pp)

    @classmethod
    def parse(cls, text: str) -> "Replica":
        """The uniform replica that a text such as "pp4", "tp2" or "pp4,tp2" names.

        Raises:
          PlanningError: an axis is unknown or repeated, or its size is not a positive number.
        """
        sizes: dict[str, int] = {}
        for part in text.split(","):
            found = re.fullmatch(r"\s*(pp|tp)\s*=?\s*([0-9]+)\s*", part)
            if not found:
                raise PlanningError(
                    f"mesh {text!r}: {part.strip()!r} is no axis with its size, expected e.g. "
                    "pp4,tp2 (pp: pipeline stages, tp: tensor parallelism)"
                )
            axis, size = found[1], int(found[2])
            if axis in sizes:
                raise PlanningError(f"mesh {text!r}: {axis} is given twice")
            if size < 1:
                raise PlanningError(f"mesh {text!r}: {axis} should be at least 1; try {axis}1")
            sizes[axis] = size
        return cls.uniform(**sizes)

    @property
    def pp(self) -> int:
        """Number of pipeline stages."""
        return len(self.stages)

    @property
    def tp(self) -> int:
        """Tensor-parallel devices of every stage.

        Raises:
          PlanningError: the stages differ, or use other axes. The cost models know neither.
        """
        first = self.stages[0]
        if first != Stage(tp=first.tp) or any(stage != first for stage in self.stages):
            raise PlanningError(
                f"replica {self}: costs are known for equal stages of tensor-parallel devices only"
            )
        return first.tp

    @property
    def devices(self) -> int:
        """Number of devices of all stages."""
        return sum(stage.devices for stage in self.stages)

    def __str__(self) -> str:
        names = [
            ",".join(f"{axis}{size}" for axis, size in stage._asdict().items() if size > 1)
            for stage in self.stages
        ]
        if any(stage != self.stages[0] for stage in self.stages):
            return "/".join(name or "tp1" for name in names)
        return f"pp{self.pp},{names[0] or 'tp1'}"

    def stage_layers(self, layers: int) -> list[int]:
        """Layers of each stage: as even as possible, the first stages have one more."""
        return [layers // self.pp + (stage < layers % self.pp) for stage in range(self.pp)]

    def require(self, layers: int, divisible: Mapping[str, int]) -> None:
        """Checks that a backbone can be spread over the replica's devices.

        Args:
          layers: number of layers of the backbone; every stage needs at least one.
          divisible: by key of its config.json, the sizes that tensor parallelism has to divide.

        Raises:
          PlanningError: the backbone cannot be spread; the message names the axis and the nearest
            size that would do.
        """
        if self.pp > layers:
            raise PlanningError(
                f"mesh {self}: {self.pp} stages for {layers} layers, every stage needs at least "
                f"one; it would fit with pp{layers}"
            )
        for name, size in divisible.items():
            if size % self.tp:
                sizes = range(1, min(divisible.values()) + 1)
                fitting = [tp for tp in sizes if not any(n % tp for n in divisible.values())]
                nearest = min(fitting, key=lambda tp: (abs(tp - self.tp), tp))
                raise PlanningError(
                    f"mesh {self}: tp{self.tp} does not divide {name}={size}; the nearest that "
                    f"divides all of {', '.join(divisible)} is tp{nearest}"
                )


ONE_DEVICE = Replica()


class Deployment(NamedTuple):
    """Replicas that train side by side, each with its own copy of the backbone (LobRA 4).

    Attributes:
      replicas: each once; equal ones are repeated.
    """

    replicas: tuple[Replica, ...]

    @classmethod
    def of_counts(cls, counts: Mapping[Replica, int]) -> "Deployment":
        """The deployment with the given number of replicas of each kind."""
        return cls(tuple(replica for replica, count in counts.items() for _ in range(count)))

    @property
    def counts(self) -> dict[Replica, int]:
        """How many replicas there are of each kind, in the order of first appearance."""
        return dict(Counter(self.replicas))

    @property
    def devices(self) -> int:
        """Number of devices of all replicas."""
        return sum(replica.devices for replica in self.replicas)
