"""Host memory that the data of a task take, for a file that is larger than this memory.

  python scripts/benchmark_data.py --out benchmarks/data_memory.json

The script writes a JSONL file of `--megabytes` MB, and prepares a task on it, as training does
before it begins: all records are read, checked and tokenized with the demo's tokenizer, and the
samples are hashed. This happens in a process of its own, whose peak of resident memory counts, less
what it has taken before the first record. A second process does the same and keeps all samples in
memory, as a baseline.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmark_records import Record, RecordFile, figures_table, make_figure

from jaxmux.installation import installed_versions

MIB = 2**20
# Most MiB of the figure: a group of records with its tokens as objects of Python, the last million
# tokens, and 20 bytes for each sample.
BOUND = 64
# Words of the demo's language, roughly.
WORDS = "the a baker Max Nora angry happy said told oven bread sea rope and is not why".split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="file for the records; default: only print")
    parser.add_argument("--megabytes", type=int, default=600)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--keep", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(prepare(args.child, args.keep)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.jsonl"
        write_file(path, args.megabytes)
        record = measure(path)
    print(json.dumps(record, indent=1))
    if args.out:
        RecordFile(args.out).add(record)


def write_file(path: Path, megabytes: int) -> None:
    """Writes records with a prompt of 60 words and a completion of 200, drawn with a fixed seed."""
    rng = random.Random(0)
    size, written = megabytes * 10**6, 0
    with path.open("w") as file:
        while written < size:
            prompt, completion = (" ".join(rng.choices(WORDS, k=k)) for k in (60, 200))
            written += file.write(
                json.dumps({"prompt": prompt, "completion": f" {completion}"}) + "\n"
            )


def measure(path: Path) -> Record:
    """The figure of a file, from two processes."""
    found, kept = (run_child(path, *more) for more in ((), ("--keep",)))
    baselines = {
        "all samples in memory, MiB": kept["bytes"] / MIB,
        "file, MB": path.stat().st_size / 1e6,
        "samples": found["samples"],
        "tokens": found["tokens"],
        "seconds": found["seconds"],
        "seconds, all samples in memory": kept["seconds"],
        "resident before the first record, MiB": found["before"] / MIB,
    }
    versions = installed_versions("jaxmux", "jax", "jaxlib", "transformers", "tokenizers")
    return make_figure(
        "peak memory of preparing a task's data",
        found["bytes"] / MIB,
        BOUND,
        "MiB",
        baselines,
        device="CPU",
        versions=versions,
    )


def run_child(path: Path, *more: str) -> dict[str, float]:
    """What `prepare` returns, in a process of its own."""
    command = [sys.executable, __file__, "--child", str(path), *more]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def prepare(path: Path, keep: bool) -> dict[str, float]:
    """Prepares a task on a file, and keeps its samples in memory if `keep` is True."""
    import jaxmux
    from jaxmux.models import resolve_backbone

    folder = resolve_backbone("jaxmux:demo/base")
    config = jaxmux.BackboneConfig.from_folder(folder)
    tokenizer = jaxmux.load_tokenizer(folder)
    # What the first record loads is not memory of the data.
    small = jaxmux.Task("small", "jaxmux:demo/tasks/mood.train.jsonl", steps=1)
    jaxmux.prepare_task(small, config, tokenizer)
    before, began = peak_bytes(), time.perf_counter()
    task = jaxmux.Task("large", str(path), max_length=4096, steps=1)
    prepared = jaxmux.prepare_task(task, config, tokenizer)
    samples = prepared.samples.samples
    kept = [*samples] if keep else []
    assert prepared.fingerprints and len(kept) in (0, len(samples))
    return {
        "bytes": peak_bytes() - before,
        "before": before,
        "samples": len(samples),
        "tokens": int((samples.stream_lengths + 1).sum()),
        "seconds": time.perf_counter() - began,
    }


def peak_bytes() -> int:
    """The peak of the resident memory of this process so far."""
    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found if sys.platform == "darwin" else found * 1024


def data_table(records: Sequence[Record]) -> str:
    """The figures of the records, with their baselines."""
    rows = []
    for record in records:
        others = record["baselines"]
        rows.append(
            [
                f"{others['file, MB']:,.0f} MB, {others['samples']:,} records, "
                f"{others['tokens'] / 1e6:,.0f} million tokens",
                f"**{record['value']:,.0f} MiB**",
                f"{others['all samples in memory, MiB']:,.0f} MiB",
                f"{others['seconds']:,.0f} s",
            ]
        )
    head = ["file", "peak above the start", "all samples in memory", "time"]
    return figures_table(records, head, rows)


if __name__ == "__main__":
    main()
