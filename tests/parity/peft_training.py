"""One task trained alone by PEFT and torch, the way a user of theirs would write it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from backbones import load_model
from peft import PeftModel, get_peft_model_state_dict
from peft.optimizers import create_loraplus_optimizer
from torch.nn.functional import cross_entropy
from transformers import get_scheduler

Tensors = dict[str, torch.Tensor]
# Samples that go through the model at once; a global batch is accumulated over several of them.
MICRO_BATCH = 4


class PeftRun(NamedTuple):
    """Attributes:
    scaling: of the low-rank product, as PEFT understands the adapter's configuration.
    losses, grad_norms, rates: of every update; norms before clipping.
    initial, final: the adapter's tensors.
    """

    scaling: set[float]
    losses: list[float]
    grad_norms: list[float]
    rates: list[float]
    initial: Tensors
    final: Tensors


def train_alone(
    backbone: Path, adapter: Path, task: dict[str, Any], batches: Sequence[Sequence[dict]]
) -> PeftRun:
    """Trains the adapter in the folder `adapter` on the given global batches.

    Args:
      task: jaxmux's specification; its optimizer is translated into torch's terms.
      batches: by update, samples with token `ids` and whether each is a `target`.
    """
    model = PeftModel.from_pretrained(load_model(backbone), adapter, is_trainable=True).train()
    initial = adapter_tensors(model)
    optimizer = make_optimizer(model, task)
    schedule = task["optimizer"]["schedule"]
    scheduler = get_scheduler(
        "constant_with_warmup" if schedule["kind"] == "constant" else schedule["kind"],
        optimizer,
        num_warmup_steps=schedule["warmup_steps"],
        num_training_steps=task["steps"],
    )
    trainable = [p for p in model.parameters() if p.requires_grad]
    losses, grad_norms, rates = [], [], []
    for batch in batches:
        losses.append(accumulate_gradients(model, batch))
        norm = torch.nn.utils.clip_grad_norm_(trainable, task["optimizer"]["clip_norm"])
        grad_norms.append(norm.item())
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    scaling = {m.scaling["default"] for m in model.modules() if hasattr(m, "lora_A")}
    return PeftRun(scaling, losses, grad_norms, rates, initial, adapter_tensors(model))


def make_optimizer(model: PeftModel, task: dict[str, Any]) -> torch.optim.Optimizer:
    spec = task["optimizer"]
    rate, decay = spec["learning_rate"], spec["weight_decay"]
    trainable = [p for p in model.parameters() if p.requires_grad]
    if spec["kind"] == "sgd":
        return torch.optim.SGD(trainable, rate, momentum=spec["momentum"], weight_decay=decay)
    if ratio := task["adapter"].get("loraplus_ratio"):
        return create_loraplus_optimizer(
            model,
            torch.optim.AdamW,
            lr=rate,
            loraplus_lr_ratio=ratio,
            loraplus_weight_decay=decay,
        )
    return torch.optim.AdamW(trainable, rate, weight_decay=decay)


def accumulate_gradients(model: PeftModel, batch: Sequence[dict]) -> float:
    """Adds the gradients of the batch's mean loss per target token; returns the loss."""
    targets = sum(sum(sample["target"]) for sample in batch)
    total = 0.0
    for start in range(0, len(batch), MICRO_BATCH):
        micro = batch[start : start + MICRO_BATCH]
        ids, attention, target = (
            torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
            for rows in (
                [s["ids"] for s in micro],
                [[1] * len(s["ids"]) for s in micro],
                [s["target"] for s in micro],
            )
        )
        logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1]
        counted = target[:, 1:]
        loss = cross_entropy(logits[counted], ids[:, 1:][counted], reduction="sum") / targets
        loss.backward()
        total += loss.item()
    return total


def adapter_tensors(model: PeftModel) -> Tensors:
    return {k: v.detach().clone() for k, v in get_peft_model_state_dict(model).items()}
