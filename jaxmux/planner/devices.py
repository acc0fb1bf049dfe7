"""Devices as values: a stage is a mesh of devices, a replica is a list of stages, a deployment is a
list of replicas. The values say how many devices there are, not which ones."""

import functools
import re
from collections import Counter
from collections.abc import Mapping
from itertools import groupby
from typing import NamedTuple

from .errors import PlanningError

# `_AXIS` matches "tp2" or "tp = 2", `_REPLICAS` matches "pp2,tp2", "(tp1)" or "2*(tp1)".
_AXIS = r"\s*(pp|tp|dp|fsdp)\s*=?\s*([0-9]{1,5})\s*"
_REPLICAS = r"\s*(?:([0-9]{1,5})\s*\*\s*)?(?:\(([^()]*)\)|([^()*]*))\s*"


# The orders of a pipeline's passes that `RunOptions.schedule` may name.
AUTO_SCHEDULE, INTERLEAVED = "auto", "interleaved"
SCHEDULES = (AUTO_SCHEDULE, "1f1b", "gpipe", INTERLEAVED, "lorapp", "template")
# An interleaved pipeline has this number of parts of the backbone on each stage.
_INTERLEAVED_PARTS = 2

# Weights may be stored in blocks that share a scale. These keys of `sizes` in `Replica.require`
# give the numbers of blocks along the axes that tensor parallelism and fully sharded data
# parallelism divide. Blocks of key heads are divided only if there are at least as many key heads
# as tensor-parallel devices.
TP_BLOCKS, FSDP_BLOCKS = "weight_blocks_for_tp", "weight_blocks_for_fsdp"
KEY_BLOCKS = "weight_blocks_of_keys_for_tp"


class Stage(NamedTuple):
    """The devices of one pipeline stage, as the sizes of their mesh axes. Devices along `dp` hold
    the same weights and train different samples (data parallelism). Devices along `fsdp` each hold
    a part of the weights and train different samples (fully sharded data parallelism). Devices
    along `tp` each hold a part of each linear and train the same samples (tensor parallelism)."""

    dp: int = 1
    fsdp: int = 1
    tp: int = 1

    @property
    def devices(self) -> int:
        return self.dp * self.fsdp * self.tp


class Replica(NamedTuple):
    """One copy of the backbone: its pipeline stages in the order in which a microbatch passes them.

    `str(replica)` is "pp4,tp2" for four stages of two tensor-parallel devices each. Stages that
    differ are listed, as in "tp2/tp2/tp4"; properties that need equal stages then raise
    PlanningError.

    Attributes:
      stages: the devices of each pipeline stage; at least one stage.
      parts: number of parts of the backbone on each stage. With S stages, stage s holds the parts
        s, s + S and so on. A pipeline with more than one part per stage is interleaved.
    """

    stages: tuple[Stage, ...] = (Stage(),)
    parts: int = 1

    @classmethod
    def uniform(cls, pp: int = 1, tp: int = 1, dp: int = 1, fsdp: int = 1) -> "Replica":
        return cls((Stage(dp, fsdp, tp),) * pp)

    @classmethod
    def parse(cls, text: str) -> "Replica":
        """Returns the replica of equal stages that a text such as "dp2,pp4,tp2" names. The axes may
        be in any order; "pp" is the number of stages, and an absent axis has size 1. Raises
        PlanningError if an axis is unknown or repeated, or its size is not a positive number."""
        return _parse_replica(text, f"mesh {text!r}")

    @property
    def pp(self) -> int:
        return len(self.stages)

    @property
    def stage(self) -> Stage:
        """The devices of each stage. Raises PlanningError if the stages differ."""
        first = self.stages[0]
        if any(stage != first for stage in self.stages):
            raise PlanningError(f"replica {self}: costs are known for equal stages only")
        return first

    @property
    def tp(self) -> int:
        return self.stage.tp

    @property
    def fsdp(self) -> int:
        """Number of fsdp devices of each stage; they divide a copy of the stage's weights."""
        return self.stage.fsdp

    @property
    def shards(self) -> int:
        """Number of data shards of each stage, which train different samples: dp · fsdp."""
        return self.stage.dp * self.stage.fsdp

    @property
    def sizes(self) -> dict[str, int]:
        return {"pp": self.pp, **self.stage._asdict()}

    @property
    def devices(self) -> int:
        return sum(stage.devices for stage in self.stages)

    def __str__(self) -> str:
        names = [
            ",".join(f"{axis}{size}" for axis, size in stage._asdict().items() if size > 1)
            for stage in self.stages
        ]
        if any(stage != self.stages[0] for stage in self.stages):
            return "/".join(name or "tp1" for name in names)
        return f"pp{self.pp},{names[0] or 'tp1'}"

    def stage_layers(self, layers: int, head_layers: float = 0.0) -> list[int]:
        of_parts = self.part_layers(layers, head_layers)
        return [sum(of_parts[stage :: self.pp]) for stage in range(self.pp)]

    def part_layers(self, layers: int, head_layers: float = 0.0) -> list[int]:
        """Returns the number of layers of each part of the backbone, a list of `pp * parts`
        numbers. The last part also has the head, whose work is that of `head_layers` layers. The
        division minimises the work of the part with the most work, then the difference between
        parts; the first parts get one layer more than later parts if the layers do not divide
        evenly."""
        return list(_part_layers(self.pp * self.parts, layers, head_layers))

    def following(self, schedule: str) -> "Replica":
        """Returns this replica with the number of parts per stage that the schedule needs. Raises
        PlanningError if the schedule needs a pipeline and the replica has a single stage."""
        if schedule != AUTO_SCHEDULE and self.pp == 1:
            raise PlanningError(
                f"schedule={schedule!r} orders the passes of a pipeline: it needs a mesh with at "
                f"least pp2, found {self}; without a pipeline, use schedule='auto'"
            )
        return self._replace(parts=_INTERLEAVED_PARTS if schedule == INTERLEAVED else 1)

    def require(self, layers: int, sizes: Mapping[str, int]) -> None:
        """Raises PlanningError if a backbone cannot be spread over the replica's devices. The
        message names the nearest size of the axis that would fit.

        `tp` has to divide the attention heads and the width of the MLP. It has to divide the key
        heads or be a multiple of them; if it exceeds them, several devices compute with the same
        key head. `fsdp` has to divide the model width. The keys of `sizes` are those of the
        backbone's config.json, and `TP_BLOCKS`, `KEY_BLOCKS` and `FSDP_BLOCKS` if weights have
        scales.
        """
        if self.parts > 1 and self.pp * self.parts > layers:
            raise PlanningError(
                f"mesh {self}: schedule='interleaved' divides the layers into {self.pp} stages of "
                f"{self.parts} parts, which needs at least {self.pp * self.parts} layers; the "
                f"backbone has {layers}"
            )
        if self.pp > layers:
            raise PlanningError(
                f"mesh {self}: {self.pp} stages for {layers} layers, every stage needs at least "
                f"one; it would fit with pp{layers}"
            )
        for stage in self.stages:
            for axis, misfit in (("tp", _tp_misfit), ("fsdp", _fsdp_misfit)):
                size = getattr(stage, axis)
                if not (name := misfit(size, sizes)):
                    continue
                fitting = (n for n in range(1, max(sizes.values()) + 1) if not misfit(n, sizes))
                nearest = min(fitting, key=lambda n: (abs(n - size), n))
                raise PlanningError(
                    f"mesh {self}: {axis}{size} does not divide {name}={sizes[name]}; the nearest "
                    f"that fits is {axis}{nearest}"
                )


def _parse_replica(text: str, where: str) -> Replica:
    """Like `Replica.parse`, but error messages begin with `where`."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(_AXIS, part)
        if not match:
            raise PlanningError(
                f"{where}: {part.strip()!r} is no axis with its size, expected e.g. pp4,tp2 (pp: "
                "pipeline stages, tp: tensor parallelism, dp: data parallelism, fsdp: fully "
                "sharded data parallelism)"
            )
        axis, size = match[1], int(match[2])
        if axis in sizes:
            raise PlanningError(f"{where}: {axis} is given twice")
        if size < 1:
            raise PlanningError(f"{where}: {axis} should be at least 1; try {axis}1")
        sizes[axis] = size
    return Replica.uniform(**sizes)


@functools.cache
def _part_layers(parts: int, layers: int, head_layers: float) -> tuple[int, ...]:
    if parts == 1:
        return (layers,)

    def divided(last: int) -> tuple[int, ...]:
        each, more = divmod(layers - last, parts - 1)
        return *(each + (part < more) for part in range(parts - 1)), last

    def unevenness(counts: tuple[int, ...]) -> tuple[float, float]:
        work = [*counts[:-1], counts[-1] + head_layers]
        return max(work), max(work) - min(work)

    return min(map(divided, range(1, layers - parts + 2)), key=unevenness)


def _tp_misfit(tp: int, sizes: Mapping[str, int]) -> str | None:
    """The name of a size that `tp` devices cannot divide; None if they can divide all."""
    for name in ("num_attention_heads", "intermediate_size", TP_BLOCKS):
        if sizes.get(name, 0) % tp:
            return name
    keys = sizes["num_key_value_heads"]
    if keys % tp == 0:
        return KEY_BLOCKS if sizes.get(KEY_BLOCKS, 0) % tp else None
    return "num_key_value_heads" if tp % keys else None


def _fsdp_misfit(fsdp: int, sizes: Mapping[str, int]) -> str | None:
    names = ("hidden_size", FSDP_BLOCKS)
    return next((name for name in names if sizes.get(name, 0) % fsdp), None)


ONE_DEVICE = Replica()


class Deployment(NamedTuple):
    """Replicas that train side by side, each with its own copy of the backbone (LobRA 4). Equal
    replicas have an entry each. `str(deployment)` is "2*(pp1,tp1) + pp2,tp2" for two replicas of
    one device each and one replica of two stages with two devices each."""

    replicas: tuple[Replica, ...]

    @classmethod
    def parse(cls, text: str) -> "Deployment":
        """Returns the deployment that a text such as "2*(tp1) + pp2,tp2" names, with replicas as in
        `Replica.parse`. Raises PlanningError if a replica cannot be read."""
        replicas: list[Replica] = []
        for term in text.split("+"):
            match = re.fullmatch(_REPLICAS, term)
            if not match:
                raise PlanningError(
                    f"mesh {text!r}: {term.strip()!r} is no replica, expected e.g. pp2,tp2 or "
                    "2*(tp1)"
                )
            count = int(match[1] or 1)
            if count < 1:
                raise PlanningError(f"mesh {text!r}: {term.strip()!r} is no replica at all")
            replicas += [_parse_replica(match[2] or match[3] or "", f"mesh {text!r}")] * count
        return cls(tuple(replicas))

    def __str__(self) -> str:
        runs = ((replica, len(list(equal))) for replica, equal in groupby(self.replicas))
        return " + ".join(f"{n}*({replica})" if n > 1 else str(replica) for replica, n in runs)

    @classmethod
    def of_counts(cls, counts: Mapping[Replica, int]) -> "Deployment":
        return cls(tuple(replica for replica, count in counts.items() for _ in range(count)))

    def following(self, schedule: str) -> "Deployment":
        return Deployment(tuple(replica.following(schedule) for replica in self.replicas))

    @property
    def counts(self) -> dict[Replica, int]:
        """The number of equal replicas of each kind, in the order of first appearance."""
        return dict(Counter(self.replicas))

    @property
    def devices(self) -> int:
        return sum(replica.devices for replica in self.replicas)
