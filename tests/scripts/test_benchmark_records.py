"""Records of benchmarks: their fields, their files, and the tables and figures of them."""

import json
from pathlib import Path

import benchmark_tables
import plot_benchmarks
import pytest
from benchmark_grouped_lora import measurements
from benchmark_records import FIELDS, RecordFile, make_record, replace_records
from benchmark_step import peft_record, round_size, with_baseline
from grouped_lora_chain import shape_name

from jaxmux.installation import installed_versions

VERSIONS = {"jax": "1.2.3"}


def op_record(case, implementation: str, group: str, ratio: float):
    return make_record(
        name="grouped_lora_linear",
        shape=shape_name(case.linear, 8192),
        tasks=len(case.ranks),
        ranks=list(case.ranks),
        dropout=case.dropout,
        implementation=implementation,
        ms_median=ratio,
        ms_min=ratio,
        ms_max=ratio,
        baseline_ms_median=1.0,
        ratio=ratio,
        device="H200",
        versions=VERSIONS,
        group=group,
    )


@pytest.fixture
def op_records():
    return [
        op_record(case, m.implementation, m.group, 1.0 + max(case.ranks) / 1000)
        for m in measurements(["mosaic_gpu", "triton", "xla"])
        for case in m.cases
    ]


def step_record(tasks: int, length: int, tokens_per_second: float):
    milliseconds = 8192e3 / tokens_per_second
    return make_record(
        name="train_step",
        tasks=tasks,
        implementation="jaxmux",
        ms_median=milliseconds,
        ms_min=milliseconds,
        ms_max=milliseconds,
        tokens_per_second=tokens_per_second,
        peak_bytes=tasks << 30,
        device="H200",
        versions=VERSIONS,
        length=length,
        adapter_bytes=tasks << 20,
    )


def peft(mode: str, length: int, tokens_per_second: float):
    milliseconds = 4e3 * length / tokens_per_second
    return peft_record(
        {
            "mode": mode,
            "batch": 4,
            "length": length,
            "ms_median": milliseconds,
            "ms_min": milliseconds,
            "ms_max": milliseconds,
            "tokens_per_second": tokens_per_second,
            "peak_bytes": 1 << 30,
            "device": "H200",
            "versions": {"torch": "2"},
        },
        layers=2,
        rank=16,
    )


@pytest.fixture
def step_records():
    baselines = [peft("eager", 2048, 9000.0), peft("compiled", 2048, 10000.0)]
    return baselines + [with_baseline(step_record(t, 2048, 12000.0), baselines) for t in (1, 2, 4)]


@pytest.fixture
def dram_records():
    counted = dict(baseline_bytes_read=1e8, baseline_bytes_written=1e8, bytes_read=2e8)
    return [
        make_record(
            shape="8192x4096x4096",
            dropout=0.1,
            implementation="xla",
            ratio=1.5,
            bytes_written=1e8,
            device="H200",
            versions=VERSIONS,
            **counted,
        )
    ]


def test_a_record_has_every_field_and_none_by_default():
    record = make_record(name="op", extra=1)
    assert tuple(record) == (*FIELDS, "extra")
    assert record["name"] == "op" and record["ratio"] is None and record["command"]


def test_versions_of_missing_packages_are_left_out():
    assert set(installed_versions("jax", "no-such-package")) == {"jax"}


def test_the_file_is_complete_after_every_record_and_can_be_appended_to(tmp_path):
    path = tmp_path / "folder" / "records.json"
    first, second = make_record(name="a", ranks=[8, 16]), make_record(name="b", versions={"x": "1"})
    RecordFile(path).add(first)
    assert json.loads(path.read_text()) == [first]
    RecordFile(path, append=True).add(first, second)
    assert json.loads(path.read_text()) == [first, second]
    RecordFile(path).add(second)
    assert json.loads(path.read_text()) == [second]


@pytest.mark.parametrize("tasks", [1, 2, 3, 8, 32])
@pytest.mark.parametrize("length", [64, 1024, 2048])
def test_a_round_fills_its_microbatches(tasks, length):
    microbatches, batch = round_size(tasks, length, tokens=8192, microbatches=2)
    assert microbatches >= 2 and batch >= 1
    assert microbatches * 8192 == tasks * batch * length


def test_the_baseline_of_a_step_is_the_fastest_of_its_length():
    baselines = [peft("eager", 128, 9000.0), peft("compiled", 128, 10000.0)]
    record = with_baseline(step_record(8, 128, 12000.0), baselines)
    assert record["ratio"] == pytest.approx(1.2) and "compiled" in record["baseline"]
    assert with_baseline(step_record(8, 64, 12000.0), baselines)["ratio"] is None


def test_only_the_first_implementation_is_measured_at_every_shape():
    every = list(measurements(["a", "b"]))
    assert {m.implementation for m in every if m.group != "tasks"} == {"a"}
    assert len({m.cases[0].linear for m in every if m.implementation == "a"}) == 5
    assert len({m.cases[0].linear for m in every if m.implementation == "b"}) == 1


def test_limits_of_the_op(op_records):
    limits = {
        (r["implementation"], r["shape"], r["dropout"]): benchmark_tables.ratio_limit(r)
        for r in op_records
        if r["group"] != "ranks"
    }
    assert limits == {
        ("mosaic_gpu", "8192x4096x4096", 0.0): 1.10,
        ("mosaic_gpu", "8192x4096x4096", 0.1): pytest.approx(1.16),
        ("mosaic_gpu", "8192x4096x14336", 0.0): 1.06,
        ("mosaic_gpu", "8192x4096x14336", 0.1): pytest.approx(1.12),
        ("mosaic_gpu", "8192x14336x4096", 0.0): 1.06,
        ("mosaic_gpu", "8192x14336x4096", 0.1): pytest.approx(1.12),
        ("mosaic_gpu", "8192x4096x4096+1024+1024", 0.0): 1.08,
        ("mosaic_gpu", "8192x4096x14336+14336", 0.0): 1.05,
        ("triton", "8192x4096x4096", 0.0): 1.25,
        ("xla", "8192x4096x4096", 0.0): None,
    }


def test_mixed_ranks_are_compared_with_uniform_ones(op_records):
    table = benchmark_tables.rank_table(op_records)
    assert "| 8, 16, 32, 64 | 1.064 | 1.064 |  |  |" in table
    assert "| 64, 64, 64, 64 | 1.064 | 1.064 | **1.000** | 1.00 |" in table
    assert "| 16, 16, 16, 16 | 1.016 | 1.016 | **1.047** | 1.05 |" in table


def test_blocks_of_the_page_are_replaced_and_the_rest_is_kept(
    op_records, step_records, dram_records
):
    blocks = "".join(f"<!-- {n} -->\nold\n<!-- /{n} -->\nkept\n" for n in benchmark_tables.BLOCKS)
    profile = make_record(
        name="profile",
        dtype="bfloat16",
        implementation="attention",
        ms_median=44.0,
        device="GPU",
        versions={},
        idle_ms=6.0,
        launches=7.0,
        kernels={"sdpa": 320.4},
    )
    in_float8 = profile | {"dtype": "float8", "ms_median": 42.0, "kernels": {"sdpa": 301.0}}
    records = {"grouped_lora": op_records, "step": step_records, "dram": dram_records}
    dots = step_records[-1] | {"implementation": "jaxmux, remat=dots"}
    full = dots | {"implementation": "jaxmux, remat=full", "ms_median": 1.5 * dots["ms_median"]}
    records |= {
        "profile": [profile, in_float8],
        "packing": [],
        "remat": [*step_records[:2], dots, full],
    }
    gap = {"name": "gap", "value": 0.01, "unit": "", "bound": 0.05, "baselines": {"greedy": 0.2}}
    records |= {"planner": [gap | {"command": "python planner.py"}]}
    page = benchmark_tables.with_tables(blocks, records)
    assert "old" not in page and page.count("kept") == len(benchmark_tables.BLOCKS)
    assert "| q/k/v: 4,096 × 4,096 + 1,024 + 1,024 | 4 | 0 | mosaic_gpu |" in page
    assert "| **jaxmux** | 4 | 2,048 | 12,000 | 683 of 8,192 tokens | 4.0 GiB |" in page
    assert "| Hugging Face PEFT, eager | 1 | 2,048 | 9,000 |" in page
    assert "| 4.0 GiB | 0.0 GiB | 1.333 | 1.200 |" in page
    assert "| gap | **0.01** | 0.05 | greedy 0.2 |" in page
    assert "| full | 12,000 | 1,024.0 | +50.0% |" in page
    assert "| xla | 0.1 | 200 | 100 | 1.50 |" in page
    assert "| attention | 44.0 | 42.0 | `sdpa` 320 / 301 |" in page
    assert "| between kernels | 6.0 | 6.0 |" in page
    assert "<!-- packing -->\nNot measured yet.\n" in page
    assert benchmark_tables.with_tables(page, records) == page
    with pytest.raises(ValueError, match="no block"):
        benchmark_tables.with_tables("", records)


def test_the_page_shows_the_records_of_the_repository():
    page = benchmark_tables.PAGE.read_text()
    records = benchmark_tables.read_all(benchmark_tables.RECORDS)
    assert benchmark_tables.with_tables(page, records) == page, "run scripts/benchmark_tables.py"


def test_records_of_other_benchmarks_stay_in_a_shared_file(tmp_path):
    path = tmp_path / "folder" / "shared.json"
    old, other, new = ({"name": name} for name in ("mine, old", "another", "mine, new"))
    replace_records(path, "mine, ", [old])
    replace_records(path, "another", [other])
    replace_records(path, "mine, ", [new])
    assert json.loads(path.read_text()) == [other, new]


@pytest.mark.long
def test_every_figure_can_be_drawn(tmp_path: Path, op_records, step_records, dram_records):
    records = {"grouped_lora": op_records, "step": step_records, "dram": dram_records}
    records["live"] = benchmark_tables.read_all(benchmark_tables.RECORDS)["live"]
    for name, (benchmark, draw) in plot_benchmarks.FIGURES.items():
        draw(records[benchmark]).savefig(tmp_path / name)
