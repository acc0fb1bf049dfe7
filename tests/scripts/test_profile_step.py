"""The times by kernel and by purpose, for a small trace in the format of JAX's profiler."""

import pytest
from gpu_trace import idle_shares, launches_by_gpu
from profile_step import by_purpose, summarise

EVENTS = [
    {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0"}},
    {"ph": "M", "pid": 2, "name": "process_name", "args": {"name": "/host:CPU"}},
    {"ph": "M", "pid": 1, "tid": 7, "name": "thread_name", "args": {"name": "Stream #7"}},
    {"ph": "M", "pid": 1, "tid": 8, "name": "thread_name", "args": {"name": "XLA Ops"}},
    {"ph": "M", "pid": 2, "tid": 7, "name": "thread_name", "args": {"name": "Stream #7"}},
    {"ph": "X", "pid": 1, "tid": 7, "name": "routed_matmul_mosaic_gpu_kernel", "ts": 10, "dur": 5},
    {"ph": "X", "pid": 1, "tid": 7, "name": "loop_add_fusion_3", "ts": 20, "dur": 1},
    {"ph": "X", "pid": 1, "tid": 7, "name": "loop_add_fusion_4", "ts": 22, "dur": 2},
    {"ph": "X", "pid": 1, "tid": 7, "name": "cudnn_generated_x_sdpa_fprop", "ts": 30, "dur": 4},
    {"ph": "X", "pid": 1, "tid": 8, "name": "not a kernel", "ts": 0, "dur": 100},
    {"ph": "X", "pid": 2, "tid": 7, "name": "not on the GPU", "ts": 0, "dur": 100},
]


def test_launches_of_a_kernel_are_added_up_and_others_left_out():
    kernels, idle = summarise(launches_by_gpu(EVENTS)["/device:GPU:0"])
    assert kernels == [
        ("routed_matmul", 1, 5),
        ("sdpa_fprop", 1, 4),
        ("loop_add_fusion", 2, 3),
    ]
    # The pauses are 5 before the first fusion, 1 between the fusions, and 6 before attention. The
    # longest one is not counted.
    assert idle == 6


def test_every_kernel_has_a_purpose():
    found = by_purpose(summarise(launches_by_gpu(EVENTS)["/device:GPU:0"])[0])
    assert list(found) == [
        "frozen products, LoRA inside",
        "attention",
        "loss, optimizer and the rest",
    ]
    assert sum(map(len, found.values())) == 3


def test_a_trace_without_a_gpu_is_refused():
    with pytest.raises(ValueError, match="no GPU stream"):
        launches_by_gpu(EVENTS[:5])


def test_idle_shares_count_the_time_in_which_all_gpus_run():
    second = [
        {"ph": "M", "pid": 3, "name": "process_name", "args": {"name": "/device:GPU:1"}},
        {"ph": "M", "pid": 3, "tid": 7, "name": "thread_name", "args": {"name": "Stream #7"}},
        {"ph": "X", "pid": 3, "tid": 7, "name": "first", "ts": 14, "dur": 6},
        # It runs while the next kernel does, and is no kernel itself.
        {"ph": "X", "pid": 3, "tid": 7, "name": "MemcpyP2P", "ts": 15, "dur": 30},
        {"ph": "X", "pid": 3, "tid": 7, "name": "last", "ts": 24, "dur": 20},
    ]
    # From 14 to 34: the first GPU pauses for 5, 1 and 6, the second one for 4.
    shares = idle_shares(launches_by_gpu([*EVENTS, *second]))
    assert shares == pytest.approx([12 / 20, 4 / 20])
