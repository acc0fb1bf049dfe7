"""Chooses the sequences that are computed together, and the row of the batch that each one gets."""

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from jaxmux.planner.numbers import power_of_two

from .requests import Prompt

# Least and most tokens of prompts, with padding, that one pass through the layers reads. With fewer
# tokens, reading the weights takes longer than multiplying by them; more tokens need too much
# memory.
_LEAST_READ, _MOST_READ = 2**8, 2**16
_LEAST_LENGTH = 16
# Free rows are filled when they are this fraction of the batch.
_FILLED_SHARE = 1 / 8


class Filling(NamedTuple):
    """Rows that get their next sequences in one pass.

    Attributes:
      rows: the row of each sequence.
      slots: the slot of each sequence.
      group: number of rows that the program reads, at least the number of sequences.
      row_len: number of tokens that the program reads in each row.
    """

    rows: tuple[int, ...]
    slots: tuple[int, ...]
    group: int
    row_len: int


class Batch:
    """The rows of a batch, each with the sequence that is written in it, and the sequences that
    wait for a row.

    When a sequence ends, its row becomes free for the next one (continuous batching: Orca, Yu et
    al. 2022; vLLM, Kwon et al. 2023). Rows are divided into chunks of equal size, and a chunk
    belongs to one slot, because its rows are multiplied by the same adapter. When no sequence of a
    chunk continues and none waits for the chunk's slot, the chunk passes to the slot for which most
    sequences wait.

    The longest sequences come first, so that later ones need a cache with fewer positions. Prompts
    are read in groups of one size, and their lengths are rounded up to powers of two. This way, the
    number of compiled programs stays small, and the shapes with which a prompt is read do not
    depend on other prompts.

    Attributes:
      requests: the index of the request of each row; None for a free row.
      slots: the slot of each chunk.
    """

    def __init__(self, prompts: Sequence[Prompt], slots: Sequence[int], max_batch: int):
        """Makes free rows.

        Args:
          prompts: the tokens of each request, at least one.
          slots: the slot of each request's adapter; there are at least two slots.
          max_batch: most sequences that are written at the same time.
        """
        self._prompts, self._most = prompts, max_batch
        counts = Counter(sorted(slots))
        if len(prompts) <= max_batch:
            if len(prompts) == 1:
                # In a batch of one row, XLA splits products with the weights into multiplications
                # and sums, and writes the products to memory. So an empty row is added. It has
                # another slot, because a GPU would run more programs for the low-rank products of
                # two rows that share a slot.
                counts[_another(slots[0])] = 0
            rows_of_chunk = _rows_of_chunk(list(counts.values()))
            chunks_of_slot = {
                slot: max(1, -(-count // rows_of_chunk)) for slot, count in counts.items()
            }
            self.slots = [
                slot for slot in sorted(chunks_of_slot) for _ in range(chunks_of_slot[slot])
            ]
        else:
            rows_of_chunk = max(1, max_batch // len(counts))
            chunks = max(2, max_batch) // rows_of_chunk
            self.slots = [list(counts)[i % len(counts)] for i in range(chunks)]
        self.requests: list[int | None] = [None] * (len(self.slots) * rows_of_chunk)
        self._rows_of_chunk = rows_of_chunk
        self._least_free = max(1, int(_FILLED_SHARE * len(self.requests)))
        self._waiting: dict[int, deque[int]] = {slot: deque() for slot in counts}
        for i in sorted(range(len(prompts)), key=lambda i: (-prompts[i].end, i)):
            self._waiting[slots[i]].append(i)

    @property
    def live(self) -> int:
        """Number of sequences that continue."""
        return sum(i is not None for i in self.requests)

    @property
    def waiting(self) -> int:
        """Number of sequences that wait for a row."""
        return sum(map(len, self._waiting.values()))

    @property
    def places(self) -> int:
        """Largest number of tokens, with padding, of the sequences that continue or wait."""
        heads = [queue[0] for queue in self._waiting.values() if queue]
        return most_places([self._prompts[i] for i in [*heads, *self.requests] if i is not None])

    @property
    def fewest(self) -> int:
        """The number of continuing sequences at which `fill` gives free rows to waiting ones."""
        return max(0, self.live - self._enough + len(self._next()[0])) if self.waiting else 0

    def free(self, row: int) -> None:
        self.requests[row] = None

    def fill(self) -> list[Filling]:
        """Gives free rows to waiting sequences if there are enough such rows. The rows of a filling
        have prompts of about the same length."""
        plan, slots = self._next()
        if not plan or (self.live and len(plan) < self._enough):
            return []
        self.slots = slots
        by_length: dict[int, list[int]] = {}
        for row, slot in plan:
            self.requests[row] = i = self._waiting[slot].popleft()
            # The last token of a prompt is not read, because the writing step starts from it.
            row_len = power_of_two(max(_LEAST_LENGTH, len(self._prompts[i].tokens) - 1))
            by_length.setdefault(row_len, []).append(row)
        fillings = []
        for row_len, rows in sorted(by_length.items(), reverse=True):
            group = max(self._least_free, min(len(self.requests), _LEAST_READ // row_len))
            group = max(1, min(power_of_two(group), _MOST_READ // row_len))
            for start in range(0, len(rows), group):
                filled_rows = tuple(rows[start : start + group])
                row_slots = tuple(slots[row // self._rows_of_chunk] for row in filled_rows)
                fillings.append(Filling(filled_rows, row_slots, group, row_len))
        return fillings

    @property
    def _enough(self) -> int:
        """The least number of free rows that are filled."""
        return min(self._least_free, self.waiting)

    def _next(self) -> tuple[list[tuple[int, int]], list[int]]:
        """The free rows that waiting sequences can get, each with its slot, and the slot that every
        chunk then has."""
        left = {slot: len(queue) for slot, queue in self._waiting.items()}
        plan, slots, most = [], list(self.slots), self._most - self.live
        for chunk in range(len(slots)):
            rows = range(chunk * self._rows_of_chunk, (chunk + 1) * self._rows_of_chunk)
            free = [row for row in rows if self.requests[row] is None]
            if len(free) == len(rows) and not left.get(slots[chunk]) and any(left.values()):
                slots[chunk] = max(left, key=lambda slot: left[slot])
            slot = slots[chunk]
            taken = free[: min(left.get(slot, 0), most - len(plan))]
            plan += [(row, slot) for row in taken]
            if taken:
                left[slot] -= len(taken)
        return plan, slots


def most_places(prompts: Sequence[Prompt]) -> int:
    """Largest number of tokens of a sequence, with padding."""
    return _rounded(max([_LEAST_LENGTH, *(prompt.end for prompt in prompts)]))


def _another(slot: int) -> int:
    return slot - 1 if slot else 1


def _rows_of_chunk(counts: Sequence[int]) -> int:
    """The number of rows per chunk for which the total of rows and chunks is least. Both take
    memory: the factors of a chunk are about as large as the cache of a row."""

    def cost(rows: int) -> int:
        chunks = sum(-(-count // rows) for count in counts)
        return chunks * (rows + 1)

    return min(range(1, max(counts) + 1), key=cost)


def _rounded(length: int) -> int:
    """Rounds up to one of four lengths between two powers of two."""
    step = max(_LEAST_LENGTH, power_of_two(length) // 8)
    return -(-length // step) * step
