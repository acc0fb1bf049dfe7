"""Divides tasks into groups that are packed together and take turns (LoRAFusion 5.2)."""

from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import PlanningError


def pair_head_with_tail(
    lengths: Mapping[int, Sequence[int]], groups: int
) -> tuple[tuple[int, ...], ...]:
    """Divides tasks into groups of similar load, each with short samples beside long ones.

    The tasks are sorted by the mean length of their samples and paired: the shortest with the
    longest, the second shortest with the second longest, and so on. The pairs are then added to
    groups in descending order of tokens, each to the group with the fewest tokens among those with
    the fewest pairs.

    Args:
      lengths: by slot, lengths in tokens of the samples of a global batch of the task.
      groups: number of groups. Two groups keep the bubble lemma without no-ops if each group's
        global batches take at least S - 1 microbatches.

    Returns:
      The slots of each group, ascending.

    Raises:
      PlanningError: a task has no samples, or there are fewer tasks than groups.
    """
    for slot, sizes in lengths.items():
        if not len(sizes):
            raise PlanningError(f"slot {slot}: no samples, so their mean length is unknown")
    if not 1 <= groups <= len(lengths):
        raise PlanningError(f"{len(lengths)} tasks cannot be divided into {groups} groups")
    tokens = {slot: int(np.sum(sizes)) for slot, sizes in lengths.items()}
    pairs = _pairs(sorted(lengths, key=lambda slot: (np.mean(lengths[slot]), slot)), groups)
    members: list[list[int]] = [[] for _ in range(groups)]
    # For each group, its number of pairs and of tokens.
    held = [(0, 0)] * groups
    for pair in sorted(pairs, key=lambda pair: -sum(tokens[slot] for slot in pair)):
        lightest = held.index(min(held))
        members[lightest] += pair
        pair_count, token_count = held[lightest]
        held[lightest] = (pair_count + 1, token_count + sum(tokens[slot] for slot in pair))
    return tuple(tuple(sorted(group)) for group in members)


def _pairs(ascending: list[int], groups: int) -> list[list[int]]:
    """Pairs from both ends; the longest tasks stay single if there are less than two per group."""
    singles = max(0, 2 * groups - len(ascending))
    paired, rest = ascending[: len(ascending) - singles], ascending[len(ascending) - singles :]
    half = len(paired) // 2
    pairs = [list(pair) for pair in zip(paired[:half], reversed(paired[-half:]), strict=True)]
    middle = [[paired[half]]] if len(paired) % 2 else []
    return pairs + middle + [[slot] for slot in rest]


def take_turns[Batch](
    rounds: Sequence[Mapping[int, Batch]], groups: Sequence[Sequence[int]]
) -> list[dict[int, Batch]]:
    """Returns the turns of the groups: in each round, one group's global batches after another's.

    The turns of a group are separated by those of all other groups, which is the distance that the
    bubble lemma requires (see `bubble_lemma`).

    Args:
      rounds: by slot, the task's global batch of the round; a task that has ended is left out.
      groups: slots of each group.

    Returns:
      For each turn, by slot, the global batches of the group's tasks. Turns without any are left
      out.
    """
    turns = [
        {slot: batches[slot] for slot in group if slot in batches}
        for batches in rounds
        for group in groups
    ]
    return [turn for turn in turns if turn]
