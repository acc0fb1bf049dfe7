"""Tiny tokenizers and record files for the data tests."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from jaxmux.data import load_tokenizer

CORPUS = [
    "What is the capital of France? The capital of France is Paris.",
    "### Instruction:\nName a colour.\n\n### Response:\nBlue is a colour.",
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
]

CHATML = (
    "{% for m in messages %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def gpt_folder(tmp_path_factory) -> Path:
    """A tokenizer like Qwen's: byte-level BPE, no BOS, ChatML template."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    specials = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|endoftext|>")
    tokenizer.chat_template = CHATML
    folder = tmp_path_factory.mktemp("gpt")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory) -> Path:
    """A tokenizer like Llama 2's: BPE over metaspaces, a BOS before every text, no template."""
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    core.train_from_iterator(CORPUS, trainer)
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    folder = tmp_path_factory.mktemp("llama")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def gpt(gpt_folder):
    return load_tokenizer(gpt_folder)


@pytest.fixture
def llama(llama_folder):
    return load_tokenizer(llama_folder)


@pytest.fixture(params=["gpt", "llama"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def write_jsonl(tmp_path):
    """Writes records (or raw lines) to a file and returns its path as a string."""

    def write(*lines: dict | str, name: str = "train.jsonl") -> str:
        path = tmp_path / name
        rows = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("".join(row + "\n" for row in rows))
        return str(path)

    return write
