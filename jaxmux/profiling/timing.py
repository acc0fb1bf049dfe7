"""Compiles programs in parallel and times them one after another."""

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from jaxmux.pallas_kernels.compilation import compiled
from jaxmux.planner.costs.device_profile import Measurement, Point

from .timed_programs import Program

# Number of samples whose median is taken, and the fraction of a measurement that is warm-up.
_SAMPLES, _WARM_UP_PART = 7, 0.3
_MOST_COMPILERS = 8


def measure(programs: Sequence[tuple[Point, Program]], seconds: float) -> Iterator[Measurement]:
    """Times programs, spending `seconds` on each, without compilation. Programs with equal
    `compiled_for` are compiled once."""
    executables = {}
    # The compiler releases Python's global lock, so the next program is lowered meanwhile. The
    # compiler may also time kernels on the device, so timing starts when all programs are compiled.
    with ThreadPoolExecutor(min(_MOST_COMPILERS, os.cpu_count() or 1)) as executor:
        for _, program in programs:
            if program.compiled_for not in executables:
                lowered = program.function.lower(program.state, program.inputs, program.constants)
                executables[program.compiled_for] = executor.submit(compiled, lowered)
    for point, program in programs:
        executable = executables[program.compiled_for].result()
        taken = _median_seconds(executable, program, seconds)
        yield Measurement(point, taken / program.repeats, _peak_bytes(executable, program))


def _median_seconds(executable: Any, program: Program, seconds: float) -> float:
    """Returns the median seconds of a call of a compiled program, whose state the first call
    donates.

    A sample is the mean over several calls. The host queues all calls of a sample before it waits
    for the device. A part of `seconds` warms the device up, until its clock has settled to a
    frequency that the device can sustain.
    """

    def queue(state: Any, calls: int) -> tuple[Any, float]:
        start = time.perf_counter()
        results = None
        for _ in range(calls):
            state, results = executable(state, program.inputs, program.constants)
        jax.block_until_ready((state, results))
        return state, time.perf_counter() - start

    state, _ = queue(program.state, 1)
    state, once = queue(state, 1)
    state, _ = queue(state, max(1, round(_WARM_UP_PART * seconds / once)))
    calls = max(1, round((1 - _WARM_UP_PART) * seconds / _SAMPLES / once))
    samples = []
    for _ in range(_SAMPLES):
        state, taken = queue(state, calls)
        samples.append(taken / calls)
    return statistics.median(samples)


def _peak_bytes(executable: Any, program: Program) -> int | None:
    """Returns the bytes of memory that a program needs besides its state and constants; None if
    unknown."""
    stats = executable.memory_analysis()
    if stats is None:
        return None
    made = stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return int(made + sum(leaf.nbytes for leaf in jax.tree.leaves(program.inputs)))
