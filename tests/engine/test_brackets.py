"""Successive halving: the decisions at rungs, against a plain reference."""

import random

import pytest

from jaxmux.engine import Bracket, EngineSize, TaskProgress, rung_of, train_on
from jaxmux.engine.queued_engine import Shrinking
from jaxmux.engine.tasks.progress import TaskEvaluation, record_evaluation
from jaxmux.objectives import Policy
from jaxmux.planner.packing import PricedShape, ShapeClass
from jaxmux.tasks import Task

INFINITE = float("inf")


def simulated(losses, ends, rungs, factor):
    """Which tasks stop at which rung, by literally running the tournament round by round.

    Args:
      losses: by task and rung, the loss, or None if it is not finite.
      ends: by task, None, or the number of rungs after which it has ended, and how.
    """
    n, alive, stopped = len(losses), list(range(len(losses))), {}
    for i in range(len(rungs)):
        seats = max(1, n // factor ** (i + 1))
        scores = {}
        for task in alive:
            when, how, last = ends[task] or (len(rungs), None, None)
            loss = losses[task][i] if when > i else last if how == "succeeded" else None
            scores[task] = INFINITE if loss is None else loss
        # Selection of the best, one after another.
        going_on, left = [], list(alive)
        while left and len(going_on) < seats:
            best = left[0]
            for task in left[1:]:
                if scores[task] < scores[best]:
                    best = task
            left.remove(best)
            going_on.append(best)
        for task in left:
            if ends[task] is None or ends[task][0] > i:
                stopped[task] = i + 1
        alive = sorted(going_on)
    return stopped


@pytest.mark.parametrize("seed", range(60))
def test_decisions_are_those_of_a_tournament(seed):
    dice = random.Random(seed)
    n, factor, rungs = dice.randint(1, 20), dice.randint(2, 4), (2, 5, 9)[: dice.randint(1, 3)]
    # Few different values, so that there are ties.
    draw = lambda: None if dice.random() < 0.1 else float(dice.randint(0, 6))  # noqa: E731
    losses = [[draw() for _ in rungs] for _ in range(n)]
    ends = [
        (dice.randrange(len(rungs)), dice.choice(["succeeded", "failed"]), draw())
        if dice.random() < 0.2
        else None
        for _ in range(n)
    ]
    names = tuple(f"t{i}" for i in range(n))
    bracket = Bracket(names, rungs, factor)
    expected = simulated(losses, ends, rungs, factor)
    progress = {name: TaskProgress() for name in names}
    stopped = {}
    for i in range(len(rungs)):
        assert len(bracket.decided(progress)) <= i or all(
            own.status != "running" for own in progress.values()
        )
        # The tasks reach a rung one after another, in any order.
        for task in dice.sample(range(n), n):
            own = progress[names[task]]
            if own.status != "running":
                continue
            if ends[task] is not None and ends[task][0] == i:
                _, own.status, own.eval_loss = ends[task]
            else:
                own.rung_values.append(losses[task][i])
                own.eval_loss = losses[task][i]
        decided = bracket.decided(progress)
        assert len(decided) > i and decided[i].step == rungs[i]
        for task, name in enumerate(names):
            why = bracket.reason_to_stop(decided, name)
            if progress[name].status == "running" and why:
                progress[name].status = "succeeded"
                stopped[task] = rung_of(why)
    assert stopped == expected


def test_a_rung_waits_for_results_that_have_not_arrived():
    bracket = Bracket(("a", "b"), (3,), 2)
    ended = TaskProgress(status="succeeded", eval_loss=2.0)
    progress = {"a": ended, "b": TaskProgress(rung_values=[1.0])}
    assert bracket.decided(progress, awaited={"a"}) == []
    (rung,) = bracket.decided(progress)
    assert rung.ranking == ("b", "a") and rung.kept == 1
    assert bracket.decided(progress | {"b": TaskProgress()}) == []


def test_the_reason_says_rung_step_and_rank():
    names = tuple(f"t{i}" for i in range(23))
    progress = {name: TaskProgress(rung_values=[float(i)]) for i, name in enumerate(names)}
    bracket = Bracket(names, (10,), 2)
    rungs = bracket.decided(progress)
    assert bracket.reason_to_stop(rungs, "t10") is None
    for name, place in (("t11", "12th"), ("t20", "21st")):
        expected = f"at rung 1 (step 10), {place} of 23 by held-out loss"
        assert bracket.reason_to_stop(rungs, name) == expected
    assert rung_of("trained for 3 s") is None and rung_of(None) is None


def test_a_metric_of_which_higher_values_are_better_ranks_the_other_way():
    progress = {
        "low": TaskProgress(rung_values=[-1.0]),
        "none": TaskProgress(rung_values=[None]),
        # It ended before the rung.
        "high": TaskProgress(status="succeeded", eval_metrics={"rewards/margins": 2.0}),
    }
    bracket = Bracket(tuple(progress), (3,), 2, "rewards/margins")
    rungs = bracket.decided(progress)
    assert rungs[0].ranking == ("high", "low", "none")
    assert bracket.reason_to_stop(rungs, "low").endswith("2nd of 3 by rewards/margins")


def test_the_progress_of_earlier_versions_is_read():
    progress = TaskProgress.from_json({"step": 4, "eval_loss": 2.0, "rung_losses": [3.0, None]})
    assert progress == TaskProgress(step=4, eval_loss=2.0, rung_values=[3.0, None])
    assert TaskProgress.from_json(progress.to_json()) == progress


def test_a_second_measurement_after_the_same_step_takes_no_patience():
    """A task that has got more steps is measured again if a rung is at its former end."""
    progress = TaskProgress()
    task = Task("a", "a.jsonl", steps=9, eval_data="b.jsonl", eval_every=2, patience=1)

    def measure(step, loss):
        best = progress.best_loss is None or loss < progress.best_loss
        done = TaskEvaluation(0, "a", step, loss, target_tokens=1, best=best)
        record_evaluation(progress, done, task)

    for step in (2, 4, 4):
        measure(step, 1 / step)
    assert (progress.status, progress.best_step, progress.eval_step) == ("running", 4, 4)
    measure(6, 1.0)
    assert progress.stopped_early.endswith("without a lower one than after step 4")


def test_a_task_stops_with_the_first_measurement_after_a_step_that_passes_its_bound():
    task = Task(
        "a",
        "a.jsonl",
        steps=9,
        eval_data="b.jsonl",
        eval_every=2,
        objective=Policy(kl_coef=0.1),
        stop_when="kl > 0.1",
    )
    progress = TaskProgress()
    for step, kl in ((0, 0.2), (2, float("nan")), (4, 0.1), (6, 0.125)):
        assert (progress.status, progress.stopped_early) == ("running", None)
        done = TaskEvaluation(0, "a", step, 1.0, target_tokens=1, best=False, metrics={"kl": kl})
        # It may have no more steps for now.
        progress.status = "succeeded" if step == 6 else "running"
        record_evaluation(progress, done, task)
    assert (progress.status, progress.stopped_early) == ("succeeded", None)
    progress = TaskProgress.from_json(progress.to_json())
    train_on(progress, task)
    assert progress.stopped_early == "kl 0.125 after step 6, and stop_when is 'kl > 0.1'"


def shape_with(rows):
    return PricedShape(ShapeClass(rows, 128, 64, 2), seconds=1.0, microbatches=1, padding=0.0)


@pytest.mark.parametrize("seed", range(8))
def test_a_size_follows_from_the_ends_of_tasks_as_if_they_were_seen_one_after_another(seed):
    rng = random.Random(seed)
    names = [f"task{i}" for i in range(12)]
    steps = {name: rng.randint(20, 60) for name in names}
    ended = {name: rng.randint(1, steps[name]) for name in names}
    rows = {name: rng.randint(1, 4) for name in names}
    first = EngineSize(16, 48)
    shrinking = Shrinking(first, 12, lambda own: shape_with(sum(map(rows.get, own))), steps)
    present = first
    for step in range(1, 61):
        seen = {name: end for name, end in ended.items() if end <= step}
        left = [name for name in names if name not in seen]
        wanted = sum(rows[name] for name in left)
        worth = left and max(steps[name] for name in left) - step >= 8
        if step in seen.values() and worth and 4 * wanted <= 3 * present.rows:
            present = EngineSize(len(left), wanted)
        assert shrinking.size(seen) == present
        assert left == [] or present.slots >= len(left)


def test_tasks_that_wait_need_rows_for_those_with_a_place():
    names = [f"task{i}" for i in range(6)]
    steps = dict.fromkeys(names, 20)
    shrinking = Shrinking(EngineSize(2, 12), 2, lambda own: shape_with(2 * len(own)), steps)
    assert shrinking.size({}) == EngineSize(2, 12)
    assert shrinking.size({"task0": 20}) == EngineSize(2, 4)
    assert shrinking.size(dict.fromkeys(names[:4], 20)) == EngineSize(2, 4)
    assert shrinking.size(dict.fromkeys(names[:5], 20)) == EngineSize(1, 2)
    assert shrinking.size(dict.fromkeys(names, 20)) == EngineSize(2, 12)


def test_sizes_are_expected_at_rungs_and_last_steps():
    names = tuple("abcdefgh")
    steps = dict.fromkeys(names, 40) | {"other": 20}
    bracket = Bracket(names, (5, 10, 35), 2)
    shrinking = Shrinking(EngineSize(9, 9), 9, lambda own: shape_with(len(own)), steps)
    found = [(own.step, own.tasks, own.shape.shape.rows) for own in shrinking.expected([bracket])]
    # At the last rung too few steps are left.
    assert found == [(5, 5, 5), (10, 3, 3), (20, 2, 2)]
