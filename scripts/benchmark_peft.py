"""The baseline: a Hugging Face PEFT LoRA training step on one GPU, Llama-3.1-8B shape.

What a PEFT user runs: float32 adapters under bf16 autocast, SDPA attention, fused AdamW. Prints one
JSON object per batch: batch, length, ms_median, tokens_per_second, peak_bytes, versions. Needs
torch, transformers and peft.
"""

import argparse
import json
import statistics
import time

import peft
import torch
import transformers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--eager", action="store_true")
    mode.add_argument("--compiled", action="store_true", help="through torch.compile")
    parser.add_argument("--batch", nargs="+", default=["4x2048", "8x128", "8x64"])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()

    model = make_model(args.layers)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True
    )
    run = torch.compile(model) if args.compiled else model
    for spec in args.batch:
        batch, length = map(int, spec.split("x"))
        print(json.dumps(measure(run, optimizer, model, batch, length, args.steps)), flush=True)


def make_model(layers: int) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, lora).train()


def measure(run, optimizer, model, batch: int, length: int, steps: int) -> dict:
    ids = torch.randint(0, model.config.vocab_size, (batch, length), device="cuda")

    def step() -> float:
        start = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    for _ in range(3):
        step()
    torch.cuda.reset_peak_memory_stats()
    median = statistics.median(step() for _ in range(steps))
    return {
        "batch": batch,
        "length": length,
        "ms_median": 1e3 * median,
        "tokens_per_second": batch * length / median,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "versions": {m.__name__: m.__version__ for m in (torch, transformers, peft)},
    }


if __name__ == "__main__":
    main()
