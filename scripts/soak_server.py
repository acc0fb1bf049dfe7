"""Runs a tuning server for a long time, and shows that it takes no more and more of the host.

  python scripts/soak_server.py --minutes 30

Tasks of the bundled demo arrive at random; some are paused, cancelled, extended or given another
priority. Every few seconds the memory of the process, its open files and its threads are counted.
The end prints their medians in the first and in the last third, after a warm-up.
"""

import argparse
import os
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path

from jaxmux import AdamW, LoRA, ServerOptions, Task, tuning_server
from jaxmux.live import LiveTraining
from jaxmux.live.states import ENDED
from jaxmux.tasks import TaskError

TASKS = ("mood", "pirate", "record", "telegram")
OPTIONS = {
    "reserved_slots": 4,
    "reserved_rank": 8,
    "row_len": 128,
    "tokens_per_microbatch": 512,
    "checkpoint_every": 20,
}
# Most tasks that have not ended, and seconds between two commands and between two counts.
MOST_TASKS, COMMANDS_EVERY, COUNTED_EVERY = 8, 0.2, 5.0
# Tasks whose status is known after their end.
MOST_ENDED = 50


def main() -> None:
    args = parse_arguments()
    counts: list[dict[str, float]] = []
    rng = random.Random(args.seed)
    options = ServerOptions(**OPTIONS, elastic=args.elastic, most_ended=MOST_ENDED)
    with tempfile.TemporaryDirectory() as folder:
        with tuning_server("jaxmux:demo/base", Path(folder) / "server", options) as server:
            owner = threading.Thread(target=server.run)
            owner.start()
            began = counted = time.monotonic()
            commands = 0
            while (now := time.monotonic()) - began < 60 * args.minutes and owner.is_alive():
                commands += command(server, rng, commands)
                if now - counted >= COUNTED_EVERY:
                    counts.append(usage())
                    counted = now
                time.sleep(COMMANDS_EVERY)
            ended = sum(status.state in ENDED for status in server.statuses())
            server.close()
            owner.join()
    print(f"{commands} commands, {ended} of the last tasks ended, {len(counts)} counts")
    third = len(counts) // 3
    for what in counts[0]:
        first, last = (
            statistics.median(own[what] for own in part)
            for part in (counts[third : 2 * third], counts[-third:])
        )
        print(f"{what}: {first:g} in the second third, {last:g} in the last one")


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


def usage() -> dict[str, float]:
    """What the process takes of the host."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "resident memory in MiB": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "open files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--elastic", action="store_true", help="let the server grow and shrink")
    return parser.parse_args()


if __name__ == "__main__":
    main()
