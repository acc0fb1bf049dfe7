"""The baseline of benchmark_generate.py: `generate` of Hugging Face transformers with PEFT.

The backbone has the shape of Llama-3.1-8B and random bf16 weights, the adapters are LoRA in bf16 on
all linears. A mode is

- "eager" with the cache that grows, or "compiled" with a static cache, for which transformers
  compiles the step that writes a token;
- and, for several adapters, "turns" or "mixed". In turns, each adapter completes its own sequences
  at once, one adapter after the other. Their factors are copied into the place of one adapter, as
  PEFT's `hotswap_adapter` does, so that nothing is compiled again. Mixed, one batch has the
  sequences of all adapters (PEFT's `adapter_names`).

The script measures one case in one mode, and prints a JSON object after each run: the medians so
far. It needs torch, transformers and peft. For a dry run on CPU:

  python scripts/benchmark_generate_hf.py --case 4x2 --mode eager-mixed --device cpu --layers 1 \
      --hidden 256 --vocab 512 --prompt_len 8 --new_tokens 6 --runs 1
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator

import peft
import torch
import transformers
from benchmark_peft import make_backbone

MODES = ("eager", "eager-turns", "eager-mixed", "compiled", "compiled-turns", "compiled-mixed")


def main() -> None:
    args = parse_arguments()
    sequences, adapters = map(int, args.case.split("x"))
    mixed = args.mode.endswith("mixed")
    model = make_model(args, adapters if mixed else 1)
    for result in measure(args, model, sequences, adapters):
        print(json.dumps(result), flush=True)


def make_model(args, adapters: int) -> peft.PeftModel:
    # No sequence ends early.
    model = make_backbone(args, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    lora = peft.LoraConfig(
        r=args.rank,
        lora_alpha=2 * args.rank,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        init_lora_weights=False,
    )
    given = {"autocast_adapter_dtype": False}
    model = peft.get_peft_model(model, lora, "adapter0", **given)
    for i in range(1, adapters):
        model.add_adapter(f"adapter{i}", lora, **given)
    return model.to(torch.bfloat16).eval()


def measure(args, model: peft.PeftModel, sequences: int, adapters: int) -> Iterator[dict]:
    """Yields the result after each run. The first run, which compiles, does not count."""
    ids = torch.randint(args.vocab, (sequences, args.prompt_len)).to(model.device)
    names = [f"adapter{i * adapters // sequences}" for i in range(sequences)]
    compiled = args.mode.startswith("compiled")
    given = {"do_sample": False, "cache_implementation": "static" if compiled else "dynamic"}
    if compiled:
        # Otherwise transformers compiles on a GPU only.
        given["compile_config"] = transformers.CompileConfig()
        given["compile_config"]._compile_all_devices = True
    else:
        given["disable_compile"] = True
    turns = 1 if args.mode.endswith("mixed") else adapters
    factors = [p for name, p in model.named_parameters() if "lora_" in name]
    swapped = range(turns) if turns > 1 else ()
    others = [[torch.randn_like(p) / 100 for p in factors] for _ in swapped]

    @torch.no_grad()
    def seconds(new_tokens: int) -> float:
        synchronise(model)
        start = time.perf_counter()
        for turn, own in enumerate(ids.chunk(turns)):
            if others:
                torch._foreach_copy_(factors, others[turn])
            more = {"adapter_names": names} if adapters > 1 and turns == 1 else {}
            found = model.generate(
                input_ids=own,
                attention_mask=torch.ones_like(own),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                **given,
                **more,
            )
            assert found.shape == (len(own), args.prompt_len + new_tokens)
        synchronise(model)
        return time.perf_counter() - start

    first = seconds(args.new_tokens)
    seconds(1)
    times: list[tuple[float, float]] = []
    for _ in range(args.runs):
        times.append((seconds(args.new_tokens), seconds(1)))
        whole, reading = (statistics.median(own) for own in zip(*times, strict=True))
        written = sequences * (args.new_tokens - 1)
        yield {
            "tokens/s": written / (whole - reading),
            "tokens/s with reading": sequences * args.new_tokens / whole,
            "ms of reading": 1e3 * reading,
            "seconds of the first run": first,
            "runs": len(times),
            "device": device_name(model),
            "versions": {m.__name__: m.__version__ for m in (torch, transformers, peft)},
        }


def synchronise(model: peft.PeftModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def device_name(model: peft.PeftModel) -> str:
    return torch.cuda.get_device_name() if model.device.type == "cuda" else "cpu"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", default="1x1", help="sequences x adapters")
    parser.add_argument("--mode", default="eager", choices=MODES)
    parser.add_argument("--prompt_len", type=int, default=128)
    parser.add_argument("--new_tokens", type=int, default=256)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


if __name__ == "__main__":
    main()
