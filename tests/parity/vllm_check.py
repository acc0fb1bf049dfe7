"""Checks an adapter folder with the rules of vLLM's LoRA loader, without needing vLLM.

The rules are those of vLLM's `lora/peft_helper.py` (configuration), `lora/utils.py` (names) and
`lora/lora_model.py` (modules, tensors).
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")


class RefusedError(ValueError):
    """vLLM would refuse this adapter, or would serve it with wrong values."""


def check_adapter(
    folder: Path, linears: Mapping[str, torch.nn.Linear], max_lora_rank: int = 16
) -> None:
    """Raises `RefusedError` if vLLM would refuse the adapter or serve it with wrong values.

    Args:
      folder: folder of the adapter.
      linears: by full name, the linears of the base model that can have an adapter.
      max_lora_rank: vLLM's option of this name; one of `RANKS`.
    """
    if max_lora_rank not in RANKS:
        raise ValueError(f"vLLM does not accept max_lora_rank={max_lora_rank}")
    config = json.loads((folder / "adapter_config.json").read_text())
    _check_config(config, max_lora_rank)
    factors: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        if not (match := _NAME.fullmatch(name)):
            raise RefusedError(f"{name} is unsupported LoRA weight")
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise RefusedError(f"{name} is {tensor.dtype}")
        if not tensor.isfinite().all():
            raise RefusedError(f"{name} is not finite")
        factors.setdefault(match["module"], {})[match["factor"]] = tensor
    if not factors:
        raise RefusedError("no tensors")
    for module, pair in factors.items():
        if module not in linears:
            raise RefusedError(f"unexpected module {module}")
        if pair.keys() != {"A", "B"}:
            raise RefusedError(f"{module} has only lora_{''.join(pair)}")
        outputs, inputs = linears[module].weight.shape
        if pair["A"].shape != (config["r"], inputs) or pair["B"].shape != (outputs, config["r"]):
            raise RefusedError(f"{module}: {pair['A'].shape}, {pair['B'].shape}")


def _check_config(config: dict, max_lora_rank: int) -> None:
    if missing := {"r", "lora_alpha", "target_modules"} - config.keys():
        raise RefusedError(f"missing configuration fields: {missing}")
    if config.get("peft_type") != "LORA":
        raise RefusedError(f"peft_type {config.get('peft_type')}")
    if not isinstance(config["r"], int) or not 0 < config["r"] <= max_lora_rank:
        raise RefusedError(f"rank {config['r']} exceeds max_lora_rank {max_lora_rank}")
    if config.get("bias", "none") != "none":
        raise RefusedError("adapter bias is not supported")
    if config.get("modules_to_save"):
        raise RefusedError("only modules_to_save None is supported")
    if config.get("use_dora"):
        raise RefusedError("DoRA is not supported")
    # vLLM ignores these fields and would serve such adapters with wrong scales.
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        raise RefusedError("ranks and scales per module are ignored")
    targets = config["target_modules"]
    if not isinstance(targets, str | list) or not targets:
        raise RefusedError(f"target_modules {targets!r}")
