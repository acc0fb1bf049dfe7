"""Compiles programs side by side and times them one by one."""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from jaxmux.pallas_kernels.compilation import compiled
from jaxmux.planner.costs.device_profile import Measurement, Point

from .timed_programs import Program

_SAMPLES = 7
_WARM_UP_PART = 0.3
_MOST_COMPILERS = 8


def measure(programs: Sequence[tuple[Point, Program]], seconds: float) -> Iterator[Measurement]:
    """Times programs; each that the compiler sees as another is compiled once.

    Args:
      seconds: of one measurement, see `median_seconds`.
    """
    executables = {}
    # The compiler leaves Python's lock alone, so programs are lowered meanwhile. But it measures
    # kernels on the device: nothing is timed until all is compiled.
    with ThreadPoolExecutor(min(_MOST_COMPILERS, os.cpu_count() or 1)) as executor:
        for _, program in programs:
            if program.compiled_for not in executables:
                lowered = program.function.lower(program.state, program.inputs, program.constants)
                executables[program.compiled_for] = executor.submit(compiled, lowered)
    for point, program in programs:
        executable = executables[program.compiled_for].result()
        arguments = (program.inputs, program.constants)
        taken = median_seconds(executable, program.state, arguments, seconds)
        yield Measurement(point, taken / program.repeats, _peak_bytes(executable, program))


def median_seconds(
    function: Callable[..., tuple[Any, Any]],
    state: Any,
    arguments: tuple[Any, ...],
    seconds: float,
) -> float:
    """Median time of a call `state, results = function(state, *arguments)`.

    Calls are queued, the host ahead of the device, as many as fill a sample; only then it waits.

    Args:
      state: donated by the function.
      seconds: of the measurement, a part of which warms the device up: under load it settles to
        the clock that it can sustain.
    """

    def queue(state: Any, calls: int) -> tuple[Any, float]:
        start = time.perf_counter()
        results = None
        for _ in range(calls):
            state, results = function(state, *arguments)
        jax.block_until_ready((state, results))
        return state, time.perf_counter() - start

    state, _ = queue(state, 1)
    state, once = queue(state, 1)
    state, _ = queue(state, max(1, round(_WARM_UP_PART * seconds / once)))
    calls = max(1, round((1 - _WARM_UP_PART) * seconds / _SAMPLES / once))
    samples = []
    for _ in range(_SAMPLES):
        state, taken = queue(state, calls)
        samples.append(taken / calls)
    return statistics.median(samples)


def _peak_bytes(executable: Any, program: Program) -> int | None:
    """What a step that contains the program has to find room for besides its state."""
    stats = executable.memory_analysis()
    if stats is None:
        return None
    made = stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return int(made + sum(leaf.nbytes for leaf in jax.tree.leaves(program.inputs)))
