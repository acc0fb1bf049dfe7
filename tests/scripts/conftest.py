"""Adds scripts/ to the path, because scripts import each other without a package name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
