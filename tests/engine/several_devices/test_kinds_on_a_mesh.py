"""Different kinds of adapters on a mesh train as on one device."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

from jaxmux.models.adapter_ops import EMBEDDING, TIED
from jaxmux.peft import (
    IA3,
    Bottleneck,
    DiffPruning,
    DoRA,
    LNTuning,
    LoRA,
    PromptTuning,
    SparseDiff,
    TrainedTokens,
    VeRA,
    size_of_adapter,
)
from jaxmux.planner import PlanningError
from jaxmux.planner.devices import Stage

SPECS = {
    "lora": LoRA(4, 8.0, target_modules=("q_proj", "down_proj")),
    "ia3": IA3(("k_proj", "o_proj", "down_proj"), ("down_proj",)),
    "ln": LNTuning(),
    "houlsby": Bottleneck("houlsby", 4),
    "columns": DiffPruning(5, ("q_proj", "o_proj")),
    "dora": DoRA(3, 6.0, target_modules=("k_proj", "down_proj")),
    "vera": VeRA(6, d_initial=0.3, target_modules=("k_proj", "o_proj")),
    "entries": SparseDiff(1, "random", ("v_proj", "o_proj")),
    "prompt": PromptTuning(7, "random"),
    "tokens": TrainedTokens((7, 0, 100, 31, 55)),
    "pattern": LoRA(
        2,
        4.0,
        target_modules=("q_proj", "o_proj"),
        rank_pattern={"q_proj": 3},
        alpha_pattern={r"layers\.3\.self_attn\.q_proj": 1.0, "o_proj": 2.0},
    ),
    "pissa": LoRA(
        2,
        4.0,
        target_modules=("q_proj", "o_proj"),
        initialisation="pissa",
        rank_pattern={"q_proj": 3},
    ),
    "olora": LoRA(2, 1.0, target_modules=("k_proj", "down_proj"), initialisation="olora"),
    "tables": LoRA(2, 4.0, target_modules=("o_proj", "embed_tokens", "lm_head")),
}
MESHES = {
    "tp2": {"layers": (4,), "stage": Stage(tp=2)},
    "pp2,tp2": {"layers": (3, 1), "stage": Stage(tp=2)},
    # There are two key heads.
    "tp4": {"layers": (4,), "stage": Stage(tp=4)},
    "dp2,fsdp2": {"layers": (4,), "stage": Stage(dp=2, fsdp=2), "remat": "dots"},
    "replicas": {"layers": (3, 1), "others": (((1, 1, 2), Stage()),)},
}
# Those that train with a head that is the embedding, beside adapters of tables. Plain LoRA does in
# `test_meshes.py`.
SOME = ("ia3", "columns", "dora", "prompt")


@pytest.fixture(scope="module")
def make_engine(make_engine):
    """Pools have only what the tasks need."""
    return partial(make_engine, modules=(), dropout=False)


@pytest.fixture(scope="module")
def tasks(make_task_with):
    """A task of each kind, by name."""
    return {
        name: make_task_with(name, spec, i, steps=2, batch_size=8)
        for i, (name, spec) in enumerate(SPECS.items())
    }


@pytest.fixture(scope="module")
def on_one_device(make_engine, tasks, train):
    """An engine of one device that has trained the tasks, and their updates."""
    engine = make_engine(*tasks.values())
    return engine, train(engine)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_all_kinds_train_on_a_mesh_as_on_one_device(mesh, make_engine, tasks, train, on_one_device):
    engine = make_engine(*tasks.values(), **MESHES[mesh])
    assert_same_training(tasks.values(), engine, train(engine), *on_one_device)


@pytest.fixture(scope="module")
def tied(backbone):
    """The backbone with its embedding as its head, whose tokens two devices can share, and with a
    bias behind attention."""
    config = dataclasses.replace(
        backbone.config, tie_word_embeddings=True, vocab_size=104, output_bias=True
    )
    weights = {name: own for name, own in backbone.weights.items() if name != "lm_head"}
    bias = np.random.default_rng(0).normal(size=(config.num_layers, config.hidden_size))
    o_proj = weights["layers"]["self_attn"]["o_proj"] | {"bias": np.float32(bias)}
    attention = weights["layers"]["self_attn"] | {"o_proj": o_proj}
    weights["layers"] = weights["layers"] | {"self_attn": attention}
    table = np.pad(weights["embed_tokens"]["weight"], ((0, 3), (0, 0)))
    weights["embed_tokens"] = {"weight": jax.numpy.asarray(table)}
    return dataclasses.replace(backbone, config=config, weights=weights)


@pytest.fixture(scope="module")
def task_of_tied(tasks, tied):
    """Trains tokens of embedding and head."""
    prepared = tasks["tokens"]
    (targets,), (own,) = prepared.targets.values(), prepared.make_adapter().values()
    size = size_of_adapter(prepared.task.adapter, tied.config)
    assert prepared.targets.keys() == {EMBEDDING}
    return dataclasses.replace(
        prepared, targets={TIED: targets}, make_adapter=lambda: {TIED: own}, size=size
    )


@pytest.fixture(scope="module")
def tables_of_tied(tasks, tied):
    """Trains low-rank adapters of the embedding and of the head, with dropout."""
    prepared = tasks["tables"]
    adapter, more = prepared.make_adapter(), tied.config.vocab_size - 101
    for point, name, axis in (("embed_tokens", "a", 1), ("lm_head", "b", 2)):
        edges = [(0, more if i == axis else 0) for i in range(3)]
        adapter[point][name] = np.pad(adapter[point][name], edges)
    spec = dataclasses.replace(prepared.task.adapter, dropout=0.2)
    return dataclasses.replace(
        prepared,
        task=dataclasses.replace(prepared.task, adapter=spec),
        make_adapter=lambda: adapter,
        size=size_of_adapter(spec, tied.config),
    )


def test_kinds_train_on_a_mesh_as_on_one_device_with_a_head_that_is_the_embedding(
    make_engine, tied, task_of_tied, tables_of_tied, train, tasks
):
    """IA3 also multiplies the bias of a linear whose inputs are divided."""
    every = task_of_tied, tables_of_tied, *(tasks[name] for name in SOME)
    expected = make_engine(*every, model=tied)
    results = expected, train(expected)
    engine = make_engine(*every, model=tied, layers=(4,), stage=Stage(dp=2, tp=2))
    assert_same_training(every, engine, train(engine), *results)


def test_a_pipeline_refuses_tokens_of_a_head_that_is_the_embedding(make_engine, tied, task_of_tied):
    problem = "task 'tokens': .* of 2 stages of a pipeline the first has the embedding and the last"
    with pytest.raises(PlanningError, match=problem):
        make_engine(task_of_tied, model=tied, layers=(3, 1), stage=Stage())
    interleaved = {"layers": (1, 1, 1, 1), "stages": 2, "schedule": "interleaved"}
    with pytest.raises(PlanningError, match=problem):
        make_engine(task_of_tied, model=tied, stage=Stage(), **interleaved)


def assert_same_training(tasks, engine, updates, expected, expected_updates):
    for prepared in tasks:
        name = prepared.task.name
        for one, other in zip(updates[name], expected_updates[name], strict=True):
            assert not one.skipped
            np.testing.assert_allclose(one.loss, other.loss, rtol=1e-5)
            # AdamW moves parameters with tiny gradients as far as others, so rounding grows, more
            # on processors with other matrix units.
            rtol = {1: 1e-4, 2: 1e-3}[one.task_step]
            np.testing.assert_allclose(one.grad_norm, other.grad_norm, rtol=rtol)
        before, found, wanted = (
            [np.asarray(x) for x in jax.tree.leaves(tree)]
            for tree in (prepared.make_adapter(), engine.adapter(name), expected.adapter(name))
        )
        change = sum(np.square(x - y).sum() for x, y in zip(wanted, before, strict=True))
        error = sum(np.square(x - y).sum() for x, y in zip(wanted, found, strict=True))
        assert error**0.5 < 1e-3 * change**0.5, name
