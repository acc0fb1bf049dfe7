"""Schedules follow their formulas, transforms follow torch's optimizers, bad values are named."""

import math
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmux
from jaxmux import optimizers
from jaxmux.engine.state.train_state import empty_state, state_specs
from jaxmux.engine.state.updates import DueUpdates, update
from jaxmux.field_checks import checked_dataclass
from jaxmux.optimizers import (
    OPTIMIZERS,
    SGD,
    AdamW,
    Lion,
    Optimizer,
    Schedule,
    optimizer_class,
)
from jaxmux.peft import Layout, LeafSpec
from jaxmux.tasks import Task

STEPS = 20


def test_constant_schedule_stays_at_the_peak():
    assert {Schedule().factor(k, 10) for k in range(10)} == {1.0}


def test_warmup_rises_linearly_from_zero():
    schedule = Schedule(warmup_steps=4)
    assert [schedule.factor(k, 100) for k in range(6)] == [0, 0.25, 0.5, 0.75, 1, 1]


@pytest.mark.parametrize(("total", "warmup"), [(10, 1), (11, 2), (100, 10)])
def test_warmup_ratio_is_rounded_up_to_steps(total, warmup):
    by_ratio = Schedule("linear", warmup_ratio=0.1)
    by_steps = Schedule("linear", warmup_steps=warmup)
    for k in range(total):
        assert by_ratio.factor(k, total) == by_steps.factor(k, total)


def test_linear_schedule_falls_to_zero_at_the_last_step():
    schedule = Schedule("linear", warmup_steps=2)
    found = [schedule.factor(k, 6) for k in range(7)]
    assert found == pytest.approx([0, 0.5, 1, 0.75, 0.5, 0.25, 0])


def test_cosine_schedule_falls_along_half_a_wave():
    schedule = Schedule("cosine", warmup_steps=3)
    for k in range(3, 13):
        expected = 0.5 * (1 + math.cos(math.pi * (k - 3) / 10))
        assert schedule.factor(k, 13) == pytest.approx(expected)
    assert schedule.factor(13, 13) == pytest.approx(0)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 5, 50])
def test_factors_never_leave_zero_to_one(kind, warmup):
    schedule = Schedule(kind, warmup_steps=warmup)
    assert all(0 <= schedule.factor(k, 20) <= 1 for k in range(40))


def numpy_adamw(o, state, g, p):
    m, v, t = state or (0.0, 0.0, 0)
    t += 1
    m = o.b1 * m + (1 - o.b1) * g
    v = o.b2 * v + (1 - o.b2) * g * g
    direction = (m / (1 - o.b1**t)) / (np.sqrt(v / (1 - o.b2**t)) + o.eps)
    return direction + o.weight_decay * p, (m, v, t)


def numpy_sgd(o, velocity, g, p):
    g = g + o.weight_decay * p
    velocity = g if velocity is None else o.momentum * velocity + g
    return velocity, velocity


def numpy_lion(o, momentum, g, p):
    momentum = np.zeros_like(g) if momentum is None else momentum
    direction = np.sign(o.b1 * momentum + (1 - o.b1) * g)
    return direction + o.weight_decay * p, o.b2 * momentum + (1 - o.b2) * g


CASES = {
    "adamw": (AdamW(weight_decay=0.1), numpy_adamw),
    "adamw, other moments": (AdamW(b1=0.8, b2=0.95, eps=1e-3), numpy_adamw),
    "sgd": (SGD(weight_decay=0.1), numpy_sgd),
    "sgd without momentum": (SGD(momentum=0.0), numpy_sgd),
    "lion": (Lion(weight_decay=0.1), numpy_lion),
    "lion, other moments": (Lion(b1=0.7, b2=0.8), numpy_lion),
}


@pytest.mark.parametrize(("optimizer", "step"), CASES.values(), ids=CASES)
def test_steps_follow_the_formula(optimizer, step):
    rng = np.random.default_rng(0)
    hyper = {k: jnp.float32(v) for k, v in optimizer.hyperparameters().items()}
    ours = optimizer.transform(hyper)
    found = rng.standard_normal((3, 4)).astype(np.float32)
    expected, reference_state = found.astype(np.float64), None
    state = ours.init({"a": found})
    for _ in range(STEPS):
        gradient = rng.standard_normal((3, 4)).astype(np.float32)
        direction, state = ours.update({"a": gradient}, state, {"a": found})
        found = np.asarray(found - 0.01 * direction["a"])
        direction, reference_state = step(
            optimizer, reference_state, gradient.astype(np.float64), expected
        )
        expected = expected - 0.01 * direction
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_zero_gradient_and_zero_parameter_stay_zero(kind):
    """What keeps padded rank columns at exactly zero."""
    optimizer = OPTIMIZERS[kind](weight_decay=0.1)
    hyper = {k: jnp.float32(v) for k, v in optimizer.hyperparameters().items()}
    ours, zeros = optimizer.transform(hyper), jnp.zeros((2, 2))
    state = ours.init(zeros)
    for _ in range(3):
        direction, state = ours.update(zeros, state, zeros)
        np.testing.assert_array_equal(direction, 0)


def test_no_clipping_is_an_infinite_norm():
    assert AdamW(clip_norm=None).hyperparameters()["clip_norm"] == math.inf
    assert AdamW(clip_norm=0.5).hyperparameters()["clip_norm"] == 0.5


@pytest.mark.parametrize("kind", ["adafactor", "adam", ""])
def test_an_unknown_optimizer_is_refused_with_those_known(kind):
    with pytest.raises(ValueError, match=f"'{kind}'; known: adamw, sgd, lion"):
        optimizer_class(kind)


@pytest.mark.parametrize(
    ("kind", "values", "problem"),
    [
        (AdamW, {"learning_rate": -1e-4}, "adamw: learning_rate .* -0.0001"),
        (AdamW, {"learning_rate": math.nan}, "adamw: learning_rate .* nan"),
        (AdamW, {"weight_decay": -0.1}, "adamw: weight_decay"),
        (AdamW, {"clip_norm": -1.0}, "adamw: clip_norm"),
        (AdamW, {"eps": math.inf}, "adamw: eps"),
        (SGD, {"momentum": -0.9}, "sgd: momentum"),
        (Lion, {"learning_rate": math.inf}, "lion: learning_rate"),
        (AdamW, {"b1": 1.0}, "adamw: b1"),
        (AdamW, {"b2": 1.5}, "adamw: b2"),
        (Lion, {"b2": 2.0}, "lion: b2"),
        (AdamW, {"learning_rate": "1e-4"}, "adamw: learning_rate .* '1e-4'"),
    ],
)
def test_values_out_of_range_are_named(kind, values, problem):
    with pytest.raises(ValueError, match=problem):
        kind(**values)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (
            {"kind": "exponential"},
            "schedule: kind should be one of 'constant', 'linear', 'cosine', found 'exponential'",
        ),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"warmup_ratio": 1.5}, "warmup_ratio"),
        ({"warmup_ratio": -0.5}, "warmup_ratio"),
    ],
)
def test_a_bad_schedule_is_named(values, problem):
    with pytest.raises(ValueError, match=problem):
        Schedule(**values)


@checked_dataclass
class HeavyBall(Optimizer):
    """An optimizer that nothing else knows."""

    friction: float = 0.5

    kind: ClassVar[str] = "heavy_ball"
    moments: ClassVar[int] = 1

    @staticmethod
    def transform(hyper):
        return optax.trace(1 - hyper["friction"])


def test_a_new_optimizer_is_its_class_and_its_entry(monkeypatch):
    """A task accepts it, and the train state has room for its moments."""
    monkeypatch.setitem(OPTIMIZERS, HeavyBall.kind, HeavyBall)
    task = Task("new", "data.jsonl", optimizer=HeavyBall(0.1), steps=1)
    assert optimizer_class(task.optimizer.kind) is HeavyBall
    leaves = {"w": LeafSpec((2, 3, 4), ("layer", "slot", "output"))}
    specs = state_specs({"imagined": leaves}, 3, HeavyBall.kind)
    assert len(specs.moments) == 1
    state = empty_state(Layout(specs))._replace(
        accumulators={"imagined": {"w": jnp.ones((2, 3, 4))}}
    )
    hyper = {name: np.float32([value]) for name, value in task.optimizer.hyperparameters().items()}
    due, rates = np.asarray([True, False, False]), np.full((1, 2, 3), 0.1, np.float32)
    after, _ = update(
        state,
        Layout(specs),
        DueUpdates(due, rates, {HeavyBall.kind: hyper}, {HeavyBall.kind: np.int32([0])}),
    )
    # The gradient of norm sqrt(8) is clipped to 1.
    expected = np.zeros((2, 3, 4), np.float32)
    expected[:, 0] = -0.1 / math.sqrt(8)
    np.testing.assert_allclose(after.adapters["imagined"]["w"], expected, rtol=1e-5)


def test_every_optimizer_is_a_public_name():
    assert {*optimizers.__all__} <= {*jaxmux.__all__}
