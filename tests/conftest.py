"""Settings and fixtures of all tests, also of tests/peft, whose environment has no JAX."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Environment variables rather than jax.config, so that the processes which tests
# start share them. They must be set before anything imports JAX.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The interpreter of GPU kernels parks threads of XLA's pool: with as few as a small machine's cores
# none would be left to wake them.
os.environ.setdefault("NPROC", "8")
# Compiling is most of the suite's time: keep every program, however small, for
# the other worker, for subprocesses and for the next run.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder `shared` beside the repository (models, data sets); skips where there is none."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    return folder
