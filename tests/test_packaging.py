"""A wheel contains exactly the modules and data files of the source folders.

An editable install finds a new subpackage by itself, but a wheel contains only the packages that
pyproject.toml lists.
"""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE_FOLDERS = {
    "jaxmux": "jaxmux",
    "data": "jaxmux/data",
    "pallas_kernels": "jaxmux/pallas_kernels",
    "sharding": "jaxmux/sharding",
}


def source_files() -> set[str]:
    """The paths that the files of the source folders should have in the wheel."""
    return {
        f"{installed}/{path.relative_to(ROOT / source).as_posix()}"
        for source, installed in SOURCE_FOLDERS.items()
        for path in (ROOT / source).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def modules(files: set[str]) -> set[str]:
    return {name for name in files if name.endswith(".py")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> set[str]:
    """The paths of all files in a wheel that is built from a copy of the sources."""
    copy = tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in SOURCE_FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    result = subprocess.run(
        [sys.executable, "-c", build], cwd=copy, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = (copy / "dist").glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_wheel_holds_exactly_the_modules_of_the_source_folders(wheel):
    assert modules(wheel) == modules(source_files())


def test_every_folder_with_modules_is_a_package():
    found = modules(source_files())
    assert {f"{Path(name).parent.as_posix()}/__init__.py" for name in found} <= found


@pytest.mark.parametrize("folder", ["jaxmux/configs/", "jaxmux/demo/", "jaxmux/ui/static/"])
def test_wheel_holds_every_data_file(wheel, folder):
    files = {name for name in source_files() if name.startswith(folder)}
    assert files, f"{folder} is empty"
    assert files <= wheel


def test_wheel_installs_no_top_level_name_but_jaxmux(wheel):
    assert {name.partition("/")[0] for name in wheel} == {"jaxmux"}
