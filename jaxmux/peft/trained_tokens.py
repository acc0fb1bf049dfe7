"""Trained tokens: some rows of the embedding are trained, for tokens that are new or get another
meaning. If the backbone's head is its embedding, the rows of the head change too."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmux.field_checks import Naturals, checked_dataclass
from jaxmux.models import BackboneConfig
from jaxmux.models.adapter_ops import (
    EMBEDDING,
    EMBEDDING_TENSOR,
    HEAD,
    TIED,
    AdapterOp,
    matmul_of_chunks,
    rows_of_chunks,
)

from .kind import AdapterKind, BaseTensors, Changes, base_values
from .leaves import LeafSpec
from .targets import PREFIX, LayerMask, take_tensor

# The name of the tensor with the rows, in folders of this kind.
TOKENS_TENSOR = f"{PREFIX}{EMBEDDING_TENSOR.removesuffix('.weight')}.trainable_tokens_delta"
# If the head is the embedding, PEFT's folders hold the same rows a second time.
_TENSOR_OF_HEAD = f"{PREFIX}{HEAD}.trainable_tokens_delta"


@checked_dataclass
class TrainedTokens:
    """The embeddings of some tokens are trained, beginning with those of the backbone.

    The trained values are the differences from the backbone's embeddings, in float32. Weight decay
    therefore pulls the embeddings back to the backbone's, not to 0 as in Hugging Face PEFT; without
    weight decay, both train in the same way. If the backbone's head is its embedding, the logits of
    these tokens change too, as in PEFT. Embedding and head must then lie on the same devices, so
    meshes with several pipeline stages refuse such tasks.

    Attributes:
      indices: the ids of the tokens.

    Raises:
      ValueError: there is no id, an id is negative, or one occurs twice.
    """

    indices: Naturals

    def __post_init__(self):
        if not self.indices:
            raise ValueError("indices is empty")
        if len(set(self.indices)) < len(self.indices):
            raise ValueError("indices: a token occurs twice")


class Rows(AdapterOp):
    """Adds rows to the embeddings of their tokens. "tokens" counts token ids from 1; 0 marks
    padding."""

    def embedding_output(self, own, x, tokens):
        is_row = (tokens[..., None] + 1 == own["tokens"][:, None]) & (own["tokens"][:, None] > 0)
        trained = is_row.any(axis=-1)
        index = jnp.where(trained, is_row.argmax(axis=-1), -1)
        rows = rows_of_chunks(own["rows"], index, own["rows"].shape[1], x.dtype)
        return jnp.where(trained[..., None], x + rows, x)

    def logits(self, own, hidden, logits, first_token):
        count, vocab = own["rows"].shape[1], logits.shape[2]
        added = matmul_of_chunks(hidden, own["rows"].swapaxes(1, 2), logits.dtype)
        column = own["tokens"] - 1 - first_token
        is_here = (own["tokens"] > 0) & (column >= 0) & (column < vocab)
        # Columns outside the vocabulary are dropped. All columns differ, so no two sums meet in an
        # arbitrary order.
        column = jnp.where(is_here, column, vocab + jnp.arange(count))

        def add(logits, column, added):
            return logits.at[:, column].add(added, mode="drop", unique_indices=True)

        return jax.vmap(add)(logits, column, added)


def _targets(spec: TrainedTokens, config: BackboneConfig) -> dict[str, LayerMask]:
    if (largest := max(spec.indices)) >= config.vocab_size:
        raise ValueError(f"indices: {largest} is no token of the {config.vocab_size} tokens")
    return {_point(config): np.arange(config.num_layers) == 0}


def _point(config: BackboneConfig) -> str:
    return TIED if config.tie_word_embeddings else EMBEDDING


def _leaves(config: BackboneConfig, points: Sequence[str], slots: int, rank: int) -> dict[str, Any]:
    sizes, axes = (1, slots, rank), ("first", "slot", "rank")
    return {
        point: {
            "rows": LeafSpec((*sizes, config.hidden_size), (*axes, "output")),
            "tokens": LeafSpec(sizes, axes, trained=False, dtype="int32"),
        }
        for point in points
    }


def _with_rows(spec: TrainedTokens, rows: np.ndarray, config: BackboneConfig) -> dict[str, Any]:
    tokens = 1 + np.asarray(spec.indices, np.int32)
    arrays = {"rows": np.asarray(rows, np.float32)[None], "tokens": tokens[None]}
    return {_point(config): arrays}


def _initial(
    spec: TrainedTokens,
    targets: Mapping[str, LayerMask],
    config: BackboneConfig,
    seed: int,
    base: BaseTensors | None,
) -> dict[str, Any]:
    return _with_rows(spec, np.zeros((len(spec.indices), config.hidden_size)), config)


def _rates(spec: TrainedTokens, targets: Mapping[str, LayerMask]) -> dict[str, Any]:
    return {point: {"rows": mask.astype(np.float32)} for point, mask in targets.items()}


def _settings(spec: TrainedTokens, config: BackboneConfig, serving: bool) -> dict[str, Any]:
    return {
        "peft_type": "TRAINABLE_TOKENS",
        "target_modules": [EMBEDDING],
        "token_indices": list(spec.indices),
    }


def _from_settings(settings: Mapping[str, Any], config: BackboneConfig) -> TrainedTokens:
    tables = settings.get("target_modules") or EMBEDDING
    names = [tables] if isinstance(tables, str) else list(tables)
    if [name.split(".")[-1] for name in names] != [EMBEDDING]:
        raise ValueError(f"target_modules={tables!r} is not supported; expected {EMBEDDING!r}")
    spec = TrainedTokens(tuple(settings["token_indices"]))
    _targets(spec, config)
    return spec


def _tensors(
    spec: TrainedTokens,
    adapter: Any,
    config: BackboneConfig,
    serving: bool,
    base: BaseTensors | None,
) -> dict[str, np.ndarray]:
    first = base_values(base, EMBEDDING_TENSOR, spec.indices)
    rows = first + np.asarray(adapter[_point(config)]["rows"][0])
    return {TOKENS_TENSOR: rows} | ({_TENSOR_OF_HEAD: rows} if config.tie_word_embeddings else {})


def _from_tensors(
    spec: TrainedTokens,
    tensors: dict[str, np.ndarray],
    config: BackboneConfig,
    base: BaseTensors | None,
) -> dict[str, Any]:
    rows = take_tensor(tensors, TOKENS_TENSOR, (len(spec.indices), config.hidden_size))
    if config.tie_word_embeddings and _TENSOR_OF_HEAD in tensors:
        of_head = take_tensor(tensors, _TENSOR_OF_HEAD, rows.shape)
        if not np.array_equal(of_head, rows):
            raise ValueError(f"tensors {TOKENS_TENSOR} and {_TENSOR_OF_HEAD} of one table differ")
    return _with_rows(spec, rows - base_values(base, EMBEDDING_TENSOR, spec.indices), config)


def _merged(spec: TrainedTokens, adapter: Any, config: BackboneConfig) -> Changes:
    def merge(weight: np.ndarray) -> np.ndarray:
        weight = weight.copy()
        weight[list(spec.indices)] += np.asarray(adapter[_point(config)]["rows"][0])
        return weight

    return {EMBEDDING_TENSOR: merge}


trained_tokens_kind = AdapterKind(
    "trained_tokens",
    specification=TrainedTokens,
    op=Rows(),
    targets=_targets,
    leaves=_leaves,
    initial=_initial,
    relative_rates=_rates,
    recognise=lambda settings: settings.get("peft_type") == "TRAINABLE_TOKENS",
    settings=_settings,
    from_settings=_from_settings,
    tensors=_tensors,
    from_tensors=_from_tensors,
    identity=("indices",),
    merged=_merged,
    rank=lambda spec: len(spec.indices),
    size_field="indices",
)
