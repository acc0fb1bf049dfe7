"""Real sequence lengths for the planner's tests, and the folders of modules imported by bare name.

These are packing (`packings`, `exact_rows`), costs (`true_costs`) and pipeline/schedules
(`mlora_workloads`).
"""

import json
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / room) for room in ("packing", "costs", "pipeline/schedules")]

# The samples of these data sets are longer than the rows of the tests.
_TOO_LONG = {"qmsum", "squality"}


@pytest.fixture(scope="session")
def real_lengths(shared_dir) -> dict[str, list[int]]:
    """By data set, the tokens of its samples; skips the test where the file is absent."""
    file = shared_dir / "data" / "lengths.json"
    if not file.is_file():
        pytest.skip(f"no {file}")
    lengths = json.loads(file.read_text())["lengths"]
    return {name: sizes for name, sizes in lengths.items() if name not in _TOO_LONG}
