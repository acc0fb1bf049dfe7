"""Groups tasks that are packed together; the groups take turns (LoRAFusion 5.2)."""

from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import PlanningError


def pair_head_with_tail(
    lengths: Mapping[int, Sequence[int]], groups: int
) -> tuple[tuple[int, ...], ...]:
    """Groups of tasks with about the same load, short samples beside long ones.

    Tasks are sorted by the mean length of their samples and paired, shortest with longest, second
    shortest with second longest, and so on. Each pair goes, the heaviest first, to the group that
    is least loaded among those with the fewest pairs.

    Args:
      lengths: by slot, lengths in tokens of samples of the task: of a global batch, for its tokens
        are the task's load.
      groups: number of groups. Two suffice for the bubble lemma where a group's global batch takes
        at least S - 1 microbatches.

    Returns:
      The slots of each group, ascending.

    Raises:
      PlanningError: a task has no samples, or there are fewer tasks than groups.
    """
    for slot, sizes in lengths.items():
        if not len(sizes):
            raise PlanningError(f"slot {slot}: no samples, expected some to tell its mean length")
    if not 1 <= groups <= len(lengths):
        raise PlanningError(f"{len(lengths)} tasks cannot be divided into {groups} groups")
    load = {slot: int(np.sum(sizes)) for slot, sizes in lengths.items()}
    pairs = _pairs(sorted(lengths, key=lambda slot: (np.mean(lengths[slot]), slot)), groups)
    members: list[list[int]] = [[] for _ in range(groups)]
    held = [(0, 0)] * groups
    for pair in sorted(pairs, key=lambda pair: -sum(load[slot] for slot in pair)):
        lightest = held.index(min(held))
        members[lightest] += pair
        count, tokens = held[lightest]
        held[lightest] = (count + 1, tokens + sum(load[slot] for slot in pair))
    return tuple(tuple(sorted(group)) for group in members)


def _pairs(ascending: list[int], groups: int) -> list[list[int]]:
    """Head with tail; with fewer than two tasks a group, the longest ones stay single."""
    singles = max(0, 2 * groups - len(ascending))
    paired, rest = ascending[: len(ascending) - singles], ascending[len(ascending) - singles :]
    half = len(paired) // 2
    pairs = [list(pair) for pair in zip(paired[:half], reversed(paired[-half:]), strict=True)]
    middle = [[paired[half]]] if len(paired) % 2 else []
    return (pairs if half else []) + middle + [[slot] for slot in rest]


def take_turns[Batch](
    rounds: Sequence[Mapping[int, Batch]], groups: Sequence[Sequence[int]]
) -> list[dict[int, Batch]]:
    """The global batches in the order of execution: of each round, one group after another.

    A group's batches are then separated by those of all other groups, which is the distance that
    the bubble lemma asks for.

    Args:
      rounds: by slot, the task's global batch of the round; a task that has ended is left out.
      groups: slots of each group.
    """
    turns = [
        {slot: batches[slot] for slot in group if slot in batches}
        for batches in rounds
        for group in groups
    ]
    return [turn for turn in turns if turn]
