"""The grouped LoRA linear, forward and backward, beside the frozen linear alone, on one GPU.

  python scripts/benchmark_grouped_lora.py --out benchmarks/grouped_lora_h200.json

Random data in bfloat16, a stream of 8,192 tokens in chunks of 128. The baseline is XLA's (cuBLAS's)
`x W` and `dy W^T`, which a frozen model needs in any case. Both are timed in turns, so that the
clock of a hot GPU counts alike; each figure is the median over turns of the mean of a turn's calls.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmux.pallas_kernels.counter_dropout import Dropout
from jaxmux.pallas_kernels.grouped_lora import (
    IMPLEMENTATIONS,
    Factors,
    Projection,
    Routing,
    grouped_lora_linear,
)


class Case(NamedTuple):
    """One linear, or several that share their input: k to each of `widths`."""

    k: int
    widths: tuple[int, ...]
    ranks: tuple[int, ...]
    dropout: float = 0.0


LINEARS = ((4096, (4096,)), (4096, (14336,)), (14336, (4096,)))
GROUPS = ((4096, (4096, 1024, 1024)), (4096, (14336, 14336)))


def cases() -> list[Case]:
    found = [Case(k, n, (16,) * tasks) for k, n in LINEARS for tasks in (1, 4, 16)]
    found += [Case(k, n, (16,) * 4) for k, n in GROUPS]
    found += [Case(4096, (4096,), ranks) for ranks in ((8, 16, 32, 64), (64,) * 4)]
    return found + [Case(k, n, (16,) * 4, 0.1) for k, n in LINEARS]


def main() -> None:
    args = parse_arguments()
    records = []
    for case in cases()[: args.cases]:
        for implementation in args.implementations:
            records.append(measure(case, implementation, args))
            print(one_line(records[-1]), flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(records, indent=2) + "\n")


def measure(case: Case, implementation: str, args) -> dict:
    x, projections, sums, routing, dropout, gradients = make_inputs(case, args.tokens)
    modules = tuple(range(len(projections)))

    @jax.jit
    def frozen(x, kernels, gradients):
        outputs, dx = frozen_linears(x, kernels)
        return outputs, dx(gradients)

    def adapted(x, projections, sums, routing, dropout, gradients):
        def forward(x, sums):
            return grouped_lora_linear(
                x, projections, sums, routing, dropout, jnp.int32(0), modules, implementation
            )

        (outputs, _), backward = jax.vjp(forward, x, sums)
        return outputs, *backward((gradients, sums))

    step = jax.jit(adapted, donate_argnums=2)

    def call():
        nonlocal sums
        outputs, dx, sums = step(x, projections, sums, routing, dropout, gradients)
        return outputs, dx

    kernels = tuple(p.kernel[0] for p in projections)
    timed = in_turns([call, lambda: frozen(x, kernels, gradients)], args.turns, args.calls)
    ours, baseline = (statistics.median(times) for times in timed)
    device = jax.devices()[0]
    return {
        "name": "grouped_lora_linear",
        "shape": f"{args.tokens}x{case.k}x{'+'.join(map(str, case.widths))}",
        "dtype": "bfloat16",
        "tasks": len(case.ranks),
        "ranks": list(case.ranks),
        "dropout": case.dropout,
        "implementation": implementation,
        "ms_median": ours,
        "ms_min": min(timed[0]),
        "ms_max": max(timed[0]),
        "baseline": "frozen linears, forward and dX, XLA",
        "baseline_ms_median": baseline,
        "ratio": statistics.median(a / b for a, b in zip(*timed, strict=True)),
        "tokens_per_second": 1e3 * args.tokens / ours,
        "peak_bytes": None,
        "device": device.device_kind,
        "versions": {p: version(p) for p in ("jax", "jaxlib")},
        "command": " ".join(["python", *sys.argv]),
    }


def frozen_linears(x, kernels):
    outputs = tuple(x @ kernel for kernel in kernels)

    def dx(gradients):
        return sum(
            jnp.einsum("Nn,kn->Nk", dy, kernel)
            for dy, kernel in zip(gradients, kernels, strict=True)
        )

    return outputs, dx


def make_inputs(case: Case, tokens: int):
    rng = np.random.default_rng(0)
    slots, rank = len(case.ranks), max(case.ranks)
    chunks = tokens // 128

    def normal(*shape, dtype=jnp.bfloat16):
        key = jax.random.key(int(rng.integers(2**31)))
        return (0.1 * jax.random.normal(key, shape)).astype(dtype)

    # True ranks below the pool's are padded with zeros, as in a pool.
    live = jnp.arange(rank)[None, :] < jnp.asarray(case.ranks)[:, None]

    def factors(n: int) -> Factors:
        a = normal(1, slots, case.k, rank, dtype=jnp.float32) * live[None, :, None, :]
        return Factors(a, normal(1, slots, rank, n, dtype=jnp.float32) * live[None, :, :, None])

    projections = tuple(Projection(normal(1, case.k, n), factors(n)) for n in case.widths)
    sums = tuple(factors(n) for n in case.widths)
    owners = jnp.asarray(np.repeat(np.arange(slots), -(-chunks // slots))[:chunks], jnp.int32)
    routing = Routing(owners, jnp.full(slots, 2.0))
    dropout = None
    if case.dropout:
        dropout = Dropout(
            jnp.full(slots, case.dropout),
            jnp.arange(slots, dtype=jnp.uint32),
            jnp.arange(tokens, dtype=jnp.uint32),
            jnp.arange(tokens, dtype=jnp.int32),
        )
    gradients = tuple(normal(tokens, n) for n in case.widths)
    return normal(tokens, case.k), projections, sums, routing, dropout, gradients


def in_turns(functions: list[Callable], turns: int, calls: int) -> list[list[float]]:
    """Milliseconds a call of each function, by turn; the first turn is not counted."""
    times: list[list[float]] = [[] for _ in functions]
    for turn in range(turns + 1):
        for function, found in zip(functions, times, strict=True):
            jax.block_until_ready(function())
            start = time.perf_counter()
            for _ in range(calls):
                result = function()
            jax.block_until_ready(result)
            if turn:
                found.append(1e3 * (time.perf_counter() - start) / calls)
    return times


def one_line(record: dict) -> str:
    return (
        f"{record['shape']}, {record['tasks']} tasks, ranks {sorted(set(record['ranks']))}, "
        f"dropout {record['dropout']}, {record['implementation']}: {record['ms_median']:.3f} ms, "
        f"frozen {record['baseline_ms_median']:.3f} ms, {record['ratio']:.3f}x"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--implementations", nargs="+", default=list(IMPLEMENTATIONS))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--cases", type=int, default=None, help="only the first so many")
    return parser.parse_args()


if __name__ == "__main__":
    main()
