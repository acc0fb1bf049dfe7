"""Bottleneck adapters beside those of AdapterHub's library `adapters`, which pins Transformers 4.57
and so needs an environment of its own:

  python3.11 -m venv /tmp/adapterhub
  /tmp/adapterhub/bin/pip install torch==2.14.1 transformers==4.57.6 adapters==1.3.0
  JAXMUX_PYTHON=.venv/bin/python /tmp/adapterhub/bin/python scripts/compare_adapterhub.py

On a random Llama and a random Qwen2, `adapters` creates an adapter of each form, saves it, trains
it alone and saves it again. jaxmux (in a process of the main environment, through
tests/parity/jaxmux_side.py) trains the three together, from the folders of the new adapters and on
the same batches. The errors, of which each has a limit, are

- losses: the largest error of a loss, relative to that of `adapters`;
- parameters: the largest error of a tensor after training, relative to its change (L2 norms);
- exported: the largest difference of the logits between jaxmux and `adapters`, which has loaded
  the folder that jaxmux wrote after training;
- imported: the same for jaxmux, which has loaded the folder that `adapters` wrote.

The result is a table in Markdown. The exit status is 1 if an error exceeds its limit.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import adapters
import numpy as np
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

HERE = Path(__file__).resolve().parent.parent
DEMO = HERE / "jaxmux" / "demo"
# The tokenizer of the demo has 2,048 tokens.
SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
BACKBONES = {"Llama": LlamaConfig(**SHAPE), "Qwen2": Qwen2Config(**SHAPE)}
# By form, the configuration of `adapters` and the width of the middle that it stands for.
FORMS = {
    "pfeiffer": ("seq_bn[reduction_factor=4]", 12),
    "houlsby": ("double_seq_bn[reduction_factor=8]", 6),
    "parallel": ("par_bn[reduction_factor=2]", 24),
}
STEPS, BATCH, RATE, DECAY, CLIP = 20, 8, 1e-3, 0.01, 1.0
LIMITS = {"losses": 1e-4, "parameters": 1e-3, "exported": 1e-4, "imported": 1e-4}


def main() -> int:
    torch.set_num_threads(1)
    packages = ("adapters", "transformers", "torch")
    found = ", ".join(f"{package} {version(package)}" for package in packages)
    rows, exceeded = [], False
    for backbone, config in BACKBONES.items():
        with tempfile.TemporaryDirectory() as folder:
            for form, errors in compare(Path(folder), config).items():
                shown = (f"{errors[name]:.1e}" for name in LIMITS)
                rows.append(f"| {backbone} | {form} | {' | '.join(shown)} |")
                exceeded |= any(errors[name] > limit for name, limit in LIMITS.items())
    print(f"\nCPU, Python {platform.python_version()}, {found}, {jaxmux_versions()}\n")
    print(f"| backbone | form | {' | '.join(LIMITS)} |\n{'| --- ' * (2 + len(LIMITS))}|")
    print("\n".join(rows))
    print(f"| limit |  | {' | '.join(f'{limit:.0e}' for limit in LIMITS.values())} |")
    return int(exceeded)


def compare(folder: Path, config: PretrainedConfig) -> dict[str, dict[str, float]]:
    """The errors of each form on one backbone. All files are written below `folder`."""
    save_random_model(config, folder / "backbone")
    tasks = []
    for form, (name, size) in FORMS.items():
        model = load_model(folder)
        torch.manual_seed(0)
        model.add_adapter("own", config=name)
        save(model, folder / "new" / form)
        adapter = {"kind": "bottleneck", "form": form, "size": size}
        tasks.append(task(form, adapter, resume_from=f"new/{form}"))
    prompts = random_prompts(config.vocab_size)
    jaxmux("train", folder, {"backbone": "backbone", "tasks": tasks, "prompts": prompts})

    batches = json.loads((folder / "batches.json").read_text())
    updates = json.loads((folder / "updates.json").read_text())
    errors = {}
    for form in FORMS:
        model = load_model(folder, folder / "new" / form)
        losses = np.array(train(model, batches[form]))
        save(model, folder / "trained" / form)
        own = np.array([update["loss"] for update in updates if update["task"] == form])
        assert len(own) == len(losses) == STEPS
        errors[form] = {
            "losses": float(np.abs(own / losses - 1).max()),
            "parameters": parameter_error(folder, form),
        }
    case = {
        "backbone": "backbone",
        "adapters": [f"trained/{form}" for form in FORMS],
        "prompts": prompts,
    }
    jaxmux("forward", folder, {"cases": {"trained": case}})
    # Names of logits and of folders: "final" is what jaxmux wrote, "trained" what `adapters` did.
    for name, written in (("exported", "final"), ("imported", "trained")):
        found = np.load(folder / "logits" / f"{written}.npz")
        bare = load_model(folder)
        for slot, form in enumerate(FORMS):
            model = load_model(folder, folder / written / form)
            pairs = [
                (found[f"{slot}-{i}"], logits_of(model, ids), logits_of(bare, ids))
                for i, ids in enumerate(prompts[slot])
            ]
            # The adapters do something.
            assert min(np.abs(wanted - without).max() for _, wanted, without in pairs) > 0.1
            errors[form][name] = float(max(np.abs(own - wanted).max() for own, wanted, _ in pairs))
    return errors


def save_random_model(config: PretrainedConfig, folder: Path) -> None:
    """Writes a float32 model whose weights are so large that every part changes the logits, with
    the tokenizer of the demo."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.normal_(1, 0.3)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.5)
            else:
                parameter.normal_(0, 1.5 * parameter.shape[1] ** -0.5)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO / "base" / file, folder / file)


def load_model(folder: Path, adapter: Path | None = None) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder / "backbone", dtype=torch.float32)
    adapters.init(model)
    if adapter:
        model.load_adapter(
            str(adapter), load_as="own", with_head=False, use_safetensors=True, set_active=True
        )
    return model.eval()


def save(model: torch.nn.Module, folder: Path) -> None:
    folder.parent.mkdir(exist_ok=True)
    model.save_adapter(str(folder), "own", with_head=False, use_safetensors=True)


def task(name: str, adapter: dict, **fields) -> dict:
    """The fields of a task for jaxmux_side.py."""
    optimizer = {
        "kind": "adamw",
        "learning_rate": RATE,
        "weight_decay": DECAY,
        "clip_norm": CLIP,
        "schedule": {"kind": "constant"},
    }
    data = str(DEMO / "tasks" / "pirate.train.jsonl")
    sizes = {"batch_size": BATCH, "max_length": 64, "steps": STEPS}
    return {"name": name, "data": data, "adapter": adapter, "optimizer": optimizer} | sizes | fields


def train(model: torch.nn.Module, batches: list[list[dict]]) -> list[float]:
    """Trains the active adapter; returns the mean loss per target token of every batch."""
    model.train_adapter("own")
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, RATE, weight_decay=DECAY)
    losses = []
    for batch in batches:
        targets = sum(sum(sample["target"]) for sample in batch)
        total = 0.0
        for sample in batch:
            ids, counted = torch.tensor(sample["ids"]), torch.tensor(sample["target"])[1:]
            logits = model(input_ids=ids[None]).logits[0, :-1]
            loss = cross_entropy(logits[counted], ids[1:][counted], reduction="sum") / targets
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(trainable, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    model.eval()
    return losses


def parameter_error(folder: Path, form: str) -> float:
    """The largest error of a tensor that jaxmux has trained, relative to its change."""
    new, wanted, own = (
        load_file(folder / where / form / "adapter.safetensors")
        for where in ("new", "trained", "final")
    )
    own = {name.replace(".adapters.jaxmux.", ".adapters.own."): x for name, x in own.items()}
    assert new.keys() == wanted.keys() == own.keys()
    return max(((own[n] - wanted[n]).norm() / (wanted[n] - new[n]).norm()).item() for n in own)


def logits_of(model: torch.nn.Module, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0].numpy()


def random_prompts(vocabulary: int) -> list[list[list[int]]]:
    """Two prompts for each of three adapters, which jaxmux_side.py packs into one microbatch."""
    rng = np.random.default_rng(1)
    lengths = [[40, 20], [25, 37], [70, 45]]
    return [[rng.integers(3, vocabulary, n).tolist() for n in of_slot] for of_slot in lengths]


def jaxmux(command: str, folder: Path, request: dict) -> None:
    """Runs a command of jaxmux_side.py; the results are written into `folder`."""
    (folder / "request.json").write_text(json.dumps(request))
    side = HERE / "tests" / "parity" / "jaxmux_side.py"
    subprocess.run([os.environ["JAXMUX_PYTHON"], side, command, folder], check=True)


def jaxmux_versions() -> str:
    code = "from jaxmux.installation import *; print(installed_versions('jaxmux', 'jax'))"
    found = subprocess.run(
        [os.environ["JAXMUX_PYTHON"], "-c", code], check=True, capture_output=True, text=True
    )
    return found.stdout.strip().strip("{}").replace("'", "").replace(":", "")


if __name__ == "__main__":
    sys.exit(main())
