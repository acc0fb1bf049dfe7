"""Trains the tasks of a jaxmux run with PEFT on a base in the nf4 of bitsandbytes, as QLoRA does.

  JAXMUX_PYTHON=.venv/bin/python .venv-peft/bin/python scripts/peft_on_nf4.py RUN_DIR OUT

compare_formats.py runs it, in the environment of `make .venv-peft/installed`. Every task is trained
alone on the CPU, with the initial adapter, batches and hyperparameters of the run in RUN_DIR, which
tests/parity/jaxmux_side.py writes. The base is in nf4 with double quantisation, forward and
backward. As PEFT's documentation describes, the base is prepared with
`prepare_model_for_kbit_training`: products with frozen linears are computed in bfloat16, as in
jaxmux, and the low-rank products, the norms, attention, the residual stream and the logits in
float32, which jaxmux computes in bfloat16 (logits: from bfloat16 to float32). Dropout draws other
masks than jaxmux.

Writes the files of a run directory that compare_formats.py reads: OUT/metrics.jsonl with the
training loss of every update, and OUT/summary.json with the held-out loss of every task after
training (the mean over all target tokens) and the versions of the packages.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from peft import prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

PARITY = Path(__file__).resolve().parent.parent / "tests" / "parity"
sys.path.insert(0, str(PARITY))

from peft_training import held_out_loss, train_alone  # noqa: E402

PACKAGES = ("torch", "transformers", "peft", "bitsandbytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    # The model is so small that several threads would be slower than one.
    torch.set_num_threads(1)
    backbone = json.loads((args.run_dir / "run.json").read_text())["backbone"]
    metrics, results = [], {}
    with tempfile.TemporaryDirectory() as folder:
        tasks, batches, held_out = prepared(args.run_dir, Path(folder))
        for name, task in tasks.items():
            torch.manual_seed(task["seed"])
            initial = Path(folder) / "initial" / name
            trained = train_alone(nf4_base(backbone), initial, task, batches[name])
            metrics += [{"task": name, "loss": loss} for loss in trained.losses]
            results[name] = {"eval_loss": held_out_loss(trained.model, held_out[name])}
            print(f"{name}: held-out loss {results[name]['eval_loss']:.6f}", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"{json.dumps(update)}\n" for update in metrics)
    (args.out / "metrics.jsonl").write_text(lines)
    summary = {"tasks": results, "versions": {name: version(name) for name in PACKAGES}}
    # The last file: it says that the run is complete.
    (args.out / "summary.json").write_text(json.dumps(summary, indent=2))


def prepared(run_dir: Path, folder: Path) -> list[dict]:
    """By task, the specifications, the global batches and the held-out samples. The initial
    adapters are written below `folder`."""
    (folder / "request.json").write_text(json.dumps({"run_dir": str(run_dir.resolve())}))
    command = [os.environ["JAXMUX_PYTHON"], PARITY / "jaxmux_side.py", "prepare", folder]
    subprocess.run(command, check=True)
    names = "tasks", "batches", "held_out"
    return [json.loads((folder / f"{name}.json").read_text()) for name in names]


def nf4_base(backbone: str) -> PreTrainedModel:
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        backbone, quantization_config=config, dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


if __name__ == "__main__":
    main()
