"""Initial values that depend on a task's data are those that a float64 model gets from them."""

import dataclasses
import threading

import jax
import numpy as np
import pytest

from jaxmux.data import Sample
from jaxmux.engine.tasks.prepared_task import _first_adapter, first_epoch
from jaxmux.peft import DoRA, LoRA, SparseDiff, kind_of
from jaxmux.peft.eva import principal_components
from jaxmux.tasks import TaskError

from .reference_llama import logits_of, loss_of

TOKENS = 150
EVA = LoRA(3, 6.0, initialisation="eva", calibration_tokens=TOKENS)
GRADIENT = SparseDiff(2, "gradient", ("q_proj", "k_proj", "down_proj"), calibration_tokens=TOKENS)


@pytest.fixture(scope="module")
def prepared(make_wide_task):
    return make_wide_task("calibrated", samples=12)


@pytest.fixture(scope="module")
def initial(prepared, config, base_tensor):
    """Makes an initial adapter with some layers of the targets left out."""

    def make(spec, base=base_tensor, batches=prepared.batches):
        task = dataclasses.replace(prepared.task, adapter=spec)
        return _first_adapter(task, targets_of(spec, config), config, base, batches)

    return make


def targets_of(spec, config):
    targets = dict(kind_of(spec).targets(spec, config))
    return targets | {"self_attn.k_proj": np.array([False, True])}


@pytest.fixture(scope="module")
def read(prepared):
    """The tokens that are read, as samples."""
    found, left = [], TOKENS
    for sample in first_epoch(prepared.batches, prepared.task.objective):
        ids, mask = sample.input_ids[:left], sample.target_mask[:left]
        found.append(Sample(ids, mask, sample.sample_id))
        left -= len(ids)
        if left == 0:
            break
    assert len(found) > 1 and left == 0
    return found


@pytest.mark.long
def test_eva_begins_with_the_principal_components_of_inputs(
    initial, config, backbone, read, assert_components
):
    """Ranks go to the largest shares of variance."""
    inputs: dict = {}
    # Every operation is compiled for one length: tokens do not see the padding behind them.
    longest = max(len(sample.input_ids) for sample in read)
    with jax.enable_x64(True):
        for sample in read:
            ids = np.pad(sample.input_ids, (0, longest - len(sample.input_ids)))
            seen: dict = {}
            logits_of(config, backbone.weights, "none", None, {}, ids, inputs=seen)
            for place, x in seen.items():
                x = np.asarray(x)[: len(sample.input_ids)]
                inputs.setdefault(place, []).append(x[sample.target_mask])
    components = {}
    for place, parts in inputs.items():
        x = np.concatenate(parts)
        _, sizes, rows = np.linalg.svd(x - x.mean(axis=0), full_matrices=False)
        components[place] = sizes**2 / np.sum(sizes**2), rows
    targets = targets_of(EVA, config)
    adapted = [(m, int(i)) for m, mask in targets.items() for i in np.flatnonzero(mask)]
    shares = np.sort(np.concatenate([components[place][0][:6] for place in adapted]))[::-1]
    least = shares[3 * len(adapted) - 1]
    adapter, ranks = initial(EVA), {}
    for module, (a, b) in adapter.items():
        assert a.shape[2] == 6 and not b.any()
        for layer in range(config.num_layers):
            ranks[module, layer] = rank = int(a[layer].any(axis=0).sum())
            share, rows = components[module, layer]
            assert not a[layer, :, rank:].any()
            if (module, layer) not in adapted:
                assert rank == 0
                continue
            # Linears with the same input share the last place.
            assert (share[:rank] > least * (1 - 1e-4)).all()
            assert rank == 6 or share[rank] < least * (1 + 1e-4)
            assert_components(a[layer, :, :rank].T, rows[:rank])
    assert sum(ranks.values()) == 3 * len(adapted)
    assert len(set(ranks.values())) > 2


@pytest.fixture(scope="module")
def assert_components():
    """Compares rows of unit length up to their signs."""

    def check(found, expected):
        signs = np.sign((found * expected).sum(axis=1, keepdims=True))
        np.testing.assert_allclose(found * signs, expected, atol=2e-4)

    return check


@pytest.mark.parametrize("shape", [(40, 7), (7, 40)], ids=["tall", "wide"])
def test_principal_components_are_those_of_a_singular_value_decomposition(shape, assert_components):
    rng = np.random.default_rng(0)
    x = np.float32(rng.standard_normal(shape) * np.arange(1, 1 + shape[1]) + 3)
    _, sizes, rows = np.linalg.svd(x.astype(np.float64) - x.mean(axis=0, dtype=np.float64))
    found = principal_components(x, 4)
    assert_components(found.directions.T, rows[:4])
    np.testing.assert_allclose(found.shares, (sizes**2 / np.sum(sizes**2))[:4], rtol=1e-6)
    largest = np.abs(found.directions).argmax(axis=0)
    assert (found.directions[largest, range(4)] > 0).all()
    # Two rows vary in one direction, equal rows in none.
    assert principal_components(x[:2], 4).directions.shape == (shape[1], 1)
    assert principal_components(x[[0, 0, 0]], 4).directions.shape == (shape[1], 0)


def test_one_rank_for_all_is_a_lora_of_this_rank(initial):
    spec = dataclasses.replace(EVA, eva_rho=1.0)
    assert (spec.largest_rank, EVA.largest_rank) == (3, 6)
    assert dataclasses.replace(EVA, rank=100, eva_rho=1.15).largest_rank == 115
    for module, (a, _) in initial(spec).items():
        adapted = a.any(axis=(1, 2))
        assert (a.any(axis=1).sum(axis=1) == 3 * adapted).all(), module


@pytest.mark.long
def test_a_mask_of_gradients_holds_the_largest_ones(initial, config, backbone, read):
    with jax.enable_x64(True):
        weights = jax.tree.map(lambda x: np.asarray(x, np.float64), backbone.weights)
        loss = jax.jit(lambda w: loss_of(config, w, "none", None, {}, read))
        gradients = jax.grad(loss)(weights)["layers"]
    for module, own in initial(GRADIENT).items():
        block, linear = module.split(".")
        for layer, adapted in enumerate(targets_of(GRADIENT, config)[module]):
            gradient = np.abs(np.asarray(gradients[block][linear]["kernel"].values[layer]))
            numbers = own["entries"][layer].astype(int) - 1
            if not adapted:
                assert (numbers < 0).all()
                continue
            count = 2 * sum(gradient.shape)
            assert len(set(numbers)) == len(numbers) == count
            assert (np.diff(numbers % 2**16 * gradient.shape[0] + (numbers >> 16)) > 0).all()
            chosen = gradient[numbers >> 16, numbers % 2**16]
            # Rounding decides between equal ones.
            assert chosen.min() > 0.9999 * np.sort(gradient, axis=None)[-count]
    assert initial(GRADIENT)["self_attn.q_proj"]["values"].max() == 0


@pytest.mark.parametrize("spec", [EVA, GRADIENT], ids=["eva", "gradient"])
def test_they_are_the_same_in_a_thread_beside_training(spec, initial, assert_same_bits):
    found = []
    thread = threading.Thread(target=lambda: found.append(initial(spec)))
    thread.start()
    thread.join()
    assert_same_bits(found[0], initial(spec))


def test_too_little_data_is_an_error_that_names_the_task(initial, config, base_tensor):
    few = dataclasses.replace(EVA, calibration_tokens=6)
    for spec, problem in (
        (few, "have 3 tokens that count in the loss, but a linear may get 6"),
        (dataclasses.replace(GRADIENT, calibration_tokens=3), "none of the first 3 tokens"),
        (dataclasses.replace(DoRA(3, initialisation="eva"), calibration_tokens=3), "none of the"),
    ):
        with pytest.raises(TaskError, match=f"task 'calibrated': .*{problem}"):
            initial(spec)
    for spec in (EVA, GRADIENT):
        with pytest.raises(TaskError, match="task 'calibrated': the weights of the backbone"):
            initial(spec, base=None)
        with pytest.raises(ValueError, match="training data; give samples"):
            kind_of(spec).initial(spec, targets_of(spec, config), config, 0, base_tensor)


def test_values_that_are_not_finite_are_an_error(initial, base_tensor):
    def broken(name):
        return base_tensor(name) * (np.nan if "layers.1" in name else 1)

    for spec in (EVA, GRADIENT):
        with pytest.raises(TaskError, match="in layer 1 that are not finite"):
            initial(spec, base=broken)


def test_ranks_of_the_user_and_of_the_data_exclude_each_other():
    with pytest.raises(ValueError, match="rank_pattern cannot be combined with .* 'eva'"):
        LoRA(initialisation="eva", rank_pattern={"q_proj": 2})
