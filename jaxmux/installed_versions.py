"""Versions of installed packages, for records of what was run."""

from importlib.metadata import PackageNotFoundError, version


def installed_versions(*packages: str) -> dict[str, str]:
    """The versions of the given packages, without those that are not installed."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
