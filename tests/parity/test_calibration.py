"""Initial values that depend on the task's data are those that PEFT and torch get from them."""

import pytest
import torch
from backbones import load_model
from peft import EvaConfig, LoraConfig, get_peft_model, initialize_lora_eva_weights
from peft.utils.incremental_pca import IncrementalPCA
from safetensors.torch import load_file

IGNORED = -100


def calibration_batch(trained, name: str) -> dict[str, torch.Tensor]:
    """The first tokens of a task's samples in the order of training, padded, with their labels."""
    left = trained.tasks[name]["adapter"]["calibration_tokens"]
    rows = []
    for sample in (sample for batch in trained.batches[name] for sample in batch):
        ids, target = (torch.tensor(sample[key][:left]) for key in ("ids", "target"))
        rows.append((ids, torch.ones_like(ids), torch.where(target, ids, IGNORED)))
        left -= len(ids)
        if left == 0:
            break
    assert left == 0
    paddings = {"input_ids": 0, "attention_mask": 0, "labels": IGNORED}
    return {
        key: torch.nn.utils.rnn.pad_sequence(part, batch_first=True, padding_value=padding)
        for (key, padding), part in zip(paddings.items(), zip(*rows, strict=True), strict=True)
    }


def initial_tensors(trained, name: str) -> dict[str, torch.Tensor]:
    return load_file(trained.folder / "initial" / name / "adapter_model.safetensors")


def test_eva_begins_with_the_components_of_peft(trained_kinds, at_most, monkeypatch):
    """PEFT goes on over the same samples until its components converge, here without the errors of
    its randomised decomposition."""
    monkeypatch.setattr(IncrementalPCA, "_svd_fn_lowrank", IncrementalPCA._svd_fn_full)
    spec, ours = trained_kinds.tasks["eva"]["adapter"], initial_tensors(trained_kinds, "eva")
    config = LoraConfig(
        r=spec["rank"],
        lora_alpha=spec["alpha"],
        target_modules=spec["target_modules"],
        init_lora_weights="eva",
        eva_config=EvaConfig(rho=2.0),
    )
    model = get_peft_model(load_model(trained_kinds.folder / "backbone"), config)
    batch = calibration_batch(trained_kinds, "eva")
    initialize_lora_eva_weights(model, [batch], show_progress_bar=False)
    ranks = set()
    for name, module in model.named_modules():
        if not hasattr(module, "lora_A"):
            continue
        found, expected = ours[f"{name}.lora_A.weight"], module.lora_A["default"].weight.detach()
        rank = len(expected)
        ranks.add(rank)
        assert module.scaling["default"] == pytest.approx(spec["alpha"] / spec["rank"])
        assert (found[rank:] == 0).all() and (ours[f"{name}.lora_B.weight"] == 0).all()
        at_most("components", (found[:rank] - expected).abs().max().item(), 1e-4)
    assert len(ranks) > 2


def test_a_mask_of_gradients_holds_the_entries_that_torch_finds(trained_kinds):
    spec, ours = (
        trained_kinds.tasks["gradient"]["adapter"],
        initial_tensors(trained_kinds, "gradient"),
    )
    model = load_model(trained_kinds.folder / "backbone")
    model(**calibration_batch(trained_kinds, "gradient")).loss.backward()
    names = [name.removesuffix(".shira_indices") for name in ours if name.endswith("indices")]
    assert len(names) == 2 * model.config.num_hidden_layers
    for name in names:
        weight = model.get_submodule(name.removeprefix("base_model.model.")).weight
        gradient, places = weight.grad.abs(), ours[f"{name}.shira_indices"].long()
        count = spec["rank"] * sum(weight.shape)
        assert len(set(map(tuple, places.T.tolist()))) == places.shape[1] == count
        smallest = gradient.flatten().topk(count).values[-1]
        # Rounding decides between equal ones.
        assert (gradient[tuple(places)] >= (1 - 1e-4) * smallest).all()
