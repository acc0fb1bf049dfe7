"""Prompt tuning: trained rows before the embeddings of every sequence (Lester et al. 2021)."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from jaxmux.field_checks import Count, Naturals, Rule, Text, checked_dataclass
from jaxmux.models import BackboneConfig
from jaxmux.models.adapter_ops import EMBEDDING, EMBEDDING_TENSOR, AdapterOp, rows_of_chunks

from .kind import AdapterKind, BaseTensors, base_values
from .leaves import LeafSpec
from .targets import LayerMask, take_tensor

_TENSOR = "prompt_embeddings"


@checked_dataclass(
    rules=[
        Rule(
            "give one of start, start_text and start_tokens",
            ("start", "start_text", "start_tokens"),
        )
    ]
)
class PromptTuning:
    """Rows are trained that stand before the embeddings of every sequence (Lester et al. 2021).

    The rows take positions as tokens do, so the first token of a text stands at position
    `virtual_tokens`. `Task.max_length` does not count the rows, and predictions at their positions
    have no loss. The rows cannot be merged into the backbone.

    Attributes:
      virtual_tokens: number of rows.
      start: "vocabulary" begins with the embeddings of tokens that are drawn at random from the
        task's seed, "random" with normally distributed numbers of variance 1, as Hugging Face PEFT
        does. These are much larger than embeddings.
      start_text: a text. The rows begin with the embeddings of its tokens, those that the tokenizer
        adds included; as in Hugging Face PEFT, they are repeated or cut to the number of rows.
      start_tokens: ids of tokens, with whose embeddings the rows begin as with those of a text.

    Raises:
      ValueError: a value is outside its range, or more than one start is given.
    """

    virtual_tokens: Count = 20
    start: Literal["vocabulary", "random"] = "vocabulary"
    start_text: Text | None = None
    start_tokens: Naturals = ()


class _Rows(AdapterOp):
    """Replaces the embeddings of virtual tokens by the trained rows."""

    def embedding_output(self, own, x, tokens):
        index = -1 - tokens
        rows = rows_of_chunks(own, index, own.shape[1], x.dtype)
        return jnp.where((index >= 0)[..., None], rows, x)


def _with_tokens(spec: PromptTuning, tokenizer: Any) -> PromptTuning:
    if spec.start_text is None:
        return spec
    tokens = tokenizer(spec.start_text, verbose=False)["input_ids"]
    if not tokens:
        raise ValueError("start_text has no tokens")
    return dataclasses.replace(spec, start_text=None, start_tokens=tokens)


def _targets(spec: PromptTuning, config: BackboneConfig) -> dict[str, LayerMask]:
    if (largest := max(spec.start_tokens, default=0)) >= config.vocab_size:
        raise ValueError(
            f"start_text or start_tokens: {largest} is no token of the {config.vocab_size} tokens"
        )
    return {EMBEDDING: np.arange(config.num_layers) == 0}


def _leaves(config: BackboneConfig, points: Sequence[str], slots: int, rank: int) -> dict[str, Any]:
    shape = 1, slots, rank, config.hidden_size
    return {point: LeafSpec(shape, ("first", "slot", "rank", "output")) for point in points}


def _initial(
    spec: PromptTuning,
    targets: Mapping[str, LayerMask],
    config: BackboneConfig,
    seed: int,
    base: BaseTensors | None,
) -> dict[str, np.ndarray]:
    if spec.start_text is not None:
        raise ValueError("start_text needs a tokenizer (`AdapterKind.with_tokens`)")
    rng, number = np.random.default_rng(seed), spec.virtual_tokens
    if spec.start == "random":
        return {EMBEDDING: rng.standard_normal((1, number, config.hidden_size), np.float32)}
    if spec.start_tokens:
        tokens = np.resize(spec.start_tokens, number)
    else:
        tokens = rng.integers(config.vocab_size, size=number)
    return {EMBEDDING: base_values(base, EMBEDDING_TENSOR, tokens)[None]}


def _rates(spec: PromptTuning, targets: Mapping[str, LayerMask]) -> dict[str, np.ndarray]:
    return {point: mask.astype(np.float32) for point, mask in targets.items()}


def _settings(spec: PromptTuning, config: BackboneConfig, serving: bool) -> dict[str, Any]:
    return {
        "peft_type": "PROMPT_TUNING",
        "num_virtual_tokens": spec.virtual_tokens,
        # The tensor replaces the result of PEFT's initialisation.
        "prompt_tuning_init": "RANDOM",
        "token_dim": config.hidden_size,
        "num_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_transformer_submodules": 1,
    }


def _from_settings(settings: Mapping[str, Any], config: BackboneConfig) -> PromptTuning:
    if settings.get("num_transformer_submodules", 1) not in (1, None):
        raise ValueError(
            f"num_transformer_submodules={settings['num_transformer_submodules']!r} is not "
            "supported; a decoder has one"
        )
    return PromptTuning(settings["num_virtual_tokens"])


def _tensors(
    spec: PromptTuning,
    adapter: Any,
    config: BackboneConfig,
    serving: bool,
    base: BaseTensors | None,
) -> dict[str, np.ndarray]:
    return {_TENSOR: np.ascontiguousarray(adapter[EMBEDDING][0])}


def _from_tensors(
    spec: PromptTuning,
    tensors: dict[str, np.ndarray],
    config: BackboneConfig,
    base: BaseTensors | None,
) -> dict[str, np.ndarray]:
    rows = take_tensor(tensors, _TENSOR, (spec.virtual_tokens, config.hidden_size))
    return {EMBEDDING: np.asarray(rows, np.float32)[None]}


prompt_tuning_kind = AdapterKind(
    "prompt_tuning",
    specification=PromptTuning,
    op=_Rows(),
    targets=_targets,
    leaves=_leaves,
    initial=_initial,
    relative_rates=_rates,
    recognise=lambda settings: settings.get("peft_type") == "PROMPT_TUNING",
    settings=_settings,
    from_settings=_from_settings,
    tensors=_tensors,
    from_tensors=_from_tensors,
    identity=("virtual_tokens",),
    virtual_tokens=lambda spec: spec.virtual_tokens,
    with_tokens=_with_tokens,
    rank=lambda spec: spec.virtual_tokens,
    size_field="virtual_tokens",
)
