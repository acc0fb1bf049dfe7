"""`python -m jaxmux.ui` is the same command as `jaxmux ui`."""

from jaxmux.cli.main import run_module

if __name__ == "__main__":
    raise SystemExit(run_module("ui"))
