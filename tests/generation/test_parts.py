"""The parts of generation that need no backbone: rows of batches, draws, and text of tokens."""

import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxmux.generation import Sampling
from jaxmux.generation.batches import Batch
from jaxmux.generation.generator import TextStream
from jaxmux.generation.requests import Prompt
from jaxmux.generation.sampling import SamplingForm, SamplingNumbers, next_tokens


@pytest.mark.parametrize(
    ("slots", "max_batch"),
    [
        ([0], 64),
        ([1], 1),
        ([0] * 7, 64),
        ([0] * 7, 1),
        ([0, 1, 2] * 15, 4),
        ([2, 0, 2, 2, 1, 2, 2, 2], 64),
        ([0] * 90 + [1] * 5 + [2], 16),
        (list(range(40)), 32),
    ],
)
def test_every_request_gets_a_row_in_a_chunk_of_its_slot(slots, max_batch):
    """Sequences end in any order; their rows are given to others."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 90, len(slots)).tolist()
    prompts = [Prompt([1] * length, length + 9) for length in lengths]
    batch = Batch(prompts, slots, max_batch)
    chunk, rest = divmod(len(batch.requests), len(batch.slots))
    assert len(batch.requests) >= 2 and not rest
    written, shapes, places = [], set(), batch.places
    while True:
        for filling in batch.fill():
            assert len(filling.rows) <= filling.group
            shapes.add((filling.group, filling.row_len))
            for row, slot in zip(filling.rows, filling.slots, strict=True):
                i = batch.requests[row]
                assert slot == slots[i] and len(prompts[i].tokens) - 1 <= filling.row_len
                written.append(i)
        live = {row: i for row, i in enumerate(batch.requests) if i is not None}
        if not live:
            break
        assert len(live) <= max_batch and batch.fewest < len(live)
        assert batch.waiting == len(slots) - len(written)
        assert all(batch.slots[row // chunk] == slots[i] for row, i in live.items())
        assert max(prompts[i].end for i in live.values()) <= batch.places <= places
        places = batch.places
        ended = rng.permutation(list(live))[: len(live) - batch.fewest]
        for row in ended:
            batch.free(row)
    assert sorted(written) == list(range(len(slots))) and not batch.waiting
    # A shape for each power of two among the lengths.
    assert len(shapes) <= 4


def test_sequences_of_eight_adapters_have_eight_chunks():
    batch = Batch([Prompt([1], 5)] * 64, sorted([*range(8)] * 8), 64)
    assert batch.slots == list(range(8)) and len(batch.requests) == 64


def test_rows_are_filled_when_an_eighth_of_them_is_free():
    batch = Batch([Prompt([1] * 20, 30)] * 99, [0] * 99, 64)
    assert sum(len(filling.rows) for filling in batch.fill()) == 64
    for row in range(7):
        batch.free(row)
    assert batch.fill() == [] and batch.fewest == 64 - 8
    batch.free(7)
    (filling,) = batch.fill()
    assert filling.rows == tuple(range(8))


@pytest.mark.long
@pytest.mark.parametrize(
    "sampling", [Sampling(0.8, top_p=0.7), Sampling(1.3, top_k=3), Sampling(1.0, 0.6, 4)]
)
def test_draws_have_the_probabilities_of_the_tokens_that_are_kept(sampling):
    logits = np.float32([2.0, 1.5, 1.0, 0.5, 0.0, -3.0])
    p = np.exp(logits.astype(np.float64) / sampling.temperature)
    p[sampling.top_k or len(p) :] = 0
    p /= p.sum()
    p[np.cumsum(p) - p >= sampling.top_p] = 0
    p /= p.sum()
    draws = 4000
    numbers = SamplingNumbers(
        jnp.float32(sampling.temperature),
        jnp.float32(sampling.top_p),
        jnp.arange(draws, dtype=jnp.uint32),
    )
    given = jnp.tile(logits, (draws, 1)), jnp.full(draws, 7, jnp.int32)
    tokens = np.asarray(next_tokens(SamplingForm.of(sampling), numbers, *given))
    shares = np.bincount(tokens, minlength=len(p)) / draws
    assert (shares[p == 0] == 0).all() and 1 < (p > 0).sum() < len(p)
    np.testing.assert_allclose(shares, p, atol=4 * np.sqrt(0.25 / draws))


def test_characters_of_several_tokens_come_whole():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    text = " né 🍎 quince, 漢字"
    ids = tokenizer(text)["input_ids"]
    stream = TextStream(tokenizer, tokenizer("wörd")["input_ids"])
    pieces = [stream.add([i], False) for i in ids]
    assert "".join(pieces) == text and [p for p in pieces if p] == list(text)
    # The end of a sequence shows what is left of a character.
    assert stream.add(ids[:3], False) == " n" and stream.add([], True) == "\ufffd"
