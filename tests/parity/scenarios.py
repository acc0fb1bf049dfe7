"""The backbones, tasks and data of the training tests, as plain values for both sides."""

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from backbones import CONFIGS, STORIES260K_SHAPE, load_model, random_model, save_tokenizer
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoTokenizer

# The arguments of jaxmux's `Task`, with dicts for nested objects. Instead of `data` it has `words`:
# the smallest and the largest number of words in a sample.
TaskFields = dict[str, Any]
WORDS = (
    "once upon a time there was little girl boy who loved to play with big red ball in the park "
    "one day she saw happy dog and cat they ran home because it very dark mom said let us sing"
).split()
# A trained prompt begins with its tokens.
PROMPT_TEXT = "the dog ran"


def _task(name: str, words: tuple[int, int], **fields: Any) -> TaskFields:
    return {"name": name, "words": words, "steps": 8, **fields}


def _adamw(learning_rate: float, warmup_steps: int, clip_norm: float) -> dict[str, Any]:
    return {
        "kind": "adamw",
        "learning_rate": learning_rate,
        "weight_decay": 0.1,
        "clip_norm": clip_norm,
        "schedule": {"kind": "cosine", "warmup_steps": warmup_steps},
    }


# Ranks, scales, learning rates, batch sizes and lengths differ between the tasks, and no global
# batch fits into one microbatch.
PARITY_TASKS = [
    _task(
        "short",
        words=(5, 10),
        adapter={"rank": 4, "alpha": 8.0},
        optimizer=_adamw(2e-3, warmup_steps=4, clip_norm=0.5),
        batch_size=20,
        max_length=32,
        seed=1,
    ),
    _task(
        "long",
        words=(30, 60),
        adapter={
            "rank": 8,
            "alpha": 4.0,
            "rslora": True,
            "initialisation": "orthogonal",
            "target_modules": ["q_proj", "v_proj"],
        },
        optimizer=_adamw(1e-3, warmup_steps=2, clip_norm=0.1),
        batch_size=4,
        max_length=120,
        seed=2,
    ),
    _task(
        "medium",
        words=(10, 25),
        adapter={"rank": 2, "alpha": 16.0},
        optimizer=_adamw(5e-4, warmup_steps=6, clip_norm=1.0),
        batch_size=9,
        max_length=64,
        seed=3,
    ),
]

FROM_PEFT = "made-by-peft"
OTHER_OPTIMIZER_TASKS = [
    _task(
        "sgd",
        words=(5, 10),
        adapter={"rank": 4, "alpha": 8.0},
        optimizer={
            "kind": "sgd",
            "learning_rate": 0.2,
            "momentum": 0.9,
            "weight_decay": 0.1,
            "clip_norm": 0.5,
            "schedule": {"kind": "linear", "warmup_steps": 2},
        },
        batch_size=20,
        max_length=32,
        steps=5,
        resume_from=FROM_PEFT,
    ),
    _task(
        "loraplus",
        words=(10, 25),
        adapter={
            "rank": 2,
            "alpha": 2.0,
            "loraplus_ratio": 8.0,
            "initialisation": "gaussian",
            "target_modules": r"model\.layers\.[02]\.(self_attn|mlp)\.(o_proj|up_proj|down_proj)",
        },
        optimizer={
            "kind": "adamw",
            "learning_rate": 5e-4,
            "weight_decay": 0.1,
            "clip_norm": 0.5,
            "schedule": {"kind": "constant", "warmup_steps": 2},
        },
        batch_size=9,
        max_length=64,
        steps=5,
    ),
    _task(
        "lora_tokens",
        words=(10, 25),
        adapter={
            "rank": 2,
            "alpha": 6.0,
            "target_modules": ["q_proj", "down_proj"],
            "trained_tokens": list(range(251, 270, 2)),
        },
        optimizer=_adamw(5e-3, warmup_steps=2, clip_norm=0.5) | {"weight_decay": 0.0},
        batch_size=9,
        max_length=64,
        steps=5,
    ),
    # The head of the backbone is its embedding, so these rows are those of both.
    _task(
        "tied_tokens",
        words=(10, 25),
        adapter={"kind": "trained_tokens", "indices": list(range(270, 250, -1))},
        optimizer=_adamw(1e-2, warmup_steps=2, clip_norm=0.5) | {"weight_decay": 0.0},
        batch_size=9,
        max_length=64,
        steps=5,
    ),
]


# Other kinds of adapters, and LoRA beside them. Few pairs of a kind and a linear: the program of
# all of them takes long to compile. The backbone has biases, which IA3 multiplies.
KIND_TASKS = [
    _task(
        "ia3",
        words=(5, 10),
        adapter={
            "kind": "ia3",
            "target_modules": ["v_proj", "down_proj"],
            "feedforward_modules": ["down_proj"],
        },
        optimizer=_adamw(2e-2, warmup_steps=2, clip_norm=0.05),
        batch_size=6,
        max_length=32,
        steps=5,
    ),
    _task(
        "ln_tuning",
        words=(10, 25),
        adapter={"kind": "ln_tuning"},
        optimizer=_adamw(1e-2, warmup_steps=2, clip_norm=0.5) | {"weight_decay": 0.0},
        batch_size=4,
        max_length=64,
        steps=5,
    ),
    # On square linears, because PEFT would also train the entries that fill up the others.
    _task(
        "diff_pruning",
        words=(5, 10),
        adapter={"kind": "diff_pruning", "columns": 6, "target_modules": ["q_proj", "o_proj"]},
        optimizer=_adamw(5e-3, warmup_steps=2, clip_norm=0.5),
        batch_size=6,
        max_length=32,
        steps=5,
    ),
    _task(
        "sparse_diff",
        words=(5, 10),
        adapter={"kind": "sparse_diff", "rank": 3, "target_modules": ["v_proj"]},
        optimizer=_adamw(5e-3, warmup_steps=2, clip_norm=0.5),
        batch_size=6,
        max_length=32,
        steps=5,
    ),
    _task(
        "prompt_tuning",
        words=(5, 10),
        adapter={"kind": "prompt_tuning", "virtual_tokens": 6, "start_text": PROMPT_TEXT},
        optimizer=_adamw(3e-2, warmup_steps=2, clip_norm=0.5),
        batch_size=6,
        max_length=32,
        steps=5,
    ),
    _task(
        "pattern",
        words=(5, 10),
        adapter={
            "rank": 3,
            "alpha": 6.0,
            "rank_pattern": {"q_proj": 2, r"model\.layers\.1\.mlp\.down_proj": 5},
            "alpha_pattern": {"self_attn.o_proj": 1.5, "down_proj": 20.0},
            "target_modules": ["q_proj", "o_proj", "down_proj"],
        },
        optimizer=_adamw(5e-3, warmup_steps=2, clip_norm=0.5),
        batch_size=6,
        max_length=32,
        steps=5,
    ),
    _task(
        "vera",
        words=(10, 25),
        adapter={
            "kind": "vera",
            "rank": 24,
            "projection_key": 5,
            "target_modules": ["q_proj", "down_proj"],
        },
        optimizer=_adamw(4e-2, warmup_steps=2, clip_norm=0.5),
        batch_size=4,
        max_length=64,
        steps=5,
    ),
    # Spaces and words, which are in nearly all samples.
    _task(
        "trained_tokens",
        words=(10, 25),
        adapter={"kind": "trained_tokens", "indices": list(range(270, 250, -1))},
        optimizer=_adamw(2e-2, warmup_steps=2, clip_norm=0.5) | {"weight_decay": 0.0},
        batch_size=4,
        max_length=64,
        steps=5,
    ),
    _task(
        "dora",
        words=(10, 25),
        adapter={
            "kind": "dora",
            "rank": 3,
            "alpha": 6.0,
            "loraplus_ratio": 2.0,
            "target_modules": ["q_proj", "down_proj"],
        },
        optimizer=_adamw(5e-3, warmup_steps=2, clip_norm=0.5),
        batch_size=4,
        max_length=64,
        steps=5,
    ),
    _task(
        "lora",
        words=(10, 25),
        adapter={"rank": 2, "alpha": 2.0, "target_modules": ["q_proj", "down_proj"]},
        optimizer=_adamw(5e-4, warmup_steps=2, clip_norm=0.5),
        batch_size=4,
        max_length=64,
        steps=5,
    ),
    _task(
        "tables",
        words=(10, 25),
        adapter={
            "rank": 4,
            "alpha": 2.0,
            "target_modules": ["o_proj", "embed_tokens", "lm_head"],
            "rank_pattern": {"lm_head": 3},
        },
        optimizer=_adamw(2e-3, warmup_steps=2, clip_norm=0.5),
        batch_size=4,
        max_length=64,
        steps=5,
    ),
    # Their initial values depend on the data.
    _task(
        "eva",
        words=(10, 25),
        adapter={
            "rank": 3,
            "alpha": 6.0,
            "initialisation": "eva",
            "calibration_tokens": 240,
            "target_modules": ["q_proj", "o_proj", "down_proj"],
        },
        optimizer=_adamw(5e-3, warmup_steps=2, clip_norm=0.5),
        batch_size=4,
        max_length=64,
        steps=5,
    ),
    _task(
        "gradient",
        words=(5, 10),
        adapter={
            "kind": "sparse_diff",
            "rank": 3,
            "mask": "gradient",
            "target_modules": ["v_proj", "down_proj"],
            "calibration_tokens": 150,
        },
        optimizer=_adamw(5e-3, warmup_steps=2, clip_norm=0.5),
        batch_size=6,
        max_length=32,
        steps=5,
    ),
]

# PEFT takes the initial factors of these off the backbone; jaxmux takes them off the product.
FROM_WEIGHTS = ("pissa", "olora")
KIND_TASKS += [
    _task(
        "pissa",
        words=(10, 25),
        adapter={
            "rank": 3,
            "alpha": 6.0,
            "initialisation": "pissa",
            "rank_pattern": {"q_proj": 2},
            "alpha_pattern": {"down_proj": 1.5},
            "target_modules": ["q_proj", "o_proj", "down_proj"],
        },
        optimizer=_adamw(2e-3, warmup_steps=2, clip_norm=0.5),
        batch_size=4,
        max_length=64,
        steps=5,
    ),
    _task(
        "olora",
        words=(5, 10),
        adapter={
            "rank": 4,
            "alpha": 2.0,
            "rslora": True,
            "initialisation": "olora",
            "target_modules": ["q_proj", "o_proj", "down_proj"],
        },
        optimizer=_adamw(2e-3, warmup_steps=2, clip_norm=0.5),
        batch_size=6,
        max_length=32,
        steps=5,
    ),
]
# CI trains the others without these, because the program of all takes long to compile.
SLOW_KINDS = ("ln_tuning", "diff_pruning", "sparse_diff", "vera", "pattern", "olora")
FAST_KINDS = tuple(task["name"] for task in KIND_TASKS if task["name"] not in SLOW_KINDS)


def make_backbone(name: str, folder: Path, shared: str | None) -> None:
    """Writes a checkpoint with a tokenizer into `folder`.

    Args:
      name: a key of `CONFIGS`, for a random model, or "stories260k".
      shared: the folder with the trained stories260K model, which is copied. Without it,
        "stories260k" is a random model of the same shape.
    """
    if name == "stories260k" and shared:
        trained = Path(shared) / "models" / "stories260k"
        shutil.copytree(trained, folder, copy_function=shutil.copyfile)
        return
    config = STORIES260K_SHAPE if name == "stories260k" else CONFIGS[name]
    random_model(config).save_pretrained(folder)
    save_tokenizer(folder, [" ".join(WORDS)])


def write_tasks(specifications: Sequence[TaskFields], folder: Path) -> list[TaskFields]:
    """Writes the data of the tasks and the PEFT adapters from which they resume.

    Returns the specifications of the tasks for jaxmux_side.py.
    """
    tasks = []
    for specification in specifications:
        task = dict(specification, data=f"{specification['name']}.jsonl")
        words = task.pop("words")
        # The steps are two and a half epochs, and the last batch of an epoch is short.
        count = int(task["batch_size"] * (task["steps"] / 2.5 - 0.5))
        write_records(folder / task["data"], words, count, task.get("seed", 0))
        if "resume_from" in task:
            settings = {"r": task["adapter"]["rank"], "lora_alpha": task["adapter"]["alpha"]}
            save_peft_adapter(folder / "backbone", folder / task["resume_from"], settings)
        tasks.append(task)
    return tasks


def write_records(path: Path, words: tuple[int, int], count: int, seed: int) -> None:
    rng = random.Random(seed)
    with path.open("w") as file:
        for _ in range(count):
            text = rng.choices(WORDS, k=rng.randint(*words))
            cut = rng.randint(1, len(text) // 2)
            record = {"prompt": " ".join(text[:cut]), "completion": " " + " ".join(text[cut:])}
            file.write(json.dumps(record) + "\n")


def save_peft_adapter(
    backbone: Path,
    folder: Path,
    settings: dict[str, Any],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Saves a LoRA adapter with random A and B that PEFT created."""
    torch.manual_seed(0)
    config = LoraConfig(
        **{"target_modules": "all-linear", "task_type": "CAUSAL_LM", "init_lora_weights": False}
        | settings
    )
    model = get_peft_model(load_model(backbone).to(dtype), config, autocast_adapter_dtype=False)
    model.save_pretrained(folder)


def vocabulary(backbone: Path) -> int:
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    return min(len(tokenizer), AutoConfig.from_pretrained(backbone).vocab_size)
