"""`python -m jaxmux.data` is the same command as `jaxmux data`."""

from jaxmux.cli.main import run_module

if __name__ == "__main__":
    raise SystemExit(run_module("data"))
