"""`python -m jaxmux.profile` is the same command as `jaxmux profile`."""

from jaxmux.cli.main import run_module

if __name__ == "__main__":
    raise SystemExit(run_module("profile"))
