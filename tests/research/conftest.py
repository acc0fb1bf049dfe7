"""Makes the modules of this folder and of tests/planner/packing importable by bare name."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "planner" / "packing")]
