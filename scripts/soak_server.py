"""Runs a tuning server for a long time, and judges whether it takes more and more of the host.

  python scripts/soak_server.py --minutes 30 --out benchmarks/live.json

Tasks of the bundled demo arrive at random; some are paused, cancelled, extended or given another
priority. Every few seconds the resident memory of the process, its open files and its threads (also
those of JAX and other libraries) are counted. The first third of the counts is a warm-up. The
medians of the second third and of the last one are printed. If the process has grown from one to
the other, a line says so and the exit status is 1. `--out` also writes the figures as records.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmark_live import circumstances
from benchmark_records import Record, replace_records
from live_records import PREFIX

from jaxmux import AdamW, LoRA, ServerOptions, Task, tuning_server
from jaxmux.server import LiveTraining
from jaxmux.server.task import ENDED
from jaxmux.tasks import TaskError

TASKS = ("mood", "pirate", "record", "telegram")
OPTIONS = {
    "reserved_slots": 4,
    "reserved_rank": 8,
    "row_len": 128,
    "tokens_per_microbatch": 512,
    "checkpoint_every": 20,
}
# Most tasks that have not ended, and seconds between two commands.
MOST_TASKS, COMMANDS_EVERY = 8, 0.2
# Tasks whose status is known after their end.
MOST_ENDED = 50
# The memory of the last third over that of the second third, and how many threads more it may have.
# Libraries start and end theirs as they like; if each task left one, hundreds would be more.
MOST_MEMORY, MOST_MORE_THREADS = 1.03, 2


class Usage(NamedTuple):
    """What the process takes of the host.

    Attributes:
      memory: resident memory in MiB.
      files: number of open files.
      threads: number of threads, those of libraries included.
    """

    memory: float
    files: float
    threads: float

    @classmethod
    def now(cls) -> "Usage":
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        memory = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
        return cls(memory, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))

    @classmethod
    def of(cls, counts: Sequence["Usage"]) -> "Usage":
        """The medians of several counts."""
        return cls(*map(statistics.median, zip(*counts, strict=True)))


def main() -> int:
    args = parse_arguments()
    counts, facts = soak(args)
    if len(counts) < 3:
        print(f"{len(counts)} counts in {args.minutes:g} minutes are too few; count more often")
        return 2
    records = judged(counts, facts)
    print(", ".join(f"{value:g} {name}" for name, value in facts.items()))
    for record in records:
        before, after = list(record["baselines"].values())[-2:]
        print(f"{record['name']}: {record['value']:g} ({before:g}, then {after:g})")
    if args.out:
        prefix = f"{PREFIX}soak{' elastic' if args.elastic else ''}, "
        own = circumstances()
        named = [record | {"name": prefix + record["name"]} | own for record in records]
        replace_records(args.out, prefix, named)
    grown = [record for record in records if record["value"] > record["bound"]]
    for record in grown:
        print(f"the server grows: {record['name']} should be at most {record['bound']:g}")
    return 1 if grown else 0


def soak(args: argparse.Namespace) -> tuple[list[Usage], dict[str, float]]:
    """Runs a server.

    Returns:
      What it took at each count, and numbers that describe the run.
    """
    counts: list[Usage] = []
    rng = random.Random(args.seed)
    options = ServerOptions(**OPTIONS, elastic=args.elastic, most_ended=MOST_ENDED)
    with tempfile.TemporaryDirectory() as folder:
        with tuning_server("jaxmux:demo/base", Path(folder) / "server", options) as server:
            owner = threading.Thread(target=server.run)
            owner.start()
            began = counted = time.monotonic()
            carried_out = commands = 0
            while (now := time.monotonic()) - began < 60 * args.minutes and owner.is_alive():
                carried_out += command(server, rng, commands)
                commands += 1
                if now - counted >= args.every:
                    counts.append(Usage.now())
                    counted = now
                time.sleep(COMMANDS_EVERY)
            alive = owner.is_alive()
            server.close()
            owner.join()
        if not alive:
            raise RuntimeError("the server has ended by itself")
    return counts, {"minutes": args.minutes, "commands": carried_out, "counts": len(counts)}


def judged(counts: Sequence[Usage], facts: dict[str, float]) -> list[Record]:
    """The growth of each kind of usage from the second third of the counts to the last one.

    Args:
      counts: at least three counts, in order.
      facts: numbers that describe the run.

    Returns:
      A record for each kind. The last two of its baselines are those of the two thirds.
    """
    third = len(counts) // 3
    before, after = Usage.of(counts[-2 * third : -third]), Usage.of(counts[-third:])
    parts = "the second third", "the last third"

    def record(what: str, value: float, bound: float, unit: str, medians: tuple) -> Record:
        return {
            "name": what,
            "value": value,
            "bound": bound,
            "sense": "at most",
            "unit": unit,
            "baselines": facts | dict(zip(parts, medians, strict=True)),
        }

    return [
        record(
            "resident memory of the last third over the second",
            after.memory / before.memory,
            MOST_MEMORY,
            "ratio",
            (before.memory, after.memory),
        ),
        record(
            "open files that the last third has more than the second",
            after.files - before.files,
            0,
            "files",
            (before.files, after.files),
        ),
        record(
            "threads that the last third has more than the second",
            after.threads - before.threads,
            MOST_MORE_THREADS,
            "threads",
            (before.threads, after.threads),
        ),
    ]


def command(server: LiveTraining, rng: random.Random, number: int) -> int:
    """Gives a server a random command; returns the number of commands that were carried out."""
    going = [status for status in server.statuses() if status.state not in ENDED]
    if len(going) < MOST_TASKS and rng.random() < 0.6:
        adapter = LoRA(rng.choice([2, 4, 8]), 16.0)
        task = Task(
            f"task{number}",
            f"jaxmux:demo/tasks/{rng.choice(TASKS)}.train.jsonl",
            adapter,
            AdamW(1e-3),
            max_length=64,
            batch_size=rng.choice([4, 8, 32]),
            steps=rng.randint(5, 60),
        )
        future = server.register(task, rng.choice([0, 0, 1]))
    elif going:
        own = rng.choice(going)
        future = rng.choice(
            [
                lambda: server.pause(own.name),
                lambda: server.resume(own.name),
                lambda: server.resume(own.name),
                lambda: server.cancel(own.name),
                lambda: server.set_priority(own.name, rng.choice([0, 1, 2])),
                lambda: server.extend(own.name, (own.steps or 0) + rng.randint(1, 20)),
            ]
        )()
    else:
        return 0
    try:
        future.result()
    except TaskError:
        # For example, a task that is not paused cannot be resumed.
        return 0
    return 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two counts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--elastic", action="store_true", help="let the server grow and shrink")
    parser.add_argument("--out", type=Path, help="JSON file of records; others in it are kept")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
