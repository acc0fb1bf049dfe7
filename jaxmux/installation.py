"""Files that ship with the package, which configs write as `jaxmux:demo/base`, the folder of its
caches, and versions of installed packages."""

import os
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path

_PREFIX = "jaxmux:"


def resolve_path(path: str | Path) -> str:
    """Returns the path of a file, which may ship with the package.

    Args:
      path: a path, or "jaxmux:" followed by a path within the package's folder.

    Returns:
      `path` itself, or the path in the file system if `path` begins with "jaxmux:".
    """
    text = str(path)
    if not text.startswith(_PREFIX):
        return text
    return str(Path(str(files("jaxmux"))) / text.removeprefix(_PREFIX))


def cache_folder(name: str) -> Path:
    """Returns a folder for results that can be computed again, in the user's cache
    ($XDG_CACHE_HOME, else ~/.cache). The folder may not exist.

    Args:
      name: name of the folder within jaxmux's cache.
    """
    user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(user_cache) / "jaxmux" / name


def installed_versions(*packages: str) -> dict[str, str]:
    """Returns the versions of packages by name, without packages that are not installed."""
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
