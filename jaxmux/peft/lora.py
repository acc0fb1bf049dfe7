"""LoRA adapters: the specification in a task, the arrays of a pool, and the initial factors."""

import dataclasses
import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from jaxtyping import Float, Int
from pydantic import BeforeValidator, Field

from jaxmux.data import Sample
from jaxmux.field_checks import (
    EXACT,
    ByName,
    Count,
    Names,
    Naturals,
    Number,
    Positive,
    checked_dataclass,
    why_left_out,
)
from jaxmux.models import BackboneConfig, linear_sizes
from jaxmux.models.adapter_ops import OUTSIDE
from jaxmux.pallas_kernels.grouped_lora import Factors

from .eva import eva_factors
from .kind import BaseTensors, calibrated
from .leaves import LeafSpec
from .targets import LayerMask, full_name, resolve_targets, tables_among

# Initialisations that draw both factors at random.
_DRAWN = ("kaiming", "gaussian", "orthogonal")
# Initialisations whose product A B is zero: random factors, and factors from the task's data.
ZERO_PRODUCTS = (*_DRAWN, "eva")
# Initialisations that take parts of the adapted weights. "pissa_niter_N", with N power iterations,
# is another one.
_FROM_WEIGHTS = ("pissa", "olora")
INITIALISATIONS = (*ZERO_PRODUCTS, *_FROM_WEIGHTS)
_PISSA_NITER = "pissa_niter_[1-9]?[0-9]"
_PissaNiter = Annotated[
    str,
    Field(
        pattern=f"^{_PISSA_NITER}$",
        json_schema_extra={"$comment": "'pissa_niter_N' with N up to 99"},
    ),
]


def begins_at_weight(initialisation: Any) -> bool:
    """Whether an initialisation takes the factors from parts of the weights."""
    if not isinstance(initialisation, str):
        return False
    is_approximate = re.fullmatch(_PISSA_NITER, initialisation) is not None
    return is_approximate or initialisation in _FROM_WEIGHTS


def supported_initialisation(initialisation: Any) -> Any:
    """Returns the initialisation. For one of PEFT's that is left out, raises ValueError with the
    reason."""
    if reason := why_left_out(initialisation):
        raise ValueError(f"initialisation {initialisation!r} is not supported; {reason}")
    return initialisation


_Initialisation = Annotated[
    Literal[*INITIALISATIONS] | _PissaNiter, BeforeValidator(supported_initialisation)
]


@checked_dataclass
class LoRA:
    """Low-rank adaptation of linears: `y = x W + scale · dropout(x) A B` (Hu et al. 2021).

    x is [N, k] (N tokens), the frozen weight W is [k, n], A is [k, r] and B is [r, n]. A and B are
    trained. The scale is alpha / rank, or alpha / sqrt(rank) with `rslora`.

    Attributes:
      rank: r, at least 1.
      alpha: numerator of the scale, a finite number.
      dropout: probability in [0, 1) with which each feature of x is set to 0 before it enters A;
        the remaining features are divided by 1 - dropout. The frozen product x W has no dropout,
        and neither have factors of the embedding, as in PEFT.
      target_modules: the linears that are adapted, chosen as in Hugging Face PEFT: "all-linear"
        (the default: all linears of attention and MLP); one or several module names ("q_proj"),
        which the full names equal or end with; or one regular expression that full names
        ("model.layers.3.self_attn.q_proj") match as a whole. Beside module names, or alone, stand
        "embed_tokens" and "lm_head" for the embedding and the head, which "all-linear" and
        expressions leave out. An embedding begins with A = 0 and a normal B. With one of them, the
        initialisation is "kaiming", "gaussian" or "orthogonal".
      rslora: True makes the scale alpha / sqrt(rank) (rsLoRA, Kalajdzievski 2023).
      initialisation: initial values. "kaiming" draws A uniformly from ±1/sqrt(k), which is PEFT's
        default, and "gaussian" from a normal distribution with standard deviation 1/rank; B starts
        at zero. With "orthogonal", neither is zero but A B is, because the rows of A and the
        columns of B lie in orthogonal subspaces; the rank must be even. "eva" takes for A the
        principal components of what each linear reads at the tokens of the task's training data
        that count in the loss, and zeros for B (EVA, Paischer et al. 2024). Linears whose
        components explain more of the variance get more of them, others fewer or none. The scale
        stays that of `rank`, and the adapter is a LoRA of the largest rank that a linear may get.
        PEFT reads data until the components converge; jaxmux reads `calibration_tokens` tokens.
        With the others, A and B are parts of the linear's weight, and what is added to it is
        `scale · (A B - A0 B0)` for their initial values A0 and B0, so that training begins at the
        backbone, which stays as it is. "pissa" takes the largest singular values with their vectors
        (PiSSA, Meng et al. 2024), "pissa_niter_N" an approximation with N power iterations, N from
        0 to 99, which is faster, and "olora" the first columns of the weight, made orthonormal
        (OLoRA, Büyükakyüz 2024). Weight decay acts on A and B, as in PEFT. These adapters take the
        memory and time of a LoRA of twice the rank, and their folders are such LoRAs. Dropout is
        not supported with them, and alpha must be positive.
      loraplus_ratio: learning rate of B divided by the learning rate of A (LoRA+, Hayou et al.
        2024), positive. The learning rate of the task's optimizer is that of A. (PEFT trains
        factors of the embedding with a rate of its own, 1e-6.)
      rank_pattern: ranks of linears in place of `rank`, by regular expressions as in Hugging Face
        PEFT: a mapping such as {"q_proj": 8}. An expression stands for the linears whose full names
        match it as a whole, or match it behind a dot; the first one counts.
      alpha_pattern: numerators of scales in place of `alpha`, chosen in the same way.
      eva_rho: with "eva", a linear gets at most this many times `rank` components, at least 1.
        All linears together get `rank` for each of them. 1 gives every linear the same rank.
      calibration_tokens: with "eva", number of tokens of the training data that the backbone reads
        for the components, from the samples that are trained first, at most 2048 of each.
      trained_tokens: the ids of tokens whose embeddings are trained besides, as by `TrainedTokens`
        (PEFT's `trainable_token_indices`). They exclude tables among the `target_modules`, and
        initialisations that are parts of weights.

    Raises:
      ValueError: a value is outside its range.
    """

    rank: Count = 16
    alpha: Number = 32.0
    dropout: Annotated[float, Field(ge=0, lt=1), EXACT] = 0.0
    target_modules: Names = "all-linear"
    rslora: bool = False
    initialisation: _Initialisation = "kaiming"
    loraplus_ratio: Positive = 1.0
    rank_pattern: ByName[Count] = ()
    alpha_pattern: ByName[Number] = ()
    eva_rho: Annotated[float, Field(ge=1), EXACT] = 2.0
    calibration_tokens: Count = 2048
    trained_tokens: Naturals = ()

    def __post_init__(self):
        if self.initialisation == "eva" and self.rank_pattern:
            raise ValueError(
                "rank_pattern cannot be combined with the initialisation 'eva', which gives every "
                "linear a rank by the task's data"
            )
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
        if self.begins_at_weight:
            self._check_beginning_at_weight()
        if self.adapts_tables:
            self._check_tables()

    def _check_beginning_at_weight(self) -> None:
        if self.dropout:
            raise ValueError(
                f"dropout should be 0 with initialisation {self.initialisation!r}, found "
                f"{self.dropout}: it would drop features of A B, but not of the initial product, "
                "which is taken off"
            )
        for alpha in (self.alpha, *dict(self.alpha_pattern).values()):
            if alpha <= 0:
                raise ValueError(
                    f"alpha should be above 0 with initialisation {self.initialisation!r}, found "
                    f"{alpha:g}"
                )

    def _check_tables(self) -> None:
        tables = " and ".join(map(repr, tables_among(self.target_modules)))
        if tables and self.trained_tokens:
            raise ValueError(
                f"trained_tokens cannot be combined with {tables} among the target_modules; train "
                "either some rows of the tables or low-rank adapters of them"
            )
        if tables and self.initialisation not in _DRAWN:
            raise ValueError(
                f"initialisation {self.initialisation!r} cannot be combined with {tables} among "
                f"the target_modules; leave {tables} out, or take one of "
                f"{', '.join(map(repr, _DRAWN))}"
            )
        if self.begins_at_weight:
            raise ValueError(
                f"initialisation {self.initialisation!r} cannot be combined with trained_tokens; "
                f"leave them out, or take one of {', '.join(map(repr, ZERO_PRODUCTS))}"
            )

    @property
    def begins_at_weight(self) -> bool:
        return begins_at_weight(self.initialisation)

    @property
    def begins_slowly(self) -> bool:
        """Whether the initial factors take long to compute (see `AdapterKind.begins_slowly`)."""
        return self.initialisation not in _DRAWN

    @property
    def adapts_tables(self) -> bool:
        """Whether the embedding or the head, or some of their rows, are adapted."""
        return bool(self.trained_tokens or tables_among(self.target_modules))

    @property
    def has_patterns(self) -> bool:
        """Whether some linears have other ranks or scales than the rest."""
        return bool(self.rank_pattern or self.alpha_pattern)

    @property
    def scale(self) -> float:
        """Factor of the low-rank product x A B: alpha / rank, or alpha / sqrt(rank) with rsLoRA.
        Linears in `rank_pattern` or `alpha_pattern` have other scales, see `ranks_and_scales`."""
        return _scale(self, self.rank, self.alpha)

    @property
    def common_rank(self) -> int:
        """The rank of linears that are not in `rank_pattern`. It is `rank`, but with "eva" the
        largest rank that the data may give these linears."""
        # 1e-9 cancels the rounding error of the product.
        return int(self.eva_rho * self.rank + 1e-9) if self.initialisation == "eva" else self.rank

    @property
    def largest_rank(self) -> int:
        return max((self.common_rank, *dict(self.rank_pattern).values()))


def _scale(spec: LoRA, rank: int, alpha: float) -> float:
    return alpha / (math.sqrt(rank) if spec.rslora else rank)


def as_stored(spec: LoRA) -> LoRA:
    """The specification of the adapter as a folder describes it. An adapter with "eva" becomes a
    LoRA of the largest rank, with an alpha that keeps the scale."""
    if spec.initialisation != "eva":
        return spec
    rank = spec.common_rank
    factor = math.sqrt(rank / spec.rank) if spec.rslora else rank / spec.rank
    return dataclasses.replace(
        spec,
        rank=rank,
        alpha=factor * spec.alpha,
        alpha_pattern=tuple((name, factor * alpha) for name, alpha in spec.alpha_pattern),
        initialisation="kaiming",
    )


def ranks_and_scales(
    spec: LoRA, module: str, layers: int
) -> tuple[Int[np.ndarray, " L"], Float[np.ndarray, " L"]]:
    """The rank of a linear in each of L layers, and the scale of its low-rank product. `module` is
    the linear's path within a layer."""
    names = [full_name(module, layer) for layer in range(layers)]
    ranks = [matching(spec.rank_pattern, name, spec.common_rank) for name in names]
    alphas = [matching(spec.alpha_pattern, name, spec.alpha) for name in names]
    # With "eva", the average rank determines the scale.
    of_scale = [spec.rank] * layers if spec.initialisation == "eva" else ranks
    scales = [_scale(spec, *pair) for pair in zip(of_scale, alphas, strict=True)]
    return np.int64(ranks), np.float32(scales)


def rank_and_scale(spec: LoRA, name: str) -> tuple[int, float]:
    """The rank of a linear or table, by its full name, and the scale of its low-rank product."""
    rank = matching(spec.rank_pattern, name, spec.rank)
    return rank, _scale(spec, rank, matching(spec.alpha_pattern, name, spec.alpha))


def matching(pattern: Sequence[tuple[str, Any]], name: str, default: Any) -> Any:
    """The first value whose expression matches the full name of a linear, as in Hugging Face PEFT;
    otherwise `default`. A pattern is a sequence of pairs (expression, value)."""
    return next((value for key, value in pattern if re.match(_expression(key), name)), default)


def _expression(key: str) -> str:
    return rf"(.*\.)?({key})$"


def lora_targets(spec: LoRA, config: BackboneConfig) -> dict[str, LayerMask]:
    """The linears that an adapter changes, from `resolve_targets`. Raises ValueError if there are
    none, or if the rank exceeds the smaller width of every one of them."""
    targets = resolve_targets(spec.target_modules, config)
    widest = max(min(linear_sizes(config, module)) for module in targets)
    if spec.largest_rank > widest:
        raise ValueError(
            f"rank is {spec.largest_rank}, but no linear that it adapts is wider than {widest}; "
            "lower the rank"
        )
    return targets


# Float32 factors by module path within a layer ("mlp.up_proj"): a [L, k, r] and b [L, r, n] of one
# task, or a [L, T, k, R] and b [L, T, R, n] of a pool.
Adapter = dict[str, Factors]


def lora_leaves(
    config: BackboneConfig, modules: Sequence[str], slots: int, rank: int
) -> dict[str, Factors]:
    """Describes the arrays of a LoRA pool with T slots and rank R: by module, `Factors` of
    `LeafSpec` with shapes [L, T, k, R] and [L, T, R, n]. Points outside the layers have no arrays
    in this pool and are left out."""
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
    samples: Iterable[Sample] | None = None,
) -> Adapter:
    """The LoRA factors with which a task begins; their product A B is zero. They depend only on the
    arguments, so a task begins with the same factors alone and beside other tasks.

    Args:
      targets: the linears that the task adapts, from `resolve_targets`.
      seed: seed of the random values, not negative.
      base: returns tensors of the backbone; used only with "eva".
      samples: the samples of the task's training data; used only with "eva".

    Returns:
      By path of a linear, the float32 NumPy arrays a [L, k, r] and b [L, r, n], for the adapter's
      largest rank r. They are zero in layers that the task does not adapt and in ranks that a
      linear does not have.

    Raises:
      ValueError: the factors are parts of the adapted weights; or with "eva", `base` or `samples`
        is None, or there are too few samples.
    """
    if spec.begins_at_weight:
        raise ValueError(f"factors of {spec.initialisation!r} are not drawn; use `kind_of`")
    adapter, components = {}, {}
    if spec.initialisation == "eva":
        calibration = calibrated(config, base, samples, spec.calibration_tokens)
        components = eva_factors(calibration, targets, spec.rank, spec.largest_rank)
    for module, layers in targets.items():
        k, n = linear_sizes(config, module)
        a = np.zeros((config.num_layers, k, spec.largest_rank), np.float32)
        b = np.zeros((config.num_layers, spec.largest_rank, n), np.float32)
        ranks, _ = ranks_and_scales(spec, module, config.num_layers)
        for layer in np.flatnonzero(layers):
            rng = np.random.default_rng([seed, zlib.crc32(module.encode()), int(layer)])
            rank = ranks[layer]
            if spec.initialisation == "eva":
                directions = components[module][int(layer)]
                a[layer, :, : directions.shape[1]] = directions
            else:
                drawn = drawn_factors(spec.initialisation, rng, k, rank, n)
                a[layer, :, :rank], b[layer, :rank] = drawn
        adapter[module] = Factors(a, b)
    return adapter


def drawn_factors(
    initialisation: str, rng: np.random.Generator, k: int, rank: int, n: int
) -> Factors:
    """Random factors a [k, rank] and b [rank, n] with the product 0. `initialisation` is "kaiming",
    "gaussian" or "orthogonal"."""
    if initialisation == "kaiming":
        bound = 1 / math.sqrt(k)
        return Factors(rng.uniform(-bound, bound, (k, rank)), np.zeros((rank, n)))
    if initialisation == "gaussian":
        return Factors(rng.standard_normal((k, rank)) / rank, np.zeros((rank, n)))
    # As in PEFT: random combinations of the even rows of an orthogonal matrix for A, and of the odd
    # rows for B.
    rows, _ = np.linalg.qr(rng.standard_normal((rank, rank)))
    a = rng.standard_normal((k, rank // 2)) @ rows[0::2]
    b = rng.standard_normal((n, rank // 2)) @ rows[1::2]
    return Factors(a / 10, b.T / 10)


def relative_rates(spec: LoRA, targets: Mapping[str, LayerMask]) -> dict[str, Factors]:
    """The learning rate of each factor in each layer, divided by the task's learning rate: float32
    [L], 1 for A, `loraplus_ratio` for B, and 0 in layers that the task does not adapt."""
    return {
        module: Factors(
            layers.astype(np.float32), layers.astype(np.float32) * np.float32(spec.loraplus_ratio)
        )
        for module, layers in targets.items()
    }
