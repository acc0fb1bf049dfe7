"""Random costs of replicas and random sequences, shared by the tests of replicas."""

import numpy as np
import pytest
from planner_replicas import BINS, BOUNDARIES, CONTEXT

from jaxmux.planner.devices import Replica
from jaxmux.planner.replicas import LengthBins, choose_length_bins


class RandomCosts:
    """A `SequenceCosts` from tables.

    Attributes:
      longest_of: by configuration, tokens of the longest sequence.
      seconds: by configuration and length, seconds of a sequence.
      constant: by configuration, seconds that do not depend on the sequences.
    """

    def __init__(self):
        self.longest_of: dict[Replica, int] = {}
        self.seconds: dict[tuple[Replica, int], float] = {}
        self.constant: dict[Replica, float] = {}

    def longest(self, configuration: Replica) -> int:
        return self.longest_of[configuration]

    def sequence_seconds(self, configuration: Replica, length: int) -> float:
        return self.seconds[configuration, length]

    def constant_seconds(self, configuration: Replica) -> float:
        return self.constant[configuration]


@pytest.fixture(scope="session")
def random_costs():
    """(rng, lengths, configurations) -> costs of which larger replicas serve longer sequences, and
    waste more device time on short ones. The largest serves all lengths."""

    def make(rng: np.random.Generator, lengths, configurations) -> RandomCosts:
        costs = RandomCosts()
        costs.constant = {c: float(rng.uniform(0, 1)) for c in configurations}
        for c in configurations:
            efficiency = rng.uniform(0.8, 1) / (1 + 0.3 * np.log2(c.devices))
            most = int(np.log2(c.devices)) + int(rng.integers(1, len(lengths)))
            costs.longest_of[c] = lengths[min(len(lengths), most) - 1]
            for length in lengths:
                costs.seconds[c, length] = float(length / c.devices / efficiency / 1000)
        costs.longest_of[max(configurations, key=lambda c: c.devices)] = lengths[-1]
        return costs

    return make


@pytest.fixture(scope="session")
def unrelated_costs():
    """(rng, lengths, configurations) -> costs of which devices and longest sequence are unrelated.
    The last configuration serves all lengths."""

    def make(rng: np.random.Generator, lengths, configurations) -> RandomCosts:
        costs = RandomCosts()
        costs.longest_of = {c: int(rng.choice(lengths)) for c in configurations}
        costs.longest_of[configurations[-1]] = lengths[-1]
        rate = {c: rng.uniform(1, 2) / c.devices ** rng.uniform(0.6, 1) for c in configurations}
        costs.constant = {c: float(rng.uniform(0, 2)) for c in configurations}
        costs.seconds = {(c, n): float(rate[c] * n / 100) for c in configurations for n in lengths}
        return costs

    return make


@pytest.fixture(scope="session")
def skewed_bins():
    """(seed, sequences) -> length bins of sequences of which most are short and a few are long."""

    def make(seed: int, sequences: int) -> LengthBins:
        lengths = np.random.default_rng(seed).lognormal(5.7, 1.3, sequences).astype(int) + 1
        return choose_length_bins(np.minimum(lengths, CONTEXT), BOUNDARIES, BINS)

    return make
