"""Finds the fastest tile sizes of the Mosaic GPU kernels for a backbone's shapes on this GPU, and
writes them to the table that is part of the package.

  python scripts/tune_grouped_lora.py

Candidates are timed in long bursts that take turns. The GPU is then at its power limit, as in
training, where its clock is lower than that of a cool GPU and depends on the energy that a
candidate needs. Entries of other devices and shapes stay in the table.
"""

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp

from jaxmux.pallas_kernels.frozen_weight import FrozenWeight
from jaxmux.pallas_kernels.grouped_lora import tilings
from jaxmux.pallas_kernels.grouped_lora.routed_matmul_sm90 import Term, Tiling, routed_matmul


def linears(d: int, kv: int, f: int, tp: int) -> list[tuple[int, tuple[int, ...]]]:
    """Input width k, and output widths n of the linears that share the input, for each input of a
    layer of Llama, on one of `tp` tensor-parallel devices.

    Args:
      d: width of the model, and of the queries.
      kv: width of the keys.
      f: width of the MLP.
      tp: number of the devices.
    """
    return [
        (d, (d // tp, kv // tp, kv // tp)),
        (d // tp, (d,)),
        (d, (f // tp, f // tp)),
        (f // tp, (d,)),
    ]


# Llama-3.1-8B and 70B, on one device and on several.
SHAPES = [
    shape
    for model in ((4096, 1024, 14336), (8192, 1024, 28672))
    for tp in (1, 2, 4)
    for shape in linears(*model, tp)
]


def main() -> None:
    args = parse_arguments()
    table = tilings.table()
    for k, widths, transposed in products(args.shapes):
        inputs = make_inputs(args.tokens, k, widths, args.rank, transposed)
        tried = candidates(len(widths), args.rank)
        programs = compiled({c: partial(lower, *inputs, transposed, c) for c in tried})
        calls = {c: partial(program, *inputs) for c, program in programs.items()}
        check_same_bits(calls)
        times = hot_milliseconds(calls, args.seconds, args.turns)
        name = tilings.key(k, widths, transposed=transposed)
        for candidate in sorted(times, key=times.get):
            print(f"{name}: {times[candidate]:.4f} ms, {tuned_fields(candidate)}", flush=True)
        best = min(times, key=times.get)
        table[jax.devices()[0].device_kind][name] = tuned_fields(best)
        tilings.TABLE.write_text(json.dumps(table, indent=1) + "\n")


def products(shapes) -> list[tuple[int, tuple[int, ...], bool]]:
    """k, widths and whether it is transposed, for every product: one product for each linear in the
    forward pass, and one for all linears that share an input in the backward pass."""
    forward = dict.fromkeys((k, (n,), False) for k, widths in shapes for n in widths)
    return [*forward, *((k, widths, True) for k, widths in shapes)]


def tuned_fields(tiling: Tiling) -> dict:
    """The fields of a tiling that the table holds."""
    return {field: getattr(tiling, field) for field in tilings.TUNED}


def candidates(terms: int, rank: int) -> list[Tiling]:
    """Tilings that fit into shared memory: several divisions of it, and two orders of tiles."""
    divisions = ((4, 1, 1), (4, 2, 1), (4, 2, 0), (3, 1, 1))
    wanted = (
        Tiling(stages=stages, borrowed=borrowed, spare=spare, group=group)
        for (stages, borrowed, spare), group in itertools.product(divisions, (8, 16))
    )
    fitting = (tilings.fitted(one, terms=terms, rank=rank, keeps_low=False) for one in wanted)
    return list(dict.fromkeys(fitting))


def make_inputs(tokens: int, k: int, widths: tuple[int, ...], rank: int, transposed: bool):
    keys = iter(jax.random.split(jax.random.key(0), 4 * len(widths)))

    def normal(*shape):
        return (0.1 * jax.random.normal(next(keys), shape)).astype(jnp.bfloat16)

    def term(n: int) -> Term:
        depth, columns = (n, k) if transposed else (k, n)
        return Term(
            normal(tokens, depth),
            FrozenWeight.of(normal(1, k, n)),
            normal(rank, tokens),
            normal(4, rank, columns),
        )

    return tuple(map(term, widths)), jnp.arange(tokens // 128, dtype=jnp.int32) % 4


def lower(terms: tuple[Term, ...], chunk_slot, transposed: bool, tiling: Tiling):
    def run(terms, chunk_slot):
        return routed_matmul(
            terms,
            chunk_slot,
            jnp.int32(0),
            transposed=transposed,
            tiling=tiling,
            blocks=tilings.multiprocessors(),
        )

    return jax.jit(run).lower(terms, chunk_slot)


def compiled(lowerings: dict[Tiling, Callable]) -> dict[Tiling, Callable]:
    """Lowers one candidate after another, and compiles them in parallel."""
    with ThreadPoolExecutor(os.cpu_count()) as executor:
        futures = {c: executor.submit(lower().compile) for c, lower in lowerings.items()}
        return {c: future.result() for c, future in futures.items()}


def hot_milliseconds(
    calls: dict[Tiling, Callable], seconds: float, turns: int
) -> dict[Tiling, float]:
    """Median milliseconds of a call of each candidate, over bursts that take turns.

    Args:
      calls: a call of each candidate.
      seconds: length of a burst.
      turns: number of bursts of each candidate; the first is not counted.
    """
    times = {candidate: [] for candidate in calls}
    counts = {c: max(1, round(1e3 * seconds / burst(call, 10))) for c, call in calls.items()}
    for _ in range(turns):
        for candidate, call in calls.items():
            times[candidate].append(burst(call, counts[candidate]))
    # The first burst brings the device to its power limit.
    return {candidate: statistics.median(each[1:]) for candidate, each in times.items()}


def check_same_bits(calls: dict[Tiling, Callable]) -> None:
    """Raises a RuntimeError if two candidates do not give the same bits."""
    results = ((candidate, call()) for candidate, call in calls.items())
    _, expected = next(results)
    for candidate, result in results:
        if not jnp.array_equal(result, expected):
            raise RuntimeError(f"{candidate} gives another result than the first candidate")


def burst(call: Callable, count: int) -> float:
    """Mean milliseconds of a call when `count` calls are queued one after another."""
    start = time.perf_counter()
    for _ in range(count):
        out = call()
    jax.block_until_ready(out)
    return 1e3 * (time.perf_counter() - start) / count


def shape(text: str) -> tuple[int, tuple[int, ...]]:
    """k and the widths of a shape like "4096x14336+14336"."""
    k, widths = text.split("x")
    return int(k), tuple(map(int, widths.split("+")))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=0.2, help="length of a burst")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=SHAPES,
        help="input and output widths of linears that share their input, as 4096x14336+14336",
        type=shape,
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
