"""Finds the tile sizes of the Mosaic GPU kernels for a backbone's shapes on this GPU, and stores
them in the table that is shipped with the package.

  python scripts/tune_grouped_lora.py

Candidates are timed hot, in long bursts one after the other: a GPU at its power limit runs at
another clock than a cool one, and the candidate that needs least energy wins. Entries of other
devices and shapes stay as they are.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jaxmux.pallas_kernels.grouped_lora import tilings
from jaxmux.pallas_kernels.grouped_lora.routed_matmul_sm90 import Term, Tiling, routed_matmul

# k and n of the linears of Llama-3.1-8B.
SHAPES = ((4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096))


def main() -> None:
    args = parse_arguments()
    table = tilings.table()
    for (k, n), transposed in itertools.product(args.shapes, (False, True)):
        inputs = make_inputs(args.tokens, k, n, args.rank, transposed)
        times = {
            c: hot_milliseconds(partial(run, *inputs, transposed, c), args.seconds)
            for c in candidates(args.rank)
        }
        best = min(times, key=times.get)
        entry = {field: getattr(best, field) for field in tilings.TUNED}
        table[jax.devices()[0].device_kind][tilings.key(k, n, transposed=transposed)] = entry
        print(
            f"{k} x {n}{' transposed' if transposed else ''}: {entry}, {times[best]:.3f} ms, "
            f"the worst {max(times.values()):.3f} ms",
            flush=True,
        )
    tilings.TABLE.write_text(json.dumps(table, indent=1) + "\n")


def candidates(rank: int) -> list[Tiling]:
    fitted = tilings.fitted(Tiling(), terms=1, rank=rank, masked=False)
    return [
        fitted._replace(split_rows=split_rows, delay_release=delay, minor=minor, group=group)
        for split_rows, delay, (minor, group) in itertools.product(
            (False, True), (0, 1), ((0, 8), (0, 16), (1, 4), (1, 16))
        )
    ]


def make_inputs(tokens: int, k: int, n: int, rank: int, transposed: bool):
    keys = jax.random.split(jax.random.key(0), 4)

    def normal(key, *shape):
        return (0.1 * jax.random.normal(key, shape)).astype(jnp.bfloat16)

    depth, columns = (n, k) if transposed else (k, n)
    term = Term(
        normal(keys[0], tokens, depth),
        normal(keys[1], 1, k, n),
        normal(keys[2], rank, tokens),
        normal(keys[3], 4, rank, columns),
    )
    return term, jnp.arange(tokens // 128, dtype=jnp.int32) % 4


@partial(jax.jit, static_argnums=(2, 3))
def run(term: Term, chunk_slot, transposed: bool, tiling: Tiling):
    return routed_matmul(
        (term,),
        chunk_slot,
        jnp.int32(0),
        transposed=transposed,
        tiling=tiling,
        blocks=tilings.multiprocessors(),
    )


def hot_milliseconds(call: Callable, seconds: float) -> float:
    """Time of one call in a burst of so many seconds, after as long a warm-up."""
    jax.block_until_ready(call())
    for _ in range(2):
        start, calls = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            jax.block_until_ready([call() for _ in range(10)])
            calls += 10
        elapsed = time.perf_counter() - start
    return 1e3 * elapsed / calls


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=0.2)
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=SHAPES,
        help="k x n of each linear, as 4096x14336",
        type=lambda text: tuple(map(int, text.split("x"))),
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
