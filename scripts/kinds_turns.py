"""Turns of an engine with LoRA tasks, for benchmark_kinds.py, which runs this file with the package
of one checkout and of another and lets them take turns.

The first line of the input holds the arguments as JSON. Each line after it asks for a turn. The
output has one line of JSON for each of them: first what is measured, then the seconds of a turn.
The first turn compiles.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import jax
from benchmark_step import llama_config, make_engine

import jaxmux
from jaxmux.engine import Engine
from jaxmux.installation import installed_versions


def main() -> None:
    # Whatever else is printed goes to the errors.
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    args = argparse.Namespace(**json.loads(sys.stdin.readline()))
    config = llama_config(args)
    engine = make_engine(config, args, args.tasks, args.length, args.remat, 10**6).engine
    facts = {
        "checkout": str(Path(jaxmux.__file__).resolve().parents[1]),
        "device": jax.devices()[0].device_kind,
        "versions": installed_versions("jax", "jaxlib"),
    }
    print(json.dumps(facts), file=results)
    for _ in sys.stdin:
        print(json.dumps(turn(engine, args.turn_rounds)), file=results)


def turn(engine: Engine, rounds: int) -> float:
    """The seconds of some rounds, from an idle device to an idle device.

    Args:
      engine: an engine whose device has nothing to do.
      rounds: number of rounds.
    """
    began = time.perf_counter()
    for _ in range(rounds):
        engine.train_round()
    engine.drain()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
