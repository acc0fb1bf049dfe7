"""Tasks with different kinds of adapters train together, each as it does alone."""

import dataclasses
import math
from functools import partial

import jax
import numpy as np
import pytest

from jaxmux.engine import Engine
from jaxmux.engine.state.renewal import changed_by_updates
from jaxmux.engine.state.train_state import pool_specs
from jaxmux.engine.tasks.prepared_task import size_of
from jaxmux.optimizers import SGD
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
    adapter_of,
    kind_of,
    own_leaves,
)
from jaxmux.peft.leaves import named_leaves, trained
from jaxmux.tasks import TaskError

from .reference_llama import loss_of

# Few pairs of a kind and a linear: each adds to the program.
SPECS = {
    "lora": LoRA(4, 8.0, target_modules=("q_proj", "down_proj")),
    "ia3": IA3(),
    "ia3-inputs": IA3(("q_proj", "k_proj", "o_proj", "up_proj"), ("q_proj", "o_proj")),
    "ln": LNTuning(),
    "pfeiffer": Bottleneck(size=3),
    "houlsby": Bottleneck("houlsby", 5, scaling=0.5),
    "parallel": Bottleneck("parallel", 4),
    "columns": DiffPruning(5, ("q_proj", "down_proj")),
    "dora": DoRA(3, 6.0, target_modules=("q_proj", "up_proj")),
    "vera": VeRA(6, 0.3, target_modules=("q_proj", "down_proj")),
    # Other projections, of which some linears have parts.
    "vera-of-some": VeRA(4, 0.3, 7, ("k_proj", "o_proj")),
    "entries": SparseDiff(3, "random", ("q_proj", "o_proj")),
    "prompt": PromptTuning(7, "random"),
    "short-prompt": PromptTuning(2, "random"),
    "tokens": TrainedTokens((7, 0, 100, 31, 55)),
    "token": TrainedTokens((1,)),
    "pattern": LoRA(
        3,
        4.0,
        target_modules=("q_proj", "o_proj"),
        rank_pattern={r"layers\.0\.self_attn\.q_proj": 2, "o_proj": 5},
        alpha_pattern={"o_proj": 1.0},
    ),
    "pissa": LoRA(
        3,
        4.0,
        target_modules=("q_proj", "o_proj", "down_proj"),
        initialisation="pissa",
        loraplus_ratio=2.0,
        rank_pattern={"o_proj": 2},
        alpha_pattern={"down_proj": 1.0},
    ),
    "olora": LoRA(2, 1.0, target_modules=("q_proj", "down_proj"), initialisation="olora"),
    "eva": DoRA(2, 3.0, target_modules=("q_proj", "up_proj"), initialisation="eva"),
    "tables": LoRA(
        3,
        4.0,
        target_modules=("q_proj", "embed_tokens", "lm_head"),
        rank_pattern={"lm_head": 2},
        alpha_pattern={"embed_tokens": 1.5},
    ),
    "head": LoRA(4, 8.0, target_modules="lm_head", initialisation="orthogonal"),
    "lora-tokens": LoRA(2, 6.0, target_modules="o_proj", trained_tokens=(90, 3, 17)),
}

# Each has the formulas of another one.
MORE_SPECS = {"ia3-inputs", "pfeiffer", "vera-of-some", "short-prompt", "token", "olora", "eva"}
MORE_SPECS |= {"head"}
# Tasks that train together. The program of all of them takes long to compile.
POOLS = {"most": [name for name in SPECS if name not in MORE_SPECS], "all": [*SPECS]}
MARKS = {"most": (), "all": pytest.mark.slow}

# By point, the scales in both layers: alpha / rank.
SCALES = {
    "pattern": {
        "self_attn.q_proj": (4 / 2, 4 / 3),
        "self_attn.o_proj": (1 / 5, 1 / 5),
    },
    "tables": {
        "self_attn.q_proj": (4 / 3, 4 / 3),
        "embed_tokens": (1.5 / 3,),
        "lm_head": (4 / 2,),
    },
    "head": {"lm_head": (8 / 4,)},
    "lora-tokens": {"self_attn.o_proj": (6 / 2, 6 / 2)},
}
# By linear, those of the adapters whose ranks are in pairs.
PAIR_SCALES = {
    "pissa": {"self_attn.q_proj": 4 / 3, "self_attn.o_proj": 4 / 2, "mlp.down_proj": 1 / 3},
    "olora": {"self_attn.q_proj": 1 / 2, "mlp.down_proj": 1 / 2},
}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=MARKS[name]) for name in POOLS])
def tasks(request, make_task_with):
    """By name, the tasks of a pool, with an adapter of each kind."""
    fields = {"steps": 3, "samples": 12, "batch_size": 3, "optimizer": SGD(0.3)}
    return {
        name: make_task_with(name, spec, i, **fields)
        for i, (name, spec) in enumerate(SPECS.items())
        if name in POOLS[request.param]
    }


def with_names(names=frozenset(SPECS)):
    """Gives a test each pool with each of its tasks that are among the names."""
    given = [
        pytest.param(pool, name, marks=MARKS[pool], id=f"{pool}-{name}")
        for pool, members in POOLS.items()
        for name in members
        if name in names
    ]
    return pytest.mark.parametrize(("tasks", "name"), given, indirect=["tasks"], scope="module")


@with_names()
def test_a_task_gets_the_same_bits_alone(name, assert_same_alone):
    assert_same_alone(name)


RATE = 0.5


@pytest.fixture(scope="module")
def stepped(make_mixed, tasks):
    """An engine that has trained all tasks for one step of plain gradient descent, and the updates
    by task."""
    sgd = SGD(RATE, momentum=0.0, clip_norm=None)
    engine = make_mixed(
        *(
            dataclasses.replace(
                prepared, task=dataclasses.replace(prepared.task, optimizer=sgd, steps=1), steps=1
            )
            for prepared in tasks.values()
        )
    )
    engine.train_round()
    return engine, {update.task: update for update in engine.drain()}


@pytest.mark.long
@with_names()
def test_a_step_equals_that_of_a_float64_model(name, backbone, stepped, tasks, config):
    """Loss, gradient norm and, by plain gradient descent, every gradient."""
    engine, updates = stepped
    prepared, update = tasks[name], updates[name]
    spec, kind = prepared.task.adapter, kind_of(prepared.task.adapter)
    specs = own_leaves(spec, list(prepared.targets), config)
    before = prepared.make_adapter()
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: np.asarray(x, np.float64), trained(specs, before))
        batch = prepared.batches[0]
        frozen = jax.tree.map(
            lambda spec, leaf: None if spec.trained else np.asarray(leaf, np.float64), specs, before
        )
        if name in SCALES:
            frozen = {point: {"scale": own} for point, own in SCALES[name].items()}
        if name in PAIR_SCALES:
            frozen = {
                module: {**params[module], "scale": scale}
                for module, scale in PAIR_SCALES[name].items()
            }
        given = config, backbone.weights, kind.name, spec
        function = partial(loss_of, *given, samples=batch, frozen=frozen)
        loss, gradients = jax.jit(jax.value_and_grad(lambda own: function(adapter=own)))(params)
        norm = np.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(gradients)))
    after = trained(specs, engine.adapter(name))
    np.testing.assert_allclose(update.loss, loss, rtol=1e-6)
    np.testing.assert_allclose(update.grad_norm, norm, rtol=1e-5)
    rates = kind.relative_rates(spec, prepared.targets)
    for path, own in named_leaves(after).items():
        first, gradient = named_leaves(params)[path], np.array(named_leaves(gradients)[path])
        if name in PAIR_SCALES and path.endswith("/a"):
            # A - A0 makes the steps of A.
            gradient[..., 1::2] = gradient[..., 0::2]
        mask = named_leaves(rates)[path]
        mask = mask[-1:] if "last" in named_leaves(specs)[path].axes else mask[: len(own)]
        mask = mask.reshape(-1, *[1] * (own.ndim - 1))
        expected = -RATE * mask * gradient
        assert np.linalg.norm(expected) > 0
        error = np.linalg.norm((own - first) - expected)
        # The parameters are rounded to float32.
        rounding = 1e-7 * np.linalg.norm(first)
        assert error < 3e-5 * np.linalg.norm(expected) + rounding, path


def test_norms_of_adapted_weights_follow_every_update(tasks, together, config, base_tensor):
    spec, kind = SPECS["dora"], kind_of(SPECS["dora"])
    _, arrays = together["dora"]
    adapter = adapter_of(arrays, spec, config)
    tensors = kind.tensors(spec, adapter, config, False, base_tensor)
    imported = kind.from_tensors(spec, tensors, config, base_tensor)
    first = tasks["dora"].make_adapter()
    for module, own in adapter.items():
        np.testing.assert_allclose(own["norm"], imported[module]["norm"], rtol=2e-6)
        change = np.abs(own["norm"] - first[module]["norm"]).max()
        assert change > 1e-4


def test_constants_do_not_change_by_updates(pool, config):
    """They need not be sent to other replicas."""
    state = pool_specs(config, pool.modules, *pool[:2], pool.optimizer, pool.others)
    found = named_leaves(changed_by_updates(state.adapters, state.adapters))
    constants = {path.split("/", 1)[0] for path in named_leaves(state.adapters).keys() - found}
    assert {"vera/self_attn.q_proj/ld", "dora/self_attn.q_proj/norm"} <= found.keys()
    assert "vera/self_attn.q_proj/a0" not in found and "dora" not in constants
    assert {"vera", "sparse_diff", "bottleneck"} < constants


@with_names(PAIR_SCALES)
def test_constants_of_pairs_stay_and_have_no_moments(name, tasks, together):
    _, arrays = together[name]
    for module, before in tasks[name].make_adapter().items():
        a, b = (arrays[f"adapter/{module}/{factor}"] for factor in "ab")
        np.testing.assert_array_equal(b[:, 1::2], before["b"][:, 1::2])
        np.testing.assert_allclose(
            a[..., ::2] - a[..., 1::2],
            before["a"][..., ::2] - before["a"][..., 1::2],
            atol=1e-6,
        )
        for own, was in ((a, before["a"]), (b.swapaxes(1, 2), before["b"].swapaxes(1, 2))):
            assert np.abs(own - was)[..., ::2].max() > 1e-3
    moments = [
        path for path in arrays if path.startswith("optimizer/") and path[-2:] in ("/a", "/b")
    ]
    for path in moments:
        ranks = np.moveaxis(arrays[path], 2 if path.endswith("/a") else 1, 0)
        assert ranks[::2].any() and not ranks[1::2].any()
    assert len(moments) == 2 * len(PAIR_SCALES[name])


def test_virtual_tokens_are_computed_but_belong_to_no_sample(tasks, together):
    prepared, (updates, _) = tasks["prompt"], together["prompt"]
    for step, update in enumerate(updates):
        batch = prepared.batches[step]
        assert update.tokens == sum(len(sample.input_ids) - 1 for sample in batch)
        assert update.computed_tokens >= sum(6 + len(sample.input_ids) for sample in batch)


def test_nan_in_a_kind_reaches_no_other(make_mixed, tasks, together, train):
    # Another task of the same kind stays sound. Two kinds, "ln" and "entries", have one task each.
    with_others = {"lora", "prompt", "ia3-inputs", "vera", "dora", "pissa", "houlsby"}
    for bad in ((with_others | {"ln"}) & tasks.keys(), {"entries"}):
        broken = {
            name: dataclasses.replace(
                tasks[name],
                make_adapter=lambda own=tasks[name]: jax.tree.map(
                    lambda x: x * np.float32(np.nan) if x.dtype == np.float32 else x,
                    own.make_adapter(),
                ),
            )
            for name in bad
        }
        engine = make_mixed(*(broken.get(name, tasks[name]) for name in tasks))
        updates = train(engine, rounds=2)
        assert all(u.skipped for name in bad for u in updates[name])
        for name in tasks.keys() - bad:
            expected, _ = together[name]
            assert [u.loss for u in updates[name]] == [u.loss for u in expected[:2]]


def test_projections_that_begin_alike_are_not_mixed_up(make_mixed, tasks, together, train, config):
    """They may come from folders. All numbers but those of the first feature differ."""
    spec, kind = SPECS["vera"], kind_of(SPECS["vera"])
    first = tasks["vera"].make_adapter()
    tensors = {name: x.copy() for name, x in kind.tensors(spec, first, config, False, None).items()}
    tensors["base_model.vera_A"][1:] *= -1
    tensors["base_model.vera_B"][:, 1:] *= 2
    begins_alike = kind.from_tensors(spec, tensors, config, None)
    for module, own in begins_alike.items():
        np.testing.assert_array_equal(own["a0"][:, 0], first[module]["a0"][:, 0])
        np.testing.assert_array_equal(own["b0"][0], first[module]["b0"][0])
    task = dataclasses.replace(tasks["vera"].task, name="alike")
    other = dataclasses.replace(tasks["vera"], task=task, make_adapter=lambda: begins_alike)
    alone = train(make_mixed(other))["alike"]
    beside = train(make_mixed(tasks["vera"], other))
    assert [u.loss for u in beside["alike"]] == [u.loss for u in alone]
    assert [u.loss for u in beside["vera"]] == [u.loss for u in together["vera"][0]]
    assert alone[0].loss != beside["vera"][0].loss


def test_slots_are_moved_from_one_pool_to_another(make_mixed, tasks, together, train):
    """A task goes on from its checkpoint in an engine that has no room for other kinds."""
    name = "houlsby"
    first = make_mixed(tasks[name])
    train(first, rounds=2)
    options = dataclasses.replace(first.options, reserved=tasks[name].pool)
    second = Engine(first.backbone, options)
    second.register_tasks([tasks[name]])
    second.restore_task(name, first.task_arrays(name), first.progress(name))
    (update,) = train(second)[name]
    assert update.task_step == 3
    np.testing.assert_allclose(update.loss, together[name][0][2].loss, rtol=1e-5)


def test_a_kind_without_room_is_refused(make_engine, tasks):
    engine = make_engine()
    for name, problem in {
        "ia3": "its adapter of the kind 'ia3' needs arrays that the pool does not have",
        "houlsby": "its adapter of the kind 'bottleneck' needs arrays",
    }.items():
        with pytest.raises(TaskError, match=problem):
            engine.refuse_outgrowing(tasks[name])


def test_a_pool_knows_the_rank_of_any_kind(tasks):
    ranks = {"lora": 4, "ia3": 0, "ln": 0, "houlsby": 5, "columns": 5, "vera": 6, "prompt": 7}
    ranks |= {"dora": 3, "entries": 3, "pattern": 5, "pissa": 6, "tables": 3, "lora-tokens": 3}
    assert {name: tasks[name].pool.largest_rank for name in ranks} == ranks


def test_the_memory_of_a_pool_is_that_of_its_arrays(make_mixed, pool, backbone):
    state = make_mixed().state
    arrays = jax.tree.leaves((state.adapters, state.accumulators, state.moments))
    size = size_of(backbone.config, backbone.compute_dtype)
    assert pool.state_bytes(size) == sum(array.nbytes for array in arrays)


def test_the_memory_of_a_stage_is_that_of_its_arrays(pool, backbone):
    """Projections lie on every stage, what is before or behind the layers on the first or last."""
    size = size_of(backbone.config, backbone.compute_dtype)
    state = pool_specs(backbone.config, pool.modules, *pool[:2], pool.optimizer, pool.others)
    specs = jax.tree.leaves((state.adapters, state.accumulators, state.moments))
    found = []
    for first, to_end in ((0, False), (1, True)):
        here = [own for own in specs if ("last" if first == 0 else "first") not in own.axes]
        shapes = [own.of_layers(first, 1, to_end).shape for own in here]
        found.append(4 * sum(map(math.prod, shapes)))
    assert pool.stage_bytes(size, [1, 1]) == found
    assert sum(found) > pool.state_bytes(size)
