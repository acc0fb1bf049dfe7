"""Times products in float8 beside those of cuBLASLt, and measures the error of their sums.

  python scripts/benchmark_float8_products.py --out benchmarks/frozen_weights_h200.json

The shapes are those of Llama-3.1-8B's linears, with 8,192 tokens. jaxmux's product takes rows that
are already in float8 and adds the low-rank products of four tasks of rank 16. That of cuBLASLt
(`torch._scaled_mm` with scales of rows and columns) has no adapters. Both read weights of several
layers in turn, and run in turns: in each turn a product runs for half of the time before it is
timed, because the clock of a GPU at its power limit depends on the last tenths of a second.

Hopper's tensor cores keep about 14 bits of a sum in float8. The error is that of the sums of the
codes, relative to their root mean square, from float64; those of torch are with this sum ("fast")
and with one that is carried to float32 every 128 terms. Beside them stands the error of rounding
both operands to float8. The script needs a Hopper GPU and torch.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from benchmark_records import Record, make_figure, replace_records

from jaxmux.installation import installed_versions
from jaxmux.pallas_kernels.frozen_weight import FLOAT8, FrozenWeight
from jaxmux.pallas_kernels.grouped_lora.routed_matmul_sm90 import Scales, Term, routed_matmul
from jaxmux.pallas_kernels.grouped_lora.tilings import matmul_tiling, multiprocessors
from jaxmux.pallas_kernels.number_formats import quantised_rows, row_scales

TOKENS, CHUNK_LEN, RANK, TASKS = 8192, 128, 16, 4
SHAPES = ((4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096))
MOST_TIME = {(4096, 14336): 1.15}
# Layers whose weights are read in turn, and rows whose sums are compared.
LAYERS, ROWS = 4, 128


class Operands(NamedTuple):
    """A product's operands in float8.

    Attributes:
      x: the activations before they are encoded, float32 [N, k].
      w: the weights before they are encoded, float32 [L, k, n].
      codes: of the activations, [N, k].
      rows: the scales of the rows.
      weight: the encoded weights.
    """

    x: jax.Array
    w: jax.Array
    codes: jax.Array
    rows: jax.Array
    weight: FrozenWeight


def main() -> None:
    args = parse_arguments()
    for k, n in SHAPES:
        operands = make_operands(k, n)
        found = [*times(args, operands), *errors(operands)]
        replace_records(args.out, tuple(figure["name"] for figure in found), found)
        for figure in found:
            print(figure["name"], figure["value"], figure["baselines"], flush=True)


def make_operands(k: int, n: int) -> Operands:
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (TOKENS, k), jnp.float32)
    w = 0.02 * jax.random.normal(keys[1], (LAYERS, k, n), jnp.float32)
    rows = row_scales(x)
    weight = jax.jit(lambda w: FrozenWeight.encoded(w, FLOAT8))(w)
    return Operands(x, w, quantised_rows(x, rows), rows, weight)


def times(args: argparse.Namespace, operands: Operands) -> Iterator[Record]:
    """The figure of the time of jaxmux's product over that of cuBLASLt."""
    calls = {
        "jaxmux": jaxmux_product(operands),
        "cuBLASLt": torch_product(operands, fast=True),
        "cuBLASLt, sums carried to float32": torch_product(operands, fast=False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(args.turns):
        for name, call in calls.items():
            seconds[name].append(sustained(call, args.seconds) / LAYERS)
    medians = {name: statistics.median(own) for name, own in seconds.items()}
    _, k, n = operands.weight.shape
    facts = {f"{name}, ms": 1e3 * s for name, s in medians.items()}
    facts["TFLOP/s"] = 2e-12 * TOKENS * k * n / medians["jaxmux"]
    ratio = medians["jaxmux"] / medians["cuBLASLt"]
    yield figure("product's time over cuBLASLt", operands, ratio, MOST_TIME.get((k, n)), facts)


def sustained(call: Callable[[], object], seconds: float) -> float:
    """The seconds of a call, measured in the second half of a time in which it is repeated."""
    start = time.perf_counter()
    half = None
    calls = 0
    while True:
        for _ in range(10):
            call()
        wait(call())
        calls += 11
        passed = time.perf_counter() - start
        if half is None and passed > seconds / 2:
            half = calls, passed
        elif passed > seconds:
            return (passed - half[1]) / (calls - half[0])


def wait(result: object) -> None:
    if isinstance(result, jax.Array):
        jax.block_until_ready(result)
    else:
        torch.cuda.synchronize()


def jaxmux_product(operands: Operands, low_rank: bool = True) -> Callable[[], jax.Array]:
    """The products of all layers. Without low-rank products their factors are zeros."""
    _, k, n = operands.weight.shape
    chunk_slot = jnp.arange(TOKENS // CHUNK_LEN, dtype=jnp.int32) % TASKS
    keys = jax.random.split(jax.random.key(1))
    size = 0.1 if low_rank else 0.0
    low = (size * jax.random.normal(keys[0], (RANK, TOKENS))).astype(jnp.bfloat16)
    b = (size * jax.random.normal(keys[1], (TASKS, RANK, n))).astype(jnp.bfloat16)
    tiling = matmul_tiling(k, (n,), RANK, transposed=False, keeps_low=True)

    @jax.jit
    def products(codes, rows, weight, low, b):
        return [
            routed_matmul(
                (Term(codes, weight, low, b),),
                chunk_slot,
                jnp.int32(layer),
                transposed=False,
                tiling=tiling,
                blocks=multiprocessors(),
                scales=Scales(rows, weight.scales),
            )
            for layer in range(LAYERS)
        ]

    given = operands.codes, operands.rows, operands.weight, low, b
    return lambda: products(*given)[-1]


def torch_product(operands: Operands, fast: bool) -> Callable[[], torch.Tensor]:
    codes, rows = map(as_torch, (operands.codes, operands.rows))
    values, scales = map(as_torch, (operands.weight.values, operands.weight.scales))

    def products() -> torch.Tensor:
        for layer in range(LAYERS):
            y = torch._scaled_mm(
                codes,
                values[layer].t(),
                scale_a=rows[:, None],
                scale_b=scales[layer][None],
                out_dtype=torch.bfloat16,
                use_fast_accum=fast,
            )
        return y

    return products


def as_torch(x: jax.Array) -> torch.Tensor:
    """The same numbers on the GPU for torch."""
    if x.dtype == jnp.float8_e4m3fn:
        return torch.from_dlpack(x.view(jnp.uint8)).view(torch.float8_e4m3fn)
    return torch.from_dlpack(x)


def errors(operands: Operands) -> Iterator[Record]:
    """The figures of the error of the kernel's sums and of rounding the operands."""
    decoded = np.asarray(operands.weight.decoded()[-1], np.float64)
    scales = np.asarray(operands.rows[:ROWS], np.float64)[:, None]
    exact = np.asarray(operands.codes[:ROWS], np.float64) * scales @ decoded
    plain = np.asarray(operands.x[:ROWS], np.float64) @ np.asarray(operands.w[-1], np.float64)

    def error(found: np.ndarray, wanted: np.ndarray) -> float:
        found = np.asarray(found, np.float64)
        return float(np.sqrt(((found - wanted) ** 2).mean() / (wanted**2).mean()))

    outputs = {
        "kernel": np.asarray(jaxmux_product(operands, low_rank=False)()[:ROWS], np.float32),
        "cuBLASLt": torch_product(operands, fast=True)()[:ROWS].float().cpu().numpy(),
        "cuBLASLt, sums carried to float32": torch_product(operands, fast=False)()[:ROWS]
        .float()
        .cpu()
        .numpy(),
        "rounding to bfloat16": np.asarray(jnp.asarray(exact, jnp.bfloat16), np.float32),
    }
    found = {name: error(y, exact) for name, y in outputs.items()}
    yield figure("error of a product's sums", operands, found.pop("kernel"), None, found)
    facts = {"weights by the least scale": rounded_by_least_scale(operands, plain, error)}
    yield figure("error of a product's operands", operands, error(exact, plain), None, facts)


def rounded_by_least_scale(
    operands: Operands, plain: np.ndarray, error: Callable[[np.ndarray, np.ndarray], float]
) -> float:
    """The error of rounding if every channel of the weights has the least scale."""
    w = operands.w[-1]
    scales = row_scales(w.T)
    decoded = quantised_rows(w.T, scales).astype(jnp.float32) * scales[:, None]
    codes = np.asarray(operands.codes[:ROWS], np.float64)
    rows = np.asarray(operands.rows[:ROWS], np.float64)[:, None]
    return error(codes * rows @ np.asarray(decoded, np.float64).T, plain)


def figure(
    name: str, operands: Operands, value: float, bound: float | None, facts: dict[str, float]
) -> Record:
    _, k, n = operands.weight.shape
    unit = "ratio" if "time" in name else "of the root mean square"
    return make_figure(
        f"float8, {name}, {TOKENS} x {k} x {n}",
        value,
        bound,
        unit,
        facts,
        device=jax.devices()[0].device_kind,
        versions=installed_versions("jax", "jaxlib", "torch"),
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.4, help="of a product in a turn")
    return parser.parse_args()


if __name__ == "__main__":
    main()
