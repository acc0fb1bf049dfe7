"""The planner loads no device code, and training on one device loads no pipeline planning."""

import subprocess
import sys

import pytest

# Imports the modules and packages given as arguments, a package with all its modules, and prints
# the names of all loaded modules.
IMPORT_ALL = """
import pkgutil, sys
from importlib import import_module

for name in sys.argv[1:]:
    module = import_module(name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), name + "."):
        import_module(found.name)
print(*sys.modules)
"""


def loaded_by(name: str) -> set[str]:
    """Names of the modules that a fresh interpreter has loaded after importing `name`, with all its
    modules if it is a package."""
    command = [sys.executable, "-c", IMPORT_ALL, name]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


@pytest.mark.long
def test_no_module_of_the_planner_imports_device_code():
    loaded = loaded_by("jaxmux.planner")
    assert {"jaxmux.planner.packing.rows", "jaxmux.planner.pipeline.make_plan"} <= loaded
    assert not {"jax", "jaxlib", "flax", "optax"} & loaded


@pytest.mark.long
def test_training_imports_neither_the_profiler_nor_the_pipeline_planner():
    loaded = loaded_by("jaxmux.cli.train_command")
    assert {"jaxmux.runs.run", "jaxmux.engine.engine", "jaxmux.planner.packing"} <= loaded
    unwanted = ("jaxmux.profiling", "jaxmux.planner.pipeline", "jaxmux.planner.replicas")
    assert not [module for module in loaded if module.startswith(unwanted)]
