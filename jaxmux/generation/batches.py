"""Which sequences are computed together, and in which row of the batch each lies."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from jaxmux.planner.numbers import power_of_two

from .requests import Prompt

# Most tokens of the prompts of a batch, with padding. They pass the layers at once.
_MOST_PROMPT_TOKENS = 2**16
_LEAST_LENGTH = 16


class Batch(NamedTuple):
    """Sequences that are computed together, a row each.

    Attributes:
      rows: the index of each row's request; None for a row without a sequence.
      slots: the slot of each chunk. The rows are divided into chunks of equal size.
      row_len: tokens of the longest prompt, with padding.
      places: most tokens of a sequence, with padding.
    """

    rows: tuple[int | None, ...]
    slots: tuple[int, ...]
    row_len: int
    places: int


def batches(prompts: Sequence[Prompt], slots: Sequence[int], max_batch: int) -> list[Batch]:
    """Divides sequences into batches of about the same size.

    Those of one slot, and of about the same length, are neighbours. Lengths are rounded up, so that
    few programs are compiled.

    Args:
      prompts: the tokens of each request.
      slots: the slot of each request's adapter; there are at least two slots.
      max_batch: most sequences of a batch.
    """
    longest = power_of_two(max(_LEAST_LENGTH, *(len(prompt.tokens) for prompt in prompts)))
    limit = max(1, min(max_batch, _MOST_PROMPT_TOKENS // longest))
    order = sorted(range(len(prompts)), key=lambda i: (slots[i], len(prompts[i].tokens), i))
    number = -(-len(order) // limit)
    cuts = [len(order) * i // number for i in range(number + 1)]
    return [
        _batch(order[start:end], prompts, slots) for start, end in zip(cuts, cuts[1:], strict=False)
    ]


def most_places(prompts: Sequence[Prompt]) -> int:
    """Most tokens of a sequence, with padding."""
    return _rounded(max(_LEAST_LENGTH, *(prompt.end for prompt in prompts)))


def _batch(own: Sequence[int], prompts: Sequence[Prompt], slots: Sequence[int]) -> Batch:
    counts = Counter(slots[i] for i in own)
    if len(own) == 1:
        # With a single row, XLA takes products with the weights apart into multiplications and sums
        # of their own, which write the products to memory. An empty row has another slot, because
        # the low-rank products of two rows of one slot are more programs on a GPU.
        counts[_another(slots[own[0]])] = 0
    chunk = _rows_of_chunk(list(counts.values()))
    rows: list[int | None] = []
    owners: list[int] = []
    for slot, count in counts.items():
        chunks = max(1, -(-count // chunk))
        rows += [i for i in own if slots[i] == slot]
        rows += [None] * (chunks * chunk - count)
        owners += [slot] * chunks
    members = [prompts[i] for i in own]
    row_len = power_of_two(max(_LEAST_LENGTH, *(len(prompt.tokens) for prompt in members)))
    places = max(row_len, most_places(members))
    return Batch(tuple(rows), tuple(owners), row_len, places)


def _another(slot: int) -> int:
    """A different slot; there are at least two."""
    return slot - 1 if slot else 1


def _rows_of_chunk(counts: Sequence[int]) -> int:
    """The rows of a chunk with which the fewest rows and chunks together are computed. The factors
    of a chunk are about as large as the cache of a row."""

    def cost(rows: int) -> int:
        chunks = sum(-(-count // rows) for count in counts)
        return chunks * (rows + 1)

    return min(range(1, max(counts) + 1), key=cost)


def _rounded(length: int) -> int:
    """Rounded up to one of four lengths in each octave."""
    step = max(_LEAST_LENGTH, power_of_two(length) // 8)
    return -(-length // step) * step
