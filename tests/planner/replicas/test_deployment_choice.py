"""Like replicas are chosen where they do better on whole sequences, and else those of Eq. 2."""

from planner_replicas import A100_7B

from jaxmux.planner.devices import Replica
from jaxmux.planner.replicas import (
    LengthBins,
    candidate_replicas,
    choose_replicas,
    plan_replicas,
)
from jaxmux.planner.replicas.deployment_search import simulate_rounds

ONE, TWO = Replica(), Replica.uniform(tp=2)


def test_like_replicas_that_do_better_on_whole_sequences_are_chosen():
    """A round has one long sequence. Eq. 2 would give it a replica of its own."""

    class Model:
        def longest(self, configuration):
            return 1024

        def sequence_seconds(self, configuration, length):
            # Two devices are 1.6 times as fast as one.
            return length / (1.6 if configuration.devices == 2 else 1.0)

        def constant_seconds(self, configuration):
            return 0.0

    bins = LengthBins((64, 1024), (4, 1), 0)
    found = choose_replicas(4, [ONE, TWO], bins, [bins], Model())
    everything = [{ONE: 4}, {TWO: 2}, {ONE: 2, TWO: 1}]
    seconds = [simulate_rounds(r, 4, [bins], Model()) for r in everything]
    assert simulate_rounds(found.replicas, 4, [bins], Model()) == min(seconds)
    assert found.bound <= found.round_seconds


def test_chosen_replicas_are_those_of_eq_2_where_they_do_better(skewed_bins):
    rounds = [skewed_bins(seed, 400) for seed in range(3)]
    given = (16, candidate_replicas(16), skewed_bins(0, 4000))
    found = choose_replicas(*given, rounds, A100_7B, sampled_rounds=10)
    assert found.replicas == plan_replicas(*given, A100_7B, sampled_rounds=10).replicas
    assert len(found.replicas) > 1
