"""Trains one task alone with PEFT and torch, in the way that their documentation describes."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.optimizers import create_loraplus_optimizer
from scenarios import FROM_WEIGHTS
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, get_scheduler

Tensors = dict[str, torch.Tensor]
# Samples of one forward pass. Gradients are accumulated over the forward passes of a global batch.
SAMPLES_PER_PASS = 4


class PeftTraining(NamedTuple):
    """The course and the result of training one task with PEFT.

    Attributes:
      scaling: the factors by which PEFT's layers scale the low-rank product.
      losses: by update, the mean loss per target token.
      grad_norms: by update, the gradient's norm before clipping.
      rates: by update, the learning rate.
      initial: the tensors of the adapter before training.
      final: the tensors of the adapter after training.
      model: the base with the trained adapter.
    """

    scaling: set[float]
    losses: list[float]
    grad_norms: list[float]
    rates: list[float]
    initial: Tensors
    final: Tensors
    model: PeftModel


def train_alone(
    base: PreTrainedModel, adapter: Path, task: dict[str, Any], batches: Sequence[Sequence[dict]]
) -> PeftTraining:
    """Trains the adapter in the folder `adapter` on the given global batches.

    Args:
      base: the frozen model. The adapter's layers are put into it.
      adapter: folder of the initial adapter; not read if PEFT makes it from the backbone.
      task: the task's specification for jaxmux; torch's optimizer is created from it.
      batches: by update, samples with their token `ids` and the mask `target`.
    """
    begun_by_peft = task["adapter"].get("initialisation") in FROM_WEIGHTS
    model = begin(base, task) if begun_by_peft else load(base, adapter)
    initial = adapter_tensors(model)
    optimizer = make_optimizer(model, task)
    schedule, steps = task["optimizer"]["schedule"], task["steps"]
    # As in the Trainer of transformers.
    warmup = schedule["warmup_steps"] or math.ceil(schedule.get("warmup_ratio", 0) * steps)
    scheduler = get_scheduler(
        "constant_with_warmup" if schedule["kind"] == "constant" else schedule["kind"],
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=steps,
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
    return PeftTraining(scaling, losses, grad_norms, rates, initial, adapter_tensors(model), model)


def load(base: PreTrainedModel, adapter: Path) -> PeftModel:
    # PEFT trains prompts, but not those that it has loaded.
    prompt = PeftConfig.from_pretrained(adapter).is_prompt_learning
    model = PeftModel.from_pretrained(base, adapter, is_trainable=not prompt).train()
    if prompt:
        model.prompt_encoder.requires_grad_(True)
    return model


def begin(base: PreTrainedModel, task: dict[str, Any]) -> PeftModel:
    """Lets PEFT make the initial LoRA of a task from the backbone, which it changes."""
    own = task["adapter"]
    config = LoraConfig(
        r=own["rank"],
        lora_alpha=own["alpha"],
        target_modules=own.get("target_modules", "all-linear"),
        use_rslora=own.get("rslora", False),
        init_lora_weights=own["initialisation"],
        rank_pattern=own.get("rank_pattern", {}),
        alpha_pattern=own.get("alpha_pattern", {}),
        task_type="CAUSAL_LM",
    )
    return get_peft_model(base, config).train()


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
    """Adds the gradients of the batch's mean loss per target token, and returns this loss."""
    total = 0.0
    for loss in losses_of_passes(model, batch):
        loss.backward()
        total += loss.item()
    return total


def held_out_loss(model: PeftModel, samples: Sequence[dict]) -> float:
    """The mean loss per target token, without dropout."""
    with torch.no_grad():
        return sum(loss.item() for loss in losses_of_passes(model.eval(), samples))


def losses_of_passes(model: PeftModel, batch: Sequence[dict]) -> Iterator[torch.Tensor]:
    """The summands of the batch's mean loss per target token, one for each forward pass."""
    targets = sum(sum(sample["target"]) for sample in batch)
    for start in range(0, len(batch), SAMPLES_PER_PASS):
        samples = batch[start : start + SAMPLES_PER_PASS]
        ids, attention, target = (
            torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
            for rows in (
                [s["ids"] for s in samples],
                [[1] * len(s["ids"]) for s in samples],
                [s["target"] for s in samples],
            )
        )
        # A trained prompt has logits, too.
        logits = model(input_ids=ids, attention_mask=attention).logits[:, -ids.shape[1] : -1]
        counted = target[:, 1:]
        yield cross_entropy(logits[counted], ids[:, 1:][counted], reduction="sum") / targets


def adapter_tensors(model: PeftModel) -> Tensors:
    # Without the frozen tables beside adapters of the embedding.
    found = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {k: v.detach().clone() for k, v in found.items() if "base_layer" not in k}
