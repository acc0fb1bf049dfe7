"""Completes prompts, each with its own adapter or with none."""

import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmux.models import (
    Backbone,
    BackboneConfig,
    ForwardOptions,
    Weights,
    cache_bytes,
    free_memory,
    pick_implementation,
)
from jaxmux.models.cached_forward import single_layers
from jaxmux.peft import ops_of
from jaxmux.planner.numbers import size_text

from .batches import Batch, batches, most_places
from .programs import Sequences, Served, read_prompts, write_tokens
from .requests import Prompt, Request, distinct_adapters, read_prompt
from .sampling import Sampling, SamplingForm, SamplingNumbers
from .served_adapters import ServedAdapters, served_adapters
from .text_stream import Piece, TextStream

MAX_BATCH = 64
# Tokens of each sequence that the device writes before the host reads them.
_STEPS = 16
# The part of the free memory that the cache may take. The rest is for working memory.
_CACHE_SHARE = 0.6


class Generator:
    """Completes prompts with one backbone. It holds the backbone's weights layer by layer, so that
    a step reads them where they lie."""

    def __init__(
        self,
        backbone: Backbone,
        tokenizer: Any,
        *,
        max_batch: int = MAX_BATCH,
        keep_backbone: bool = True,
    ):
        """Prepares the weights.

        Args:
          backbone: the backbone, from `load_backbone`.
          tokenizer: the backbone's tokenizer, from `load_tokenizer`.
          max_batch: most sequences that are computed together; fewer if the device has no memory
            for their keys and values. More requests are completed one batch after another.
          keep_backbone: whether `backbone` can be used afterwards. The weights of its layers are
            then copied, or where the device has no memory for that, read from where they are, which
            takes up to three times as long. False moves them.
        """
        self._config: BackboneConfig = backbone.config
        self._dtype = backbone.compute_dtype
        self._tokenizer = tokenizer
        self._max_batch = max_batch
        self._weights = _layer_by_layer(backbone, keep_backbone)
        # The adapters of the last call, and their arrays on the device.
        self._adapters: tuple[list[Any], ServedAdapters | None] = [], None

    def complete(
        self,
        requests: Sequence[Request],
        *,
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
    ) -> list[str]:
        """The completions of requests, in their order. The arguments are those of `stream`."""
        texts = [""] * len(requests)
        given = {"max_new_tokens": max_new_tokens, "sampling": sampling}
        for piece in self.stream(requests, **given):
            texts[piece.request] += piece.text
        return texts

    def stream(
        self,
        requests: Sequence[Request],
        *,
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
    ) -> Iterator[Piece]:
        """Yields the completions of requests piece by piece, while they are written. Pieces of
        different requests come in turns; each request has one last piece.

        Args:
          requests: the prompts with their adapters.
          max_new_tokens: most tokens of a completion. A completion ends earlier before the
            tokenizer's end-of-sequence token, before one of its request's `stops`, or at the end of
            the backbone's context.
          sampling: how tokens are chosen; None takes the most likely ones.

        Raises:
          DataError: a prompt has no tokens, or fills the backbone's context, with its adapter's
            virtual tokens. It is raised before any text is yielded.
        """
        sampling = sampling or Sampling()
        given = self._tokenizer, self._config, max_new_tokens
        prompts = [read_prompt(request, *given) for request in requests]
        if not prompts:
            return
        firsts, slots = distinct_adapters(requests)
        adapters = self._on_device(firsts)
        most = self._most_sequences(prompts)
        for batch in batches(prompts, slots, most):
            yield from self._written(batch, prompts, adapters, sampling)

    def _on_device(self, firsts: Sequence[Request]) -> ServedAdapters:
        """The adapters of these requests; those of the call before if they are the same objects."""
        own = [request.adapter for request in firsts]
        before, held = self._adapters
        if held is None or list(map(id, own)) != list(map(id, before)):
            # The device need not hold both.
            self._adapters, held = ([], None), None
            held = served_adapters(firsts, self._config, self._dtype)
            self._adapters = own, held
        return held

    def _most_sequences(self, prompts: Sequence[Prompt]) -> int:
        if (free := free_memory()) is None:
            return self._max_batch
        each = cache_bytes(self._config, most_places(prompts), self._dtype)
        return max(1, min(self._max_batch, int(_CACHE_SHARE * free / each)))

    def _written(
        self,
        batch: Batch,
        prompts: Sequence[Prompt],
        adapters: ServedAdapters,
        sampling: Sampling,
    ) -> Iterator[Piece]:
        tokens = np.zeros((len(batch.rows), batch.row_len), np.int32)
        lengths, ends, seeds = (np.zeros(len(batch.rows), np.int32) for _ in range(3))
        # The same for all batches, so that programs fit. No token has the id -1.
        stops = np.full((len(batch.rows), max(1, *(len(own.stops) for own in prompts))), -1)
        for row, i in _sequences_of(batch):
            lengths[row], ends[row] = len(prompts[i].tokens), prompts[i].end
            tokens[row, : lengths[row]] = prompts[i].tokens
            stops[row, : len(prompts[i].stops)] = sorted(prompts[i].stops)
            seeds[row] = np.uint32(sampling.seed + i & 0xFFFFFFFF).astype(np.int32)
        numbers = SamplingNumbers(
            jnp.float32(sampling.temperature),
            jnp.float32(sampling.top_p),
            jnp.asarray(seeds.view(np.uint32)),
        )
        served = Served(
            adapters.outside,
            adapters.of_layers,
            adapters.scale,
            jnp.asarray(batch.slots, jnp.int32),
            jnp.asarray(ends),
            jnp.asarray(stops, jnp.int32),
            numbers,
        )
        static = self._config, self._options(batch, adapters), SamplingForm.of(sampling)
        given = *static, batch.places, self._weights, served, tokens, lengths
        yield from self._pieces(batch, prompts, static, served, read_prompts(*given))

    def _options(self, batch: Batch, adapters: ServedAdapters) -> ForwardOptions:
        return ForwardOptions(
            pick_implementation(self._config, self._dtype, batch.row_len),
            # The other implementations are made for many tokens. XLA fuses its own operations, and
            # starts them together.
            grouped_lora="xla",
            norm="xla",
            remat="none",
            max_sequences=1,
            adapter_ops=ops_of(adapters.outside),
            in_order=batch.slots == tuple(range(len(adapters.scale))),
        )

    def _pieces(
        self,
        batch: Batch,
        prompts: Sequence[Prompt],
        static: tuple,
        served: Served,
        sequences: Sequences,
    ) -> Iterator[Piece]:
        """The pieces of a batch whose prompts have been read."""
        live = {}
        for row, i in _sequences_of(batch):
            text = TextStream(self._tokenizer, [t for t in prompts[i].tokens if t >= 0])
            live[row] = _Sequence(i, text, prompts[i].stops)
        left = {row: prompts[i].end - len(prompts[i].tokens) for row, i in _sequences_of(batch)}
        written: jax.Array = sequences.last[None]
        while live:
            # The device writes on while the host turns the tokens before into text.
            following = None
            if max(left[row] for row in live) > len(written):
                following, sequences = write_tokens(
                    *static, _STEPS, self._weights, served, sequences
                )
            yield from _read(np.asarray(written), live, left)
            if following is None:
                break
            written = following


class _Sequence(NamedTuple):
    """A sequence that goes on: the index of its request, its text, and what ends it."""

    request: int
    text: TextStream
    stops: frozenset[int]


def _read(written: np.ndarray, live: dict[int, _Sequence], left: dict[int, int]) -> Iterator[Piece]:
    """The pieces of new tokens [steps, B]; sequences that end are removed from `live`."""
    for row, sequence in list(live.items()):
        new = written[: left[row], row].tolist()
        end = next((n for n, token in enumerate(new) if token in sequence.stops), len(new))
        left[row] -= len(new)
        is_last = end < len(new) or not left[row]
        if is_last:
            del live[row]
        text = sequence.text.add(new[:end], is_last)
        if text or is_last:
            yield Piece(sequence.request, text, is_last)


def _sequences_of(batch: Batch) -> Iterator[tuple[int, int]]:
    return ((row, i) for row, i in enumerate(batch.rows) if i is not None)


def complete(
    backbone: Backbone,
    tokenizer: Any,
    requests: Sequence[Request],
    *,
    max_new_tokens: int = 64,
    sampling: Sampling | None = None,
) -> list[str]:
    """Completes prompts at once, each with its own adapter or none, to show what adapters have
    learnt. For several calls, make a `Generator`.

    Args:
      backbone: the backbone, from `load_backbone`.
      tokenizer: the backbone's tokenizer, from `load_tokenizer`.
      requests: the prompts with their adapters.
      max_new_tokens: most tokens of a completion. A completion ends earlier if the model produces
        the tokenizer's end-of-sequence token, or at the end of the backbone's context.
      sampling: how tokens are chosen; None takes the most likely ones.

    Returns:
      The texts of the completions in the order of `requests`, without prompts and special tokens.

    Raises:
      DataError: a prompt has no tokens, or fills the backbone's context, with its adapter's virtual
        tokens.
    """
    generator = Generator(backbone, tokenizer)
    return generator.complete(requests, max_new_tokens=max_new_tokens, sampling=sampling)


def _layer_by_layer(backbone: Backbone, keep: bool) -> Weights:
    """The weights with "layers" as `single_layers` gives them, or as they are if there is no memory
    for a copy."""
    layers, count = backbone.weights["layers"], backbone.config.num_layers
    leaves, structure = jax.tree.flatten(layers)
    size, free = sum(leaf.nbytes for leaf in leaves), free_memory()
    if keep and free is not None and size > _CACHE_SHARE * free:
        logging.getLogger(__name__).info(
            "generation reads the layers' weights from their stacks, which is slower: a copy of "
            "each layer takes %s, and %s are free",
            size_text(size),
            size_text(free),
        )
        return backbone.weights

    split = jax.jit(lambda leaf: single_layers(leaf, count))
    of_leaves = []
    for leaf in leaves:
        of_leaves.append(jax.block_until_ready(split(leaf)))
        if not keep:
            leaf.delete()
    separate = tuple(jax.tree.unflatten(structure, own) for own in zip(*of_leaves, strict=True))
    return {**backbone.weights, "layers": separate}
