"""LoRA adapters: the specification in a task, the arrays of a pool, and the initial factors."""

import dataclasses
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jaxmux.field_checks import (
    check_fields,
    choice,
    flag,
    integer,
    integers,
    names,
    number,
    numbers_by_name,
)
from jaxmux.models import BackboneConfig, linear_sizes
from jaxmux.models.adapter_ops import OUTSIDE
from jaxmux.pallas_kernels.grouped_lora import Factors

from .kind import BaseTensors
from .leaves import LeafSpec
from .targets import LayerMask, full_name, resolve_targets

INITIALISATIONS = ("kaiming", "gaussian", "orthogonal")


@dataclasses.dataclass(frozen=True)
class LoRA:
    """Low-rank adaptation of linears: `y = x W + scale · dropout(x) A B` (Hu et al. 2021).

    x is [N, k] (N tokens), the frozen weight W is [k, n], A is [k, r] and B is [r, n]. A and B are
    trained. The scale is alpha / rank, or alpha / sqrt(rank) with `rslora`.

    Attributes:
      rank: r, at least 1.
      alpha: numerator of the scale, a finite number.
      dropout: probability in [0, 1) with which each feature of x is set to 0 before it enters A;
        the remaining features are divided by 1 - dropout. The frozen product x W has no dropout.
      target_modules: the linears that are adapted, chosen as in Hugging Face PEFT: "all-linear"
        (the default: all linears of attention and MLP); one or several module names ("q_proj"),
        which the full names equal or end with; or one regular expression that full names
        ("model.layers.3.self_attn.q_proj") match as a whole. Beside module names, or alone, stand
        "embed_tokens" and "lm_head" for the embedding and the head, which "all-linear" and
        expressions leave out. An embedding begins with A = 0 and a normal B.
      rslora: True makes the scale alpha / sqrt(rank) (rsLoRA, Kalajdzievski 2023).
      initialisation: initial values. "kaiming" draws A uniformly from ±1/sqrt(k), which is PEFT's
        default, and "gaussian" from a normal distribution with standard deviation 1/rank; B starts
        at zero. With "orthogonal", neither is zero but A B is, because the rows of A and the
        columns of B lie in orthogonal subspaces; the rank must be even.
      loraplus_ratio: learning rate of B divided by the learning rate of A (LoRA+, Hayou et al.
        2024), positive. The learning rate of the task's optimizer is that of A.
      rank_pattern: ranks of linears in place of `rank`, by regular expressions as in Hugging Face
        PEFT: a mapping such as {"q_proj": 8}. An expression stands for the linears whose full names
        match it as a whole, or match it behind a dot; the first one counts.
      alpha_pattern: numerators of scales in place of `alpha`, chosen in the same way.
      trained_tokens: the ids of tokens whose embeddings are trained besides, as by `TrainedTokens`
        (PEFT's `trainable_token_indices`). It excludes tables among the `target_modules`.

    Raises:
      ValueError: a value is outside its range.
    """

    rank: int = integer(16, least=1)
    alpha: float = number(32.0)
    dropout: float = number(0.0, least=0, below=1)
    target_modules: str | tuple[str, ...] = names("all-linear")
    rslora: bool = flag(False)
    initialisation: str = choice("kaiming", INITIALISATIONS)
    loraplus_ratio: float = number(1.0, above=0)
    rank_pattern: tuple[tuple[str, int], ...] = numbers_by_name(rule=integer(least=1))
    alpha_pattern: tuple[tuple[str, float], ...] = numbers_by_name(rule=number())
    trained_tokens: tuple[int, ...] = integers((), least=0)

    def __post_init__(self):
        check_fields(self)
        if len(set(self.trained_tokens)) < len(self.trained_tokens):
            raise ValueError("trained_tokens: a token occurs twice")
        for rank in (self.rank, *dict(self.rank_pattern).values()):
            if self.initialisation == "orthogonal" and rank % 2:
                raise ValueError(
                    f"rank should be even with orthogonal initialisation, found {rank}"
                )
        for field in ("rank_pattern", "alpha_pattern"):
            for name, _ in getattr(self, field):
                try:
                    re.compile(_expression(name))
                except re.error as e:
                    raise ValueError(
                        f"{field}: {name!r} is no valid regular expression: {e}"
                    ) from None

    @property
    def scale(self) -> float:
        """Factor of the low-rank product x A B: alpha / rank, or alpha / sqrt(rank) with rsLoRA.
        Linears in `rank_pattern` or `alpha_pattern` have others, see `ranks_and_scales`."""
        return _scale(self, self.rank, self.alpha)

    @property
    def largest_rank(self) -> int:
        """The largest rank that a linear may have."""
        return max((self.rank, *dict(self.rank_pattern).values()))


def _scale(spec: LoRA, rank: int, alpha: float) -> float:
    return alpha / (math.sqrt(rank) if spec.rslora else rank)


def ranks_and_scales(
    spec: LoRA, module: str, layers: int
) -> tuple[Int[np.ndarray, " L"], Float[np.ndarray, " L"]]:
    """The rank of a linear in every layer, and the factor of its low-rank product.

    Args:
      spec: specification of the adapter.
      module: path of the linear within a layer.
      layers: number of layers L.
    """
    names = [full_name(module, layer) for layer in range(layers)]
    ranks = [matching(spec.rank_pattern, name, spec.rank) for name in names]
    alphas = [matching(spec.alpha_pattern, name, spec.alpha) for name in names]
    scales = [_scale(spec, *pair) for pair in zip(ranks, alphas, strict=True)]
    return np.int64(ranks), np.float32(scales)


def rank_and_scale(spec: LoRA, name: str) -> tuple[int, float]:
    """The rank of a linear or table, and the factor of its low-rank product.

    Args:
      spec: specification of the adapter.
      name: its full name.
    """
    rank = matching(spec.rank_pattern, name, spec.rank)
    return rank, _scale(spec, rank, matching(spec.alpha_pattern, name, spec.alpha))


def matching(pattern: Sequence[tuple[str, Any]], name: str, default: Any) -> Any:
    """The first value in a pattern whose expression matches a linear's name, as in Hugging Face
    PEFT.

    Args:
      pattern: pairs of an expression and a value.
      name: full name of the linear.
      default: the value if there is none.
    """
    return next((value for key, value in pattern if re.match(_expression(key), name)), default)


def _expression(key: str) -> str:
    return rf"(.*\.)?({key})$"


def lora_targets(spec: LoRA, config: BackboneConfig) -> dict[str, LayerMask]:
    """The linears that an adapter changes, by `resolve_targets`.

    Args:
      spec: specification of the adapter.
      config: configuration of the backbone.

    Raises:
      ValueError: there are none, or a smaller rank would express the same in every one.
    """
    targets = resolve_targets(spec.target_modules, config)
    widest = max(min(linear_sizes(config, module)) for module in targets)
    if spec.largest_rank > widest:
        raise ValueError(
            f"rank is {spec.largest_rank}, but no linear that it adapts is wider than {widest}; "
            "lower the rank"
        )
    return targets


# By module path within a layer ("mlp.up_proj"), float32 factors: of one task, a [L, k, r] and
# b [L, r, n]; of a pool, a [L, T, k, R] and b [L, T, R, n].
Adapter = dict[str, Factors]


def lora_leaves(
    config: BackboneConfig, modules: Sequence[str], slots: int, rank: int
) -> dict[str, Factors]:
    """Describes the arrays of a LoRA pool: for each module, `Factors` of `LeafSpec`.

    Args:
      config: configuration of the backbone.
      modules: paths of the adapted modules within a layer. Points outside the layers have no
        arrays in this pool.
      slots: number of slots T.
      rank: rank R of the pool.

    Returns:
      By module, the description of a with shape [L, T, k, R] and of b with shape [L, T, R, n].
    """
    leaves = {}
    for module in modules:
        if module in OUTSIDE:
            continue
        k, n = linear_sizes(config, module)
        layers = config.num_layers
        leaves[module] = Factors(
            LeafSpec((layers, slots, k, rank), ("layer", "slot", "input", "rank")),
            LeafSpec((layers, slots, rank, n), ("layer", "slot", "rank", "output")),
        )
    return leaves


def initial_adapter(
    spec: LoRA,
    targets: Mapping[str, LayerMask],
    config: BackboneConfig,
    seed: int,
    base: BaseTensors | None = None,
) -> Adapter:
    """The LoRA factors with which a task (fine-tuning job) begins, whose product A B is zero.

    The values depend only on the arguments, so a task begins with the same factors alone and beside
    other tasks.

    Args:
      spec: specification of the adapter.
      targets: the linears that the task adapts, from `resolve_targets`: by path of a linear within
        a layer, a bool mask [L] of the layers in which it is adapted.
      config: configuration of the backbone.
      seed: seed of the random values, not negative.
      base: the tensors of the backbone, or None; not read.

    Returns:
      By path of a linear, the float32 NumPy arrays a [L, k, r] and b [L, r, n], for L layers, input
      width k, output width n and the adapter's largest rank r. Layers that the task does not adapt,
      and ranks that a linear does not have, are zero.
    """
    adapter = {}
    for module, layers in targets.items():
        k, n = linear_sizes(config, module)
        a = np.zeros((config.num_layers, k, spec.largest_rank), np.float32)
        b = np.zeros((config.num_layers, spec.largest_rank, n), np.float32)
        ranks, _ = ranks_and_scales(spec, module, config.num_layers)
        for layer in np.flatnonzero(layers):
            rng = np.random.default_rng([seed, zlib.crc32(module.encode()), int(layer)])
            rank = ranks[layer]
            if spec.initialisation == "kaiming":
                bound = 1 / math.sqrt(k)
                a[layer, :, :rank] = rng.uniform(-bound, bound, (k, rank))
            elif spec.initialisation == "gaussian":
                a[layer, :, :rank] = rng.standard_normal((k, rank)) / rank
            else:
                a[layer, :, :rank], b[layer, :rank] = orthogonal_factors(rng, k, rank, n)
        adapter[module] = Factors(a, b)
    return adapter


def orthogonal_factors(rng: np.random.Generator, k: int, rank: int, n: int) -> Factors:
    """Factors a [k, rank] and b [rank, n] with the product 0, as PEFT draws them: random
    combinations of one half of the rows of an orthogonal matrix, and of the other half."""
    rows, _ = np.linalg.qr(rng.standard_normal((rank, rank)))
    a = rng.standard_normal((k, rank // 2)) @ rows[0::2]
    b = rng.standard_normal((n, rank // 2)) @ rows[1::2]
    return Factors(a / 10, b.T / 10)


def relative_rates(spec: LoRA, targets: Mapping[str, LayerMask]) -> dict[str, Factors]:
    """The learning rate of each factor in each layer, divided by the task's learning rate.

    Args:
      spec: specification of the adapter.
      targets: by module, the mask over the layers that the task adapts, from `resolve_targets`.

    Returns:
      By module, `Factors` of float32 arrays [L]: 1 for A, `loraplus_ratio` for B, and 0 in layers
      that the task does not target.
    """
    return {
        module: Factors(
            layers.astype(np.float32), layers.astype(np.float32) * np.float32(spec.loraplus_ratio)
        )
        for module, layers in targets.items()
    }
