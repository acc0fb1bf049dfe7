"""Versions of installed packages, for records of what was run."""

from importlib.metadata import PackageNotFoundError, version


def installed_versions(*packages: str) -> dict[str, str]:
    """Returns the versions of packages by name, without packages that are not installed."""
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
