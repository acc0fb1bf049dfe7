"""The loop over a batch: prompts are read into free rows, and tokens are written, until no sequence
is left."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmux.models import BackboneConfig, ForwardOptions, Weights, pick_implementation
from jaxmux.peft import ops_of
from jaxmux.peft.leaves import Layout

from .batches import Batch, Filling
from .programs import (
    Choices,
    Served,
    begin_sequences,
    no_sequences,
    read_prompts,
    with_places,
    write_tokens,
)
from .requests import Prompt
from .sampling import Sampling, SamplingForm, SamplingNumbers
from .served_adapters import ServedAdapters, adapters_of_chunks

# Number of tokens of each sequence that the device writes before the host reads them.
_STEPS = 16
# The cache is replaced by a smaller one when sequences need at most this fraction of its positions.
# Each size needs another compiled program.
_SMALLER = 1 / 4


class NewTokens(NamedTuple):
    """New tokens of a sequence.

    Attributes:
      request: index of the request.
      tokens: the tokens, without a token that ends the sequence.
      is_last: whether the sequence has ended.
    """

    request: int
    tokens: list[int]
    is_last: bool


class Writing:
    """Generates the sequences of a batch, token by token."""

    def __init__(
        self,
        config: BackboneConfig,
        dtype: jnp.dtype,
        weights: Weights,
        adapters: ServedAdapters,
        layout: Layout,
        prompts: Sequence[Prompt],
        batch: Batch,
        sampling: Sampling,
    ):
        """Makes the cache.

        Args:
          dtype: the compute dtype.
          adapters: the adapters of all slots.
          layout: the axes of the adapters' arrays.
          prompts: the tokens of each request.
          batch: the rows; all are free.
        """
        self._config, self._dtype, self._weights = config, dtype, weights
        self._adapters, self._layout = adapters, layout
        self._prompts, self._batch = prompts, batch
        self._sampling = sampling
        rows = len(batch.requests)
        self._places = batch.places
        self._sequences = no_sequences(config, rows, self._places, dtype)
        # For the sequence in each row: the position behind its last token, its seed, and the number
        # of tokens that the host has not read.
        self._ends, self._left = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        self._seeds = np.zeros(rows, np.uint32)
        # The tokens that end the sequence in each row. No token has the id -1.
        self._stops = np.full(
            (rows, max(1, *(len(prompt.stops) for prompt in prompts))), -1, np.int32
        )
        # The slots of the chunks, in the order of the adapters in `_served`.
        self._slots: list[int] | None = None
        self._served: Served
        self._choices: Choices

    def tokens(self) -> Iterator[NewTokens]:
        """Yields the new tokens of all sequences, piece by piece."""
        self._fill()
        # The first token is written alone, so that it comes quickly.
        current: jax.Array | None = self._write(1)
        steps = 1
        while current is not None:
            following = None
            # The device continues while the host reads the last tokens. If sequences wait, the host
            # must read first, to know which rows are free.
            if not self._batch.waiting and self._left.max() > steps:
                following = self._write()
            read = self._read(np.asarray(current))
            if following is None and (self._batch.live or self._batch.waiting):
                self._fill()
                following = self._write()
            yield from read
            current, steps = following, _STEPS

    def _fill(self) -> None:
        fillings = self._batch.fill()
        for filling in fillings:
            self._read_prompts(filling)
        if not fillings:
            return
        places = self._batch.places
        if self._batch.waiting and places <= _SMALLER * self._places:
            self._sequences = with_places(self._sequences, places)
            self._places = places
        if self._batch.slots != self._slots:
            self._slots = list(self._batch.slots)
            self._served = self._of_chunks(self._slots)
        sampling = SamplingNumbers(
            jnp.float32(self._sampling.temperature),
            jnp.float32(self._sampling.top_p),
            jnp.asarray(self._seeds),
        )
        self._choices = Choices(sampling, jnp.asarray(self._ends), jnp.asarray(self._stops))

    def _read_prompts(self, filling: Filling) -> None:
        tokens = np.zeros((filling.group, filling.row_len), np.int32)
        lengths, last, slots = (np.zeros(filling.group, np.int32) for _ in range(3))
        # Numbers behind the last row of the batch, for the unused rows of the group.
        rows = len(self._ends) + np.arange(filling.group, dtype=np.int32)
        for i, (row, slot) in enumerate(zip(filling.rows, filling.slots, strict=True)):
            request = self._batch.requests[row]
            prompt = self._prompts[request]
            lengths[i] = len(prompt.tokens) - 1
            tokens[i, : lengths[i]] = prompt.tokens[:-1]
            last[i], slots[i], rows[i] = prompt.tokens[-1], slot, row
            self._ends[row], self._left[row] = prompt.end, prompt.end - len(prompt.tokens)
            self._seeds[row] = self._sampling.seed + request & 0xFFFFFFFF
            self._stops[row] = -1
            self._stops[row, : len(prompt.stops)] = sorted(prompt.stops)
        attention = pick_implementation(self._config, self._dtype, filling.row_len)
        served = Served(*self._adapters, jnp.asarray(slots))
        options = self._options(attention, in_order=False)
        cache = read_prompts(self._config, options, self._weights, served, tokens, lengths)
        self._sequences = begin_sequences(self._sequences, cache, rows, last, lengths)

    def _options(self, attention: str, in_order: bool) -> ForwardOptions:
        return ForwardOptions(
            attention,
            # The other implementations are made for many tokens. XLA fuses its own operations, so
            # fewer programs are started.
            grouped_lora="xla",
            norm="xla",
            remat="none",
            max_sequences=1,
            adapter_ops=ops_of(self._adapters.outside),
            in_order=in_order,
        )

    def _of_chunks(self, slots: Sequence[int]) -> Served:
        """The adapters of the chunks, in the order of the chunks."""
        order = jnp.arange(len(slots), dtype=jnp.int32)
        adapters = self._adapters
        if list(slots) != list(range(len(adapters.scale))):
            adapters = adapters_of_chunks(self._layout, adapters, jnp.asarray(slots, jnp.int32))
        return Served(*adapters, order)

    def _write(self, steps: int = _STEPS) -> jax.Array:
        written, self._sequences = write_tokens(
            self._config,
            self._options("xla", in_order=True),
            SamplingForm.of(self._sampling),
            _STEPS,
            self._weights,
            self._served,
            self._sequences,
            self._choices,
            np.int32(steps),
            np.int32(self._batch.fewest),
        )
        return written

    def _read(self, written: np.ndarray) -> list[NewTokens]:
        """The new tokens [steps, B] by request. Rows of sequences that have ended become free."""
        pieces = []
        for row, request in enumerate(self._batch.requests):
            if request is None:
                continue
            new = [token for token in written[:, row].tolist() if token >= 0][: self._left[row]]
            stops = self._prompts[request].stops
            end = next((n for n, token in enumerate(new) if token in stops), len(new))
            self._left[row] -= len(new)
            is_last = end < len(new) or not self._left[row]
            if is_last:
                self._left[row] = 0
                self._batch.free(row)
            pieces.append(NewTokens(request, new[:end], is_last))
        return pieces
