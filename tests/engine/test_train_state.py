"""The state of a slot is read, written, updated and enlarged by what its leaves declare, for any
adapter kind."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmux.engine.state.stored_state import StoredState
from jaxmux.engine.state.train_state import (
    SlotKind,
    SlotState,
    clear_slot,
    empty_state,
    grown,
    read_slot,
    slot_specs,
    state_specs,
    write_leaf,
    written_specs,
)
from jaxmux.engine.state.updates import DueUpdates, update
from jaxmux.optimizers import OPTIMIZERS
from jaxmux.peft import KINDS, Layout, LeafSpec
from jaxmux.peft.leaves import named_leaves
from jaxmux.sharding import OneDevice, consecutive_parts

# As many layers as slots: an axis that is found by its size would be the wrong one.
LAYERS = SLOTS = 3
WIDTH = 5
RATE = 0.1
ON_ONE_DEVICE = OneDevice.of_device(jax.devices()[0])


def imagined_leaves(slots: int) -> dict[str, dict[str, LeafSpec]]:
    """A kind with leaves of every sort: scales padded with 1, a slot axis that comes first, no
    layer axis, and frozen data of the slot."""
    scales = ("layer", "slot", "output")
    return {
        "q": {
            "scale": LeafSpec((LAYERS, slots, WIDTH), scales, padding=1.0),
            "frozen": LeafSpec((LAYERS, slots, WIDTH), scales, trained=False),
        },
        "v": {
            "factor": LeafSpec((slots, LAYERS, WIDTH, 2), ("slot", "layer", "input", "rank")),
            "shared": LeafSpec((slots, WIDTH), ("slot", "output")),
        },
    }


def specs_of(slots: int = SLOTS, optimizer: str = "adamw"):
    return state_specs({"imagined": imagined_leaves(slots)}, slots, optimizer)


def random_state(specs, seed: int = 0):
    rng = np.random.default_rng(seed)

    def draw(spec: LeafSpec) -> jax.Array:
        if spec.dtype == "int32":
            return jax.numpy.full(spec.shape, 2, "int32")
        return jax.numpy.asarray(rng.uniform(0.1, 1, spec.shape), "float32")

    return jax.tree.map(draw, specs)


def of_slot(specs, tree, slot: int):
    """One slot's part of every leaf."""
    return jax.tree.map(lambda spec, x: np.take(np.asarray(x), slot, spec.slot_axis), specs, tree)


def bits(tree) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def assert_slots_unchanged(specs, before, after, slots):
    for slot in slots:
        pairs = zip(
            bits(of_slot(specs, before, slot)), bits(of_slot(specs, after, slot)), strict=True
        )
        for one, other in pairs:
            np.testing.assert_array_equal(one, other)


def updated(kind: str, slot: int, rates: np.ndarray, decay: float = 0.5):
    """A random state before and after an update of one slot."""
    specs = specs_of()
    before = jax.device_get(random_state(specs))
    numbers = OPTIMIZERS[kind](weight_decay=decay).hyperparameters()
    hyper = {kind: {name: np.float32([value]) for name, value in numbers.items()}}
    members = {kind: np.int32([slot])}
    due = np.arange(SLOTS) == slot
    after, stats = update(
        random_state(specs), Layout(specs), DueUpdates(due, rates, hyper, members)
    )
    return specs, before, jax.device_get(after), stats


def same_rates() -> np.ndarray:
    return np.full((3, LAYERS, SLOTS), RATE, np.float32)


@pytest.mark.long
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_update_of_any_leaves_is_that_of_optax_for_one_slot(kind):
    slot = 1
    specs, before, after, stats = updated(kind, slot, same_rates())
    assert_slots_unchanged(specs, before, after, [0, 2])

    own = of_slot(specs, before, slot)
    gradients = own.accumulators
    norm = np.sqrt(sum((leaf.astype(np.float64) ** 2).sum() for leaf in bits(gradients)))
    np.testing.assert_allclose(stats.grad_norm[slot], norm, rtol=1e-6)
    gradients = jax.tree.map(lambda g: g * min(1, 1 / norm), gradients)
    params = {
        "imagined": {
            "q": {"scale": own.adapters["imagined"]["q"]["scale"], "frozen": None},
            "v": own.adapters["imagined"]["v"],
        }
    }
    optimizer = OPTIMIZERS[kind]
    transform = optimizer.transform(optimizer(weight_decay=0.5).hyperparameters())
    moments = own.moments
    state = {
        "adamw": lambda: (optax.ScaleByAdamState(own.count, *moments), optax.EmptyState()),
        "sgd": lambda: (optax.EmptyState(), optax.TraceState(moments[0])),
        "lion": lambda: (optax.ScaleByLionState(own.count, moments[0]), optax.EmptyState()),
    }[kind]()
    direction, _ = transform.update(gradients, state, params)
    expected = jax.tree.map(lambda p, d: p - RATE * d, params, direction)
    found = of_slot(specs, after, slot)
    for name, value in named_leaves(expected).items():
        np.testing.assert_allclose(named_leaves(found.adapters)[name], value, rtol=2e-5)
    frozen = [state.adapters["imagined"]["q"]["frozen"] for state in (own, found)]
    np.testing.assert_array_equal(*frozen)
    assert not any(leaf.any() for leaf in bits(found.accumulators)) and not found.sums.any()


def test_layers_with_rate_zero_keep_their_padding_whatever_the_decay():
    rates = same_rates()
    rates[:, 2, 1] = 0
    specs, before, after, _ = updated("adamw", 1, rates)
    for name in ("q/scale", "v/factor"):
        spec, one, other = (
            named_leaves(tree["imagined"])[name]
            for tree in (specs.adapters, before.adapters, after.adapters)
        )
        at = spec.of_slot().axes.index("layer")
        one, other = (np.moveaxis(np.take(x, 1, spec.slot_axis), at, 0) for x in (one, other))
        np.testing.assert_array_equal(one[2], other[2])
        assert (one[:2] != other[:2]).all()


KIND = SlotKind("imagined", "lion")


@pytest.fixture(autouse=True)
def imagined_kind(monkeypatch):
    monkeypatch.setitem(KINDS, "imagined", KINDS["ia3"]._replace(name="imagined"))


def stored_state(specs) -> StoredState:
    stored = StoredState(consecutive_parts([LAYERS]), [ON_ONE_DEVICE])
    stored.make_room(specs)
    stored.states = [random_state(specs)]
    return stored


def test_reading_and_writing_a_slot_touches_no_other():
    specs = specs_of()
    layout, before = Layout(specs), jax.device_get(random_state(specs))
    other = random_state(specs, seed=1)
    value = SlotState(**read_slot(other, layout, KIND, SlotState._fields, 2))
    expected = jax.tree.structure(slot_specs(specs, KIND))
    assert jax.tree.structure(value) == expected
    stored = stored_state(specs)
    stored.write(KIND, 1, jax.device_get(named_leaves(value)))
    after = jax.device_get(stored.states[0])
    assert_slots_unchanged(specs, before, after, [0, 2])
    again = SlotState(**read_slot(jax.device_put(after), layout, KIND, SlotState._fields, 1))
    for one, two in zip(bits(again), bits(value), strict=True):
        np.testing.assert_array_equal(one, two)
    # Lion has one moment: the other is not its own.
    old, new = (of_slot(specs, state, 1).moments[1] for state in (before, after))
    for one, two in zip(bits(old), bits(new), strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_cleared_slot_is_padding_and_the_others_keep_their_bits():
    specs = specs_of()
    layout, before = Layout(specs), jax.device_get(random_state(specs))
    after = jax.device_get(clear_slot(random_state(specs), layout, 0))
    assert_slots_unchanged(specs, before, after, [1, 2])
    empty = jax.device_get(empty_state(layout))
    for one, other in zip(
        bits(of_slot(specs, after, 0)), bits(of_slot(specs, empty, 0)), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    assert (of_slot(specs, after, 0).adapters["imagined"]["q"]["scale"] == 1).all()


def test_an_adapter_is_written_to_its_slot_alone():
    specs = specs_of()
    before = jax.device_get(random_state(specs))
    adapter = of_slot(specs, random_state(specs, seed=1), 0).adapters["imagined"]
    stored = stored_state(specs)
    leaves = named_leaves(adapter).items()
    stored.write(KIND, 2, {f"adapter/{name}": value for name, value in leaves})
    after = jax.device_get(stored.states[0])
    assert_slots_unchanged(specs, before, after, [0, 1])
    found = of_slot(specs, after, 2)
    for one, other in zip(bits(found.adapters["imagined"]), bits(adapter), strict=True):
        np.testing.assert_array_equal(one, other)
    for part in ("accumulators", "moments", "sums", "count"):
        kept = of_slot(specs, before, 2)
        for one, other in zip(bits(getattr(found, part)), bits(getattr(kept, part)), strict=True):
            np.testing.assert_array_equal(one, other)


def test_arrays_of_an_adapter_that_are_not_written_stay():
    specs = specs_of()
    stored = stored_state(specs)
    before = named_leaves(jax.device_get(stored.states[0].adapters["imagined"]))
    adapter = of_slot(specs, random_state(specs, seed=1), 0).adapters["imagined"]
    stored.write(KIND, 1, {"adapter/v/factor": adapter["v"]["factor"]})
    after = named_leaves(jax.device_get(stored.states[0].adapters["imagined"]))
    changed = [name for name in before if not np.array_equal(before[name], after[name])]
    assert changed == ["v/factor"]


def test_an_array_of_a_lower_rank_leaves_the_other_ranks_of_its_slot():
    spec = LeafSpec((2, 3, WIDTH, 20), ("layer", "slot", "input", "rank"))
    sizes = [own.shape[-1] for own in written_specs(spec.of_slot())]
    assert sizes == [8, 16, 20]
    before = np.random.default_rng(0).normal(size=spec.shape).astype(spec.dtype)
    value = np.ones((2, WIDTH, 8), np.float32)
    expected = before.copy()
    expected[:, 1, :, :8] = 1
    np.testing.assert_array_equal(write_leaf(jnp.asarray(before), spec, 1, value), expected)


def test_a_state_that_grows_keeps_its_slots_and_pads_the_new_ones():
    small, large = specs_of(2, "sgd"), specs_of(4, "adamw")
    before = jax.device_get(random_state(small))
    leaves = named_leaves(random_state(small))
    after = jax.device_get(grown(leaves, large, ON_ONE_DEVICE))
    assert not leaves
    for name, old in named_leaves(before).items():
        spec, new = named_leaves(large)[name], named_leaves(after)[name]
        np.testing.assert_array_equal(np.take(new, [0, 1], spec.slot_axis), old)
        assert (np.take(new, [2, 3], spec.slot_axis) == spec.padding).all()
    # The second moment is new: AdamW has one more than SGD.
    assert len(before.moments) == 1 and len(after.moments) == 2
    assert not any(leaf.any() for leaf in bits(after.moments[1]))
