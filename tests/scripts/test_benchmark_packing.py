"""The policies of the packing benchmark: their layouts, predictions and reports."""

import json

import benchmark_packing
import jax.numpy as jnp
import numpy as np
import pytest
from benchmark_packing import (
    ENGINE,
    Policy,
    pack_padded,
    parse_arguments,
    policies,
    tasks_of_mix,
    with_ratio,
)
from benchmark_records import make_record
from benchmark_step import llama_config
from benchmark_tables import packing_table

from jaxmux.engine.rounds.rounds import pack_tightly
from jaxmux.models import Backbone
from jaxmux.planner.packing import ShapeClass
from jaxmux.runs.run_shape import run_costs

NAMES = ["zero-padding", "zero-padding per task", "first-fit packing", "jaxmux"]


@pytest.fixture(scope="module")
def args():
    sizes = ["--layers", "1", "--hidden", "256", "--vocab", "512", "--tokens", "2048"]
    return parse_arguments(["--predict", "--chunk_len", "128", "--mixes", "2", *sizes])


@pytest.fixture(scope="module")
def tasks(args):
    rng = np.random.default_rng(0)
    lengths = {"long": rng.integers(100, 500, 80), "short": rng.integers(5, 60, 80)}
    return tasks_of_mix(llama_config(args), args, lengths, 2)


@pytest.fixture(scope="module")
def found(args, tasks):
    costs = run_costs(tasks, llama_config(args), "bfloat16")._replace(least_chunk_len=128)
    return policies(tasks, costs, args)


def test_policies_place_every_sample_of_a_round_once(found, tasks):
    assert [policy.name for policy in found] == NAMES
    assert [task.task.name for task in tasks] == ["short", "long"]
    lengths = {i: [s.stream_length for s in t.batches[0]] for i, t in enumerate(tasks)}
    for policy in found:
        shape, placed = policy.shape, []
        for microbatch in policy.packing(lengths, shape):
            owner = np.full((shape.rows, shape.row_len), -1)
            for slot, sample, row, offset in microbatch:
                cells = owner[row, offset : offset + lengths[slot][sample]]
                assert len(cells) == lengths[slot][sample] and (cells == -1).all()
                cells[:] = slot
                placed.append((slot, sample))
            for chunk in owner.reshape(-1, shape.chunk_len):
                assert len(set(chunk) - {-1}) <= 1
        assert sorted(placed) == [(slot, i) for slot in lengths for i in range(16)]


def test_zero_padding_gives_every_sample_a_row_of_the_longest(found, tasks):
    shape = found[0].shape
    longest = max(task.longest for task in tasks)
    assert shape.max_sequences == 1 and longest <= shape.row_len < 2 * longest
    lengths = {i: [s.stream_length for s in t.batches[0]] for i, t in enumerate(tasks)}
    rows = [{p.row for p in microbatch} for microbatch in found[0].packing(lengths, shape)]
    assert sum(map(len, rows)) == 32


def test_padding_per_task_pads_samples_to_the_longest_of_their_task():
    shape = ShapeClass(rows=2, row_len=256, chunk_len=64, max_sequences=16)
    (placed,) = pack_padded({0: [10, 20, 30], 1: [5]}, shape, longest=[60, 200])
    starts = {(p.slot, p.sample): (p.row, p.offset) for p in placed}
    own = sorted(starts[0, i] for i in range(3))
    assert all(b[0] > a[0] or b[1] - a[1] >= 60 for a, b in zip(own, own[1:], strict=False))


@pytest.mark.long
def test_predictions_are_printed_without_training(tmp_path, capsys, monkeypatch):
    lengths = tmp_path / "lengths.json"
    lengths.write_text(json.dumps({"lengths": {"a": [40] * 64, "b": [300] * 64}}))
    arguments = ["--predict", "--lengths", str(lengths), "--mixes", "2", "--hidden", "256"]
    arguments += ["--layers", "1", "--vocab", "512"]
    monkeypatch.setattr("sys.argv", ["benchmark_packing.py", *arguments])
    benchmark_packing.main()
    lines = capsys.readouterr().out.splitlines()
    assert "costs estimated for NVIDIA H200: a, b" in lines[0]
    assert [line.strip().partition(":")[0] for line in lines[1:]] == NAMES
    assert all("padding" in line and "ms a round" in line for line in lines[1:])


@pytest.mark.slow
def test_a_policy_is_measured_by_training(args):
    """The engine accepts the options of the benchmark, and all tokens of the rounds are counted."""
    small = ["--samples", "2", "--rounds", "1", "--max_length", "64", "--tokens", "128"]
    sizes = ["--layers", "1", "--hidden", "256", "--vocab", "512", "--mixes", "1"]
    args = parse_arguments(["--out", "unused.json", *small, *sizes])
    (task,) = tasks = tasks_of_mix(llama_config(args), args, {"short": np.full(8, 30)}, 1)
    backbone = Backbone.random(llama_config(args), dtype=jnp.float32)
    policy = Policy(ENGINE, ShapeClass(2, 64, 64, max_sequences=2), pack_tightly)
    record = benchmark_packing.measure(backbone, policy, tasks, args)
    assert record["data"] == [task.task.name] and record["microbatches"] == 1
    assert record["padding"] == pytest.approx(1 - 2 * 29 / 128)


def test_lognormal_lengths_are_reproducible_and_their_parameters_are_printed(args, capsys):
    one, other = (benchmark_packing.read_lengths(args) for _ in range(2))
    assert one == other and len(one) >= 8
    assert "sst2: lognormal, median 16, sigma 0.46" in capsys.readouterr().out
    assert all(2 <= min(sizes) and max(sizes) < 1024 for sizes in one.values())


def test_the_table_compares_with_zero_padding_and_with_first_fit():
    def record(name: str, tokens_per_second: float):
        return make_record(
            implementation=name,
            shape="8 x 1024",
            tasks=4,
            ms_median=1e6 / tokens_per_second,
            tokens_per_second=tokens_per_second,
            device="H200",
            versions={},
            data=["a", "b"],
            microbatches=2.0,
            padding=0.25,
        )

    zero = record("zero-padding", 4000.0)
    records = [
        with_ratio(r, zero) for r in (zero, record(NAMES[2], 10000.0), record("jaxmux", 12000.0))
    ]
    table = packing_table(records)
    assert "| 4 | **jaxmux** | 8 x 1024 | 2.0 | 25% | 83 | 12,000 | 3.00 | 1.20 |" in table
    assert "- 4 tasks: a, b" in table
