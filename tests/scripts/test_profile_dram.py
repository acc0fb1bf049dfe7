"""The output of Nsight Compute is parsed to the bytes that each program moves."""

import pytest
from profile_dram import Kernel, make_records, ncu_errors, parse_kernels, split_programs

HEADER = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size",'
    '"Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)


def launch(number: int, kernel: str, read: str, written: str, unit: str = "byte") -> str:
    row = (
        f'"{number}","4711","python3","127.0.0.1","{kernel}","1","7","(128, 1, 1)","(132, 1, 1)",'
        '"0","9.0","Command line profiler metrics"'
    )
    return (
        f'{row},"dram__bytes_read.sum","{unit}","{read}"\n'
        f'{row},"dram__bytes_write.sum","{unit}","{written}"\n'
    )


def output(*launches: str) -> str:
    return "\n".join(
        [
            "==PROF== Connected to process 4711 (/usr/bin/python3)",
            'profiled: {"programs": []}',
            '==PROF== Profiling "wrapped_cosine" - 0: 0%....50%....100% - 1 pass',
            "==PROF== Disconnected from process 4711",
            HEADER,
            *launches,
        ]
    )


SAMPLE = output(
    launch(0, "wrapped_cosine", "4,096", "0"),
    launch(1, "nvjet_hsh_128x256<bf16, bf16>", "100,000,000", "50,000,000"),
    launch(2, "wrapped_cosine", "0", "0"),
    launch(3, "row_products", "70,000,000", "0"),
    launch(4, "routed_matmul", "100,000,000", "55,000,000"),
)


def test_launches_are_read_in_their_order():
    kernels = parse_kernels(SAMPLE)
    assert [k.name for k in kernels[2:]] == ["wrapped_cosine", "row_products", "routed_matmul"]
    assert kernels[1] == Kernel("nvjet_hsh_128x256<bf16, bf16>", 1e8, 5e7)


@pytest.mark.parametrize("launches", [(), (launch(0, "k", "1.5", "2", unit="Mbyte"),)])
def test_output_without_bytes_is_refused(launches):
    with pytest.raises(ValueError, match="no kernel|expected a number of bytes"):
        parse_kernels(output(*launches))


def test_counters_that_could_not_be_read_are_refused():
    with pytest.raises(ValueError, match="n/a"):
        parse_kernels(output(launch(0, "k", "n/a", "n/a", unit="")))


def test_markers_separate_the_programs():
    frozen, fused = split_programs(parse_kernels(SAMPLE), 2)
    assert [k.name for k in fused] == ["row_products", "routed_matmul"] and len(frozen) == 1
    with pytest.raises(ValueError, match="2 markers for 3 programs"):
        split_programs(parse_kernels(SAMPLE), 3)


def test_records_hold_bytes_per_layer_beside_the_frozen_linear():
    about = {
        "programs": [["frozen", 0.0], ["mosaic_gpu", 0.1]],
        "shape": "8192x4096x4096",
        "tasks": 4,
        "layers": 2,
        "device": "NVIDIA H200",
        "versions": {},
    }
    (record,) = make_records(about, split_programs(parse_kernels(SAMPLE), 2))
    assert (record["bytes_read"], record["bytes_written"]) == (85e6, 27.5e6)
    assert (record["baseline_bytes_read"], record["baseline_bytes_written"]) == (50e6, 25e6)
    assert record["ratio"] == pytest.approx(1.5) and record["dropout"] == 0.1
    assert record["kernels"] == {"row_products": 35e6, "routed_matmul": 77.5e6}


def test_missing_permission_is_explained():
    errors = ncu_errors("==PROF== fine\n==ERROR== ERR_NVGPUCTRPERM - The user does not have …\n")
    assert len(errors) == 2 and "run as root" in errors[1]
    assert ncu_errors("==WARNING== something") == []
