"""A tiny random Llama folder, small data sets, configs and an independent forward pass.

Runs share the shape of their microbatches, so that few programs are compiled.
"""

import dataclasses
import json
import shutil
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from jaxmux import AdamW, Backbone, LoRA, RunOptions, Schedule, Task, fine_tune, save_backbone
from jaxmux.data import Microbatch
from jaxmux.models import (
    BackboneConfig,
    ForwardOptions,
    SlotTable,
    head_kernel,
    hidden_states,
    load_backbone,
)
from jaxmux.pallas_kernels.frozen_weight import FrozenWeight

SPECIALS = ["<unk>", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
CHAT = (
    "{% for m in messages %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FRUITS = ("apple", "pear", "plum", "fig", "quince", "lemon", "melon", "cherry")
COLOURS = ("red", "green", "purple", "brown", "yellow", "white", "orange", "black")
ROW = 128
RUN = {"tokens_per_microbatch": 2 * ROW, "row_len": ROW, "chunk_len": 64, "remat": "none"}
POOL = {"reserved_rank": 4, "reserved_targets": ("q_proj", "down_proj")}
SERVER = RUN | POOL | {"reserved_slots": 3}
# Runs have the sizes of servers, so that they share their programs.
SIZES = SERVER | {"max_sequences": 8}


DRAW = Figure.draw


@pytest.fixture(scope="module", autouse=True)
def use_is_written_at_once():
    """Servers write what tasks have used after every round, so that a copy of a folder has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxmux.server.saving._USE_EVERY", 0.0)
        yield


@pytest.fixture(scope="module", autouse=True)
def empty_plots():
    """Figures stay empty, because to draw one takes longer than a short run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "draw", lambda *_: None)
        yield


@pytest.fixture
def drawn(monkeypatch):
    """Figures are drawn."""
    monkeypatch.setattr(Figure, "draw", DRAW)


@pytest.fixture(scope="session")
def backbone(tmp_path_factory) -> Path:
    """A folder with a random two-layer Llama and its tokenizer, which puts a BOS before a text."""
    folder = tmp_path_factory.mktemp("backbone")
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder)
    config = BackboneConfig(
        architecture="LlamaForCausalLM",
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
    )
    random = Backbone.random(config, seed=7)
    # Large enough that the tokens before matter to the next one.
    weights = jax.tree.map(lambda w: w if w.ndim == 1 else 5 * w, random.weights)
    save_backbone(dataclasses.replace(random, weights=weights), folder)
    return folder


@pytest.fixture(scope="session")
def chat_backbone(backbone, tmp_path_factory) -> Path:
    """The same backbone, its tokenizer with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "backbone"
    shutil.copytree(backbone, folder)
    tokenizer = _tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([*FRUITS, *COLOURS], trainer)
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
    )


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> dict[str, str]:
    """Paths of small record files by name: short and long ones, chats, held-out records."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(3)

    def words(least, most):
        return " ".join(rng.choice(FRUITS + COLOURS, rng.integers(least, most)))

    records = {
        "short": [{"prompt": words(1, 4), "completion": " " + words(1, 5)} for _ in range(14)],
        "short.eval": [{"prompt": words(1, 4), "completion": " " + words(1, 5)} for _ in range(5)],
        "long": [{"prompt": words(3, 9), "completion": " " + words(4, 12)} for _ in range(20)],
        "long.eval": [{"prompt": words(3, 9), "completion": " " + words(4, 12)} for _ in range(3)],
        # Training on fruits makes them now more, now less likely.
        "letters.eval": [{"prompt": "apple", "completion": " O O O"}],
        "more_letters.eval": [{"prompt": "apple", "completion": " O O O"}] * 25,
        "chat": [
            {
                "messages": [
                    {"role": "user", "content": words(1, 4)},
                    {"role": "assistant", "content": words(1, 4)},
                ]
            }
            for _ in range(6)
        ],
    }
    paths = {}
    for name, rows in records.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        paths[name] = str(path)
    return paths


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """Paths of preference records, for training and held out."""
    folder, rng = tmp_path_factory.mktemp("pairs"), np.random.default_rng(4)

    def words(of, most):
        return " " + " ".join(rng.choice(of, rng.integers(1, most)))

    paths = {}
    for name, count in {"train": 14, "eval": 5}.items():
        records = [
            {"prompt": "eat", "chosen": words(FRUITS, 5), "rejected": words(COLOURS, 5)}
            for _ in range(count)
        ]
        paths[name] = folder / f"{name}.jsonl"
        paths[name].write_text("".join(json.dumps(record) + "\n" for record in records))
    return {name: str(path) for name, path in paths.items()}


@pytest.fixture
def write_lines(tmp_path):
    """Writes records, or raw lines, to a file of the test; returns its path."""

    def write(*lines: dict | str, name: str = "records.jsonl") -> str:
        path = tmp_path / name
        rows = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("".join(row + "\n" for row in rows))
        return str(path)

    return write


@pytest.fixture(scope="session")
def write_config(tmp_path_factory, backbone, data):
    """Writes a gin config with one task, "tiny", of three steps, to a folder of its own.

    `lines` are appended as they are; `run` sets parameters of `fine_tune`, None leaves one out.
    """

    def write(*lines: str, name: str = "tiny", run: dict | None = None) -> str:
        settings = {"backbone": str(backbone), **SIZES} | (run or {})
        text = [f"fine_tune.{k} = {v!r}" for k, v in settings.items() if v is not None]
        text += [
            "fine_tune.tasks = [@tiny/Task()]",
            "tiny/Task.name = 'tiny'",
            f"tiny/Task.data = {data['short']!r}",
            "tiny/Task.batch_size = 4",
            "tiny/Task.steps = 3",
            "tiny/Task.adapter = @tiny/LoRA()",
            "tiny/LoRA.rank = 2",
            "tiny/LoRA.target_modules = ('q_proj', 'down_proj')",
            "tiny/Task.optimizer = @tiny/AdamW()",
            "tiny/AdamW.learning_rate = 1e-2",
            *lines,
        ]
        path = tmp_path_factory.mktemp("config") / f"{name}.gin"
        path.write_text("\n".join(text) + "\n")
        return str(path)

    return write


@pytest.fixture(scope="session")
def make_task(data):
    """Makes a small task; keyword arguments are those of `Task`. It adapts a linear of the
    attention and one of the MLP, because fewer linears are compiled faster."""

    def make(name: str = "tiny", **fields) -> Task:
        defaults = {
            "data": data["short"],
            "adapter": LoRA(rank=2, alpha=4.0, target_modules=("q_proj", "down_proj")),
            "optimizer": AdamW(1e-2, schedule=Schedule("linear", warmup_steps=1)),
            "batch_size": 4,
        }
        if not {"epochs", "steps"} & fields.keys():
            defaults["steps"] = 3
        return Task(name, **(defaults | fields))

    return make


@pytest.fixture(scope="session")
def train(backbone):
    """`fine_tune` on the tiny backbone with the shared shape. Keyword arguments are those of
    `RunOptions`, or of `fine_tune`."""
    names = {field.name for field in dataclasses.fields(RunOptions)}

    def run(run_dir, *tasks: Task, **keywords):
        options = RunOptions(**SIZES | {k: v for k, v in keywords.items() if k in names})
        others = {k: v for k, v in keywords.items() if k not in names}
        arguments = {"backbone": backbone, "tasks": tasks, "options": options} | others
        return fine_tune(run_dir=run_dir, **arguments)

    return run


@pytest.fixture
def watch(backbone):
    """Opens a server that watches `tmp/inbox` with the folder `tmp/server`; arguments are those of
    `watched_server`."""
    from .watched_server import watched_server

    return partial(watched_server, backbone)


@pytest.fixture
def put(tmp_path, data):
    """Writes a specification, and the data of its tenant."""
    from .watched_server import write_specification

    def write(place: str, **fields) -> Path:
        path = tmp_path / "inbox" / f"{place}.json"
        (path.parent / "data").mkdir(parents=True, exist_ok=True)
        for name in ("short", "long"):
            if not (path.parent / "data" / f"{name}.jsonl").exists():
                shutil.copy(data[name], path.parent / "data" / f"{name}.jsonl")
        return write_specification(path, **fields)

    return write


@pytest.fixture(scope="session")
def logits_of(backbone):
    """Logits of one sequence at each of its tokens, by a plain forward pass that knows no LoRA: an
    adapter is added to the frozen weights."""
    loaded = load_backbone(backbone, "float32")

    @jax.jit
    def forward(weights, tokens, length):
        positions = jnp.arange(ROW, dtype=jnp.int32)[None]
        microbatch = Microbatch(
            tokens=tokens,
            targets=tokens,
            loss_weight=jnp.zeros((1, ROW)),
            positions=positions,
            segment_ids=jnp.where(positions < length, 0, -1),
            sample_id=jnp.zeros((1, ROW), jnp.uint32),
            chunk_slot=jnp.full(1, -1, jnp.int32),
        )
        slots = SlotTable(jnp.zeros(1), jnp.zeros(1), jnp.zeros(1, jnp.uint32))
        options = ForwardOptions("xla", remat="none", max_sequences=1)
        none = {"lora": {}}
        hidden, _, _ = hidden_states(loaded.config, weights, none, None, microbatch, slots, options)
        return head_kernel(weights).matmul(hidden)

    def logits(ids: list[int], spec: LoRA | None = None, adapter=None) -> np.ndarray:
        tokens = np.zeros((1, ROW), np.int32)
        tokens[0, : len(ids)] = ids
        weights = _merged(loaded.weights, spec, adapter or {})
        return np.asarray(forward(weights, tokens, len(ids)), np.float64)[: len(ids)]

    return logits


def _merged(weights, spec, adapter):
    layers = {group: dict(modules) for group, modules in weights["layers"].items()}
    for module, (a, b) in adapter.items():
        group, name = module.split(".")
        merged = layers[group][name]["kernel"].decoded() + spec.scale * jnp.matmul(a, b)
        layers[group][name] = layers[group][name] | {"kernel": FrozenWeight.of(merged)}
    return weights | {"layers": layers}


@pytest.fixture(scope="session")
def adapter_bytes():
    """What a folder of PEFT adapters holds, by path, but for the cards, which name their tasks."""

    def read(folder: Path) -> dict[str, bytes]:
        found = Path(folder).rglob("*")
        files = sorted(p for p in found if p.is_file() and p.name != "README.md")
        return {str(p.relative_to(folder)): p.read_bytes() for p in files}

    return read
