"""Lines of rounds.jsonl: how long each round of a training run took, and what it held."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxmux.engine.round_record import RoundRecord
from jaxmux.models import DeviceBytes

# The first rounds have details, and then so many each time the number of rounds has doubled.
_DETAILED = 32
# Most microbatches and most passes that a line tells of.
MOST_MICROBATCHES, MOST_PASSES = 256, 4096


def has_details(index: int) -> bool:
    """Whether the line of a round tells what each microbatch held: it is one of the first 64
    rounds, or one of 32 that are spread over those in which the number of rounds doubles.

    Args:
      index: number of the round, from 0.
    """
    return index % 2 ** max(0, index.bit_length() - _DETAILED.bit_length()) == 0


def round_line(
    record: RoundRecord,
    spent: Mapping[str, float],
    memory: Sequence[DeviceBytes],
    host_bytes: int | None,
    detailed: bool,
) -> Mapping[str, Any]:
    """The entries of a line of rounds.jsonl.

    Args:
      record: what the round held.
      spent: where the time since the round before went, from `DeviceTime.spent`. The time of a
        round is seen from it although the devices are one round behind.
      memory: memory of the local devices; empty if they do not report it.
      host_bytes: bytes of the host's memory that this process uses; None if that is not known.
      detailed: whether the line tells what each microbatch held, as `has_details` advises.

    Returns:
      A dict with round, seconds, spent (seconds by kind; their sum is `seconds`), microbatches
      (their number), tokens (with padding), chunk_tokens (of the chunks that hold samples),
      read_tokens (without padding), memory_in_use and memory_peak (bytes by device), host_bytes;
      and with details, held and passes. "held" has for each of the first 256 microbatches its
      replica, its tokens with padding, and by task the tokens of its chunks and those that the
      model reads.
      "passes" has for each of the first 4096 passes the milliseconds since the first one, replica,
      stage, part, round, microbatch, and "F" or "B".
    """
    tasks = [own for microbatch in record.microbatches for own in microbatch.tasks.values()]
    line = {
        "round": record.index,
        "seconds": round(sum(spent.values()), 4),
        "spent": {kind: round(seconds, 4) for kind, seconds in spent.items()},
        "microbatches": len(record.microbatches),
        "tokens": sum(own.capacity for own in record.microbatches),
        "chunk_tokens": sum(own.chunks for own in tasks),
        "read_tokens": sum(own.read for own in tasks),
        "memory_in_use": [own.in_use for own in memory],
        "memory_peak": [own.peak for own in memory],
        "host_bytes": host_bytes,
    }
    if detailed:
        line["held"] = [
            [own.replica, own.capacity, own.tasks]
            for own in record.microbatches[:MOST_MICROBATCHES]
        ]
        line["passes"] = _passes(record)
    return line


def host_bytes() -> int | None:
    """Bytes of the host's memory that this process uses; None where that is not known."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _passes(record: RoundRecord) -> list[list[Any]]:
    begin = record.passes[0].seconds if record.passes else 0.0
    return [
        [
            round(1000 * (own.seconds - begin), 2),
            own.replica,
            own.stage,
            own.part,
            record.index + (own.steps is not record.steps),
            own.microbatch,
            "F" if own.forward else "B",
        ]
        for own in record.passes[:MOST_PASSES]
    ]
