"""Paths of files that ship with the package. Configs write such a path as `jaxmux:demo/base`."""

from importlib.resources import files
from pathlib import Path

_PREFIX = "jaxmux:"


def resolve_path(path: str | Path) -> str:
    """The path of a file that may ship with the package.

    Args:
      path: a path, or "jaxmux:" followed by a path within the package's folder.

    Returns:
      `path` itself, or the path in the file system if `path` begins with "jaxmux:".
    """
    text = str(path)
    if not text.startswith(_PREFIX):
        return text
    return str(Path(str(files("jaxmux"))) / text.removeprefix(_PREFIX))
