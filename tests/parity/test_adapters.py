"""Adapter folders can be exchanged between jaxmux, PEFT and servers such as vLLM."""

import copy
import dataclasses
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from backbones import (
    CONFIGS,
    VOCABULARY,
    load_model,
    logits,
    random_model,
    random_prompts,
    write_files,
)
from peft import (
    IA3Config,
    LNTuningConfig,
    LoraConfig,
    PeftModel,
    PromptTuningConfig,
    ShiraConfig,
    TrainableTokensConfig,
    VeraConfig,
    get_peft_model,
)
from safetensors.torch import load_file, save_file
from scenarios import OTHER_OPTIMIZER_TASKS, PARITY_TASKS, PROMPT_TEXT, save_peft_adapter
from transformers import AutoModelForCausalLM
from vllm_check import RefusedError, check_adapter

TASKS = [task["name"] for task in PARITY_TASKS]
FORMS = ("final", "serving")
REQUIRED_KEYS = set(
    "peft_type task_type base_model_name_or_path r lora_alpha lora_dropout bias target_modules "
    "use_rslora rank_pattern alpha_pattern inference_mode".split()
)
# By name, the arguments of `save_peft_adapter`; three at a time are read together.
MADE_BY_PEFT = {
    "all-linear": {"settings": {"r": 4, "lora_alpha": 8}},
    "rslora": {"settings": {"r": 6, "lora_alpha": 3, "use_rslora": True}},
    "bfloat16": {
        "settings": {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"]},
        "dtype": torch.bfloat16,
    },
    "expression": {
        "settings": {"r": 2, "lora_alpha": 4, "target_modules": r".*\.layers\.[01]\..*(k|o)_proj"}
    },
    "tables": {
        "settings": {
            "r": 2,
            "lora_alpha": 1,
            "target_modules": ["lm_head", "embed_tokens", "k_proj"],
        }
    },
}
# The same for adapters of other kinds.
KINDS_MADE_BY_PEFT = {
    "ia3": IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "dora": LoraConfig(r=3, use_dora=True, target_modules=["q_proj", "down_proj"]),
    "vera": VeraConfig(r=16, target_modules=["q_proj", "v_proj"], save_projection=False),
    "shira": ShiraConfig(r=2, target_modules=["q_proj", "v_proj"]),
    "ln": LNTuningConfig(target_modules=["input_layernorm", "norm"]),
    "tokens": TrainableTokensConfig(token_indices=[5, 9, 40], target_modules=["embed_tokens"]),
}
# Backbones into which adapters are merged: by case, the configuration, the number of files, and
# whether the head is also there by its own name, or only so.
MERGED = {
    "tied": ("llama-tied", 1, ""),
    "tied, three files": ("llama-tied", 3, ""),
    "tied, two heads": ("llama-tied", 1, "also"),
    "tied, two heads, three files": ("llama-tied", 3, "also"),
    "tied, only a head": ("llama-tied", 3, "only"),
    "tied, another head": ("llama-tied", 3, "another"),
    "untied": ("llama", 1, ""),
    "untied, three files": ("llama", 3, ""),
}
# What is wrong with the index of several files.
LIES = ("", "stale copies", "missing entries", "other files", "more entries")
slow = partial(pytest.param, marks=pytest.mark.slow)
# In CI, one of several files and one of a single file, and each lie once.
SLOW_MERGES = {"tied, three files", "tied, two heads", "untied, three files"}
MERGE_CASES = [
    slow(case, lie)
    if case in SLOW_MERGES or lie and case != "tied, two heads, three files"
    else (case, lie)
    for case in MERGED
    for lie in LIES
    if not lie or MERGED[case][1] > 1
]
PROMPTS = random_prompts(VOCABULARY)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("task", TASKS)
def test_an_exported_adapter_has_the_same_logits_in_peft(task, form, trained, at_most):
    check_exported_logits(trained, task, form, at_most)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("task", [task["name"] for task in OTHER_OPTIMIZER_TASKS])
def test_an_adapter_of_some_layers_or_begun_in_peft_has_the_same_logits_in_peft(
    task, form, trained_by_other_optimizers, at_most
):
    check_exported_logits(trained_by_other_optimizers, task, form, at_most)


@pytest.mark.parametrize(
    ("task", "form"),
    [
        ("ia3", "final"),
        slow("ln_tuning", "final"),
        slow("diff_pruning", "final"),
        slow("sparse_diff", "final"),
        ("prompt_tuning", "final"),
        ("trained_tokens", "final"),
        ("dora", "final"),
        slow("pattern", "final"),
        slow("pattern", "serving"),
        ("tables", "final"),
        ("tables", "serving"),
        slow("vera", "final"),
        slow("vera", "serving"),
        ("pissa", "final"),
        ("pissa", "serving"),
        slow("olora", "final"),
        ("eva", "final"),
        ("eva", "serving"),
        ("gradient", "final"),
    ],
)
def test_an_exported_adapter_of_another_kind_has_the_same_logits_in_peft(
    task, form, trained_with, at_most
):
    check_exported_logits(trained_with(task), task, form, at_most)


@pytest.mark.slow
def test_the_projections_of_vera_are_those_of_peft(trained_all_kinds):
    folder = trained_all_kinds.folder
    ours = folder / "initial" / "vera"
    config = VeraConfig.from_pretrained(ours)
    model = get_peft_model(load_model(folder / "backbone"), config)
    made, written = model.state_dict(), load_file(ours / "adapter_model.safetensors")
    for name in ("base_model.vera_A", "base_model.vera_B"):
        assert torch.equal(made[f"{name}.default"], written[name])


def test_a_prompt_begins_with_a_text_as_in_peft(trained_kinds):
    folder = trained_kinds.folder
    config = PromptTuningConfig(
        task_type="CAUSAL_LM",
        num_virtual_tokens=6,
        prompt_tuning_init="TEXT",
        prompt_tuning_init_text=PROMPT_TEXT,
        tokenizer_name_or_path=str(folder / "backbone"),
    )
    model = get_peft_model(load_model(folder / "backbone"), config)
    written = load_file(folder / "initial" / "prompt_tuning" / "adapter_model.safetensors")
    assert torch.equal(
        model.prompt_encoder["default"].embedding.weight, written["prompt_embeddings"]
    )


@pytest.mark.parametrize("task", [slow("vera"), slow("pattern"), "pissa", "eva"])
def test_what_becomes_a_lora_for_serving_passes_vllms_checks(task, trained_with):
    folder = trained_with(task).folder
    check_adapter(folder / "serving" / task, linears(folder / "backbone"), max_lora_rank=32)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("task", TASKS)
def test_an_exported_adapter_passes_vllms_checks(task, form, trained):
    check_adapter(trained.folder / form / task, linears(trained.folder / "backbone"))


@pytest.mark.parametrize("task", TASKS)
def test_the_exported_configuration_has_the_values_of_the_task(task, trained):
    spec = trained.tasks[task]["adapter"]
    config = read_config(trained.folder / "final" / task)
    assert REQUIRED_KEYS <= config.keys()
    assert (config["r"], config["lora_alpha"]) == (spec["rank"], spec["alpha"])
    assert config["use_rslora"] is spec.get("rslora", False)
    assert config["task_type"] == "CAUSAL_LM" and config["inference_mode"] is True
    assert config["base_model_name_or_path"] == str(trained.folder / "backbone")


@pytest.mark.parametrize("task", TASKS)
def test_an_adapter_for_serving_has_its_scale_folded_into_b(task, trained):
    spec = trained.tasks[task]["adapter"]
    scale = spec["alpha"] / spec["rank"] ** (0.5 if spec.get("rslora") else 1)
    config = read_config(trained.folder / "serving" / task)
    assert config["lora_alpha"] == config["r"] and not config["use_rslora"]
    plain, serving = (
        load_file(trained.folder / form / task / "adapter_model.safetensors") for form in FORMS
    )
    for name, tensor in plain.items():
        factor = scale if "lora_B" in name else 1.0
        torch.testing.assert_close(serving[name], factor * tensor, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "change",
    [
        {"r": 32},
        {"bias": "all"},
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"alpha_pattern": {"q_proj": 4}},
        {"tensor": "base_model.model.lm_head.lora_A.weight"},
        {"tensor": "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"},
    ],
    ids=str,
)
def test_the_vllm_check_refuses_what_vllm_refuses(change, trained, tmp_path):
    good = trained.folder / "final" / "short"
    tensors = load_file(good / "adapter_model.safetensors")
    if "tensor" in change:
        tensors[change["tensor"]] = torch.zeros(4, 4)
        change = {}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(read_config(good) | change))
    with pytest.raises(RefusedError):
        check_adapter(tmp_path, linears(trained.folder / "backbone"))


@pytest.fixture(scope="module")
def imported(tmp_path_factory, jaxmux) -> Path:
    """Adapters that PEFT created, and the tensors and logits that jaxmux gets from them."""
    folder = tmp_path_factory.mktemp("imported")
    random_model(CONFIGS["qwen3"]).save_pretrained(folder / "backbone")
    for name, arguments in MADE_BY_PEFT.items():
        save_peft_adapter(folder / "backbone", folder / name, **arguments)
    torch.manual_seed(0)
    for kind, config in KINDS_MADE_BY_PEFT.items():
        config.task_type = "CAUSAL_LM"
        model = get_peft_model(load_model(folder / "backbone"), config)
        for parameter in filter(lambda own: own.requires_grad, model.parameters()):
            parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(folder / kind)
    groups = [
        names[i : i + 3]
        for names in map(list, (MADE_BY_PEFT, KINDS_MADE_BY_PEFT))
        for i in range(0, len(names), 3)
    ]
    case = {"backbone": "backbone", "prompts": PROMPTS}
    jaxmux("forward", folder, {"cases": {own[0]: case | {"adapters": own} for own in groups}})
    return folder


def case_and_slot(name: str) -> tuple[str, int]:
    """The case of `imported` in which an adapter is read, and its slot there."""
    names = list(MADE_BY_PEFT if name in MADE_BY_PEFT else KINDS_MADE_BY_PEFT)
    slot = names.index(name) % 3
    return names[names.index(name) - slot], slot


@pytest.mark.parametrize("name", MADE_BY_PEFT)
def test_jaxmux_reads_the_tensors_that_peft_wrote(name, imported):
    written = load_file(imported / name / "adapter_model.safetensors")
    case, slot = case_and_slot(name)
    read = np.load(imported / "tensors" / f"{case}-{slot}.npz")
    # PEFT also writes tables of the backbone.
    adapter = {key: tensor for key, tensor in written.items() if "base_layer" not in key}
    assert (len(adapter) < len(written)) == (name == "tables")
    assert set(read) == set(adapter)
    for key, tensor in adapter.items():
        assert tensor.dtype == MADE_BY_PEFT[name].get("dtype", torch.float32)
        np.testing.assert_array_equal(read[key], tensor.float().numpy())


@pytest.mark.parametrize("name", [*MADE_BY_PEFT, *KINDS_MADE_BY_PEFT])
def test_an_adapter_of_peft_has_the_same_logits_in_jaxmux(name, imported, at_most):
    case, slot = case_and_slot(name)
    model = PeftModel.from_pretrained(load_model(imported / "backbone"), imported / name).eval()
    found = np.load(imported / "logits" / f"{case}.npz")
    error = largest_difference(found, slot, PROMPTS[slot], model)
    at_most("logits of imported adapters", error, 1e-4)
    with model.disable_adapter():
        assert largest_difference(found, slot, PROMPTS[slot], model) > 0.1


def test_all_settings_of_peft_are_known(jaxmux, tmp_path):
    classes = (LoraConfig, *map(type, KINDS_MADE_BY_PEFT.values()), PromptTuningConfig)
    fields = {field.name for each in classes for field in dataclasses.fields(each)}
    jaxmux("settings", tmp_path, {})
    assert fields <= set(json.loads((tmp_path / "settings.json").read_text()))


@pytest.fixture
def merged(case, lie, tmp_path, jaxmux) -> Path:
    """Adapters of PEFT merged into a backbone by jaxmux: `merged-<adapter>`."""
    backbone, cases = tmp_path / "backbone", {}
    make_merge_backbone(backbone, *MERGED[case], lie)
    for adapter in merged_adapters(case):
        if adapter == "lora":
            save_peft_adapter(backbone, tmp_path / adapter, {"r": 4, "lora_alpha": 8})
        else:
            save_trained_tokens(backbone, tmp_path / adapter)
        cases[adapter] = {
            "backbone": "backbone",
            "adapters": [adapter],
            "merged": f"merged-{adapter}",
        }
    jaxmux("forward", tmp_path, {"cases": cases})
    return tmp_path


def merged_adapters(case: str) -> list[str]:
    """PEFT ties trained tokens as config.json says, also where the weights say otherwise."""
    return ["lora"] if case == "tied, another head" else ["lora", "tokens"]


def make_merge_backbone(backbone: Path, name: str, files: int, head: str, lie: str) -> None:
    random_model(CONFIGS[name]).save_pretrained(backbone)
    (weights,) = backbone.glob("*.safetensors")
    tensors, table = load_file(weights), "model.embed_tokens.weight"
    weights.unlink()
    if head:
        factor = 2 if head == "another" else 1
        tensors["lm_head.weight"] = factor * tensors[table].clone()
    if head == "only":
        del tensors[table]
    write_files(backbone, tensors, files)
    if not lie:
        return
    path = backbone / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    entries, names = index["weight_map"], sorted(index["weight_map"])
    if lie == "stale copies":
        # The last of all files, by their names, has the tensors that count.
        stale = {name: torch.zeros_like(tensors[name]) for name in names[2::3]}
        save_file(
            load_file(backbone / "model-0.safetensors") | stale, backbone / "model-0.safetensors"
        )
        entries |= dict.fromkeys(stale, "model-0.safetensors")
        entries[names[2]] = "model-2.safetensors"
    elif lie == "missing entries":
        index["weight_map"] = {name: entries[name] for name in names[:3]}
    elif lie == "other files":
        index["weight_map"] = {name: entries[names[i - 1]] for i, name in enumerate(names)}
    else:
        entries |= dict.fromkeys(
            ("model.layers.0.self_attn.rotary_emb.inv_freq",), entries[names[0]]
        )
    path.write_text(json.dumps(index))


def save_trained_tokens(backbone: Path, folder: Path) -> None:
    config = copy.deepcopy(KINDS_MADE_BY_PEFT["tokens"])
    config.task_type = "CAUSAL_LM"
    model = get_peft_model(load_model(backbone), config)
    for name, parameter in model.named_parameters():
        if "trainable_tokens" in name:
            parameter.data += torch.randn(parameter.shape, generator=torch.manual_seed(0))
    model.save_pretrained(folder)


@pytest.mark.parametrize(("case", "lie"), MERGE_CASES)
def test_a_merged_checkpoint_has_the_logits_of_the_adapter_in_peft(case, lie, merged, at_most):
    for adapter in merged_adapters(case):
        wanted = PeftModel.from_pretrained(load_model(merged / "backbone"), merged / adapter).eval()
        whole = merged / f"merged-{adapter}"
        model, report = AutoModelForCausalLM.from_pretrained(whole, output_loading_info=True)
        assert not any(report.values()), report
        expected = [logits(wanted, prompt) for prompt in PROMPTS[0]]
        for prompt, own in zip(PROMPTS[0], expected, strict=True):
            error = (logits(model.eval(), prompt) - own).abs().max().item()
            at_most("logits of merged checkpoints", error, 1e-4)
        with wanted.disable_adapter():
            assert (logits(wanted, PROMPTS[0][0]) - expected[0]).abs().max() > 0.1
        files, index = {}, whole / "model.safetensors.index.json"
        for path in whole.glob("*.safetensors"):
            files |= dict.fromkeys(load_file(path), path.name)
        assert index.exists() == (MERGED[case][1] > 1)
        if index.exists():
            assert json.loads(index.read_text())["weight_map"] == files


def check_exported_logits(trained, task: str, form: str, at_most) -> None:
    adapter = trained.folder / form / task
    model = PeftModel.from_pretrained(load_model(trained.folder / "backbone"), adapter).eval()
    found = np.load(trained.folder / "logits" / "final.npz")
    slot, prompts = list(trained.tasks).index(task), trained.prompts[task]
    error = largest_difference(found, slot, prompts, model)
    at_most("logits of exported adapters", error, 1e-4)
    with model.disable_adapter():
        change = largest_difference(found, slot, prompts, model)
    assert change > 0.1, f"the adapter hardly changes the logits ({change:.1e})"


def largest_difference(found, slot: int, prompts, model) -> float:
    return max(
        np.abs(found[f"{slot}-{i}"] - logits(model, prompt).numpy()).max()
        for i, prompt in enumerate(prompts)
    )


def linears(backbone: Path) -> dict[str, torch.nn.Linear]:
    """The linears that can have an adapter in vLLM: those of the decoder layers."""
    modules = load_model(backbone).named_modules()
    return {
        name: module
        for name, module in modules
        if ".layers." in name and isinstance(module, torch.nn.Linear)
    }


def read_config(folder: Path) -> dict:
    return json.loads((folder / "adapter_config.json").read_text())
