"""Stages of several devices train like one device: data, fully sharded data and tensor
parallelism."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmux.engine.tasks.prepared_task import size_of
from jaxmux.models import MODULES as ALL_MODULES
from jaxmux.models import Backbone
from jaxmux.models.modules import abstract_weights
from jaxmux.optimizers import SGD, AdamW
from jaxmux.planner import PlanningError
from jaxmux.planner.devices import Stage
from jaxmux.planner.packing import ShapeClass
from jaxmux.sharding import forward

# Rounding in another order changes gradients by this much, relative to their norm.
GRADIENT_TOLERANCE = 1e-5
# An adapter differs by this part of what training has changed.
ADAPTER_TOLERANCE = 1e-3

SUMMED = ("accumulators", "sums")

SHAPE = ShapeClass(rows=2, row_len=128, chunk_len=64, max_sequences=8)
SHORT = ShapeClass(rows=4, row_len=64, chunk_len=64, max_sequences=8)

# All attention and MLP linears of the backbone are divided. Adapters are on two of each kind, by
# whether tensor parallelism divides the output or the input.
TARGETS = ("q_proj", "v_proj", "o_proj", "down_proj")
MODULES = tuple(module for module in ALL_MODULES if module.endswith(TARGETS))

LARGEST = {"layers": (4,), "stage": Stage(dp=2, fsdp=2, tp=2), "remat": "dots"}
MORE_MESHES = {
    # Replicas of two devices and of one; only the first one has rows for the long samples.
    "tp2 + tp1": {
        "layers": (4,),
        "stage": Stage(tp=2),
        "others": (((4,), Stage()),),
        "replica_shapes": (SHAPE, SHORT),
    },
    "pp2,tp2 + tp1": {
        "layers": (3, 1),
        "stage": Stage(tp=2),
        "others": (((4,), Stage()),),
        "replica_shapes": (SHAPE, SHORT),
    },
    "pp2,tp2 + 2*(tp1)": {
        "layers": (2, 2),
        "stage": Stage(tp=2),
        "others": (((4,), Stage()), ((4,), Stage())),
        "replica_shapes": (SHAPE, SHORT, SHORT),
    },
    "tp2,pp2": {"layers": (2, 2), "stage": Stage(tp=2)},
    "dp2": {"layers": (4,), "stage": Stage(dp=2)},
    "tp4 + dp2,pp2": {
        "layers": (4,),
        "stage": Stage(tp=4),
        "others": (((1, 3), Stage(dp=2)),),
        "replica_shapes": (SHORT, SHAPE),
    },
    # As on a GPU.
    "fsdp2": {"layers": (4,), "stage": Stage(fsdp=2), "unroll": True, "remat": "dots"},
    "tp2": {"layers": (4,), "stage": Stage(tp=2)},
    "tp4": {"layers": (4,), "stage": Stage(tp=4)},
    "dp2,pp2,tp2": {"layers": (3, 1), "stage": Stage(dp=2, tp=2)},
    "fsdp2,pp2,tp2": {"layers": (1, 3), "stage": Stage(fsdp=2, tp=2), "remat": "dots"},
    "interleaved": {
        "layers": (1, 1, 1, 1),
        "stages": 2,
        "stage": Stage(tp=2),
        "schedule": "interleaved",
    },
}


OTHER_BACKBONES = {
    "biases": {"attention_bias": True, "output_bias": True, "mlp_bias": True},
    "head norms": {"architecture": "Qwen3ForCausalLM", "qk_norm": True},
    "an untied head": {"tie_word_embeddings": False},
    "a vocabulary that tp does not divide": {"vocab_size": 101},
}


@pytest.fixture(scope="module")
def make_backbone(config):
    """Makes a random backbone in which rounding stays small: a last bit that differs in a weight
    changes gradients by less than 1e-6."""

    def make(**fields) -> Backbone:
        fields = {"vocab_size": 104, "tie_word_embeddings": True} | fields
        random = Backbone.random(dataclasses.replace(config, **fields), seed=5)
        rng = np.random.default_rng(3)

        def larger(path, weight):
            if getattr(path[-1], "key", None) == "bias":
                return jax.numpy.asarray(rng.normal(0, 0.1, weight.shape), weight.dtype)
            return weight if weight.ndim == 1 else 2 * weight

        weights = jax.tree.map_with_path(larger, random.weights)
        return dataclasses.replace(random, weights=weights)

    return make


@pytest.fixture(scope="module")
def make_engine(make_engine):
    """Pools have the same linears, so that all tests of a mesh run the same programs."""
    return partial(make_engine, modules=MODULES)


@pytest.fixture(scope="module")
def make_wide_task(make_task):
    return partial(make_task, targets=TARGETS)


@pytest.fixture(scope="module")
def tasks(make_wide_task):
    """Three updates of tasks of different lengths, ranks, optimizers, targets and dropout; clipping
    bites."""
    make = partial(make_wide_task, steps=3)
    return (
        make("long", lengths=(60, 120)),
        make("dropped", rank=8, dropout=0.2, optimizer=AdamW(1e-2, clip_norm=0.02)),
        make("short", rank=2, lengths=(3, 20), batch_size=9),
        make("few", rank=3, targets=("q_proj", "down_proj"), optimizer=SGD(0.1)),
    )


@pytest.fixture(scope="module")
def trained(make_backbone, make_engine, tasks, train):
    """What one device makes of the tasks: adapters at the beginning and the end, and updates."""
    engine = make_engine(*tasks, model=make_backbone())
    begin = arrays_of(engine)
    updates = train(engine)
    return begin, arrays_of(engine), updates


def arrays_of(engine):
    return {name: engine.task_arrays(name) for name in engine.names}


def test_a_mesh_trains_like_one_device(trained, make_backbone, make_engine, tasks, train):
    check_training(LARGEST, trained, make_backbone(), make_engine, tasks, train)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MORE_MESHES.values(), ids=MORE_MESHES)
def test_more_meshes_train_like_one_device(mesh, trained, make_backbone, make_engine, tasks, train):
    check_training(mesh, trained, make_backbone(), make_engine, tasks, train)


@pytest.mark.slow
def test_halves_that_take_turns_change_no_order_of_sums(
    make_backbone, make_engine, make_task, train
):
    """On four tensor-parallel devices, a task gets the bits that it gets alone, wherever in a
    microbatch its samples lie."""
    # A sample fills a chunk, of which each half has two.
    lengths = (50, 60)
    first = make_task("first", lengths=lengths, batch_size=1, optimizer=SGD(0.1), steps=3)
    task = make_task("task", lengths=lengths, batch_size=3, optimizer=SGD(0.1), steps=3)
    results, options = [], {"modules": ("self_attn.q_proj", "mlp.down_proj")}
    for own in ((task,), (first, task)):
        engine = make_engine(*own, model=make_backbone(), **MORE_MESHES["tp4"], **options)
        train(engine)
        results.append(jax.tree.leaves(engine.task_arrays("task")))
    for alone, together in zip(*results, strict=True):
        np.testing.assert_array_equal(alone, together)


@pytest.mark.slow
@pytest.mark.parametrize("fields", OTHER_BACKBONES.values(), ids=OTHER_BACKBONES)
def test_other_backbones_have_the_gradients_of_one_device(
    fields, make_backbone, make_engine, tasks
):
    model = make_backbone(**fields)
    meshes = MORE_MESHES["fsdp2,pp2,tp2"], MORE_MESHES["tp4"]
    expected = gradients(make_engine(*tasks, model=model))
    for mesh in meshes:
        found = gradients(make_engine(*tasks, model=model, **mesh))
        assert_gradients_are_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp2", "fsdp2,pp2,tp2"])
def test_adapters_on_the_other_linears_have_the_gradients_of_one_device(
    mesh, make_backbone, make_engine, make_task
):
    others = tuple(module for module in ALL_MODULES if module not in MODULES)
    make = partial(make_task, targets=tuple(name.partition(".")[2] for name in others))
    tasks = make("wide", lengths=(60, 120)), make("dropped", rank=8, dropout=0.2)
    options = {"model": make_backbone(), "modules": others}
    expected = gradients(make_engine(*tasks, **options))
    found = gradients(make_engine(*tasks, **options, **MORE_MESHES[mesh]))
    assert_gradients_are_close(found, expected)


def check_training(mesh, trained, model, make_engine, tasks, train):
    """Losses and adapters after three updates, and the gradients of one round."""
    begin, end, expected_updates = trained
    engine = make_engine(*tasks, model=model, **mesh)
    updates = train(engine)
    for name, arrays in arrays_of(engine).items():
        losses, expected = ([u.loss for u in own[name]] for own in (updates, expected_updates))
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        assert_adapter_is_close(begin[name], end[name], arrays)
    assert min(u.grad_norm for u in updates["dropped"]) > 0.02
    expected = gradients(make_engine(*tasks, model=model))
    assert_gradients_are_close(gradients(make_engine(*tasks, model=model, **mesh)), expected)


def gradients(engine):
    """By task, accumulators and loss of a round that begins with random adapters."""
    for name in engine.names:
        rng = np.random.default_rng(7)
        arrays = {
            path: value + 0.05 * rng.standard_normal(value.shape).astype(np.float32)
            if path.startswith("adapter")
            else value
            for path, value in engine.task_arrays(name).items()
        }
        engine._slots.write(name, arrays)
    plan = engine._stream.next(engine._live(), {})._replace(updates=())
    engine._executor.run(plan, [], lambda: False, engine._due, lambda: None)
    engine.close()
    return {
        name: {path: x for path, x in arrays.items() if path.split("/")[0] in SUMMED}
        for name, arrays in arrays_of(engine).items()
    }


def assert_gradients_are_close(found, expected):
    for name, arrays in expected.items():
        np.testing.assert_allclose(found[name]["sums"], arrays["sums"], rtol=GRADIENT_TOLERANCE)
        scale = norm_of_difference(arrays, {path: 0 for path in arrays}, "accumulators")
        error = norm_of_difference(found[name], arrays, "accumulators")
        assert error <= GRADIENT_TOLERANCE * scale, (name, error / scale)


def assert_adapter_is_close(begin, expected, found):
    change = norm_of_difference(expected, begin, "adapter")
    assert norm_of_difference(found, expected, "adapter") <= ADAPTER_TOLERANCE * change


def norm_of_difference(one, other, kind):
    paths = [path for path in one if path.startswith(kind)]
    return np.sqrt(sum(np.sum(np.square(one[path] - other[path])) for path in paths))


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(MORE_MESHES["tp2,pp2"], id="tp2,pp2", marks=pytest.mark.slow),
        pytest.param(LARGEST, id="dp2,fsdp2,tp2"),
    ],
)
def test_a_task_that_is_not_finite_fails_alone(
    mesh, make_backbone, make_engine, make_wide_task, replace_adapter, train, assert_same_training
):
    """The other tasks keep their bits, also after the task has left in the middle of the run."""
    good = (
        make_wide_task("good", steps=4),
        make_wide_task("other", dropout=0.2, batch_size=3, optimizer=SGD(0.1), steps=4),
    )
    bad = make_wide_task("bad", batch_size=3, steps=4)
    bad = replace_adapter(bad, lambda x: np.full_like(x, np.nan))
    options = {"model": make_backbone(), "max_bad_steps": 2, **mesh}
    expected, found = make_engine(*good, **options), make_engine(*good, bad, **options)
    expected_updates, updates = train(expected), train(found)
    assert found.progress("bad").status == "failed"
    del updates["bad"]
    expected.microbatches = found.microbatches
    assert_same_training(found, updates, expected, expected_updates)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_new_task_gets_no_gradients_of_the_failed_one_before_it(
    schedule, make_backbone, make_engine, make_wide_task, replace_adapter, train
):
    """In the same slot, on a replica that does not own the train state."""
    good, new = (
        make_wide_task("good", steps=3, batch_size=9),
        make_wide_task("new", steps=2, batch_size=9),
    )
    bad = make_wide_task("bad", steps=3, batch_size=9)
    bad = replace_adapter(bad, lambda x: np.full_like(x, np.nan))
    two = {"layers": (4,), "others": (((4,), Stage()),), "schedule": schedule}
    losses = {}
    for name, mesh in (("one", {}), ("two", two)):
        engine = make_engine(good, bad, model=make_backbone(), max_bad_steps=2, **mesh)
        train(engine)
        assert engine.progress("bad").status == "failed"
        engine.release("bad")
        engine.register_tasks([new])
        losses[name] = [update.loss for update in train(engine)["new"]]
    np.testing.assert_allclose(losses["two"], losses["one"], rtol=1e-5)


def test_all_devices_keep_the_same_bits(make_backbone, make_engine, tasks, train):
    """Data-parallel devices update their adapters by themselves."""
    engine = make_engine(*tasks, model=make_backbone(), **LARGEST)
    train(engine, rounds=1)
    (state,) = engine._slots.stored.states
    for leaf in jax.tree.leaves((state.adapters, state.moments, state.count)):
        by_place = {}
        for shard in leaf.addressable_shards:
            by_place.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        for first, *others in by_place.values():
            assert len(others) >= 3
            for other in others:
                np.testing.assert_array_equal(other, first)


@pytest.mark.slow
@pytest.mark.parametrize("last", [{}, MORE_MESHES["dp2"]], ids=["to one device", "to dp2"])
def test_training_moves_between_meshes_in_the_middle_of_a_round(
    last, trained, make_backbone, make_engine, tasks, train
):
    """From one device to eight and to fewer; every sample is trained once."""
    begin, end, expected_updates = trained
    model, updates = make_backbone(), {}
    engine = make_engine(*tasks, model=model)
    for mesh in (LARGEST, last):
        for name, more in train(engine, rounds=1).items():
            updates[name] = updates.get(name, []) + more
        assert not engine.train_round(lambda: True)
        assert any(engine.accumulated(name) for name in engine.names)
        following = make_engine(*tasks, model=model, **mesh)
        for name in engine.names:
            state = engine.task_arrays(name), engine.progress(name), engine.accumulated(name)
            following.restore_task(name, *state)
        following.rounds = engine.rounds
        engine = following
    for name, more in train(engine).items():
        updates[name] += more
        losses, expected = ([u.loss for u in own[name]] for own in (updates, expected_updates))
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        assert_adapter_is_close(begin[name], end[name], engine.task_arrays(name))


@pytest.mark.slow
@pytest.mark.usefixtures("trace_once")
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(LARGEST, id="dp2,fsdp2,tp2"),
        pytest.param(MORE_MESHES["tp4"], id="tp4"),
    ],
)
def test_policies_are_chosen_by_the_memory_of_a_device(mesh, make_backbone, make_engine, make_task):
    """Also if a device has more keys than it uses."""
    policies = {}
    for memory in (2**32, 700_000):
        options = mesh | {"remat": "auto", "memory": memory, "modules": ("self_attn.q_proj",)}
        engine = make_engine(make_task("a"), model=make_backbone(), **options)
        executor = engine._executor
        policies[memory] = executor._replicas[0].compiled.choose_remat(dropout=False)
    assert {policy for part in policies[2**32] for policy in part} == {"norms"}
    assert "full" in {policy for part in policies[700_000] for policy in part}


def test_fsdp_does_not_keep_the_gathered_weights(make_backbone, make_engine, make_wide_task):
    with pytest.raises(PlanningError, match="remat='none' would keep .* use remat='norms'"):
        mesh = MORE_MESHES["fsdp2"] | {"remat": "none"}
        make_engine(make_wide_task("a"), model=make_backbone(), **mesh)


def test_a_state_grows_where_it_lies(make_backbone, make_engine, make_wide_task):
    """A task with other linears, of a higher rank, and with more moments."""
    few = make_wide_task("few", targets=("q_proj",), rank=2, optimizer=SGD(0.1))
    engine = make_engine(few, model=make_backbone(), modules=(), **LARGEST)
    engine.register_tasks([make_wide_task("more", rank=16)])
    stored = engine._slots.stored
    (state,), (layout,), (home,) = stored.states, stored.layouts, stored.homes
    leaves, places = map(jax.tree.leaves, (state, home.shardings(home.leaf_specs(layout.tree))))
    assert len(leaves) > 4 * 2 * len(TARGETS)
    for leaf, place in zip(leaves, places, strict=True):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim)


def test_each_device_holds_its_part_of_the_weights(make_backbone, make_engine, make_wide_task):
    task = make_wide_task("a")
    engine = make_engine(task, model=make_backbone(), **LARGEST)
    layers = engine.backbone.weights[0]["layers"]
    for path, divided in (("self_attn.q_proj", 4), ("mlp.down_proj", 4)):
        block, name = path.split(".")
        values = layers[block][name]["kernel"].values
        (shape,) = {shard.data.shape for shard in values.addressable_shards}
        assert np.prod(shape) * divided == values.size
    (state,) = engine._slots.stored.states
    of_query = state.adapters["lora"]["self_attn.q_proj"]
    assert of_query.a.addressable_shards[0].data.size == of_query.a.size
    assert of_query.b.addressable_shards[0].data.size * 2 == of_query.b.size


@pytest.mark.parametrize(
    ("mesh", "remat"),
    [
        pytest.param(
            mesh,
            remat,
            id=f"{name}-{remat}",
            marks=[] if remat == usual else pytest.mark.slow,
        )
        for name, mesh, usual in (
            ("pp2,tp2 + tp1", MORE_MESHES["pp2,tp2 + tp1"], "norms"),
            ("dp2,fsdp2,tp2", LARGEST, "dots"),
        )
        for remat in ("norms", "dots", "full")
    ],
)
def test_the_backward_pass_is_given_no_weights_or_adapters(
    mesh, remat, make_backbone, make_engine, make_wide_task
):
    """They would be copied for every microbatch in flight."""
    task = make_wide_task("a")
    engine = make_engine(task, model=make_backbone(), **mesh)
    replica = engine._executor._replicas[0]
    compiled, backbone = replica.compiled, replica._backbone
    parts = range(len(backbone.parts))
    for part in parts:
        program = compiled.program(part, False, remat)
        arguments = compiled.forward_arguments(part, *compiled.empty_inputs(part))
        _, _, residuals = jax.eval_shape(partial(forward, program), *arguments)
        kept = {leaf.shape[1:] for leaf in jax.tree.leaves(residuals)}
        state = replica.state.states[part]
        home, tree = program.home, replica.state.layouts[part].tree
        own = home.of_one_device(
            (backbone.weights[part], state.adapters),
            (home.weight_specs(backbone.weights[part]), home.leaf_specs(tree.adapters)),
        )
        # A stack of two layers, a stack of one layer that was gathered, and one layer.
        shapes = {leaf.shape for leaf in jax.tree.leaves(own) if leaf.ndim > 1}
        config = program.home.device_config(backbone.config, 1)
        whole = jax.tree.leaves(abstract_weights(config))
        shapes |= {shape for leaf in whole for shape in (leaf.shape, leaf.shape[1:])}
        assert len(kept) > 3
        # Vectors, such as the weights of the final norm, are small.
        assert not {s for s in kept & shapes if len(s) > 1 and 1 not in s[-2:]}


def test_the_memory_of_a_state_is_that_of_its_arrays(make_engine, different_tasks):
    engine = make_engine(*different_tasks, layers=(3, 1), stage=Stage(tp=2))
    size = size_of(engine.backbone.config, jnp.float32)
    found = [
        sum(
            leaf.addressable_shards[0].data.nbytes
            for leaf in jax.tree.leaves((state.adapters, state.accumulators, state.moments))
        )
        for state in engine._slots.stored.states
    ]
    assert engine._slots.pool.stage_bytes(size, (3, 1), tp=2) == found
