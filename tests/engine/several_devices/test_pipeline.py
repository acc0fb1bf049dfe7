"""A pipeline of several devices trains to the bits of one device."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

from jaxmux.engine.devices.replica_pipeline import ReplicaPipeline
from jaxmux.models import Backbone
from jaxmux.planner import PlanningError
from jaxmux.planner.devices import SCHEDULES, Stage
from jaxmux.planner.pipeline.pipeline_plan import PipelineCosts, grouping_of_tasks, plan_pipeline
from jaxmux.planner.pipeline.schedules import Pass, walk

slow = partial(pytest.param, marks=pytest.mark.slow)
PIPELINES = {
    "uneven stages": {"layers": (3, 1)},
    "gpipe": {"layers": (3, 1), "schedule": "gpipe"},
    "interleaved": {"layers": (1, 1, 1, 1), "stages": 2, "schedule": "interleaved"},
}


MORE_PIPELINES = {
    "1f1b": {"layers": (3, 1), "schedule": "1f1b"},
    "lorapp": {"layers": (3, 1), "schedule": "lorapp"},
    "template": {"layers": (3, 1), "schedule": "template"},
    # The interleaved pipeline has the same parts on fewer stages.
    "four stages": {"layers": (1, 1, 1, 1)},
    "four stages of gpipe": {"layers": (1, 1, 1, 1), "schedule": "gpipe"},
    "recomputing": {"layers": (3, 1), "remat": "dots"},
}


@pytest.fixture(scope="module")
def on_one_device(make_engine, different_tasks, train):
    """An engine of one device that has trained the tasks to their ends, and their updates."""
    engine = make_engine(*different_tasks)
    return engine, train(engine)


@pytest.mark.parametrize(
    "pipeline",
    [
        *(pytest.param(mesh, id=name) for name, mesh in PIPELINES.items()),
        *(slow(mesh, id=name) for name, mesh in MORE_PIPELINES.items()),
    ],
)
def test_a_pipeline_trains_to_the_bits_of_one_device(
    pipeline, make_engine, different_tasks, train, on_one_device, assert_same_training
):
    expected, expected_updates = on_one_device
    found = make_engine(*different_tasks, **pipeline)
    updates = train(found)
    # Two groups of tasks may fill one more microbatch than all tasks together.
    assert 0 <= found.microbatches - expected.microbatches <= expected.rounds
    assert expected.microbatches > 2 * expected.rounds
    assert min(u.grad_norm for u in updates["dropped"]) > 0.05
    assert_same_training(found, updates, expected, expected_updates)


@pytest.mark.parametrize("name", [slow("uneven stages"), "interleaved"])
def test_every_pass_of_a_round_is_recorded_once(name, make_engine, different_tasks):
    layers = PIPELINES[name]["layers"]
    engine, records = make_engine(*different_tasks, **PIPELINES[name]), []
    for index in range(3):
        engine.train_round(stream=index < 2)
        records.append(engine.take_round())
        assert engine.take_round() is None
    passes = [own for record in records for own in record.passes]
    parts = range(len(layers))
    whole = [(True, part) for part in parts] + [(False, part) for part in reversed(parts)]
    for index, record in enumerate(records):
        assert record.index == index
        for microbatch in range(len(record.microbatches)):
            own = [p for p in passes if p.steps is record.steps and p.microbatch == microbatch]
            assert [(p.forward, p.part) for p in own] == whole
            assert all(p.stage == p.part % PIPELINES[name].get("stages", len(layers)) for p in own)
    assert len(passes) == len(whole) * sum(len(record.microbatches) for record in records)
    assert [p.seconds for p in passes] == sorted(p.seconds for p in passes)


@pytest.mark.parametrize(
    "schedule",
    [
        schedule if schedule in ("auto", "gpipe", "interleaved") else slow(schedule)
        for schedule in SCHEDULES
    ],
)
def test_stages_run_their_passes_in_the_order_of_the_plan(schedule, make_engine, make_task):
    """Plan and engine pack the rounds by themselves, and divide the tasks into groups."""
    tasks = [
        make_task("long", lengths=(60, 120), steps=2),
        make_task("short", lengths=(3, 20), batch_size=9, steps=2),
        make_task("few", steps=2),
    ]
    layers = (1, 1, 1, 1) if schedule == "interleaved" else (3, 1)
    parts = len(layers)
    engine = make_engine(*tasks, layers=layers, stages=2, schedule=schedule)
    executed, counts = [[], []], []
    while not engine.finished:
        engine.train_round()
        record = engine.take_round()
        counts.append(len(record.microbatches))
        for dispatched in record.passes:
            entry = dispatched.steps[0], dispatched.microbatch, dispatched.part, dispatched.forward
            executed[dispatched.stage].append(entry)
    lengths = [task.batch_lengths for task in tasks]
    rounds = [dict(enumerate(of_round)) for of_round in zip(*lengths, strict=True)]
    shape = engine.options.shape
    grouping = grouping_of_tasks(lengths, shape, 2, schedule=schedule)
    seconds = np.full(2, 1.0), np.full(2, 2.0)
    costs = PipelineCosts(shape, lambda _: seconds, 0.0, schedule, parts // 2)
    plan = plan_pipeline(rounds, grouping, costs)
    planned = [[], []]
    for step in walk(plan.schedule):
        if isinstance(step, Pass):
            index = plan.rounds[step.microbatch]
            number = step.microbatch - plan.rounds.index(index)
            planned[step.virtual_stage % 2].append(
                (index, number, step.virtual_stage, step.forward)
            )
    assert counts == [plan.rounds.count(step) for step in range(2)]
    assert executed == planned


@pytest.mark.slow
@pytest.mark.parametrize("change", ["biases", "head norms", "an untied head"])
def test_other_backbones(change, make_engine, different_tasks, train, assert_same_training, config):
    if change == "biases":
        config = dataclasses.replace(config, architecture="Qwen2ForCausalLM", attention_bias=True)
    elif change == "head norms":
        config = dataclasses.replace(config, architecture="Qwen3ForCausalLM", qk_norm=True)
    else:
        config = dataclasses.replace(config, tie_word_embeddings=not config.tie_word_embeddings)
    model = Backbone.random(config, seed=3)
    tasks = different_tasks[:2]
    expected = make_engine(*tasks, model=model)
    found = make_engine(*tasks, model=model, layers=(3, 1))
    expected_updates, updates = train(expected), train(found)
    assert_same_training(found, updates, expected, expected_updates)


def test_held_out_losses_are_those_of_one_device(make_engine, different_tasks, train):
    tasks = [
        dataclasses.replace(task, eval_samples=task.samples.samples[:9]) for task in different_tasks
    ]
    expected, found = make_engine(*tasks), make_engine(*tasks, layers=(3, 1))
    for engine in (expected, found):
        train(engine, rounds=1)
    assert found.evaluate(found.names) == expected.evaluate(expected.names)


def test_a_task_that_is_not_finite_fails_alone(
    make_engine, make_task, replace_adapter, train, assert_same_training
):
    good = (
        make_task("good", batch_size=3, steps=4),
        make_task("other", rank=8, dropout=0.1, batch_size=3, steps=4),
    )
    bad = make_task("bad", batch_size=3, steps=4)
    bad = replace_adapter(bad, lambda x: np.full_like(x, np.nan))
    options = {"layers": (3, 1), "max_bad_steps": 2}
    expected, found = make_engine(*good, **options), make_engine(*good, bad, **options)
    expected_updates, updates = train(expected), train(found)
    assert found.progress("bad").status == "failed"
    del updates["bad"]
    assert_same_training(found, updates, expected, expected_updates)


def test_one_bad_layer_skips_the_update_in_all_stages(
    make_engine, make_task, replace_adapter, assert_same_bits, train
):
    """The layer of the last stage overflows in the update; the first stage keeps its values too."""
    task = make_task("task", steps=1)

    def change(leaf):
        leaf = np.array(leaf)
        leaf[-1] = 3e38
        return leaf

    engine = make_engine(replace_adapter(task, change), layers=(3, 1))
    before = engine.task_arrays("task")
    updates = train(engine)
    assert updates["task"][0].skipped
    after = engine.task_arrays("task")
    adapter = [name for name in before if name.startswith("adapter")]
    assert_same_bits({n: before[n] for n in adapter}, {n: after[n] for n in adapter})


@pytest.mark.parametrize(
    "moves",
    [
        pytest.param(({"layers": (3, 1)}, PIPELINES["interleaved"]), id="to more parts"),
        slow(({}, {"layers": (3, 1)}), id="to more devices"),
        slow(({"layers": (3, 1)}, {"layers": (1, 1, 1, 1)}), id="to four stages"),
    ],
)
def test_training_moves_to_other_devices_in_the_middle_of_a_round(
    moves, make_engine, different_tasks, train, on_one_device, assert_same_training
):
    expected, expected_updates = on_one_device
    before, after = (make_engine(*different_tasks, **pipeline) for pipeline in moves)
    updates = train(before, rounds=1)
    assert not before.train_round(lambda: True)
    assert before.microbatches < expected.microbatches
    assert any(before.accumulated(name) for name in before.names)
    for name in before.names:
        state = before.task_arrays(name), before.progress(name), before.accumulated(name)
        after.restore_task(name, *state)
    after.rounds = before.rounds
    rest = train(after)
    joined = {name: updates[name] + rest[name] for name in updates}
    assert_same_training(after, joined, expected, expected_updates)


def test_rounds_follow_each_other_without_a_gap(make_engine, different_tasks):
    """Whenever a round ends, microbatches of the next one are in the pipeline."""
    engine = make_engine(*different_tasks, layers=(3, 1))
    in_flight = []
    for _ in range(2):
        engine.train_round()
        order = engine._executor._replicas[0]._order
        in_flight.append(order.begun - order.ended)
    assert min(in_flight) > 0
    before = engine.microbatches
    engine.drain()
    assert order.begun == order.ended
    assert engine.microbatches > before
    assert any(engine.accumulated(name) for name in engine.names)


@pytest.mark.parametrize("stop_after", [slow(1), 7])
def test_training_can_stop_after_every_microbatch(
    stop_after, make_engine, different_tasks, train, on_one_device, assert_same_training
):
    """A pipeline is stopped after k microbatches, in which rounds overlap; one device goes on."""
    expected = on_one_device[0]
    expected_updates = without_rounds(on_one_device[1])

    before, calls, updates = make_engine(*different_tasks, layers=(3, 1)), [], []
    while len(calls) < stop_after:
        updates += before.train_round(lambda: calls.append(1) or len(calls) >= stop_after)
    updates += before.drain()
    after = make_engine(*different_tasks)
    for name in before.names:
        state = before.task_arrays(name), before.progress(name), before.accumulated(name)
        after.restore_task(name, *state)
    after.rounds = before.rounds
    rest = train(after)
    joined = {n: [u for u in updates if u.task == n] + rest[n] for n in before.names}
    assert_same_training(after, without_rounds(joined), expected, expected_updates)


def without_rounds(updates):
    """The updates without the numbers of their rounds: where tasks of one round are updated one
    after another, a stop may come between them."""
    return {name: [u._replace(round=0) for u in own] for name, own in updates.items()}


@pytest.mark.slow
def test_draining_after_every_round_changes_nothing(
    make_engine, different_tasks, on_one_device, assert_same_training
):
    drained, updates = make_engine(*different_tasks, layers=(3, 1)), []
    while not drained.finished:
        updates += drained.train_round() + drained.drain()
    found = {name: [u for u in updates if u.task == name] for name in drained.names}
    assert_same_training(drained, found, *on_one_device)


def test_a_stop_ends_the_round_with_what_has_begun(make_engine, different_tasks):
    engine = make_engine(*different_tasks, layers=(3, 1))
    calls = []
    engine.train_round(lambda: calls.append(1) or True)
    # Two microbatches are in flight, and a third one begins while the first one ends.
    assert engine.microbatches == len(calls) == 3
    assert engine.rounds == 0
    assert sum(len(engine.accumulated(name)) for name in engine.names) > 0


@pytest.mark.slow
def test_tasks_come_and_go_between_rounds(make_engine, make_task, train, assert_same_training):
    def trained(**options):
        engine = make_engine(make_task("a", steps=5), make_task("b", steps=5), **options)
        updates = train(engine, rounds=2)
        engine.release("a")
        engine.register_tasks([make_task("c", rank=16, steps=2)])
        rest = train(engine)
        return engine, {n: updates.get(n, []) + rest[n] for n in ("b", "c")}

    assert_same_training(*trained(layers=(3, 1)), *trained())


def test_weights_lie_once_and_on_their_own_device(make_engine, make_task):
    engine = make_engine(make_task("a"), layers=(1, 3), first_device=4)
    weights = engine.backbone.weights
    for i, own in enumerate(weights):
        leaves = jax.tree.leaves((own, engine._slots.stored.states[i]))
        assert {device for leaf in leaves for device in leaf.devices()} == {jax.devices()[4 + i]}
    assert [len(own["layers"]["input_layernorm"]["weight"]) for own in weights] == [1, 3]
    assert "norm" not in weights[0] and "norm" in weights[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"layers": (2, 2), "schedule": "zigzag"},
            "schedule should be one of auto, 1f1b, gpipe, interleaved, lorapp, template",
        ),
        ({"layers": (2, 2), "schedule": "interleaved"}, "does not suit 2 parts on 2 stages"),
        ({"layers": (1, 1, 1, 1), "stages": 2}, "several parts on a stage are interleaved"),
        ({"layers": (2, 1, 1), "stages": 2, "schedule": "interleaved"}, "stages in turn"),
    ],
)
def test_pipelines_that_cannot_be_are_refused(options, message, make_engine):
    with pytest.raises(PlanningError, match=message):
        make_engine(**options)


def test_a_round_that_ends_in_an_exception_is_the_end_of_the_engine(make_engine, different_tasks):
    """A microbatch may then be in the accumulators of one stage and not in those of another."""
    engine = make_engine(*different_tasks, layers=(3, 1))

    def stop():
        raise ConnectionError("the user's function")

    with pytest.raises(ConnectionError):
        engine.train_round(stop)
    with pytest.raises(RuntimeError, match="restore a checkpoint in a new engine"):
        engine.train_round()


@pytest.mark.usefixtures("trace_once")
def test_policies_leave_room_for_the_microbatches_in_flight(make_engine, make_task):
    """With memory for few values, early stages recompute more than late ones."""
    seen = {}
    for memory in (2**32, 2_000_000):
        engine = make_engine(
            make_task("a", steps=1), layers=(1, 1, 1, 1), remat="auto", memory=memory
        )
        seen[memory] = engine._executor._replicas[0].compiled.choose_remat(dropout=False)
    assert seen[2**32] == [("norms",)] * 4
    order = ("norms", "dots", "lean", "full")
    leaner = [order.index(policy) for (policy,) in seen[2_000_000]]
    assert leaner == sorted(leaner, reverse=True) and leaner[0] > leaner[-1]


def test_gpipe_needs_a_named_policy_where_memory_is_known(make_engine, make_task):
    options = {"layers": (2, 2), "schedule": "gpipe", "remat": "auto", "memory": 2**32}
    with pytest.raises(PlanningError, match="name a remat policy"):
        make_engine(make_task("a"), **options).train_round()


def test_the_state_of_several_devices_is_read_by_task(make_engine, make_task):
    engine = make_engine(make_task("a"), layers=(2, 2))
    with pytest.raises(RuntimeError, match="read tasks with task_arrays"):
        _ = engine.state


@pytest.mark.slow
def test_nothing_is_compiled_after_the_first_microbatch_begins(
    make_engine, different_tasks, train, monkeypatch, caplog
):
    """Neither passes, nor updates of any optimizer kind, nor what replicas exchange."""
    engine = make_engine(
        *different_tasks, layers=(3, 1), stage=Stage(tp=2), others=(((4,), Stage()),)
    )
    advance, compiled = ReplicaPipeline.advance, []

    def counted(self, may_begin):
        compiled.append(sum("Finished XLA compilation" in r.message for r in caplog.records))
        return advance(self, may_begin)

    monkeypatch.setattr(ReplicaPipeline, "advance", counted)
    with jax.log_compiles(), caplog.at_level("WARNING", "jax"):
        train(engine)
    assert compiled[0] == compiled[-1] > 0
