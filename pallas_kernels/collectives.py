"""What kernels leave to the sums over devices that run beside them."""

# Mesh axis over which devices sum up their outputs (tensor parallelism).
TP = "tp"
# Kernels occupy every multiprocessor from their beginning to their end, so a sum can only run
# beside them on multiprocessors that they leave free. This many are enough for NCCL.
_BLOCKS = 16
# With fewer devices, a sum takes less time than kernels lose by leaving multiprocessors free and by
# working on one half of a microbatch at a time.
_FEWEST_DEVICES = 4


def sums_run_beside_kernels(devices: int) -> bool:
    """Whether the sums of so many tensor-parallel devices are to run beside kernels."""
    return devices >= _FEWEST_DEVICES


def blocks_of_sums(devices: int) -> int:
    """The multiprocessors that kernels leave to the sums of so many tensor-parallel devices. They
    leave them also in microbatches of a single row, of which no parts can take turns."""
    return _BLOCKS if sums_run_beside_kernels(devices) else 0
