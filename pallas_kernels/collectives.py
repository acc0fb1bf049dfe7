"""Multiprocessors that kernels leave free for the sums over devices that run beside them."""

# Mesh axis over which devices sum up their outputs (tensor parallelism).
TP = "tp"
# Kernels occupy every multiprocessor from their beginning to their end, so a sum can run beside
# them only if they leave some multiprocessors free. This many are enough for NCCL.
_BLOCKS = 16
# With fewer devices, a sum takes less time than the kernels lose: they have fewer multiprocessors,
# and work on one half of a microbatch at a time.
_FEWEST_DEVICES = 4


def sums_run_beside_kernels(devices: int) -> bool:
    """Whether sums over this many tensor-parallel devices run beside kernels."""
    return devices >= _FEWEST_DEVICES


def blocks_of_sums(devices: int) -> int:
    """The number of multiprocessors that kernels leave free for sums over this many tensor-parallel
    devices. They do so even for microbatches of a single row, which cannot be divided."""
    return _BLOCKS if sums_run_beside_kernels(devices) else 0
