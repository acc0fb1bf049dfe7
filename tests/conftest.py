"""Settings and fixtures of all tests, including tests/parity, whose environment has no JAX."""

import functools
import gc
import os
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
# Grain's module with the function `index_shuffle`.
SHUFFLING = "grain._src.python.experimental.index_shuffle.python.index_shuffle_module"
# Folders whose tests `make test` leaves out, and fixtures by which tests train, serve or measure.
LONG_FOLDERS = {"parity", "research", "several_devices"}
LONG_FIXTURES = {"calm", "make_engine", "profile_path", "recording", "said_by", "serve", "served"}
LONG_FIXTURES |= {"train", "watch"}
# Packages that take longest to import and that the package imports when it needs them.
IMPORTED_WHEN_NEEDED = ("grain", "matplotlib.pyplot", "orbax.checkpoint", "transformers")

# Environment variables rather than jax.config, so that the processes which tests start inherit
# them. They must be set before JAX is imported.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The interpreter of GPU kernels blocks threads of XLA's pool. The pool has one thread per core by
# default, and on a small machine no thread would be left to unblock the others.
os.environ.setdefault("NPROC", "8")
# Compilation takes most of the suite's time, and the compiled programs run only briefly: compile
# them without LLVM's optimizations, and fused operations with XLA's older emitters, which need less
# than half of the time. To test without these options, set XLA_FLAGS, for example to "".
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
        "--xla_cpu_parallel_codegen_split_count=1 --xla_cpu_multi_thread_eigen=false "
        "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
        # `make test-devices` sets the number of devices into which JAX divides the CPU.
        f"--xla_force_host_platform_device_count={os.environ.get('JAXMUX_TEST_DEVICES', '1')}",
    )
# Every program is kept, even a small one, for the other worker, for subprocesses and for the next
# call of pytest.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# Programs are traced and compiled faster if their operations do not say where in Python they are.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

if find_spec("jax"):
    from jaxtyping import install_import_hook

    # Every annotated function of the kernels checks the shapes and dtypes of its arguments and
    # results. The hook must be installed before the package is imported. Triton compiles the source
    # of its kernels, which the hook would wrap. `compilation` visits every operation of a program.
    install_import_hook(
        [
            ".".join(("jaxmux", *path.relative_to(ROOT).with_suffix("").parts))
            for path in (ROOT / "pallas_kernels").rglob("*.py")
            if path.stem not in ("__init__", "compilation", "triton_kernels")
        ],
        "beartype.beartype",
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--most-seconds",
        type=float,
        help="fail tests without the marker `long` that use more seconds of CPU time than this",
    )


# How long JAX traced and compiled, for each program.
SECONDS_OF_COMPILING: list[float] = []


def cpu_seconds() -> float:
    """CPU time of this thread and of child processes that have ended. Other threads do not count,
    because those of an earlier test may still run."""
    times = os.times()
    return time.thread_time() + times.children_user + times.children_system


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests as long by their folder and their fixtures, before `-m` chooses by markers."""
    for item in items:
        folders = item.path.relative_to(ROOT / "tests").parts
        fixtures = getattr(item, "fixturenames", ())
        if not (LONG_FOLDERS.isdisjoint(folders) and LONG_FIXTURES.isdisjoint(fixtures)):
            item.add_marker("long")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    """Fails a test that uses more CPU time than `--most-seconds`. Other work on the machine does
    not count, nor do fixtures, which several tests may share, nor tracing and compiling, for which
    the first test pays that needs a program."""
    before, compiling = cpu_seconds(), sum(SECONDS_OF_COMPILING)
    result = yield
    seconds, most = cpu_seconds() - before, item.config.getoption("--most-seconds")
    seconds -= sum(SECONDS_OF_COMPILING) - compiling
    if most is not None and seconds > most and not item.get_closest_marker("long"):
        pytest.fail(
            f"used {seconds:.1f} s of CPU time, more than {most} s: make it shorter, or give it "
            "the marker `long`, so that only `make test-all` runs it"
        )
    return result


def pytest_collection_finish(session: pytest.Session) -> None:
    """Makes tests faster, now that everything has been imported."""
    if session.config.getoption("--most-seconds") is not None:
        # Imported here so that their time is not counted as that of the first test that needs them.
        for name in IMPORTED_WHEN_NEEDED:
            if find_spec(name):
                import_module(name)
        if find_spec("jax"):
            from jax import monitoring

            def note(event: str, seconds: float, **_) -> None:
                if event.startswith("/jax/core/compile/"):
                    SECONDS_OF_COMPILING.append(seconds)

            monitoring.register_event_duration_secs_listener(note)
    # Grain takes a millisecond to shuffle one index, which depends on the arguments only. The
    # package imports it when it is needed.
    if find_spec("grain"):
        shuffling = import_module(SHUFFLING)
        shuffling.index_shuffle = functools.cache(shuffling.index_shuffle)
    if find_spec("jax"):
        # Processes that tests start would not find the programs of this one, so only where needed.
        if os.environ.get("JAXMUX_TEST_DEVICES", "1") != "1":
            let_parts_share_programs()
        let_interpreted_kernels_use_numpy()
    # JAX makes millions of small objects while it traces, and the collector's default settings take
    # a tenth of the time of tests that trace much. It need not look at what was imported.
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def let_parts_share_programs() -> None:
    """Lets a part of the CPU run what has been compiled for another, as GPUs do. A key of the
    compilation cache names the devices otherwise."""
    from jax._src import cache_key

    hash_options = cache_key._hash_serialized_compile_options
    cache_key._hash_serialized_compile_options = lambda hashed, options, **_: hash_options(
        hashed, options, strip_device_assignment=True
    )


def let_interpreted_kernels_use_numpy() -> None:
    """Hands NumPy arrays to the callbacks of the interpreter of GPU kernels. Without this, JAX
    makes arrays of its own of them, which takes two fifths of the time of such tests."""
    import jax
    from jax._src import callback
    from jax._src.pallas.mosaic_gpu.interpret import shared_memory

    def run(*arguments, callback, **_):
        return jax.tree.map(np.asarray, callback(*arguments))

    to_int = shared_memory._to_int
    callback.io_callback_impl = run
    shared_memory._to_int = lambda x: x.item() if isinstance(x, np.ndarray) else to_int(x)


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of optional models and data sets; the test is skipped if none is given."""
    folder = os.environ.get("JAXMUX_SHARED")
    if not folder:
        pytest.skip("JAXMUX_SHARED does not name the folder with the shared models and data sets")
    return Path(folder)


@pytest.fixture(scope="session")
def small_profile():
    """Makes a profile that has only the points to which the cost models are fitted.

    `price(point)` returns the seconds of a point, and `peak(point)` its peak memory in bytes or
    None. Points of layers and rounds have the first of `row_lens` and of `sequences`. Layers are
    measured with rank 0 and with `rank`.
    """
    from jaxmux.planner.costs import device_profile as profile

    def make(
        size,
        price,
        *,
        peak=lambda point: None,
        device="Abacus",
        dtype="bfloat16",
        tokens=(256, 1024),
        row_lens=(128,),
        sequences=(1, 8),
        rank=8,
        optimizers=("adamw",),
    ) -> profile.Profile:
        points = []
        for n in tokens:
            shape = (n, row_lens[0], 64, sequences[0])
            points += [
                profile.LayerPoint(1, *shape, 1, r, min(r, 1), remat, False, True)
                for r, remat in ((0, "dots"), (rank, "dots"), (rank, "norms"))
            ]
            points += [
                profile.AttentionPoint(n, row_len, 64, most, backward)
                for row_len in row_lens
                for most in sequences
                for backward in (False, True)
            ]
            points.append(profile.HeadPoint(n))
            points += [profile.UpdatePoint(n, 1, optimizer) for optimizer in optimizers]
            points.append(profile.RoundPoint(1, *shape, 1, rank, 1))
        found = (profile.Measurement(point, price(point), peak(point)) for point in points)
        return profile.Profile(device, 2**34, dtype, {"jax": "0"}, size, tuple(found))

    return make
