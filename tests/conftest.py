"""Settings and fixtures of all tests, also of tests/parity, whose environment has no JAX."""

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


@pytest.fixture(scope="session")
def small_profile():
    """Makes a profile with just the points that the cost models are fitted to.

    `price(point)` gives the seconds of each; `peak(point)`, if given, the bytes. The first row
    length, sequences per row and rank are those of layers and rounds; rank 0 is measured too.
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
