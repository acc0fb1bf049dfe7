"""Run directories as a training run writes them, with as many tasks as wanted."""

import dataclasses
import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxmux import Task
from jaxmux.server import Meter, StateChange
from jaxmux.server.database import Database, Rows
from jaxmux.server.task import LiveTask

BEGUN = 1_800_000_000.0
_WORDS = ("billing", "support", "legal", "search", "triage", "summary", "routing", "intent")


def write_run(
    path: Path,
    tasks: int = 3,
    rounds: int = 20,
    *,
    stages: int = 0,
    ended: bool = False,
    steps: int | None = None,
) -> Path:
    """Writes the files of a training run; returns its directory.

    Args:
      path: the directory, which is created.
      tasks: number of tasks.
      rounds: number of rounds.
      stages: stages of its pipeline; 0 for a single device.
      ended: whether it has a summary.
      steps: steps of each task; None for the number of rounds.
    """
    path.mkdir(parents=True, exist_ok=True)
    names = [f"{_WORDS[i % len(_WORDS)]}_{i // len(_WORDS)}" for i in range(tasks)]
    record = {
        "format": 3,
        "backbone": "/models/Llama-3.1-8B",
        "backbone_format": None,
        "shape": {"rows": 4, "row_len": 2048, "chunk_len": 128, "max_sequences": 32},
        "tasks": {
            n: {"adapter": {"kind": "lora", "rank": 2 ** (i % 5 + 2)}, "steps": steps or rounds}
            for i, n in enumerate(names)
        },
    }
    (path / "run.json").write_text(json.dumps(record))
    numbers, metrics, held_out, lines = random.Random(0), [], [], []
    for index in range(rounds):
        time = BEGUN + 2.5 * index
        for i, name in enumerate(names):
            loss = 0.3 + 0.02 * i + 2.5 * math.exp(-index / (12 + 2 * i))
            loss *= 1 + 0.12 * numbers.gauss(0, 1)
            metrics.append(update(index, name, loss, time))
            if index % 50 == 49:
                held_out.append(evaluation(index, name, loss * 1.1, time))
        lines.append(round_line(index, names, time, stages))
    append(path / "metrics.jsonl", *metrics)
    append(path / "held_out.jsonl", *held_out)
    append(path / "rounds.jsonl", *lines)
    if ended:
        results = {n: {"status": "succeeded", "error": None, "stopped_early": None} for n in names}
        results[names[-1]] |= {"status": "failed", "error": "8 updates in a row were skipped"}
        summary = {"tasks": results, "wall_seconds": 2.5 * rounds, "peak_memory_bytes": 61 * 2**30}
        (path / "summary.json").write_text(json.dumps(summary))
    return path


def write_server(path: Path, tasks: int = 3, rounds: int = 20) -> Path:
    """Writes the files of a server that was killed and started again; returns its folder.

    Args:
      path: the folder, which is created.
      tasks: number of tasks; some wait, have ended, or come later.
      rounds: number of rounds.
    """
    run = write_run(path, tasks, rounds)
    lines = [
        json.loads(line) for n in ("metrics", "held_out") for line in (path / f"{n}.jsonl").open()
    ]
    names = list(dict.fromkeys(line["task"] for line in lines))
    # The last eighth waits for a place, and the first one has ended.
    waiting, ended = set(names[-(tasks // 8) :]), set(names[: tasks // 8])

    def state(name: str, time: float, state: str, reason: str | None = None) -> dict[str, Any]:
        fields = {"state": state, "reason": reason, "priority": 0}
        return {"time": time, "task": name, "kind": "state"} | fields

    events = [state(name, BEGUN, "preparing") for name in names]
    places = "all places are taken"
    events += [
        state(n, BEGUN + 1, "queued", places) if n in waiting else state(n, BEGUN + 1, "running")
        for n in names
    ]
    events += [
        line | {"kind": "update" if "lr" in line else "evaluation"}
        for line in lines
        if line["task"] not in waiting
    ]
    end = BEGUN + 2.5 * rounds
    events += [state(name, end, "succeeded") for name in ended]
    (path / "server.json").write_text(
        json.dumps(
            {
                "backbone": "/models/Llama-3.1-8B",
                "backbone_format": None,
                "sizes": {"rows": 4, "row_len": 2048, "chunk_len": 128},
            }
        )
    )
    events.sort(key=lambda event: event["time"])
    half = len(events) // 2
    append(path / "events.1.jsonl", *events[:half])
    append(path / "events.jsonl", *events[half:])
    for name in ("run.json", "metrics.jsonl", "held_out.jsonl"):
        (path / name).unlink()
    return run


def open_database(path: Path, origins: Mapping[str, Task]) -> Database:
    """Creates the database of a server; returns it as the server has it open.

    Args:
      path: the folder of the server.
      origins: by their names in the server, tasks as their tenants have specified them.
    """
    database, rows = Database(path / "server.db"), []
    for name, origin in origins.items():
        history = [StateChange("preparing", None, BEGUN)]
        task = LiveTask(dataclasses.replace(origin, name=name), 0, 0, history, origin=origin)
        rows.append(task.first_row() | task.row(ends=False))
    columns = dict.fromkeys(("rounds", "checkpoints", "events_bytes", "rounds_bytes"), 0)
    database.write(Rows(new=rows), columns | dataclasses.asdict(Meter()))
    return database


def update(index: int, task: str, loss: float | None, time: float) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    fields = {"step": index, "task": task, "task_step": index + 1, "loss": loss, "lr": 1e-3}
    fields |= {"grad_norm": 1.0, "target_tokens": 50, "tokens": 90, "computed_tokens": 128}
    return fields | {"skipped": loss is None, "time": time}


def evaluation(index: int, task: str, loss: float, time: float) -> dict[str, Any]:
    """A line of held_out.jsonl."""
    fields = {"step": index, "task": task, "task_step": index + 1, "loss": loss}
    return fields | {"target_tokens": 500, "best": True, "time": time}


def append(path: Path, *lines: Mapping[str, Any]) -> None:
    """Appends lines to a file."""
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def round_line(index: int, names: list[str], time: float, stages: int) -> dict[str, Any]:
    """A line of rounds.jsonl, of a pipeline of so many stages; 0 for a single device."""
    numbers, capacity = random.Random(index), 8192
    microbatches: list[dict[str, tuple[int, int]]] = [{}]
    for name in names:
        chunks = 128 * numbers.randint(2, 12)
        if sum(c for c, _ in microbatches[-1].values()) + chunks > capacity:
            microbatches.append({})
        microbatches[-1][name] = chunks, chunks - numbers.randint(0, 120)
    chunks = sum(c for own in microbatches for c, _ in own.values())
    read = sum(r for own in microbatches for _, r in own.values())
    seconds = (2.5 if index else 40) * (1 + 0.05 * numbers.random())
    spent = {"training": 0.97, "idle": 0.03} if index else {"compiling": 0.94, "training": 0.06}
    if index % 50 == 49:
        spent = {"training": 0.6, "evaluation": 0.28, "checkpoints": 0.09, "idle": 0.03}
    line = {
        "round": index,
        "seconds": seconds,
        "spent": {kind: share * seconds for kind, share in spent.items()},
        "microbatches": len(microbatches),
        "tokens": capacity * len(microbatches),
        "chunk_tokens": chunks,
        "read_tokens": read,
        "memory_in_use": [(38 + numbers.random()) * 2**30],
        "memory_peak": [61 * 2**30],
        "host_bytes": int(6.1 * 2**30) + index * 2**20,
        "time": time,
    }
    if index < 64 or index % 8 == 0:
        line["held"] = [[0, capacity, own] for own in microbatches]
        line["passes"] = _passes(index, len(microbatches), stages) if stages else []
    return line


def _passes(index: int, microbatches: int, stages: int) -> list[list[Any]]:
    """The passes of 1F1B: after a forward pass for each later stage, a stage takes one of each."""
    found = []
    for stage in range(stages):
        warm = min(stages - stage, microbatches)
        order = [("F", m) for m in range(warm)]
        for m in range(microbatches):
            order.append(("B", m))
            if m + warm < microbatches:
                order.append(("F", m + warm))
        found += [
            [3.0 * (i + stage), 0, stage, stage, index, m, way] for i, (way, m) in enumerate(order)
        ]
    return sorted(found, key=lambda own: own[0] + (own[2] if own[6] == "F" else -own[2]) / 100)


def write_sweep(path: Path, ranks: Sequence[int], rates: Sequence[float]) -> Path:
    """Writes the files of a run of a sweep over ranks and learning rates that has ended after
    40 steps, with rungs at the steps 10 and 20; returns its directory.

    Args:
      path: the directory, which is created.
      ranks: the ranks.
      rates: the learning rates.
    """
    path.mkdir(parents=True)
    values = {
        f"pirate-rank_{rank}-learning_rate_{rate}-target_modules_{modules}": {
            "adapter.rank": rank,
            "optimizer.learning_rate": rate,
            "adapter.target_modules": modules.split(".") if "." in modules else modules,
        }
        for rank in ranks
        for rate in rates
        for modules in ("all-linear", "q_proj.v_proj")
    }
    record = {
        "backbone": "/models/Llama-3.1-8B",
        "shape": {"rows": 4, "row_len": 2048, "chunk_len": 128},
        "tasks": {
            name: {"adapter": {"kind": "lora", "rank": own["adapter.rank"]}, "steps": 40}
            for name, own in values.items()
        },
        "sweeps": {"pirate": {"first_rung": 10, "factor": 2, "values": values}},
    }
    (path / "run.json").write_text(json.dumps(record))
    numbers, results = random.Random(1), {}
    for i, name in enumerate(values):
        end = numbers.choice((10, 20, 40))
        metrics = [update(n, name, 3 - 0.01 * n - 0.02 * i, BEGUN + n) for n in range(end)]
        append(path / "metrics.jsonl", *metrics)
        losses = {n: numbers.uniform(0.5, 3) for n in (10, 20, 40) if n <= end}
        lines = [evaluation(n - 1, name, loss, BEGUN + n) for n, loss in losses.items()]
        append(path / "held_out.jsonl", *lines)
        rung = {10: 1, 20: 2}.get(end)
        reason = rung and f"at rung {rung} (step {end}), 9th of 9 by held-out loss"
        result = {"status": "succeeded", "error": None, "stopped_early": reason}
        results[name] = result | {"eval_loss": min(losses.values())}
    results[name] |= {"status": "failed", "error": "diverged"}
    append(path / "rounds.jsonl", *(round_line(n, [*values], BEGUN + n, 0) for n in range(40)))
    (path / "summary.json").write_text(json.dumps({"tasks": results, "wall_seconds": 100}))
    return path
