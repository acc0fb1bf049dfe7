"""The baseline of benchmark_step.py: a training step of Hugging Face PEFT on one GPU.

The backbone has the shape of Llama-3.1-8B. As is usual with PEFT, the LoRA adapters are float32
under bf16 autocast, attention is SDPA, and AdamW is fused. The script prints a JSON object for
each mode and batch, with the times, the tokens per second and the peak memory. It needs torch,
transformers and peft. For a dry run on CPU:

  python scripts/benchmark_peft.py --modes eager --batch 2x64 --device cpu \
      --layers 2 --hidden 256 --vocab 512 --steps 2
"""

import argparse
import json
import statistics
import time
from itertools import pairwise

import peft
import torch
import transformers

MODES = ("eager", "compiled")
WARM_UP = 3


def main() -> None:
    args = parse_arguments()
    model = make_model(args)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True
    )
    for mode in args.modes:
        for spec in args.batch:
            batch, length = map(int, spec.split("x"))
            # Compile for this shape alone, without recompiling for dynamic shapes.
            torch.compiler.reset()
            forward = torch.compile(model) if mode == "compiled" else model
            found = measure(forward, optimizer, model, batch, length, args.steps)
            print(json.dumps({"mode": mode} | found), flush=True)


def make_backbone(args, **config) -> torch.nn.Module:
    """A model of Llama-3.1-8B's proportions with random bf16 weights.

    Args:
      args: its sizes (vocab, hidden, layers) and its device.
      **config: further fields of its configuration.
    """
    config = transformers.LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 7 // 2,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 128,
        num_key_value_heads=max(1, args.hidden // 512),
        max_position_embeddings=8192,
        rope_theta=500000.0,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        **config,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(args.device):
        model = transformers.LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return model


def make_model(args) -> torch.nn.Module:
    model = make_backbone(args)
    lora = peft.LoraConfig(
        r=args.rank,
        lora_alpha=2 * args.rank,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(model, lora).train()


def measure(forward, optimizer, model, batch: int, length: int, steps: int) -> dict:
    device = model.device
    on_gpu = device.type == "cuda"
    ids = torch.randint(0, model.config.vocab_size, (batch, length), device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = forward(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(WARM_UP):
        step()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = sorted(step_seconds(step, steps, on_gpu))
    median = statistics.median(seconds)
    return {
        "batch": batch,
        "length": length,
        "ms_median": 1e3 * median,
        "ms_min": 1e3 * seconds[0],
        "ms_max": 1e3 * seconds[-1],
        "tokens_per_second": batch * length / median,
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "versions": {m.__name__: m.__version__ for m in (torch, transformers, peft)},
    }


def step_seconds(step, steps: int, on_gpu: bool) -> list[float]:
    """Seconds from the end of each step to the end of the next, without waiting between steps."""
    if not on_gpu:
        ends = [time.perf_counter()]
        for _ in range(steps):
            step()
            ends.append(time.perf_counter())
        return [end - start for start, end in pairwise(ends)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [1e-3 * start.elapsed_time(end) for start, end in pairwise(events)]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument(
        "--batch", nargs="+", default=["4x2048", "8x128", "8x64"], help="batch x length"
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


if __name__ == "__main__":
    main()
