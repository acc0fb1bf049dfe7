"""A sample of rounds is spread over the training run and of bounded size."""

from jaxmux.planner.packing.shape_choice import sample_rounds


def steps(count: int, samples: int = 16) -> list[list[int]]:
    """Global batches; every sample of step i has i + 1 tokens."""
    return [[step + 1] * samples for step in range(count)]


def test_rounds_are_sampled_from_first_to_last_with_the_tasks_that_are_live():
    tasks = [steps(100), steps(40)]
    rounds = sample_rounds(tasks)
    assert 8 <= len(rounds) <= 16
    assert [sorted(batches) for batches in (rounds[0], rounds[-1])] == [[0, 1], [0]]
    for step, batches in ((0, rounds[0]), (99, rounds[-1])):
        for slot, lengths in batches.items():
            assert lengths == tasks[slot][step]
    assert sample_rounds([steps(1, samples=4)]) == [{0: [1] * 4}]


def test_large_rounds_are_sampled_in_part():
    rounds = sample_rounds([steps(100, samples=256)] * 16)
    assert len(rounds) == 2
    assert [len(lengths) for lengths in rounds[0].values()] == [64] * 16


def test_a_large_task_leaves_a_small_one_its_share():
    rounds = sample_rounds([steps(100, samples=2048), steps(100, samples=64)])
    assert len(rounds) == 2
    for batches in rounds:
        large, small = (len(lengths) for lengths in batches.values())
        assert small == 32 and 32 * small >= large > 31 * small and large + small <= 1025
