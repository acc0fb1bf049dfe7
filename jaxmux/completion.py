"""Completes prompts, each with its own adapter or with none, to show what an adapter has learnt.

All prompts run as rows of one microbatch, through the same forward pass as training. There is no
key/value cache: every new token recomputes its row. This is simple and exact. It is meant for a few
samples, not for serving.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from .data import DataError, Microbatch
from .models import (
    Backbone,
    BackboneConfig,
    ForwardOptions,
    SlotTable,
    Weights,
    compute_dtype,
    hidden_states,
    logits_of,
    pick_implementation,
)
from .models.adapter_ops import LOW_RANK_KIND
from .models.head_adapters import head_adapters
from .pallas_kernels.compilation import compiled
from .peft import KINDS, LeafSpec, kind_of, ops_of, pad, scale_of
from .peft.leaves import named_leaves
from .planner.numbers import power_of_two


class Request(NamedTuple):
    """A prompt for `complete`, and the adapter that completes it.

    Attributes:
      prompt: the text. It must give at least one token.
      spec: the specification of the adapter, such as a `LoRA`; None if `adapter` is None.
      adapter: the trained weights, as `Engine.adapter` and `import_adapter` return them. Give
        `spec` and `adapter` together. None completes the prompt with the bare backbone.
    """

    prompt: str
    spec: Any = None
    adapter: Any = None


def complete(
    backbone: Backbone,
    tokenizer: Any,
    requests: Sequence[Request],
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[str]:
    """Completes several prompts at once, each with its own adapter or none.

    It shows what adapters have learnt. There is no key/value cache: every new token computes the
    whole text so far again. So it is meant for a few samples, not for serving.

    Args:
      backbone: the backbone, from `load_backbone`.
      tokenizer: the backbone's tokenizer, from `load_tokenizer`.
      requests: the prompts with their adapters, at least one.
      max_new_tokens: most tokens of a completion. A completion ends earlier if the model produces
        the tokenizer's end-of-sequence token, or at the end of the backbone's context.
      temperature: 0 takes the most likely token; a positive value samples tokens from the logits
        divided by `temperature`.
      seed: seed of the sampling; without effect at temperature 0.

    Returns:
      The texts of the completions in the order of `requests`, without prompts and special tokens.

    Raises:
      DataError: a prompt has no tokens, or fills the backbone's context, with its adapter's virtual
        tokens.
    """
    # Not verbose: the tokenizer would warn of long prompts, which are refused below.
    prompts = [tokenizer(request.prompt, verbose=False)["input_ids"] for request in requests]
    if not all(prompts):
        raise DataError("a prompt is empty, and the tokenizer adds no first token of its own")
    prompts = [
        [*_virtual_tokens(request), *ids] for request, ids in zip(requests, prompts, strict=True)
    ]
    lengths = np.array([len(ids) for ids in prompts], np.int32)
    context = backbone.config.max_position_embeddings
    if (longest := int(lengths.max())) >= context:
        raise DataError(
            f"a prompt has {longest} tokens, but the backbone was made for {context} "
            "(max_position_embeddings), the completion and virtual tokens included"
        )
    ends = np.minimum(lengths + max_new_tokens, context)
    # Row lengths are powers of two, so that few programs are compiled.
    row_len = max(64, power_of_two(int(ends.max())))
    tokens = np.zeros((len(requests), row_len), np.int32)
    for row, ids in enumerate(prompts):
        tokens[row, : len(ids)] = ids
    scale = [scale_of(r.spec) if r.spec else 0.0 for r in requests]
    eos = -1 if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    attention = pick_implementation(backbone.config, backbone.compute_dtype, row_len)
    arguments = (
        backbone.config,
        attention,
        backbone.weights,
        _stack(requests, backbone.config),
        jnp.asarray(scale, jnp.float32),
        tokens,
        lengths,
        ends,
        jnp.int32(eos),
        jnp.float32(temperature),
        jax.random.key(seed),
    )
    compiled(_complete.lower(*arguments))
    completions = []
    for row, start, end in zip(np.asarray(_complete(*arguments)), lengths, ends, strict=True):
        new = row[start:end].tolist()
        ended = new.index(eos) if eos in new else len(new)
        completions.append(tokenizer.decode(new[:ended], skip_special_tokens=True))
    return completions


@partial(jax.jit, static_argnums=(0, 1))
def _complete(
    config: BackboneConfig,
    attention: str,
    weights: Weights,
    pool: Any,
    scale,
    tokens,
    lengths,
    ends,
    eos,
    temperature,
    key,
):
    """Appends tokens until every row has reached its end or the end-of-sequence token."""
    rows, row_len = tokens.shape
    zeros = jnp.zeros(rows)
    slots = SlotTable(scale, zeros, zeros.astype(jnp.uint32))
    options = ForwardOptions(attention, remat="none", max_sequences=1, adapter_ops=ops_of(pool))
    dtype = compute_dtype(weights)
    low_rank = jax.tree.map(lambda x: x.astype(dtype), pool[LOW_RANK_KIND])
    adapters = pool | {LOW_RANK_KIND: low_rank}

    def next_token(state):
        tokens, lengths, live, key = state
        microbatch = prompts_in_rows(tokens, lengths)
        at_head, _ = head_adapters(options.adapter_ops, adapters, None, microbatch.chunk_slot)
        hidden, _, _ = hidden_states(
            config, weights, adapters, None, microbatch, slots, options, at_head
        )
        last = hidden.reshape(rows, row_len, -1)[jnp.arange(rows), lengths - 1]
        logits = logits_of(weights, last, at_head)
        key, draw = jax.random.split(key)
        sampled = jax.random.categorical(draw, logits / jnp.maximum(temperature, 1e-6))
        token = jnp.where(temperature > 0, sampled, logits.argmax(axis=-1)).astype(jnp.int32)
        written = tokens.at[jnp.arange(rows), lengths].set(token, mode="drop")
        tokens = jnp.where(live[:, None], written, tokens)
        lengths = lengths + live
        return tokens, lengths, live & (token != eos) & (lengths < ends), key

    state = (jnp.asarray(tokens), jnp.asarray(lengths), lengths < ends, key)
    return jax.lax.while_loop(lambda state: state[2].any(), next_token, state)[0]


def _virtual_tokens(request: Request) -> list[int]:
    """The tokens before a prompt that stand for those of its adapter, see `Microbatch.tokens`."""
    number = kind_of(request.spec).virtual_tokens(request.spec) if request.spec else 0
    return [-1 - i for i in range(number)]


def prompts_in_rows(tokens: Int[Array, "rows row_len"], lengths: Int[Array, " rows"]) -> Microbatch:
    """A microbatch without labels, with one sequence and one chunk a row; row i belongs to slot i.

    Args:
      tokens: int32 [rows, row_len], the tokens of each sequence, and padding behind them.
      lengths: int32 [rows], the tokens of each sequence.
    """
    rows, row_len = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(row_len, dtype=jnp.int32), tokens.shape)
    return Microbatch(
        tokens=tokens,
        targets=tokens,
        loss_weight=jnp.zeros(tokens.shape),
        positions=positions,
        segment_ids=jnp.where(positions < lengths[:, None], 0, -1),
        sample_id=jnp.zeros(tokens.shape, jnp.uint32),
        chunk_slot=jnp.arange(rows, dtype=jnp.int32),
    )


def _stack(requests: Sequence[Request], config: BackboneConfig) -> dict[str, Any]:
    """By kind, a pool with the adapter of request i in slot i."""
    trees = [kind_of(r.spec).in_pools(r.adapter) if r.spec else {} for r in requests]

    def pool(name: str) -> Any:
        own = [r.spec for r, tree in zip(requests, trees, strict=True) if name in tree]
        points = sorted({point for spec in own for point in kind_of(spec).targets(spec, config)})
        rank = max((kind_of(spec).rank_in(name, spec) for spec in own), default=1)
        pool = KINDS[name].leaves(config, points, 1, rank)
        specs = jax.tree.map(LeafSpec.of_slot, pool)
        slots = [pad(named_leaves(tree.get(name, {})), specs) for tree in trees]
        axes = jax.tree.map(lambda spec: spec.slot_axis, pool)
        return jax.tree.map(lambda axis, *leaves: jnp.stack(leaves, axis), axes, *slots)

    return {
        name: pool(name) for name in {LOW_RANK_KIND, *(name for tree in trees for name in tree)}
    }
