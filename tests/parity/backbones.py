"""Tiny random backbones of every architecture, created and saved by transformers."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 320
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_WINDOW_ON_EVERY_LAYER = {
    "use_sliding_window": True,
    "sliding_window": 16,
    "max_window_layers": 0,
}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_SHAPE),
    "llama-no-grouping": LlamaConfig(**_SHAPE | {"num_key_value_heads": 4}),
    "llama-one-key-head": LlamaConfig(**_SHAPE | {"num_key_value_heads": 1}),
    "llama-llama3-rope": LlamaConfig(**_SHAPE, rope_parameters=LLAMA3_ROPE),
    "llama-tied": LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "llama-biases": LlamaConfig(**_SHAPE, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**_SHAPE, sliding_window=None),
    "mistral-window": MistralConfig(**_SHAPE, sliding_window=16),
    "qwen2": Qwen2Config(**_SHAPE),
    "qwen2-window": Qwen2Config(**_SHAPE, **_WINDOW_ON_EVERY_LAYER),
    "qwen3": Qwen3Config(**_SHAPE, head_dim=16),
    "qwen3-biases-tied": Qwen3Config(
        **_SHAPE, head_dim=16, attention_bias=True, tie_word_embeddings=True
    ),
}
# By case, the configuration without the feature that the case tests.
WITHOUT_FEATURE: dict[str, PreTrainedConfig] = {
    "llama-llama3-rope": CONFIGS["llama"],
    "mistral-window": CONFIGS["mistral"],
    "qwen2-window": CONFIGS["qwen2"],
}

# The shape of karpathy/tinyllamas stories260K.
STORIES260K_SHAPE = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=172,
    num_hidden_layers=5,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
)


def random_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A float32 model with random weights, scaled so that every part changes the logits.

    Attention is far from uniform, logits have a standard deviation of about 2, and the weights of
    norms and the biases are not trivial.
    """
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.normal_(1, 0.3, generator=generator)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.5, generator=generator)
            else:
                gain = 2 if "embed_tokens" in name or "lm_head" in name else 1.2
                parameter.normal_(0, gain * parameter.shape[1] ** -0.5, generator=generator)
    return model


def write_files(folder: Path, tensors: dict[str, torch.Tensor], files: int) -> None:
    """Spreads tensors over files of weights, with an index if there are several."""
    names, weight_map = sorted(tensors), {}
    for i in range(files):
        file = "model.safetensors" if files == 1 else f"model-{i}.safetensors"
        part = {name: tensors[name] for name in names[i::files]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    if files > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def small_llama(vocabulary: int) -> PreTrainedModel:
    """A model that is never called, for trainers of TRL that only prepare data."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )


def load_model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits(model: torch.nn.Module, prompt: Sequence[int]) -> torch.Tensor:
    """Logits of a single sequence without padding, [tokens, vocabulary], and without those of a
    trained prompt before it."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([prompt])).logits[0, -len(prompt) :]


def random_prompts(vocabulary: int) -> list[list[list[int]]]:
    """Two prompts (token ids) for each of three slots.

    Packing puts the prompts of the first two slots into one row of 128 tokens, and those of the
    third slot into another.
    """
    generator = torch.Generator().manual_seed(1)
    lengths = [[40, 20], [25, 37], [70, 45]]
    return [
        [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in of_slot]
        for of_slot in lengths
    ]


def save_tokenizer(folder: Path, corpus: Sequence[str]) -> None:
    """Trains a byte-level BPE tokenizer of at most `VOCABULARY` tokens and saves it in `folder`."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(corpus, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|endoftext|>")
    tokenizer.save_pretrained(folder)
