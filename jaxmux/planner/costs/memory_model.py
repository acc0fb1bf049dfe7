"""Predicts the peak memory of a round. Some parts are counted by MuxTune's model (Eq. 5), the rest
is learnt by mLoRA's online fit (mLoRA Eq. 5).

  M_stage = [M_b + Σ M_g] / S + Σ M_a(b, l)                                  (MuxTune)

M_stage is the peak memory of one pipeline stage, S the number of stages, M_b the bytes of the
backbone's weights, M_g the train state of a task (masters, accumulators, moments), and M_a the
bytes that layers keep for the backward pass. All of these are counted. If S does not divide the
number of layers, M_stage is that of a stage with the most layers.

A running pass needs more memory: temporaries, workspaces, blocks of logits. For B rows of L tokens,
with one sequence per row, it is learnt as

  Mem = β0 + β1 · B · L + β2 · B · L²                                        (mLoRA)

by non-negative least squares, first from the profile, then from each observed peak.

`fill_layers` chooses, for the memory that is left, the remat policy of each layer.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import scipy

from ..devices import ONE_DEVICE, Replica
from ..errors import PlanningError
from ..numbers import numbered, size_text
from ..packing.rows import ShapeClass
from .device_profile import BackboneSize, ProfileError
from .pool_spec import PoolSpec

# Plans may use this fraction of a device's memory, because allocators leave gaps.
USABLE = 0.97


def keeps_attention(remat: str) -> bool:
    return remat != "full"


def working_bytes(
    sizes: Mapping[str, float], loss_bytes: float, attention_bytes: float = 0.0
) -> float:
    """Returns the bytes that a pass needs while it runs, besides the values that layers keep.
    During the backward pass of a layer, its inputs, its outputs and the gradients of all its values
    exist at the same time. Together they take 1.25 times the bytes that the layer keeps under the
    first remat policy in `sizes`, which recomputes least."""
    return max(1.25 * next(iter(sizes.values())), loss_bytes, attention_bytes)


def exchanged_bytes(gradients: float, replicas: int) -> float:
    """Returns the bytes that a device needs while replicas exchange gradients and adapters. Every
    device of a stage has the whole gradients. The first replica holds the gradients of all other
    replicas and their sum; another replica holds its own gradients and the sum. The programs have
    temporaries of the same size."""
    return (replicas + 1) * gradients if replicas > 1 else 0.0


def fill_layers(sizes: Mapping[str, float], layers: int, room: float) -> tuple[str, ...]:
    """Chooses the remat policy of every layer, from two neighbouring policies in `sizes`. `sizes`
    maps policies to bytes per layer, in order from least to most recomputation. As many layers as
    there is room for get the policy that recomputes less. These are the last layers: their backward
    pass comes first and frees their memory before the other layers recompute. If there is not
    enough room for any choice, every layer gets the last policy."""
    names = list(sizes)
    for more, less in zip(names, names[1:], strict=False):
        if sizes[less] * layers <= room:
            gain = sizes[more] - sizes[less]
            count = int((room - sizes[less] * layers) // gain) if gain else layers
            return (less,) * max(0, layers - count) + (more,) * min(count, layers)
    return (names[-1],) * layers


def fill_stages(sizes: Mapping[str, float], layers: Sequence[int], room: float) -> tuple[str, ...]:
    """Chooses the remat policies of all stages' layers. Each stage gets the policies of a stage
    with the most layers. A stage with fewer layers omits the first of these policies, which
    recompute most."""
    fullest = fill_layers(sizes, max(layers), room)
    return tuple(policy for count in layers for policy in fullest[len(fullest) - count :])


def split_stages(policies: Sequence[str], layers: Sequence[int]) -> list[tuple[str, ...]]:
    rest = iter(policies)
    return [tuple(islice(rest, count)) for count in layers]


# Ridge penalty of the first coefficient; each later coefficient is penalised ten times as much. The
# penalty decides between features that the observations cannot tell apart, and is negligible
# otherwise.
_TIE_BREAK = 1e-7


class OnlineFit(NamedTuple):
    """A linear model y = β · x with β >= 0, fitted to all observations in constant memory.
    `triangle` is R of the QR decomposition of the rows (x, y), float64 [features + 1, features +
    1]. ‖R (β, -1)‖ is the norm of the residuals, so R is all that the fit needs."""

    triangle: np.ndarray
    observations: int = 0

    @classmethod
    def of_features(cls, features: int) -> "OnlineFit":
        return cls(np.zeros((features + 1, features + 1)))

    def observe(self, x: np.ndarray, y: float, weight: float = 1.0) -> "OnlineFit":
        """Returns a new model with one more observation. Its squared residual is multiplied by
        `weight`."""
        row = np.sqrt(weight) * np.append(x, y)
        triangle = np.linalg.qr(np.vstack([self.triangle, row]), mode="r")
        return OnlineFit(triangle, self.observations + 1)

    def coefficients(self) -> np.ndarray:
        features, target = self.triangle[:, :-1], self.triangle[:, -1]
        size = np.linalg.norm(features, axis=0)
        size[size == 0] = 1
        tie_break = np.diag(_TIE_BREAK * 10.0 ** np.arange(len(size)))
        rows = np.vstack([features / size, tie_break])
        return scipy.optimize.nnls(rows, np.append(target, np.zeros(len(size))))[0] / size


# The measured memory of attention may exceed the counted bytes by this factor.
_SLACK = 1.05
_FLOAT32 = 4


@dataclasses.dataclass(frozen=True)
class MemoryModel:
    """Predicts the peak memory of a round of a backbone on one kind of device, in bytes of one
    device.

    A round fits if its peak is at most 97% of `memory`. For replicas with several stages, results
    are for the stage that needs the most memory. `remat` is one policy, or a sequence with one
    policy for each layer. Methods raise ProfileError for an unknown policy, and PlanningError for
    an unknown optimizer or for a linear of the pool that the backbone lacks.

    Attributes:
      memory: bytes of one device that JAX may use.
      working: the fit of the memory that a pass needs while it runs.
      packed_from: row length in tokens from which attention takes memory for every sequence that a
        row may hold, even if the row holds fewer; infinite if there is no such length.
      replicas: number of replicas of the training run.
    """

    backbone: BackboneSize
    memory: int
    working: OnlineFit
    packed_from: float
    replicas: int = 1

    @functools.cached_property
    def _coefficients(self) -> np.ndarray:
        return self.working.coefficients()

    def resident(self, pool: PoolSpec, replica: Replica = ONE_DEVICE) -> float:
        """Returns the bytes of weights and train state: [M_b + Σ M_g] / S in MuxTune Eq. 5.

        Tensor parallelism also divides weights and train state, except the values that every device
        has whole (see `PoolSpec.stage_bytes`); fully sharded data parallelism divides the weights.
        The result includes the weights that are gathered (two layers, or the head) or decoded at a
        time, and the gradients and adapters that replicas exchange.
        """
        return max(self._resident(pool, replica))

    def _resident(self, pool: PoolSpec, replica: Replica) -> list[float]:
        size = self.backbone
        head = size.vocab_size * size.hidden_size * size.stream_bytes
        layer = size.layer_bytes
        if replica.tp * replica.fsdp > 1:
            layer = size.divided_layer_bytes or layer
        gathered = max(2 * layer, head) if replica.fsdp > 1 else 0
        layers = size.stage_layers(replica)
        # The first stage has the embedding, and the last stage the head, which is as large.
        outside = (
            [head] + [0] * (replica.pp - 2) + [head] if replica.pp > 1 else [size.outside_bytes]
        )
        states = pool.stage_bytes(size, layers, replica.tp)
        weights = (
            (count * layer + end) / replica.fsdp for count, end in zip(layers, outside, strict=True)
        )
        gradients = _FLOAT32 * pool.parameters(size) / size.layers
        return [
            (weight_bytes + gathered + size.decoded_bytes) / replica.tp
            + state
            + exchanged_bytes(count * gradients, self.replicas)
            for weight_bytes, state, count in zip(weights, states, layers, strict=True)
        ]

    def kept(self, tokens: int, rank: int, remat: str, tp: int = 1) -> float:
        """Returns the bytes that one layer keeps of one microbatch on one device. The additional
        bytes of attention in rows of several sequences are not included. Of the hidden states
        before and after attention, the norms, and the adapters' intermediates of width r, every
        tensor-parallel device keeps all. Of the values between column-parallel and row-parallel
        linears, each device keeps 1/tp."""
        if remat not in self.backbone.kept:
            known = ", ".join(self.backbone.kept)
            raise ProfileError(f"the profile counts no remat policy {remat!r}; known: {known}")
        of_token, of_rank = self.backbone.kept[remat]
        # "norms" keeps all that "dots" keeps, and the inputs of column-parallel linears.
        without_norms = min(of_token, self.backbone.kept.get("dots", (of_token, 0.0))[0])
        stream = min(without_norms, 2 * self.backbone.hidden_size * self.backbone.stream_bytes)
        whole = stream + of_token - without_norms
        return tokens * (whole + (of_token - whole) / tp + rank * of_rank)

    def peak(
        self,
        shape: ShapeClass,
        pool: PoolSpec,
        remat: str | Sequence[str] | None = None,
        replica: Replica = ONE_DEVICE,
        in_flight: float = 1,
    ) -> float:
        """Returns the predicted peak of a round. If `remat` is None, `policies` chooses the remat
        policies."""
        counted = self._counted(shape, pool, remat, replica, in_flight)
        return counted + max(self._packed(shape, replica), self._learnt(shape))

    def stage_peaks(
        self,
        shape: ShapeClass,
        pool: PoolSpec,
        remat: str | Sequence[str],
        replica: Replica,
        in_flight: Sequence[float],
    ) -> list[float]:
        """Returns the predicted peak of a round on each stage. `peak` is at least the largest of
        these: it adds the largest train state and weights of any stage to the most that any stage
        keeps."""
        kept = self._kept_by_stages(shape, pool, remat, replica)
        working = max(self._packed(shape, replica), self._learnt(shape))
        return [
            held + count * kept_bytes + working
            for held, count, kept_bytes in zip(
                self._resident(pool, replica), in_flight, kept, strict=True
            )
        ]

    def policies(
        self,
        shape: ShapeClass,
        pool: PoolSpec,
        replica: Replica = ONE_DEVICE,
        in_flight: float = 1,
    ) -> tuple[str, ...]:
        """Returns the remat policy of every layer that the engine picks with `remat="auto"`."""
        sizes = {r: self._of_layer(shape, pool, r, replica) for r in self.backbone.kept}
        packed = self._packed(shape, replica)
        working = working_bytes(sizes, self.backbone.head_block_bytes, packed)
        room = USABLE * self.memory - self.resident(pool, replica) - working
        room = room / in_flight - _bytes_at_head(shape, pool)
        return fill_stages(sizes, self.backbone.stage_layers(replica), room)

    def fits(
        self,
        shape: ShapeClass,
        pool: PoolSpec,
        replica: Replica = ONE_DEVICE,
        in_flight: float = 1,
    ) -> bool:
        least = list(self.backbone.kept)[-1]
        return self.peak(shape, pool, least, replica, in_flight) <= USABLE * self.memory

    def require(
        self,
        shape: ShapeClass,
        pool: PoolSpec,
        replica: Replica = ONE_DEVICE,
        more_stages: bool = True,
    ) -> None:
        """Raises PlanningError if a round with one microbatch in flight does not fit into memory
        even with the most recomputation. The message lists single changes with which the round
        would fit."""
        if self.fits(shape, pool, replica):
            return
        needed = self.peak(shape, pool, list(self.backbone.kept)[-1], replica)
        changes = " or ".join(self._changes(shape, pool, replica, more_stages))
        raise PlanningError(
            f"a step of {numbered(pool.slots, 'slot')} of rank {pool.rank} with {shape.tokens} "
            f"tokens a microbatch needs {size_text(needed)}, usable are "
            f"{size_text(USABLE * self.memory)} of {size_text(self.memory)}; it would fit with "
            + (changes or "no single change of slots, rank or tokens")
        )

    def observe(
        self, shape: ShapeClass, pool: PoolSpec, remat: str | Sequence[str], peak_bytes: int
    ) -> "MemoryModel":
        """Returns a model that has learnt from the measured peak of a round on one device. If
        attention in rows of several sequences explains the peak, nothing can be learnt and the
        result is this model."""
        beyond = peak_bytes - self._counted(shape, pool, remat, ONE_DEVICE, 1)
        if max(beyond, self._learnt(shape)) <= _SLACK * self._packed(shape, ONE_DEVICE):
            # Attention needed the most memory, so the peak says nothing about the fitted part.
            return self
        features = working_features(shape.tokens, shape.row_len)
        working = self.working.observe(features, max(0.0, beyond))
        return dataclasses.replace(self, working=working)

    def _learnt(self, shape: ShapeClass) -> float:
        return float(self._coefficients @ working_features(shape.tokens, shape.row_len))

    def _counted(self, shape, pool, remat, replica, in_flight) -> float:
        if remat is None:
            remat = self.policies(shape, pool, replica, in_flight)
        kept = max(self._kept_by_stages(shape, pool, remat, replica))
        return self.resident(pool, replica) + in_flight * kept

    def _kept_by_stages(self, shape, pool, remat, replica) -> list[float]:
        layers = self.backbone.layers
        policies = (remat,) * layers if isinstance(remat, str) else remat
        of_layer = {r: self._of_layer(shape, pool, r, replica) for r in set(policies)}
        stages = split_stages(policies, self.backbone.stage_layers(replica))
        kept = (sum(of_layer[policy] for policy in stage) for stage in stages)
        return [layer_bytes + _bytes_at_head(shape, pool) for layer_bytes in kept]

    def _of_layer(self, shape: ShapeClass, pool: PoolSpec, remat: str, replica: Replica) -> float:
        kept = self.kept(shape.tokens, pool.rank, remat, replica.tp)
        packed = self.backbone.packed.kept_by(shape.tokens, self._paid_sequences(shape))
        # Every tensor-parallel device keeps all values of these kinds.
        of_kinds = sum(kind.work.kept for kind in pool.others) * self.backbone.stream_bytes
        kept += shape.tokens * of_kinds / self.backbone.layers * keeps_attention(remat)
        return kept + packed / replica.tp * keeps_attention(remat)

    def _packed(self, shape: ShapeClass, replica: Replica) -> float:
        needed = self.backbone.packed.needed_by(shape.tokens, self._paid_sequences(shape))
        return needed / replica.tp

    def _paid_sequences(self, shape: ShapeClass) -> int:
        """Number of sequences per row for which attention takes memory."""
        return shape.max_sequences if shape.row_len >= self.packed_from else 1

    def _changes(
        self, shape: ShapeClass, pool: PoolSpec, replica: Replica, more_stages: bool
    ) -> list[str]:
        fits = functools.partial(self.fits, replica=replica)
        unit = max(1, shape.chunk_len // shape.row_len)
        shapes = [dataclasses.replace(shape, rows=r) for r in range(unit, shape.rows, unit)]
        tokens = [s.tokens for s in shapes if fits(s, pool)]
        slots = [t for t in range(1, pool.slots) if fits(shape, pool._replace(slots=t))]
        ranks = [r for r in range(1, pool.rank) if fits(shape, pool._replace(rank=r))]
        deeper = range(replica.pp + 1, more_stages * self.backbone.layers + 1)
        replicas = (Replica((replica.stage,) * pp) for pp in deeper)
        stages = next((r.pp for r in replicas if self.fits(shape, pool, r)), None)
        return [
            *([f"at most {numbered(max(slots), 'slot')}"] if slots else []),
            *([f"ranks of at most {max(ranks)}"] if ranks else []),
            *([f"at most {max(tokens)} tokens a microbatch"] if tokens else []),
            *([f"{stages} pipeline stages"] if stages else []),
        ]


def _bytes_at_head(shape: ShapeClass, pool: PoolSpec) -> float:
    """Bytes of the arrays that adapters of the head have for each chunk, and of their gradients."""
    return 2 * 4 * shape.chunks * sum(kind.at_head for kind in pool.others)


def working_features(tokens: int, row_len: int) -> np.ndarray:
    """The features of the online fit `MemoryModel.working`: 1, B · L and B · L²."""
    return np.array([1.0, tokens, tokens * row_len])
