"""The baseline of benchmark_generate.py: `generate` of Hugging Face transformers with PEFT.

The backbone has the shape of Llama-3.1-8B and random bf16 weights, the adapters are LoRA in bf16 on
all linears. The cache is static, for which transformers compiles the decoding step on a GPU. The
adapters of a case complete their sequences one adapter after the other. The script prints a JSON
object for each case. It needs torch, transformers and peft. For a dry run on CPU:

  python scripts/benchmark_generate_hf.py --cases 1x1 4x2 --device cpu --layers 1 --hidden 256 \
      --vocab 512 --prompt_len 8 --new_tokens 6 --runs 1
"""

import argparse
import json
import statistics
import time

import peft
import torch
import transformers
from benchmark_peft import make_backbone


def main() -> None:
    args = parse_arguments()
    for case in args.cases:
        sequences, adapters = map(int, case.split("x"))
        model = make_model(args, adapters)
        print(json.dumps({"case": case} | measure(args, model, sequences, adapters)), flush=True)
        del model


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


def measure(args, model: peft.PeftModel, sequences: int, adapters: int) -> dict:
    ids = torch.randint(args.vocab, (adapters, sequences // adapters, args.prompt_len))
    ids = ids.to(model.device)

    def seconds(new_tokens: int) -> float:
        synchronise(model)
        start = time.perf_counter()
        for i in range(adapters):
            model.set_adapter(f"adapter{i}")
            model.generate(
                input_ids=ids[i],
                attention_mask=torch.ones_like(ids[i]),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                cache_implementation="static",
            )
        synchronise(model)
        return time.perf_counter() - start

    whole, reading = (
        statistics.median([seconds(n) for _ in range(args.runs + 1)][1:])
        for n in (args.new_tokens, 1)
    )
    written = sequences * (args.new_tokens - 1)
    return {
        "tokens/s": written / (whole - reading),
        "tokens/s with reading": sequences * args.new_tokens / whole,
        "ms of reading": 1e3 * reading,
        "versions": {m.__name__: m.__version__ for m in (torch, transformers, peft)},
    }


def synchronise(model: peft.PeftModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", nargs="+", default=["1x1", "64x8"])
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
