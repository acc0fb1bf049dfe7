"""Objectives of two passes, and of one pass with losses of tokens or of pairs, train on meshes and
in replicas like on one device."""

import jax
import numpy as np
import pytest

from jaxmux.engine import TaskProgress
from jaxmux.objectives import DPO, KTO, Policy
from jaxmux.planner.devices import Stage

TP2, DP2, DP2_TP2 = Stage(tp=2), Stage(dp=2), Stage(dp=2, tp=2)


@pytest.fixture(scope="module")
def tasks(make_paired, make_task, make_rollouts):
    weighted = DPO(0.5, use_weighting=True)
    return (
        make_paired("pairs", weighted, dropout=0.3, eval_data="random.jsonl", eval_every=2),
        make_task("sft", steps=3),
        make_rollouts("rollouts", Policy("ppo", kl_coef=0.3)),
        make_paired("one-pass", DPO(0.5), dropout=0.2),
        make_paired("labels", KTO(0.5), steps=3),
    )


@pytest.fixture(scope="module")
def expected(make_engine, tasks, train):
    engine = make_engine(*tasks)
    return engine, train(engine)


def test_a_pipeline_keeps_the_bits_of_one_device(
    expected, make_engine, tasks, train, assert_same_bits
):
    """A pipeline begins its rounds earlier, so tasks that wait for their reference begin later."""
    first, updates = expected
    engine = make_engine(*tasks, layers=(2, 2))
    assert [task.pairs_fit(engine.options.shape) for task in tasks] == [False] * 3 + [True, False]
    for name, found in train(engine).items():
        of_rounds = [update.round for update in updates[name]]
        assert [
            update._replace(round=of_round)
            for update, of_round in zip(found, of_rounds, strict=True)
        ] == updates[name]
        assert_same_bits(engine.task_arrays(name), first.task_arrays(name))


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param({"layers": (4,), "stage": DP2_TP2}, id="dp2,tp2"),
        pytest.param({"layers": (4,), "stage": TP2}, id="tp2", marks=pytest.mark.slow),
        pytest.param({"layers": (4,), "stage": DP2}, id="dp2", marks=pytest.mark.slow),
        pytest.param({"layers": (4,), "others": (((4,), TP2),)}, id="1+tp2"),
    ],
)
def test_a_mesh_trains_like_one_device(mesh, expected, make_engine, tasks, train):
    first, updates = expected
    engine = make_engine(*tasks, **mesh)
    begun = {name: engine.adapter(name) for name in engine.names}
    for name, found in train(engine).items():
        # Sums in another order move the losses of later steps more than that of the first.
        losses = [update.loss for update in updates[name]]
        assert [update.loss for update in found] == pytest.approx(losses, rel=1e-3)
        assert found[0].loss == pytest.approx(losses[0], rel=1e-5)
        assert found[0].grad_norm == pytest.approx(updates[name][0].grad_norm, rel=1e-4)
        one, other, start = (
            np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(adapter)])
            for adapter in (engine.adapter(name), first.adapter(name), begun[name])
        )
        assert np.linalg.norm(one - other) < 1e-3 * np.linalg.norm(other - start)


def test_a_pipeline_continues_from_a_checkpoint(
    expected, make_engine, tasks, train, assert_same_bits
):
    first = make_engine(*tasks, layers=(2, 2))
    first.train_round(stream=False)
    first.train_round(stream=False)
    first.drain()
    second = make_engine(*tasks, layers=(2, 2))
    for name in first.names:
        progress = TaskProgress.from_json(first.progress(name).to_json())
        second.restore_task(name, first.task_arrays(name), progress, first.accumulated(name))
    train(second)
    for name in second.names:
        assert_same_bits(second.adapter(name), expected[0].adapter(name))
