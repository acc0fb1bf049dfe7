"""The script that measures adapter kinds: figures, a dry run, and the package of a checkout."""

import json
import os
import subprocess
import sys
from pathlib import Path

import benchmark_kinds
import pytest
from kinds_lora import link_package
from kinds_records import kinds_table
from kinds_timing import in_pairs, interval

from jaxmux.peft import KINDS, kind_of

ROOT = Path(__file__).resolve().parents[2]
FIELDS = {"name", "value", "bound", "sense", "unit", "command", "device", "versions", "baselines"}
TINY = "--layers 2 --hidden 256 --vocab 512 --tokens 256 --length 64 --chunk_len 64"
TINY += " --part_of_backbone 2 --dtype float32 --turns 2 --turn_rounds 1 --one_process"


@pytest.fixture
def main(monkeypatch, tmp_path):
    """Calls the script; returns its records."""

    def call(*arguments):
        path = tmp_path / "records.json"
        own = ["benchmark_kinds.py", *arguments, *TINY.split(), "--out", str(path)]
        monkeypatch.setattr(sys, "argv", own)
        monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        benchmark_kinds.main()
        return json.loads(path.read_text())

    return call


def test_every_kind_is_measured():
    own = {k.name for k in KINDS.values() if k.specification.__module__.startswith("jaxmux.")}
    measured = {kind_of(mix.adapter).name for mix in benchmark_kinds.MIXES}
    assert measured | {"lora"} == own


def test_engines_take_turns_in_alternating_order():
    order = []
    args = benchmark_kinds.parse_arguments(["--out", "x", "--parts", "mixed", "--turns", "3"])
    args.deadline = float("inf")
    turns = {name: lambda name=name: order.append(name) or len(order) for name in ("a", "b")}
    assert in_pairs(args, turns) == {"a": [1, 4, 5], "b": [2, 3, 6]}
    assert order == ["a", "b", "b", "a", "a", "b"]
    # Whatever the deadline, there are enough turns for a figure.
    args.deadline, args.turns = 0.0, 9
    assert len(in_pairs(args, turns)["a"]) == 3


def test_the_interval_is_that_of_the_ratio_of_pairs():
    # A slow drift of both does not matter, because pairs are divided before the median is taken.
    before = [1.0 + 0.1 * i for i in range(12)]
    low, median, high = interval({"now": [0.9 * x for x in before], "before": before})
    assert low == pytest.approx(0.9) and median == pytest.approx(0.9) == high
    one_slow = [0.9 * x for x in before[:-1]] + [5.0]
    assert interval({"now": one_slow, "before": before})[2] == pytest.approx(0.9)


@pytest.mark.slow
def test_a_dry_run_of_mixes_and_memory(main):
    records = main("--parts", "memory", "mixed", "--kinds", "LN-tuning")
    assert [r["name"].split(",")[0] for r in records] == ["memory", "mixed"]
    assert all(record.keys() == FIELDS and record["sense"] == "at most" for record in records)
    memory, mixed = records
    # 16 bytes for each of three weights of norms, and the loss and the count of updates.
    assert memory["baselines"]["bytes, measured"] == pytest.approx(
        16 * 3 * 2 * 256, rel=1e-2, abs=8
    )
    assert memory["value"] < memory["bound"]
    assert mixed["baselines"]["turns"] == 2 and mixed["value"] > 0 and mixed["bound"] == 1.25
    table = kinds_table(records)
    assert "| mixed | 2 tasks of LN-tuning and 2 of LoRA, over 4 of LoRA |" in table
    assert "at most 3.0%" in table and "not measured" not in table.lower()


def test_the_package_of_a_checkout_is_imported_without_installing_it(tmp_path):
    link_package(ROOT, tmp_path / "own")
    code = (
        "import jaxmux, jaxmux.data, jaxmux.pallas_kernels, jaxmux.planner as p; print(p.__file__)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "own")},
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert Path(found.stdout.strip()).is_relative_to(tmp_path / "own" / "jaxmux")


def test_a_figure_without_a_bound_is_shown_as_such():
    record = {
        "name": "mixed, 2 tasks of masks and 2 of LoRA, over 4 of LoRA",
        "value": 1.5,
        "bound": None,
        "sense": "at most",
        "command": "python benchmark_kinds.py",
        "device": "H200",
        "versions": {"jax": "1"},
        "baselines": {"95% interval": [1.4, 1.6], "turns": 12, "ms of a microbatch, mixed": 130.0},
    }
    assert "| **1.500** | none | interval 1.4000 to 1.6000 of 12 pairs, mixed 130 ms |" in (
        kinds_table([record])
    )
