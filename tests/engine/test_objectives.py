"""Objectives in the engine, in one pass and in two: against a plain model with autodiff, alone and
in company, in several turns, and continued from a checkpoint."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmux.engine import TaskProgress, driven_task
from jaxmux.engine.devices.executor import Executor
from jaxmux.engine.rounds.rounds import recorded_of
from jaxmux.objectives import ACCURACY, CPO, DPO, KTO, ORPO, SFT, CustomLoss, Policy, SimPO
from jaxmux.optimizers import SGD
from jaxmux.peft import LoRA
from jaxmux.planner.packing import ShapeClass
from jaxmux.tasks import TaskError
from tests.engine.conftest import SMALL, measured_to_the_end, random_samples

from .reference_llama import logits_of

OBJECTIVES = {
    "dpo": DPO(0.5),
    "mixed": DPO(0.3, ("ipo", "sft"), (0.1, 0.5), ld_alpha=0.4),
    "simpo": SimPO(),
    "cpo": CPO(),
    "orpo": ORPO(0.7),
    "kto": KTO(0.5, desirable_weight=1.2),
}


@pytest.fixture(scope="module")
def plain_log_probs(config, backbone):
    """Log-probabilities of padded token ids [samples, n] under an adapter, by a plain model."""
    spec = LoRA(4, 8.0, target_modules=("q_proj", "down_proj"))

    @jax.jit
    def log_probs(adapter, ids):
        @jax.vmap
        def of_sample(ids):
            logits = logits_of(config, backbone.weights, "lora", spec, adapter, ids[:-1])
            return jax.nn.log_softmax(logits)[np.arange(len(ids) - 1), ids[1:]]

        return of_sample(ids)

    return log_probs


@pytest.fixture(scope="module")
def plain_step(plain_log_probs):
    """The objective of a batch by a plain model in float64, its gradient by JAX's autodiff, and
    what it knows of the batch. Without a reference, the batch is its own."""

    def step(objective, adapter, batch, reference=None, recorded=None):
        ids = np.stack([np.pad(each.input_ids, (0, 60 - len(each.input_ids))) for each in batch])
        masks = [each.target_mask[1:] for each in batch]
        found, pullback = jax.vjp(lambda adapter: plain_log_probs(adapter, ids), adapter)
        values = [
            np.asarray(of_sample)[: len(mask)][mask]
            for of_sample, mask in zip(found, masks, strict=True)
        ]
        known = objective.known(values)
        graded = objective.grade(values, known if reference is None else reference, recorded)
        cotangent = np.zeros(found.shape)
        for row, mask, slopes in zip(cotangent, masks, graded.slopes, strict=True):
            row[: len(mask)][mask] = slopes
        return graded, pullback(jnp.asarray(cotangent))[0], known

    return step


def step_by_step(engine, name):
    """Trains the only task to the end; returns the adapters before each step and after the last
    one, and the updates."""
    adapters, updates = [engine.adapter(name)], []
    while not engine.finished:
        updates += engine.train_round()
        updates += engine.drain()
        if len(updates) == len(adapters):
            adapters.append(engine.adapter(name))
    return adapters, updates


@pytest.mark.parametrize("name", OBJECTIVES)
def test_updates_are_those_of_a_plain_model(name, make_paired, make_engine, plain_step):
    objective = OBJECTIVES[name]
    prepared = make_paired("pairs", objective)
    engine = make_engine(prepared, shape=SMALL)
    adapters, updates = step_by_step(engine, "pairs")
    assert len(updates) == 4 and not updates[-1].skipped
    with jax.enable_x64(True):
        for step, update in enumerate(updates):
            batch = prepared.batches[step]
            recorded = recorded_of(objective, batch)
            _, _, reference = plain_step(objective, adapters[0], batch, None, recorded)
            graded, gradient, _ = plain_step(objective, adapters[step], batch, reference, recorded)
            assert update.loss == pytest.approx(graded.loss, rel=1e-5)
            for metric, value in graded.metrics.items():
                assert update.metrics[metric] == pytest.approx(value, rel=1e-3, abs=1e-5)
            norm = np.sqrt(sum((np.asarray(g) ** 2).sum() for g in jax.tree.leaves(gradient)))
            assert update.grad_norm == pytest.approx(norm, rel=1e-4)


# Rows that are too short for the pairs of `make_paired`.
SHORT = ShapeClass(rows=2, row_len=64, chunk_len=64, max_sequences=8)


@pytest.mark.long
@pytest.mark.parametrize(
    "objective",
    [
        DPO(0.5, ("sigmoid", "robust", "sft"), (1.0, 0.3, 0.2), 0.1, ld_alpha=0.4),
        SimPO(cpo_alpha=0.3, label_smoothing=0.1),
    ],
)
def test_one_pass_trains_like_two(objective, make_paired, make_engine, train, monkeypatch):
    passes, log_probs = [], Executor.log_probs
    monkeypatch.setattr(
        Executor, "log_probs", lambda *args: passes.append(args) or log_probs(*args)
    )
    found = []
    for shape in (SMALL, SHORT):
        prepared = make_paired("pairs", objective, dropout=0.3)
        assert prepared.pairs_fit(shape) == (shape is SMALL)
        engine = make_engine(prepared, shape=shape)
        before = np.concatenate([np.ravel(x) for x in jax.tree.leaves(engine.adapter("pairs"))])
        passes.clear()
        updates = train(engine)["pairs"]
        # One pass for the reference, if there is one.
        assert len(passes) == objective.needs_reference + (0 if shape is SMALL else 4)
        after = np.concatenate([np.ravel(x) for x in jax.tree.leaves(engine.adapter("pairs"))])
        found.append((updates, after))
    (one, of_one), (two, of_two) = found
    assert [u.loss for u in one] == pytest.approx([u.loss for u in two], rel=1e-5)
    assert np.linalg.norm(of_one - of_two) < 1e-4 * np.linalg.norm(of_two - before)
    assert len(one) == 4
    for step, (update, expected) in enumerate(zip(one, two, strict=True)):
        if objective.needs_reference and step == 0:
            # All rewards are 0, or rounding errors.
            assert expected.metrics[ACCURACY] == 0
            update.metrics[ACCURACY] = 0
        assert update.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-5)


def test_the_place_of_a_pair_changes_no_bit(
    make_paired, make_task, make_rollouts, make_engine, train, assert_same_bits
):
    """Pairs of different tasks share rows, at other places than alone."""

    def pairs():
        return make_paired("pairs", DPO(0.5), lengths=(5, 20), dropout=0.3)

    alone = make_engine(pairs(), shape=SMALL)
    expected = train(alone)["pairs"]
    beside = make_engine(
        make_task("sft", steps=6, lengths=(5, 60)),
        make_paired("simpo", SimPO(), lengths=(5, 20)),
        make_rollouts("rollouts", POLICIES["importance sampling"]),
        pairs(),
        shape=SMALL,
    )
    found = train(beside)["pairs"]
    assert [(u.loss, u.grad_norm, u.metrics) for u in found] == [
        (u.loss, u.grad_norm, u.metrics) for u in expected
    ]
    assert_same_bits(beside.adapter("pairs"), alone.adapter("pairs"))


@pytest.mark.parametrize("name", ["dpo", "mixed"])
def test_neighbours_change_no_bit(
    name, make_paired, make_task, make_engine, train, assert_same_bits
):
    """In one pass and in two."""
    objective = OBJECTIVES[name]
    fields = {"dropout": 0.3, "eval_data": "random.jsonl", "eval_every": 2}
    alone = make_engine(make_paired("pairs", objective, **fields), shape=SMALL)
    expected = train(alone)["pairs"]
    others = [make_task("sft", steps=6), make_paired("more", ORPO(), dropout=0.1)]
    beside = make_engine(
        others[0], make_paired("pairs", objective, **fields), others[1], shape=SMALL
    )
    found = train(beside)["pairs"]
    assert [(u.loss, u.grad_norm, u.metrics) for u in found] == [
        (u.loss, u.grad_norm, u.metrics) for u in expected
    ]
    assert_same_bits(beside.adapter("pairs"), alone.adapter("pairs"))
    of_sft = make_engine(make_task("sft", steps=6), shape=SMALL)
    train(of_sft)
    assert_same_bits(beside.adapter("sft"), of_sft.adapter("sft"))


def test_a_ruined_neighbour_changes_no_bit(
    make_paired, make_task, make_engine, train, assert_same_bits
):
    alone = make_engine(make_paired("pairs", DPO(0.5)), shape=SMALL)
    train(alone)
    ruined = make_paired("ruined", SimPO(1e30), optimizer=SGD(1e30, clip_norm=None))
    beside = make_engine(ruined, make_paired("pairs", DPO(0.5)), shape=SMALL)
    train(beside)
    assert beside.progress("ruined").status == "failed"
    assert_same_bits(beside.adapter("pairs"), alone.adapter("pairs"))


def test_mismatched_answers_are_read_but_not_trained(make_paired, make_engine, train):
    prepared = make_paired("answers", KTO(0.5), dropout=0.3)
    engine = make_engine(prepared, shape=SMALL)
    plan = []
    while not engine.finished:
        updates = engine.train_round()
        for update in updates:
            batch = prepared.batches[update.task_step - 1]
            assert update.tokens == sum(sample.read_tokens for sample in batch[::2])
            assert update.target_tokens == sum(sample.target_tokens for sample in batch[::2])
            plan.append((update.computed_tokens, [sample.read_tokens for sample in batch]))
    # Of three answers in chunks of 64 tokens, what is read is at least all six samples.
    for computed, lengths in plan:
        assert computed >= sum(lengths) + sum(lengths[::2])
        assert computed <= 64 * (len(lengths) + len(lengths[::2]))


def test_other_tasks_keep_their_bits_beside_labelled_answers(
    make_paired, make_task, make_engine, train, assert_same_bits
):
    def others():
        return make_task("sft", steps=4), make_paired("pairs", DPO(0.5), dropout=0.3)

    def labelled():
        return make_paired("answers", KTO(0.5), dropout=0.2)

    without, alone = make_engine(*others(), shape=SMALL), make_engine(labelled(), shape=SMALL)
    sft, pairs = others()
    beside = make_engine(sft, labelled(), pairs, shape=SMALL)
    for engine in (without, alone, beside):
        train(engine)
    for name in ("sft", "pairs"):
        assert_same_bits(beside.adapter(name), without.adapter(name))
    assert_same_bits(beside.adapter("answers"), alone.adapter("answers"))


@pytest.mark.parametrize("name", ["dpo", "mixed"])
def test_a_global_batch_may_take_several_turns(name, make_paired, make_engine, train):
    objective = OBJECTIVES[name]
    expected = make_engine(make_paired("pairs", objective, dropout=0.3), shape=SMALL)
    updates = train(expected)["pairs"]
    turns = make_engine(make_paired("pairs", objective, dropout=0.3), shape=SMALL, round_tokens=60)
    found = train(turns)["pairs"]
    # Turns divide a batch into other microbatches, so gradients are summed in another order.
    assert [u.loss for u in found] == pytest.approx([u.loss for u in updates], rel=1e-5)
    assert [u.grad_norm for u in found] == pytest.approx([u.grad_norm for u in updates], rel=1e-4)
    assert turns.rounds > 2 * expected.rounds


def test_labelled_answers_keep_their_bits_in_several_turns(
    make_paired, make_engine, train, assert_same_bits
):
    """Answers of equal length, one in a microbatch, are added up in the same order."""
    whole, turns = (
        make_engine(
            make_paired("answers", KTO(0.5), dropout=0.3, lengths=(100, 101)),
            shape=SMALL,
            round_tokens=tokens,
        )
        for tokens in (None, 100)
    )
    expected, found = train(whole)["answers"], train(turns)["answers"]
    assert [(u.loss, u.grad_norm, u.metrics) for u in found] == [
        (u.loss, u.grad_norm, u.metrics) for u in expected
    ]
    assert_same_bits(turns.adapter("answers"), whole.adapter("answers"))
    assert turns.rounds > 2 * whole.rounds


@pytest.mark.parametrize("name", ["dpo", "mixed", "kto"])
def test_a_task_continues_within_a_global_batch(
    name, make_paired, make_engine, train, assert_same_bits
):
    options, objective = {"shape": SMALL, "round_tokens": 60}, OBJECTIVES[name]
    whole = make_engine(make_paired("pairs", objective, dropout=0.3), **options)
    train(whole)
    first = make_engine(make_paired("pairs", objective, dropout=0.3), **options)
    while not (first.progress("pairs").step == 1 and first.accumulated("pairs")):
        first.train_round()
        first.drain()
    arrays, progress = first.task_arrays("pairs"), first.progress("pairs").to_json()
    assert arrays["reference/training"].shape == (14, 2)
    second = make_engine(make_paired("pairs", objective, dropout=0.3), **options)
    second.restore_task(
        "pairs", arrays, TaskProgress.from_json(progress), first.accumulated("pairs")
    )
    train(second)
    assert_same_bits(second.adapter("pairs"), whole.adapter("pairs"))


@pytest.mark.parametrize(("objective", "loss"), [(DPO(0.5), np.log(2)), (KTO(0.5), 0.5)])
def test_held_out_pairs_are_measured_by_the_objective(objective, loss, make_paired, make_engine):
    prepared = make_paired("pairs", objective, eval_data="random.jsonl", eval_every=2)
    engine = make_engine(prepared, shape=SMALL)
    found = measured_to_the_end(engine)
    assert [done.task_step for done in found] == [0, 2, 4]
    # At the start, policy and reference are the same.
    assert found[0].loss == pytest.approx(loss, rel=1e-12)
    assert found[0].metrics["rewards/margins"] == 0
    assert found[-1].metrics["rewards/margins"] != 0
    assert engine.evaluate(["pairs"])["pairs"] == found[-1].loss


def test_the_best_adapter_is_that_of_the_best_metric(make_paired, make_engine, assert_same_bits):
    fields = {"eval_data": "random.jsonl", "eval_every": 1, "keep_best": True, "steps": 6}
    fields["optimizer"] = SGD(1.0)
    # Tasks whose names have the same letters have the same data.
    by_loss = make_paired("ab", DPO(0.5), stop_when="rewards/accuracies > 0.9", **fields)
    by_accuracy = make_paired("ba", DPO(0.5), best_metric=ACCURACY, patience=2, **fields)
    engine, adapters, found = make_engine(by_loss, by_accuracy, shape=SMALL), {}, []
    while not engine.finished:
        engine.train_round()
        engine.drain()
        adapters[engine.progress("ab").step] = engine.adapter("ab")
        found += [done for done in engine.take_evaluations() if done.task_step]
    losses = [done.loss for done in found if done.task == "ab"]
    assert [done.best for done in found if done.task == "ba"] == [True, True, False, False]
    accuracies = [done.metrics[ACCURACY] for done in found if done.task == "ba"]
    # Equal values are no better ones.
    assert accuracies == [0, 0.5, 0.5, 0.5]
    progress = engine.progress("ba")
    assert (progress.step, progress.best_step) == (4, 2)
    assert progress.stopped_early == (
        "2 measurements of rewards/accuracies without a higher one than after step 2"
    )
    assert (progress.eval_loss, progress.eval_metrics[ACCURACY]) == (losses[1], 0.5)
    lowest, progress = 1 + int(np.argmin(losses)), engine.progress("ab")
    assert (progress.step, progress.best_step) == (5, lowest) and lowest != 2
    assert progress.stopped_early == (
        "rewards/accuracies 1 after step 5, and stop_when is 'rewards/accuracies > 0.9'"
    )
    for name, step in (("ab", lowest), ("ba", 2)):
        assert_same_bits(engine.result(name)(), adapters[step])


def test_sft_is_trained_in_one_pass(make_task, make_engine, train):
    engine = make_engine(make_task("sft"), shape=SMALL)
    assert engine.prepared("sft").task.objective == SFT()
    assert train(engine)["sft"][0].metrics == {}


POLICIES = {
    "importance sampling": Policy("importance_sampling"),
    "ppo with a divergence": Policy("ppo", kl_coef=0.3),
    "sequences": Policy("grpo", level="sequence", clip_low=0.1, clip_high=9.0, kl_coef=0.1),
}


@pytest.mark.parametrize("name", POLICIES)
def test_policies_are_updated_as_by_a_plain_model(name, make_rollouts, make_engine, plain_step):
    prepared = make_rollouts("rollouts", POLICIES[name])
    engine = make_engine(prepared, shape=SMALL)
    adapters, updates = step_by_step(engine, "rollouts")
    assert len(updates) == 3 and not updates[-1].skipped
    with jax.enable_x64(True):
        for step, update in enumerate(updates):
            batch = prepared.batches[step]
            recorded = recorded_of(POLICIES[name], batch)
            _, _, reference = plain_step(POLICIES[name], adapters[0], batch, None, recorded)
            graded, gradient, _ = plain_step(
                POLICIES[name], adapters[step], batch, reference, recorded
            )
            assert update.loss == pytest.approx(graded.loss, rel=1e-4)
            norm = np.sqrt(sum((np.asarray(g) ** 2).sum() for g in jax.tree.leaves(gradient)))
            assert update.grad_norm == pytest.approx(norm, rel=1e-3)


def test_policies_change_no_bit_beside_others(
    make_rollouts, make_paired, make_engine, train, assert_same_bits
):
    policy = POLICIES["ppo with a divergence"]
    alone = make_engine(make_rollouts("rollouts", policy, dropout=0.2), shape=SMALL)
    train(alone)
    beside = make_engine(
        make_paired("pairs", DPO()), make_rollouts("rollouts", policy, dropout=0.2), shape=SMALL
    )
    train(beside)
    assert_same_bits(beside.adapter("rollouts"), alone.adapter("rollouts"))


def test_a_function_trains_like_the_objective_that_it_spells_out(make_paired, make_engine, train):
    def function(log_probs, inputs):
        rewards = 0.1 * jnp.where(inputs.is_target, log_probs - inputs.reference, 0).sum(axis=1)
        return -jax.nn.log_sigmoid(rewards[::2] - rewards[1::2]).mean()

    found, updates = {}, {}
    for name, objective in (
        ("function", CustomLoss(function, "pairs", with_reference=True)),
        ("dpo", DPO(0.1)),
    ):
        engine = make_engine(make_paired("pairs", objective), shape=SMALL)
        updates[name] = [update.loss for update in train(engine)["pairs"]]
        found[name] = jax.tree.leaves(engine.adapter("pairs"))
    # A function is computed on the host in float64, DPO on the device.
    assert updates["function"] == pytest.approx(updates["dpo"], rel=1e-5)
    for one, other in zip(found["function"], found["dpo"], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_a_driven_task_trains_on_given_batches(
    make_rollouts, make_task, make_engine, backbone, train, assert_same_bits
):
    """It gets the adapter of a task whose data are the same batches, and others train beside it."""
    policy = Policy("importance_sampling")
    expected = make_engine(make_rollouts("rollouts", policy), shape=SMALL)
    losses = [update.loss for update in train(expected)["rollouts"]]
    prepared = make_rollouts("rollouts", policy)
    driven = driven_task(prepared.task, backbone.config)
    engine = make_engine(driven, make_task("sft", steps=2), shape=SMALL)
    found = []
    for step in range(3):
        updates = engine.train_on("rollouts", prepared.batches[step])
        found += [update.loss for update in updates if update.task == "rollouts"]
    assert found == losses
    assert_same_bits(engine.adapter("rollouts"), expected.adapter("rollouts"))
    assert engine.progress("rollouts").step == 3 and engine.progress("sft").step == 2
    with pytest.raises(TaskError, match="task 'sft': has data of its own"):
        engine.train_on("sft", prepared.batches[0])
    with pytest.raises(TaskError, match="a sample takes 140 places in a row, and a row has 128"):
        engine.train_on("rollouts", random_samples(1, 1, (141, 142)))


def test_a_driven_task_has_no_reference(make_paired, backbone):
    with pytest.raises(TaskError, match="no objective with a reference"):
        driven_task(make_paired("pairs", DPO()).task, backbone.config)


@pytest.mark.parametrize("name", ["dpo", "simpo", "orpo"])
def test_updates_are_differences_of_the_objective(name, make_paired, make_engine):
    """Ten random parameters of an SGD update against differences of the objective, which
    `Engine.log_probs` computes with changed adapters."""
    objective, rate, step = OBJECTIVES[name], 0.1, 1e-2
    optimizer = SGD(rate, momentum=0.0, clip_norm=None)
    prepared = make_paired("pairs", objective, optimizer=optimizer)
    engine = make_engine(prepared, shape=SMALL)
    batch = list(prepared.batches[1])

    def values():
        found = engine.log_probs("pairs", batch)
        return [v[s.target_mask[1:]].astype(float) for s, v in zip(batch, found, strict=True)]

    reference = objective.sums(values())
    progress = []
    for _ in range(4):
        if engine.progress("pairs").step == 1 and not progress:
            engine.drain()
            progress.append(engine.progress("pairs").to_json())
            arrays = engine.task_arrays("pairs")
        if engine.progress("pairs").step == 2:
            break
        engine.train_round()
        engine.drain()
    after = engine.task_arrays("pairs")

    def loss(path, place, change):
        changed = arrays[path].copy()
        changed[place] += change
        engine.restore_task("pairs", arrays | {path: changed}, TaskProgress.from_json(progress[0]))
        return objective.grade(values(), reference).loss

    rng = np.random.default_rng(0)
    paths = [path for path in arrays if path.startswith("adapter/")]
    found, expected = [], []
    for path in rng.choice(paths, 10):
        place = tuple(rng.integers(arrays[path].shape))
        found.append((arrays[path][place] - after[path][place]) / rate)
        expected.append((loss(path, place, step) - loss(path, place, -step)) / (2 * step))
    assert np.linalg.norm(expected) > 0
    assert np.linalg.norm(np.subtract(found, expected)) < 1e-2 * np.linalg.norm(expected)
