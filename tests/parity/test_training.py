"""Tasks that jaxmux trains together get the same adapters as tasks that PEFT trains alone.

Both sides start from the same initial adapter and train on the same batches without dropout.
"""

import json
from typing import NamedTuple

import pytest
import torch
from backbones import load_model
from peft_training import PeftTraining, train_alone
from safetensors.torch import load_file
from scenarios import (
    FAST_KINDS,
    FROM_PEFT,
    FROM_WEIGHTS,
    OTHER_OPTIMIZER_TASKS,
    PARITY_TASKS,
    SLOW_KINDS,
)

PARITY = [task["name"] for task in PARITY_TASKS]
OTHERS = [task["name"] for task in OTHER_OPTIMIZER_TASKS]


class Pair(NamedTuple):
    """One task, trained by jaxmux and by PEFT."""

    task: dict
    updates: list[dict]
    final: dict[str, torch.Tensor]
    peft: PeftTraining


def pair(trained, name: str) -> Pair:
    task, folder = trained.tasks[name], trained.folder
    base = load_model(folder / "backbone")
    peft = train_alone(base, folder / "initial" / name, task, trained.batches[name])
    begun, final = (
        load_file(folder / when / name / "adapter_model.safetensors")
        for when in ("initial", "final")
    )
    if task["adapter"].get("initialisation") in FROM_WEIGHTS:
        # PEFT decomposes weights in float32, with errors up to 1.5e-4 that depend on the processor.
        # The errors of its initial values are not those of training.
        begun, final = (trained_factors(own, peft.initial) for own in (begun, final))
        for key, initial in peft.initial.items():
            assert (begun[key] - initial).norm() < 5e-4 * initial.norm(), key
            final[key] += initial - begun[key]
    return Pair(task, trained.updates[name], final, peft)


def trained_factors(
    tensors: dict[str, torch.Tensor], initial: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """A and B of an adapter that has been exported as [A; A - A0] and [B - B0, B0], with the signs
    of PEFT's singular vectors."""
    found = {}
    for name, a in tensors.items():
        if "lora_A" in name:
            of_b = name.replace("lora_A", "lora_B")
            (a, _), (change, b0) = a.chunk(2), tensors[of_b].chunk(2, dim=1)
            sign = (a * initial[name]).sum(dim=1).sign()
            found[name], found[of_b] = a * sign[:, None], (change + b0) * sign
    return found


@pytest.fixture(scope="module", params=PARITY)
def adamw(request, trained) -> Pair:
    return pair(trained, request.param)


@pytest.fixture(scope="module", params=OTHERS)
def other(request, trained_by_other_optimizers) -> Pair:
    return pair(trained_by_other_optimizers, request.param)


def test_the_tasks_share_microbatches_and_accumulate_gradients(trained):
    assert any(len(tasks) > 1 for a_round in trained.microbatches for tasks in a_round)
    for name in trained.tasks:
        counts = [sum(name in tasks for tasks in a_round) for a_round in trained.microbatches]
        assert sum(count > 1 for count in counts) >= 0.8 * len(counts), f"{name}: {counts}"


def test_most_gradients_are_clipped(adamw):
    clipped = [u["grad_norm"] > adamw.task["optimizer"]["clip_norm"] for u in adamw.updates]
    assert sum(clipped) >= 0.8 * len(clipped)


def test_peft_reads_the_scale_of_the_task(adamw):
    spec = adamw.task["adapter"]
    root = 0.5 if spec.get("rslora") else 1
    assert adamw.peft.scaling == {spec["alpha"] / spec["rank"] ** root}


def test_losses_equal_those_of_peft(adamw, at_most):
    assert len(adamw.updates) == 8
    check_losses(adamw, at_most)


def test_adapters_equal_those_of_peft(adamw, at_most):
    check_adapters(adamw, at_most)


def test_learning_rates_and_gradient_norms_equal_those_of_torch(adamw, at_most):
    check_rates_and_norms(adamw, at_most)


def test_sgd_and_loraplus_train_like_torch_and_peft(other, at_most):
    assert len(other.updates) == 5
    check_losses(other, at_most)
    check_adapters(other, at_most)
    check_rates_and_norms(other, at_most)


@pytest.fixture(
    scope="module",
    params=[
        *FAST_KINDS,
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_KINDS),
    ],
)
def kind(request, trained_with) -> Pair:
    return pair(trained_with(request.param), request.param)


def test_other_kinds_of_adapters_train_together_as_in_peft(kind, at_most):
    assert len(kind.updates) == 5
    check_losses(kind, at_most)
    check_adapters(kind, at_most)
    check_rates_and_norms(kind, at_most)


def test_training_can_start_from_an_adapter_of_peft(trained_by_other_optimizers):
    folder = trained_by_other_optimizers.folder
    made = load_file(folder / FROM_PEFT / "adapter_model.safetensors")
    begun = load_file(folder / "initial" / "sgd" / "adapter_model.safetensors")
    assert made.keys() == begun.keys()
    assert all(torch.equal(made[name], begun[name]) for name in made)


def check_losses(pair: Pair, at_most) -> None:
    for update, loss in zip(pair.updates, pair.peft.losses, strict=True):
        at_most("losses, relative", abs(update["loss"] - loss) / loss, 1e-5)


def check_adapters(pair: Pair, at_most) -> None:
    initial, expected = pair.peft.initial, pair.peft.final
    assert pair.final.keys() == expected.keys()
    for name, tensor in pair.final.items():
        # PEFT trains neither the indices of sparse masks nor VeRA's projections.
        if not tensor.is_floating_point() or name in ("base_model.vera_A", "base_model.vera_B"):
            assert torch.equal(tensor, expected[name])
            continue
        change = (expected[name] - initial[name]).norm()
        assert change > 0, f"{name} was not trained"
        error = ((tensor - expected[name]).norm() / change).item()
        at_most("adapter tensors, relative to their change", error, 1e-3)


def check_rates_and_norms(pair: Pair, at_most) -> None:
    peft = pair.peft
    for update, rate, norm in zip(pair.updates, peft.rates, peft.grad_norms, strict=True):
        assert update["lr"] == pytest.approx(rate, rel=1e-12)
        at_most("gradient norms, relative", abs(update["grad_norm"] - norm) / norm, 1e-4)


def test_prepare_gives_the_batches_and_initial_adapters_of_training(
    trained_kinds, jaxmux, tmp_path
):
    folder, tasks = trained_kinds.folder, {}
    for name, fields in trained_kinds.tasks.items():
        adapter = {"kind": "lora", **fields["adapter"]}
        tasks[name] = {**fields, "adapter": adapter, "data": str(folder / fields["data"])}
        del tasks[name]["name"]
    run = {"backbone": str(folder / "backbone"), "dtype": "float32", "backbone_format": None}
    (tmp_path / "run.json").write_text(json.dumps(run | {"tasks": tasks}))
    jaxmux("prepare", tmp_path, {"run_dir": "."})
    assert json.loads((tmp_path / "batches.json").read_text()) == trained_kinds.batches
    for name in tasks:
        begun, prepared = (
            load_file(where / "initial" / name / "adapter_model.safetensors")
            for where in (folder, tmp_path)
        )
        assert begun.keys() == prepared.keys()
        assert all(torch.equal(begun[key], prepared[key]) for key in begun), name
