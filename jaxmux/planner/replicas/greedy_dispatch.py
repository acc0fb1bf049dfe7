"""Divides sequences among replicas greedily: first among configurations, then among replicas."""

import numpy as np

from .cost_table import CostTable

# Limits on the number of moves between configurations and of exchanges between replicas. Both
# loops end by themselves long before.
_MOST_MOVES = 2000
_MOST_EXCHANGES = 300
# The slowest replica exchanges sequences only with this many of the fastest replicas of each
# configuration.
_PARTNERS = 6


def dispatch_greedily(costs: CostTable, number: np.ndarray, demand: np.ndarray) -> np.ndarray:
    """Divides sequences among configurations: length-based dispatch (LobRA 3), then improvements.

    At first each length bin is served by the configuration that takes the fewest device seconds for
    it. Then sequences move from the slowest configuration to others, as many at a time as make the
    two equally fast. The sequences that move are those whose time on the new configuration is the
    least relative to their time on the old one.

    Args:
      costs: costs of the S deployed configurations.
      number: int64 [S], replicas of each configuration.
      demand: [R], number of sequences in each bin.

    Returns:
      int64 [S, R], the sequences of each bin that each configuration serves.
    """
    share = costs.per_sequence / number[:, None]
    counts = np.zeros(share.shape, np.int64)
    cheapest = (costs.devices[:, None] * costs.per_sequence).argmin(axis=0)
    counts[cheapest, range(len(demand))] = demand
    for _ in range(_MOST_MOVES):
        busy = costs.constant + costs.seconds_of(counts) / number
        slowest = int(busy.argmax())
        room = busy[slowest] - busy[:, None]
        relief = share[slowest]
        helps = (counts[slowest] > 0) & (share < room)
        if not helps.any():
            break
        price = np.where(helps, share, np.inf) / np.where(np.isfinite(relief), relief, 1)
        to, length_bin = np.unravel_index(price.argmin(), price.shape)
        even = int(room[to, 0] / (share[to, length_bin] + relief[length_bin]))
        moved = min(max(1, even), counts[slowest, length_bin])
        counts[slowest, length_bin] -= moved
        counts[to, length_bin] += moved
    return counts


def split_evenly(counts: np.ndarray, per_sequence: np.ndarray, replicas: int) -> np.ndarray:
    """Divides the sequences of a configuration evenly among its replicas.

    The remainder of each bin goes to the replicas that are least busy so far, the bin with the
    longest sequences first (longest processing time first).

    Args:
      counts: int64 [R], sequences of each bin.
      per_sequence: float64 [R], seconds of a sequence of each bin.
      replicas: number of replicas.

    Returns:
      int64 [replicas, R].
    """
    parts = np.tile(counts // replicas, (replicas, 1))
    seconds = np.where(counts > 0, per_sequence, 0)
    busy = parts @ seconds
    for length_bin in np.argsort(-seconds, kind="stable"):
        takers = np.argsort(busy, kind="stable")[: counts[length_bin] % replicas]
        parts[takers, length_bin] += 1
        busy[takers] += seconds[length_bin]
    return parts


def exchange_sequences(
    costs: CostTable, number: np.ndarray, counts: np.ndarray, enough: float = 0.0
) -> tuple[np.ndarray, float]:
    """Shortens the round by exchanging single sequences between the slowest replica and others.

    In each exchange the slowest replica gives a sequence and takes a quicker one or none. Sequences
    are whole and a replica has few long ones, so an even division leaves replicas uneven; exchanges
    between two replicas nearly always correct that.

    Args:
      costs: costs of the S deployed configurations.
      number: int64 [S], replicas of each configuration; K together.
      counts: int64 [K, R], sequences of each bin that each replica serves, in the order of `costs`.
      enough: seconds of the slowest replica at which to stop.

    Returns:
      The new counts, int64 [K, R], and the seconds of the slowest replica.
    """
    held = counts.copy()
    replicas = np.split(np.arange(len(held)), np.cumsum(number)[:-1])
    costs = costs.of(np.repeat(np.arange(len(number)), number))
    # The last column stands for taking no sequence.
    seconds = np.column_stack([costs.per_sequence, np.zeros(len(held))])
    busy = costs.constant + costs.seconds_of(held)
    for _ in range(_MOST_EXCHANGES):
        slowest = int(busy.argmax())
        if busy[slowest] <= enough:
            break
        others = np.concatenate([kind[np.argsort(busy[kind])[:_PARTNERS]] for kind in replicas])
        gives = np.flatnonzero(held[slowest])
        own, theirs = seconds[slowest], seconds[others]
        takes = np.column_stack([held[others] > 0, np.ones(len(others), bool)]) & np.isfinite(own)
        # [others, gives, takes]: seconds of the slower of the two replicas after the exchange.
        back = np.where(takes, theirs, 0)[:, None, :]
        ours = busy[slowest] - own[gives][:, None] + np.where(takes, own, np.inf)[:, None, :]
        slower = np.maximum(ours, busy[others, None, None] + theirs[:, gives, None] - back)
        partner, given, taken = np.unravel_index(slower.argmin(), slower.shape)
        if slower[partner, given, taken] >= busy[slowest] * (1 - 1e-9):
            break
        other, given = others[partner], gives[given]
        held[slowest, given] -= 1
        held[other, given] += 1
        if taken < held.shape[1]:
            held[other, taken] -= 1
            held[slowest, taken] += 1
        pair = [slowest, other]
        busy[pair] = costs.constant[pair] + costs.of(pair).seconds_of(held[pair])
    return held, float(busy.max())
