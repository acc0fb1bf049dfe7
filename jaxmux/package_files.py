"""Paths of files that ship with the package; configs write them as `jaxmux:demo/base`."""

from importlib.resources import files
from pathlib import Path

_PREFIX = "jaxmux:"


def resolve_path(path: str | Path) -> str:
    """The path itself, or the path of a file in the package if it begins with `jaxmux:`."""
    text = str(path)
    if not text.startswith(_PREFIX):
        return text
    return str(Path(str(files("jaxmux"))) / text.removeprefix(_PREFIX))
