"""LoRA of the embedding and of the head, with or without linears.

This kind has the factors of the tables. The linears of such a task have their factors in the pool
of LoRA and their scales in the pool of this kind, as with `lora_pattern`.
"""

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmux.errors import InputError
from jaxmux.models import BackboneConfig
from jaxmux.models.adapter_ops import (
    COUNTERS,
    EMBEDDING,
    HEAD,
    OUTSIDE,
    RATE,
    SCALE,
    AdapterOp,
    matmul_of_chunks,
)
from jaxmux.pallas_kernels.counter_dropout import keep_mask
from jaxmux.planner.costs.pool_spec import PointWork

from . import lora_folder
from .kind import AdapterKind, BaseTensors, Changes
from .leaves import LeafSpec
from .lora import (
    LoRA,
    drawn_factors,
    initial_adapter,
    lora_targets,
    rank_and_scale,
)
from .lora_pattern import factors_of, rates_by_name, scale_leaf, with_scales
from .targets import (
    PREFIX,
    LayerMask,
    full_name,
    linears_among,
    linears_of,
    tables_among,
    take_tensor,
)

# For each table, the names of its factors in PEFT.
_FACTORS = {
    EMBEDDING: ("lora_embedding_A", "lora_embedding_B"),
    HEAD: ("lora_A.weight", "lora_B.weight"),
}


class _Tables(AdapterOp):
    """Adds `scale · A B` to the tables. At the embedding, A has a row for every token; at the head,
    B has a column for every token."""

    low_rank = True
    by_token = frozenset({"a"})

    def embedding_output(self, own, x, tokens):
        rows = own["a"].astype(x.dtype)
        added = matmul_of_chunks(rows, own["b"] * own[SCALE][:, None, None])
        return x + added

    def logits(self, own, hidden, logits, first_token):
        scale, read = own[SCALE], hidden
        if COUNTERS in own:
            read = _dropped(hidden, own[COUNTERS], own[RATE])
            scale = scale / (1 - own[RATE])
        b = jax.lax.dynamic_slice_in_dim(own["b"], first_token, logits.shape[2], axis=2)
        low = matmul_of_chunks(read, own["a"])
        return logits + matmul_of_chunks(low, b, logits.dtype) * scale[:, None, None]


def _dropped(
    x: Float[Array, "chunks l d"], counters: Array, rate: Float[Array, " chunks"]
) -> Float[Array, "chunks l d"]:
    """Sets the dropped features to 0 without scaling the others."""
    rates = jnp.broadcast_to(rate[:, None], counters.shape).reshape(-1)
    kept = keep_mask(counters.reshape(-1), rates, x.shape[2])
    return jnp.where(kept.reshape(x.shape), x, 0)


def _linears(spec: LoRA) -> LoRA | None:
    names = linears_among(spec.target_modules)
    return dataclasses.replace(spec, target_modules=names) if names else None


def _sizes(config: BackboneConfig, point: str) -> tuple[int, int]:
    """The number of rows of A, and the number of columns of B."""
    sizes = config.vocab_size, config.hidden_size
    return sizes if point == EMBEDDING else sizes[::-1]


def _targets(spec: LoRA, config: BackboneConfig) -> dict[str, LayerMask]:
    linears, widest = _linears(spec), min(config.hidden_size, config.vocab_size)
    targets = lora_targets(linears, config) if linears else {}
    if spec.largest_rank > widest:
        raise ValueError(f"rank is {spec.largest_rank}, but the tables are no wider than {widest}")
    layers = {EMBEDDING: 0, HEAD: config.num_layers - 1}
    tables = tables_among(spec.target_modules)
    return targets | {point: np.arange(config.num_layers) == layers[point] for point in tables}


def _leaves(config: BackboneConfig, points: Sequence[str], slots: int, rank: int) -> dict[str, Any]:
    def table(point: str) -> dict[str, LeafSpec]:
        end = "first" if point == EMBEDDING else "last"
        k, n = _sizes(config, point)
        return {
            "a": LeafSpec((1, slots, k, rank), (end, "slot", "input", "rank")),
            "b": LeafSpec((1, slots, rank, n), (end, "slot", "rank", "output")),
            SCALE: LeafSpec((1, slots), (end, "slot"), trained=False),
        }

    return {
        point: table(point) if point in OUTSIDE else {SCALE: scale_leaf(config, slots)}
        for point in points
    }


def _initial(
    spec: LoRA,
    targets: Mapping[str, LayerMask],
    config: BackboneConfig,
    seed: int,
    base: BaseTensors | None,
) -> dict[str, Any]:
    adapter: dict[str, Any] = {}
    if linears := _linears(spec):
        modules = linears_of(targets)
        factors = initial_adapter(linears, modules, config, seed, base)
        adapter = with_scales(linears, factors, modules)
    for point in tables_among(spec.target_modules):
        rng = np.random.default_rng([seed, zlib.crc32(point.encode()), 0])
        (k, n), (rank, scale) = _sizes(config, point), rank_and_scale(spec, full_name(point, 0))
        if point == EMBEDDING:
            a, b = np.zeros((k, rank)), rng.standard_normal((rank, n))
        else:
            a, b = drawn_factors(spec.initialisation, rng, k, rank, n)
        adapter[point] = _table(spec, a, b, scale)
    return adapter


def _table(spec: LoRA, a: np.ndarray, b: np.ndarray, scale: float) -> dict[str, np.ndarray]:
    missing = spec.largest_rank - a.shape[1]
    a, b = np.float32(a), np.float32(b)
    return {
        "a": np.pad(a, ((0, 0), (0, missing)))[None],
        "b": np.pad(b, ((0, missing), (0, 0)))[None],
        SCALE: np.float32([scale]),
    }


def _recognise(settings: Mapping[str, Any]) -> bool:
    return (
        lora_folder.is_low_rank(settings)
        and not settings.get("use_dora")
        and not settings.get("trainable_token_indices")
        and bool(tables_among(settings.get("target_modules")))
    )


def _settings(spec: LoRA, config: BackboneConfig, serving: bool) -> dict[str, Any]:
    linears = _linears(spec)
    others = linears or dataclasses.replace(spec, target_modules="all-linear")
    settings_of_linears = lora_folder.settings(others, config, serving)
    names = settings_of_linears["target_modules"] if linears else []
    return settings_of_linears | {
        "target_modules": sorted([*names, *tables_among(spec.target_modules)])
    }


def _from_settings(settings: Mapping[str, Any], config: BackboneConfig) -> LoRA:
    names = settings["target_modules"]
    names = (names,) if isinstance(names, str) else tuple(names)
    linears = linears_among(names) or "all-linear"
    others = lora_folder.from_settings({**settings, "target_modules": linears}, config)
    spec = dataclasses.replace(others, target_modules=names)
    _targets(spec, config)
    return spec


def _tensors(
    spec: LoRA, adapter: Any, config: BackboneConfig, serving: bool, base: BaseTensors | None
) -> dict[str, np.ndarray]:
    tensors = {}
    if linears := _linears(spec):
        of_linears = linears_of(adapter)
        tensors = lora_folder.tensors(linears, factors_of(of_linears), config, serving, base)
    for point in tables_among(spec.target_modules):
        module, (name_a, name_b) = full_name(point, 0), _FACTORS[point]
        rank, scale = rank_and_scale(spec, module)
        if serving:
            # As in `lora_folder.tensors`: servers support one rank and one scale.
            rank = spec.largest_rank
        a, b = adapter[point]["a"][0, :, :rank].T, adapter[point]["b"][0, :rank].T
        b = b * np.float32(scale) if serving else b
        tensors[f"{PREFIX}{module}.{name_a}"] = np.ascontiguousarray(a)
        tensors[f"{PREFIX}{module}.{name_b}"] = np.ascontiguousarray(b)
    return tensors


def _from_tensors(
    spec: LoRA, tensors: dict[str, np.ndarray], config: BackboneConfig, base: BaseTensors | None
) -> dict[str, Any]:
    adapter: dict[str, Any] = {}
    if linears := _linears(spec):
        factors = lora_folder.from_tensors(linears, tensors, config, base)
        adapter = with_scales(linears, factors, lora_targets(linears, config))
    for point in tables_among(spec.target_modules):
        module, (name_a, name_b) = full_name(point, 0), _FACTORS[point]
        (k, n), (rank, scale) = _sizes(config, point), rank_and_scale(spec, module)
        a = take_tensor(tensors, f"{PREFIX}{module}.{name_a}", (rank, k))
        b = take_tensor(tensors, f"{PREFIX}{module}.{name_b}", (n, rank))
        # PEFT also writes the backbone's table.
        tensors.pop(f"{PREFIX}{module}.base_layer.weight", None)
        adapter[point] = _table(spec, a.T, b.T, scale)
    return adapter


def _merged(spec: LoRA, adapter: Any, config: BackboneConfig) -> Changes:
    if config.tie_word_embeddings:
        raise InputError(
            "the backbone's head is its embedding (tie_word_embeddings), so an adapter of one of "
            "them cannot be merged into the checkpoint; export it without --merge"
        )

    def change(point: str, weight: np.ndarray) -> np.ndarray:
        arrays = adapter[point]
        added = np.asarray(arrays[SCALE][0] * (arrays["a"][0] @ arrays["b"][0]))
        return weight + (added if point == EMBEDDING else added.T)

    changes: dict[str, Any] = {}
    if linears := _linears(spec):
        of_linears = linears_of(adapter)
        changes |= lora_folder.merged(linears, factors_of(of_linears), config)
    for point in tables_among(spec.target_modules):
        changes[f"{full_name(point, 0)}.weight"] = partial(change, point)
    return changes


def _work(config: BackboneConfig, point: str, rank: int) -> PointWork:
    d, vocab = config.hidden_size, config.vocab_size
    if point == EMBEDDING:
        return PointWork(2 * rank * d, 3 * d)
    return PointWork(2 * rank * (d + vocab), d + 2 * vocab) if point == HEAD else PointWork(0, 0)


lora_tables_kind = AdapterKind(
    "lora_tables",
    specification=LoRA,
    op=_Tables(),
    targets=_targets,
    leaves=_leaves,
    initial=_initial,
    relative_rates=rates_by_name,
    recognise=_recognise,
    settings=_settings,
    from_settings=_from_settings,
    tensors=_tensors,
    from_tensors=_from_tensors,
    identity=("rank", "alpha", "rslora", "rank_pattern", "alpha_pattern"),
    rank=lambda spec: spec.largest_rank,
    serves=lambda spec: bool(tables_among(spec.target_modules)) and not spec.trained_tokens,
    merged=_merged,
    work=_work,
)
