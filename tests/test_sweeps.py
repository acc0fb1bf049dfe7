"""Sweeps: configurations, their names, and what is refused."""

import itertools
import math
import re
import time
from dataclasses import replace

import pytest

from jaxmux import AdamW, Integers, LogUniform, LoRA, Source, Sweep, Task, TaskError, Uniform
from jaxmux.sweeps import expanded, sweeps_of
from jaxmux.tasks import LONGEST_NAME, TASK_NAME

TASK = Task("base", "a.jsonl", steps=10, eval_data="b.jsonl")
TASK_WITHOUT_HELD_OUT = replace(TASK, eval_data=None)


@pytest.mark.parametrize(
    ("space", "settings", "said"),
    [
        (
            {"seed": list(range(1001)), "adapter.rank": list(range(1, 21))},
            {},
            "20,020 configurations (1001 values of seed x 20 values of adapter.rank)",
        ),
        ({"seed": Integers(0, 10**6)}, {"samples": 10_001}, "10,001 configurations (samples)"),
    ],
)
def test_a_sweep_of_too_many_configurations_is_refused_at_once(space, settings, said):
    begun = time.monotonic()
    with pytest.raises(TaskError, match=re.escape(said)):
        Sweep(Task("a", "a.jsonl", steps=1), space, **settings)
    assert time.monotonic() - begun < 2


def test_a_grid_has_all_combinations_and_changes_nothing_else():
    space = {
        "adapter.rank": [4, 8],
        "optimizer.learning_rate": [1e-3, 1e-4, 3e-4],
        "adapter.target_modules": ["all-linear", ["q_proj", "v_proj"]],
        "data": ["x.jsonl", ["y.jsonl", Source("z.jsonl", repeat=2)]],
    }
    found = Sweep(TASK, space).configurations()
    expected = [
        Task(
            own.task.name,
            data,
            LoRA(rank=rank, target_modules=targets),
            AdamW(rate),
            steps=10,
            eval_data="b.jsonl",
        )
        for own, (rank, rate, targets, data) in zip(
            found, itertools.product(*space.values()), strict=True
        )
    ]
    assert [own.task for own in found] == expected
    assert [tuple(own.values.values()) for own in found] == list(itertools.product(*space.values()))


def test_configurations_of_all_seeds_hold_out_the_same_records():
    task = Task("base", "a.jsonl", steps=10, validation_fraction=0.2, seed=5)
    found = Sweep(task, {"seed": [5, 6, 7]}).tasks()
    assert [(own.seed, own.split_seed) for own in found] == [(5, 5), (6, 5), (7, 5)]
    # Each of them trains alone as it trains in the sweep.
    alone = Task(found[1].name, "a.jsonl", steps=10, validation_fraction=0.2, seed=6)
    assert alone.split_seed == 6 and found[1] == replace(alone, validation_seed=5)
    own = Sweep(replace(task, validation_seed=3), {"seed": [6]}).tasks()
    both = Sweep(task, {"seed": [6], "validation_seed": [8, None]}).tasks()
    fractions = Sweep(TASK_WITHOUT_HELD_OUT, {"seed": [6], "validation_fraction": [None, 0.5]})
    assert [task.split_seed for task in (*own, *both)] == [3, 8, 6]
    assert [task.validation_seed for task in fractions.tasks()] == [None, 0]


def test_a_part_is_set_before_its_fields():
    space = {"adapter.rank": [3], "adapter": [LoRA(rank=8, alpha=1.0), LoRA(rank=8, alpha=2.0)]}
    adapters = [task.adapter for task in Sweep(TASK, space).tasks()]
    assert adapters == [LoRA(rank=3, alpha=1.0), LoRA(rank=3, alpha=2.0)]


@pytest.mark.long
def test_random_configurations_follow_the_seed_and_stay_in_their_ranges():
    space = {
        "adapter.rank": Integers(2, 5),
        "optimizer.learning_rate": LogUniform(1e-5, 1e-1),
        "adapter.alpha": Uniform(1, 3),
        "seed": [7, 8, 9],
    }
    sweep = Sweep(TASK, space, samples=400)
    values = [own.values for own in sweep.configurations()]
    assert values == [own.values for own in Sweep(TASK, space, samples=400).configurations()]
    other = Sweep(TASK, space, samples=400, seed=1)
    assert values != [own.values for own in other.configurations()]
    ranks, rates, alphas, seeds = zip(*(own.values() for own in values), strict=True)
    assert set(ranks) == {2, 3, 4, 5} and set(seeds) == {7, 8, 9}
    assert 1 <= min(alphas) and max(alphas) <= 3 and sum(alphas) / 400 == pytest.approx(2, rel=0.1)
    assert 1e-5 <= min(rates) and max(rates) <= 1e-1
    assert sum(map(math.log10, rates)) / 400 == pytest.approx(-3, abs=0.2)


def test_random_configurations_differ():
    values = [own.values for own in Sweep(TASK, {"seed": [1, 2, 3]}, samples=3).configurations()]
    assert sorted(own["seed"] for own in values) == [1, 2, 3]
    with pytest.raises(TaskError, match="samples: 4 different configurations .* only 3"):
        Sweep(TASK, {"seed": [1, 2, 3]}, samples=4)


@pytest.mark.parametrize(
    ("space", "samples", "expected"),
    [
        ({"adapter.rank": [4, 16]}, None, ["base-rank_4", "base-rank_16"]),
        (
            {"optimizer.learning_rate": [1e-5, 2e-3], "seed": [0]},
            None,
            ["base-learning_rate_1e-05-seed_0", "base-learning_rate_0.002-seed_0"],
        ),
        (
            {"adapter.target_modules": ["all-linear", ["q_proj", "v_proj"], [".*_proj"]]},
            None,
            [f"base-target_modules_{end}" for end in ("all-linear", "q_proj.v_proj", "no3")],
        ),
        (
            {"data": ["one/mix.jsonl", "two/mix.jsonl", ["a.jsonl", "b.jsonl"]]},
            None,
            ["base-data_no1", "base-data_no2", "base-data_a.b"],
        ),
        (
            {"optimizer.weight_decay": [0.0, 0.1], "optimizer.schedule.kind": ["linear"]},
            None,
            [f"base-weight_decay_{end}-kind_linear" for end in ("0.0", "0.1")],
        ),
    ],
)
def test_names_say_the_values(space, samples, expected):
    names = [task.name for task in Sweep(TASK, space, samples=samples).tasks()]
    assert names == expected or expected is None
    assert len(set(names)) == len(names)


def test_long_and_similar_names_get_numbers():
    rates = [1 + 1e-9 * i for i in range(3)]
    space = {"optimizer.learning_rate": Uniform(1, 1.0001), "seed": [0]}
    for sweep in (
        Sweep(Task("a" * 90, "a.jsonl", steps=1), {"optimizer.learning_rate": rates}),
        Sweep(Task("a", "a.jsonl", steps=1), space, samples=12),
    ):
        names = [task.name for task in sweep.tasks()]
        assert len(set(names)) == len(names)
        assert all(re.fullmatch(TASK_NAME, n) and len(n) <= LONGEST_NAME for n in names)
    assert names[0] == "a-learning_rate_1-seed_0-01"


@pytest.mark.parametrize(
    ("space", "fields", "message"),
    [
        ({"adapter.rnk": [1]}, {}, r"adapter \(LoRA\) has no field 'rnk'; did you mean rank\?"),
        ({"adaptr.rank": [1]}, {}, "a task has no field 'adaptr'; did you mean adapter"),
        ({"seed.x": [1]}, {}, "seed of the task is 0, which has no fields"),
        ({"adapter.rank": [4, 0]}, {}, "'adapter.rank' = 0: rank should be an integer"),
        ({"adapter.rank": 4}, {}, "should be a list of values, or Uniform"),
        ({"adapter.rank": []}, {}, "should be a list of values"),
        ({"adapter.rank": Integers(1, 4)}, {}, "a grid takes a list of values; with samples=N"),
        ({"name": ["a"]}, {}, "'name' cannot be swept"),
        ({"best_metric": ["loss", "kl"]}, {}, "'best_metric' cannot be swept"),
        ({"seed": [1, 2, 1]}, {}, "has the value 1 twice"),
        ({}, {}, "space should be a mapping"),
        ({"seed": [1]}, {"samples": 0}, "samples should be an integer of at least 1"),
        ({"seed": [1]}, {"factor": 1, "first_rung": 2}, "factor should be an integer"),
        ({"epochs": [1]}, {}, "'epochs' = 1: give epochs or steps"),
    ],
)
def test_what_cannot_be_is_refused_with_the_sweep_and_the_key(space, fields, message):
    with pytest.raises(TaskError, match=message) as error:
        Sweep(TASK, space, **fields)
    assert str(error.value).startswith("sweep 'base': ")


def test_other_mistakes_are_named():
    with pytest.raises(ValueError, match="LogUniform: low should be a number above 0"):
        LogUniform(0, 1)
    with pytest.raises(ValueError, match="Integers: high should be above low, found 4 and 4"):
        Integers(4, 4)
    with pytest.raises(TaskError, match="task should be a Task, found 'a'"):
        Sweep("a", {"seed": [1]})
    with pytest.raises(TaskError, match="first_rung needs eval_data or validation_fraction"):
        Sweep(Task("a", "a.jsonl", steps=1), {"seed": [1]}, first_rung=1)
    short = Task("a", "a.jsonl", eval_data="b.jsonl", steps=2)
    with pytest.raises(TaskError, match="'a': first_rung is 3, but its tasks train only 3 steps"):
        Sweep(short, {"steps": [1, 3]}, first_rung=3)
    with pytest.raises(TaskError, match="2 sweeps have this name"):
        sweeps_of([Sweep(TASK, {"seed": [1]}), Sweep(TASK, {"seed": [2]})])


def test_rungs_and_expansion():
    sweep = Sweep(TASK, {"seed": [1, 2]}, first_rung=2, factor=3)
    assert sweep.rungs(18) == [2, 6] and sweep.rungs(19) == [2, 6, 18] and sweep.rungs(2) == []
    names = [task.name for task in expanded([TASK, sweep])]
    assert names == ["base", "base-seed_1", "base-seed_2"]
