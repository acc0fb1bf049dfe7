"""Reads the kernels of GPUs from traces of JAX's profiler."""

import gzip
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Launch(NamedTuple):
    """One launch of a kernel, or one copy; times are in microseconds of the trace's clock."""

    name: str
    start: float
    stop: float


def trace_file(folder: Path) -> Path:
    """The Chrome trace that `jax.profiler.trace` has written into a folder."""
    (trace,) = folder.rglob("*.trace.json.gz")
    return trace


def read_launches(trace: Path) -> dict[str, list[Launch]]:
    """The launches of a Chrome trace, by GPU, in the order of their start.

    Raises:
      ValueError: the trace has no GPU stream.
    """
    with gzip.open(trace) as file:
        return launches_by_gpu(json.load(file)["traceEvents"])


def launches_by_gpu(events: Sequence[Mapping[str, Any]]) -> dict[str, list[Launch]]:
    """`read_launches`, from the events of the trace."""
    processes, threads = {}, {}
    for event in events:
        if event.get("name") == "process_name":
            processes[event["pid"]] = event["args"]["name"]
        elif event.get("name") == "thread_name":
            threads[event["pid"], event["tid"]] = event["args"]["name"]
    found: dict[str, list[Launch]] = defaultdict(list)
    for event in events:
        device = processes.get(event.get("pid"), "")
        thread = threads.get((event.get("pid"), event.get("tid")), "")
        if event.get("ph") == "X" and "GPU" in device and "Stream" in thread:
            start = event["ts"]
            found[device].append(Launch(event["name"], start, start + event["dur"]))
    if not found:
        raise ValueError("no GPU stream is in the trace")
    return {
        device: sorted(own, key=lambda launch: launch.start)
        for device, own in sorted(found.items())
    }


def pauses(launches: Sequence[Launch]) -> list[float]:
    """The microseconds between launches in which nothing ran, given in the order of their start."""
    found, end = [], math.inf
    for launch in launches:
        found.append(max(0.0, launch.start - end))
        end = launch.stop if end == math.inf else max(end, launch.stop)
    return found


def idle_shares(launches: Mapping[str, Sequence[Launch]]) -> list[float]:
    """For every GPU, the share of the time in which no kernel ran.

    The time is that in which every GPU has begun and none has finished what the trace shows of it.
    Copies between devices do not count as kernels.

    Raises:
      ValueError: a GPU runs no kernel.
    """
    kernels = {
        device: [launch for launch in own if not launch.name.startswith("Memcpy")]
        for device, own in launches.items()
    }
    if idle := [device for device, own in kernels.items() if not own]:
        raise ValueError(f"{idle[0]} runs no kernel in the trace")
    first = max(own[0].start for own in kernels.values())
    last = min(max(launch.stop for launch in own) for own in kernels.values())
    shares = []
    for own in kernels.values():
        within = [
            launch._replace(start=max(first, launch.start), stop=min(last, launch.stop))
            for launch in own
            if launch.stop > first and launch.start < last
        ]
        # The two ends belong to the time, whether or not a kernel touches them.
        ends = Launch("", first, first), Launch("", last, last)
        shares.append(sum(pauses([ends[0], *within, ends[1]])) / (last - first))
    return shares
