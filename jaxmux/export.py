"""`python -m jaxmux.export` is the same command as `jaxmux export`."""

from jaxmux.cli.main import run_module

if __name__ == "__main__":
    raise SystemExit(run_module("export"))
