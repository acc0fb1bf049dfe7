"""transformers and jaxmux compute the same logits from a checkpoint that either of them wrote."""

import json
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from backbones import (
    CONFIGS,
    VOCABULARY,
    WITHOUT_FEATURE,
    load_model,
    logits,
    random_model,
    random_prompts,
    write_files,
)
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

LIMIT = 1e-4
PROMPTS = random_prompts(VOCABULARY)

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 12,
}
# Arguments of jaxmux's `BackboneConfig`.
MADE_BY_JAXMUX = {
    "llama": {"architecture": "LlamaForCausalLM", **_SHAPE},
    "llama-biases-tied": {
        "architecture": "LlamaForCausalLM",
        **_SHAPE,
        "attention_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "mistral-window": {"architecture": "MistralForCausalLM", **_SHAPE, "sliding_window": 16},
    "mistral": {"architecture": "MistralForCausalLM", **_SHAPE},
    "qwen2": {"architecture": "Qwen2ForCausalLM", **_SHAPE, "attention_bias": True},
    "qwen2-window": {
        "architecture": "Qwen2ForCausalLM",
        **_SHAPE,
        "attention_bias": True,
        "sliding_window": 16,
    },
    "qwen3": {"architecture": "Qwen3ForCausalLM", **_SHAPE, "head_dim": 16, "qk_norm": True},
}


# Each of these is a part of what other cases have.
PARTS = {
    "llama-no-grouping",
    "llama-tied",
    "mistral",
    "saved-llama",
    "saved-mistral",
    "saved-qwen2",
}


def cases(names):
    """The cases of a test. Parts of others are slow."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in PARTS else name for name in names]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, jaxmux):
    """A function that returns the folder of a checkpoint of either library; jaxmux's logits for it
    are in the folder `logits` beside it."""
    folder = tmp_path_factory.mktemp("logits")

    @cache
    def made(case: str) -> Path:
        request = {"backbone": case, "prompts": PROMPTS}
        if case == "sharded":
            random_model(CONFIGS["llama"]).save_pretrained(folder / case, max_shard_size="50KB")
        elif case in CONFIGS:
            random_model(CONFIGS[case]).save_pretrained(folder / case)
        else:
            request["random"] = MADE_BY_JAXMUX[case.removeprefix("saved-")]
        jaxmux("forward", folder, {"cases": {case: request}})
        return folder / case

    return made


def difference(checkpoint: Path, model) -> float:
    """Largest difference of a logit over all prompts; transformers computes each prompt alone."""
    found = np.load(checkpoint.parent / "logits" / f"{checkpoint.name}.npz")
    return max(
        np.abs(found[f"{slot}-{i}"] - logits(model, prompt).numpy()).max()
        for slot, prompts in enumerate(PROMPTS)
        for i, prompt in enumerate(prompts)
    )


@pytest.mark.parametrize("case", cases(CONFIGS))
def test_packed_sequences_have_the_logits_of_transformers(case, checkpoint, at_most):
    folder = checkpoint(case)
    at_most("logits of loaded backbones", difference(folder, load_model(folder)), LIMIT)


def test_a_sharded_checkpoint_loads_like_a_single_file(checkpoint, at_most):
    folder = checkpoint("sharded")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    at_most("logits of loaded backbones", difference(folder, load_model(folder)), LIMIT)


@pytest.mark.parametrize("case", cases(f"saved-{name}" for name in MADE_BY_JAXMUX))
def test_a_backbone_saved_by_jaxmux_loads_in_transformers(case, checkpoint, at_most):
    folder = checkpoint(case)
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    at_most("logits of saved backbones", difference(folder, model.eval()), LIMIT)


@pytest.mark.parametrize("case", cases(CONFIGS))
def test_logits_depend_on_the_whole_context(case, checkpoint):
    """Checks that the comparison is not trivial: logits vary and depend on distant tokens."""
    model = load_model(checkpoint(case))
    prompt = PROMPTS[2][0]
    before = logits(model, prompt)
    assert before.std() > 1
    changed = [*prompt[:-12], prompt[-12] ^ 1, *prompt[-11:]]
    assert (logits(model, changed)[-1] - before[-1]).abs().max() > 0.01


@pytest.mark.parametrize("case", WITHOUT_FEATURE)
def test_rope_scaling_and_sliding_windows_change_the_logits(case, checkpoint):
    model = random_model(WITHOUT_FEATURE[case])
    assert difference(checkpoint(case), model) > 0.01


# By case, what config.json says in its top level and in text_config (None: nothing), the head in
# the files and the number of files.
HEADS = {
    f"{flag}-{section}-{head}-{files}": (flag, section, head, files)
    for (flag, section, head), files in zip(
        product((True, False, None), (True, False, None), ("absent", "equal", "other", "alone")),
        [1, 3] * 18,
        strict=True,
    )
    if not (head == "absent" and False in (flag, section) and True not in (flag, section))
    and not (head == "alone" and not flag)
}


@pytest.fixture(scope="module")
def heads(tmp_path_factory, jaxmux) -> Path:
    """Checkpoints whose config.json may contradict their weights, and jaxmux's logits for them."""
    folder = tmp_path_factory.mktemp("heads")
    for case, (flag, section, head, files) in HEADS.items():
        random_model(CONFIGS["llama-tied"]).save_pretrained(folder / case)
        (weights,) = (folder / case).glob("*.safetensors")
        tensors, table = load_file(weights), "model.embed_tokens.weight"
        if head != "absent":
            other = 2 * tensors[table].roll(1, 0)
            tensors["lm_head.weight"] = other if head == "other" else tensors[table].clone()
        if head == "alone":
            del tensors[table]
        weights.unlink()
        write_files(folder / case, tensors, files)
        config = json.loads((folder / case / "config.json").read_text())
        del config["tie_word_embeddings"]
        if flag is not None:
            config["tie_word_embeddings"] = flag
        if section is not None:
            config["text_config"] = {"tie_word_embeddings": section}
        (folder / case / "config.json").write_text(json.dumps(config))
    cases = {case: {"backbone": case, "prompts": PROMPTS} for case in HEADS}
    jaxmux("forward", folder, {"cases": cases})
    return folder


@pytest.mark.parametrize("case", HEADS)
def test_the_weights_decide_whether_the_head_is_the_embedding_as_in_transformers(
    case, heads, at_most
):
    config = AutoConfig.from_pretrained(heads / case)
    # It does not read this section in a Llama, and fails to make a generation config of it.
    vars(config).pop("text_config", None)
    # It makes a random head if config.json does not say that the embedding is the head.
    config.tie_word_embeddings |= HEADS[case][2] == "absent"
    model, report = AutoModelForCausalLM.from_pretrained(
        heads / case, config=config, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    at_most("logits of loaded backbones", difference(heads / case, model.eval()), LIMIT)
