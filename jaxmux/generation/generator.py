"""Completes prompts, each with its own adapter or with none, and turns their tokens into text."""

import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from jaxmux.models import Backbone, BackboneConfig, Weights, cache_bytes, free_memory
from jaxmux.models.cached_forward import single_layers
from jaxmux.peft.leaves import Layout
from jaxmux.planner.numbers import size_text

from .batches import Batch, most_places
from .requests import Prompt, Request, distinct_adapters, read_prompt
from .sampling import Sampling
from .served_adapters import ServedAdapters, served_adapters
from .writing import Writing

MAX_BATCH = 64
# Fraction of the free memory that the cache may take. The rest is for working memory.
_CACHE_SHARE = 0.6
# Maximum number of positions of a cache if the amount of free memory is not known.
_MOST_PLACES = 2**16
# Number of the prompt's tokens that are decoded together with the first new ones, because decoders
# of some tokenizers drop the space before a text.
_CONTEXT = 4
# The character by which decoders replace bytes that are no whole character.
_INCOMPLETE = "\ufffd"


class Piece(NamedTuple):
    """New text of a sequence.

    Attributes:
      request: index of the request.
      text: the text that follows the earlier pieces.
      is_last: whether the sequence has ended.
    """

    request: int
    text: str
    is_last: bool


class TextStream:
    """Turns the tokens of one sequence into text, piece by piece.

    A character may consist of the bytes of several tokens. It is held back until it is complete or
    the sequence ends. All pieces together are the text of all tokens.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]):
        """Begins behind a prompt; `prompt` has its tokens without virtual tokens."""
        self._tokenizer = tokenizer
        self._tokens = list(prompt[-_CONTEXT:])
        # The text of the tokens before `_read` has been returned, and `_shown` characters behind
        # it. Decoding begins at `_start`, so that a long text is not decoded again and again.
        self._start, self._read, self._shown = 0, len(self._tokens), 0

    def add(self, tokens: Sequence[int], is_last: bool) -> str:
        """The text that new tokens complete.

        Args:
          tokens: the new tokens, without a token that ends the sequence.
          is_last: whether no tokens follow; incomplete characters are then replaced.
        """
        self._tokens += tokens
        known, text = self._decoded(self._read), self._decoded(len(self._tokens))
        new = text[len(known) :]
        whole = new if is_last else new.rstrip(_INCOMPLETE)
        piece = whole[self._shown :]
        if whole == new:
            self._start, self._read, self._shown = self._read, len(self._tokens), 0
        else:
            self._shown = len(whole)
        return piece

    def _decoded(self, end: int) -> str:
        # Spaces are not cleaned up, because that could change text that was returned before.
        return self._tokenizer.decode(
            self._tokens[self._start : end],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )


class Generator:
    """Completes prompts with one backbone. If memory allows, the weights of each layer are separate
    arrays, which a step reads without copying."""

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
          tokenizer: the backbone's tokenizer, from `load_tokenizer`, for requests without one.
          max_batch: most sequences that are computed together; fewer if the device has no memory
            for their keys and values. When a completion ends, the next request takes its row.
          keep_backbone: whether `backbone` can be used afterwards. True copies the weights of its
            layers; if the device has no memory for a copy, completions read the weights from their
            stacks, which takes up to three times as long. False moves the weights.
        """
        self._config: BackboneConfig = backbone.config
        self._dtype = backbone.compute_dtype
        self._tokenizer = tokenizer
        self._max_batch = max_batch
        self._weights = _layer_by_layer(backbone, keep_backbone)
        # The adapters of the last call, and their arrays on the device if there was a call.
        self._adapters: tuple[list[Any], tuple[ServedAdapters, Layout] | None] = [], None

    def complete(
        self,
        requests: Sequence[Request],
        *,
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
    ) -> list[str]:
        """The completions of requests, in their order; arguments as for `stream`."""
        texts = [""] * len(requests)
        for piece in self.stream(requests, max_new_tokens=max_new_tokens, sampling=sampling):
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
        different requests alternate; each request has one last piece.

        Args:
          max_new_tokens: most tokens of a completion. A completion ends earlier before the
            tokenizer's end-of-sequence token, before one of its request's `stops`, or at the end of
            the backbone's context.
          sampling: how tokens are chosen; None takes the most likely ones.

        Raises:
          DataError: a prompt has no tokens, has a token that the backbone does not know, or fills
            the backbone's context together with its adapter's virtual tokens. It is raised before
            any text is yielded.
        """
        sampling = sampling or Sampling()
        prompts = [
            read_prompt(
                request,
                tokenizer=self._tokenizer,
                config=self._config,
                max_new_tokens=max_new_tokens,
            )
            for request in requests
        ]
        if not prompts:
            return
        firsts, slots = distinct_adapters(requests)
        served, layout = self._on_device(firsts)
        batch = Batch(prompts, slots, self._most_sequences(prompts))
        writing = Writing(
            config=self._config,
            dtype=self._dtype,
            weights=self._weights,
            adapters=served,
            layout=layout,
            prompts=prompts,
            batch=batch,
            sampling=sampling,
        )
        texts: dict[int, TextStream] = {}
        for new in writing.tokens():
            if new.request not in texts:
                prompt = prompts[new.request]
                text_tokens = [token for token in prompt.tokens if token >= 0]
                texts[new.request] = TextStream(prompt.tokenizer, text_tokens)
            text = texts[new.request].add(new.tokens, new.is_last)
            if new.is_last:
                del texts[new.request]
            if text or new.is_last:
                yield Piece(new.request, text, new.is_last)

    def _on_device(self, firsts: Sequence[Request]) -> tuple[ServedAdapters, Layout]:
        """The adapters of these requests; not copied again if the last call had the same
        objects."""
        adapters = [request.adapter for request in firsts]
        before, held = self._adapters
        if held is None or list(map(id, adapters)) != list(map(id, before)):
            # The old adapters are dropped first, because the device may not have room for both.
            self._adapters, held = ([], None), None
            held = served_adapters(firsts, self._config, self._dtype)
            self._adapters = adapters, held
        return held

    def _most_sequences(self, prompts: Sequence[Prompt]) -> int:
        places = most_places(prompts)
        if (free := free_memory()) is None:
            most = _MOST_PLACES // places
        else:
            most = int(_CACHE_SHARE * free / cache_bytes(self._config, places, self._dtype))
        return max(1, min(self._max_batch, most))


def complete(
    backbone: Backbone,
    tokenizer: Any,
    requests: Sequence[Request],
    *,
    max_new_tokens: int = 64,
    sampling: Sampling | None = None,
) -> list[str]:
    """Completes prompts, each with its own adapter or none, to show what adapters have learnt. For
    several calls, make a `Generator`.

    Args:
      backbone: the backbone, from `load_backbone`.
      tokenizer: the backbone's tokenizer, from `load_tokenizer`.
      max_new_tokens, sampling: as for `Generator.stream`.

    Returns:
      The texts of the completions in the order of `requests`, without prompts and special tokens.

    Raises:
      DataError: as for `Generator.stream`.
    """
    generator = Generator(backbone, tokenizer)
    return generator.complete(requests, max_new_tokens=max_new_tokens, sampling=sampling)


def _layer_by_layer(backbone: Backbone, keep: bool) -> Weights:
    """The backbone's weights with separate arrays for each layer, from `single_layers`, or
    unchanged if there is no memory for a copy."""
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
    separate = tuple(
        jax.tree.unflatten(structure, of_layer) for of_layer in zip(*of_leaves, strict=True)
    )
    return {**backbone.weights, "layers": separate}
