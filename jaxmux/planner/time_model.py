"""What steps, microbatches and pipeline stages take: MuxTune's cost model (3.3), from a profile.

A layer takes t_o(n) for its base operators over all n tokens of a microbatch, plus attention by
the length of its rows, plus the fused adapters of the tasks. The backbone is frozen, so forward and
backward are alike; they are kept apart all the same, since attention and recomputation are not.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from .adapter_times import AdapterLoad, AdapterTimes
from .attention_times import AttentionTimes
from .curve import Curve
from .fusion import HTask
from .pool import Pool
from .profile import BackboneSize, ProfileError
from .shape_class import PlanningError, ShapeClass

# Policy of all layers, or of each.
Remat = str | Sequence[str]


class Passes(NamedTuple):
    """Seconds of a forward and of a backward pass."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


class Pipeline(NamedTuple):
    """How a backbone is spread over devices.

    Attributes:
      stages: S; layers are divided as evenly as they can be.
      tp: N_g, devices of a stage.
      microbatches: C, of every hTask.
      split_head: whether every stage has its part of the head, or the last one all of it.
    """

    stages: int = 1
    tp: int = 1
    microbatches: int = 1
    split_head: bool = True

    def layers(self, total: int) -> list[int]:
        """Layers of each stage."""
        return [total // self.stages + (s < total % self.stages) for s in range(self.stages)]

    def head_shares(self) -> list[float]:
        """Part of the head that each stage has."""
        if self.split_head:
            return [1 / self.stages] * self.stages
        return [0.0] * (self.stages - 1) + [1.0]


@dataclasses.dataclass(frozen=True)
class TimeModel:
    """A fitted cost model; `time_fit.fit_time_model` makes one. All times in seconds.

    Attributes:
      backbone: that was measured.
      base: Σ_o t_o(n), forward and backward of a frozen layer over n tokens, in rows of one
        sequence and `row_len` tokens.
      row_len: of the rows that `base` was measured with.
      attention: forward and backward of a layer's attention.
      attention_forward: the forward pass alone.
      adapters: of the fused adapters of a layer.
      empty_share: what a token of an empty chunk takes in `base`, as a part of another token:
        products skip it, all else does not.
      forward_share: part of a layer that is its forward pass, attention in longer rows aside.
      recompute: by rematerialisation policy, what it recomputes as a part of `base`.
      head: last norm, head and loss, by tokens.
      update: by optimizer kind, over the parameters of the pool.
      round_overhead: what a round takes beyond all that.
      collectives: by (collective, axis, devices), over the bytes that each device puts in.
    """

    backbone: BackboneSize
    base: Curve
    row_len: int
    attention: AttentionTimes
    attention_forward: AttentionTimes
    adapters: AdapterTimes
    empty_share: float
    forward_share: float
    recompute: Mapping[str, float]
    head: Curve
    update: Mapping[str, Curve]
    round_overhead: float
    collectives: Mapping[tuple[str, str, int], Curve]

    def predict(
        self, shape: ShapeClass, tasks: int, rank: int, microbatches: int = 1, remat: Remat = "dots"
    ) -> float:
        """Step time of `tasks` tasks of one rank that fill each microbatch in equal parts."""
        full = (shape.tokens / tasks,) * tasks
        return self.step(shape, [full] * microbatches, Pool(tasks, rank), remat)

    def step(
        self,
        shape: ShapeClass,
        microbatches: Sequence[Sequence[float]],
        pool: Pool,
        remat: Remat = "dots",
    ) -> float:
        """Step time of a plan on one device: Σ microbatches (layers + head) + update.

        Args:
          microbatches: for each, the tokens of every task's chunks in it; what they leave of the
            shape class are empty chunks.
        """
        if pool.optimizer not in self.update:
            raise ProfileError(f"the profile measures no update of {pool.optimizer!r}")
        seconds = sum(self.microbatch(shape, tokens, pool, remat) for tokens in microbatches)
        update = self.update[pool.optimizer](pool.parameters(self.backbone))
        return seconds + update + self.round_overhead

    def microbatch(
        self, shape: ShapeClass, tokens: Sequence[float], pool: Pool, remat: Remat = "dots"
    ) -> float:
        """Forward and backward of one microbatch; the tasks' chunks in it have so many tokens."""
        policies = (remat,) * self.backbone.layers if isinstance(remat, str) else remat
        if len(policies) != self.backbone.layers:
            raise PlanningError(
                f"remat: {len(policies)} policies for {self.backbone.layers} layers"
            )
        return self.head(shape.tokens) + sum(
            count * self.layer(shape, tokens, pool, policy, total=shape.tokens).total
            for policy, count in Counter(policies).items()
        )

    def layer(
        self,
        shape: ShapeClass,
        tokens: Sequence[float],
        pool: Pool,
        remat: str = "dots",
        tp: int = 1,
        total: float | None = None,
    ) -> Passes:
        """One decoder layer: base operators, over `tp` devices, and fused adapters (Eq. 3).

        Args:
          shape: its row and chunk length and its sequences per row are read, not its rows.
          tokens: n_k, of each task's chunks.
          total: tokens of the stream, empty chunks included; None for Σ_k n_k.
        """
        if remat not in self.recompute:
            known = ", ".join(self.recompute)
            raise ProfileError(
                f"the profile measures no remat policy {remat!r}; known: {known}; "
                "python -m jaxmux.profile completes it"
            )
        owned = sum(tokens)
        total = owned if total is None else total
        load = AdapterLoad(tokens, pool.slots, pool.rank, shape.chunk_len, pool.dropout)
        base = self.base(owned + self.empty_share * (total - owned)) / tp
        both = base + pool.share(self.backbone) * self.adapters.seconds(load)
        forward = self.forward_share * both + self._rows(self.attention_forward, shape) * total / tp
        both += self._rows(self.attention, shape) * total / tp
        return Passes(forward, both - forward + self.recompute[remat] * base)

    def _rows(self, times: AttentionTimes, shape: ShapeClass) -> float:
        """What attention takes longer per token in such rows than in those of `base`."""
        return times(shape.row_len, shape.max_sequences) - times(self.row_len, max_sequences=1)

    def stages(
        self,
        shape: ShapeClass,
        tokens: Sequence[float],
        pool: Pool,
        pipeline: Pipeline,
        remat: str = "dots",
    ) -> list[Passes]:
        """Every stage's passes over one microbatch of an hTask; communication is overlapped.

        Of the head, whose gradient is computed with the loss, each pass gets half.
        """
        layer = self.layer(shape, tokens, pool, remat, pipeline.tp)
        head = self.head(sum(tokens)) / pipeline.tp
        parts = zip(pipeline.layers(self.backbone.layers), pipeline.head_shares(), strict=True)
        return [
            Passes(*(layers * one_pass + share * head / 2 for one_pass in layer))
            for layers, share in parts
        ]

    def htask_latency(
        self, shape: ShapeClass, tokens: Sequence[float], pool: Pool, pipeline: Pipeline
    ) -> float:
        """L(H), end-to-end latency of an hTask alone in the pipeline (Eq. 4)."""
        stages = self.stages(shape, tokens, pool, pipeline)
        return pipeline_latency([stage.total / 2 for stage in stages], pipeline.microbatches)

    def latency_of_htasks(
        self, shape: ShapeClass, tokens: Sequence[float], pool: Pool, pipeline: Pipeline
    ) -> Callable[[HTask], float]:
        """L as `fusion.fuse_tasks` calls it.

        Args:
          tokens: n_i, of a microbatch of each task.
        """
        return lambda htask: self.htask_latency(
            shape, tuple(tokens[task] for task in htask), pool, pipeline
        )

    def collective(
        self, collective: str, devices: int, payload_bytes: float, axis: str = "inner"
    ) -> float:
        """A collective among `devices` devices, each of which puts in `payload_bytes`."""
        if devices == 1:
            return 0.0
        key = (collective, axis, devices)
        if key not in self.collectives:
            known = ", ".join(f"{c} over {n} ({a})" for c, a, n in self.collectives) or "none"
            raise ProfileError(
                f"the profile measures no {collective} over {devices} devices ({axis} axis); "
                f"measured: {known}"
            )
        return self.collectives[key](payload_bytes)


def pipeline_latency(stages: Sequence[float], microbatches: int) -> float:
    """L = 2 Σ_{s<S} L⁽ˢ⁾ + 2 C max_s L⁽ˢ⁾ (Eq. 4): warm-up and drain, then the steady phase.

    Args:
      stages: L⁽ˢ⁾, of one pass of each stage, in seconds: the mean of forward and backward.
      microbatches: C.
    """
    return 2 * sum(stages[:-1]) + 2 * microbatches * max(stages)
