"""`python -m jaxmux.eval` is the same command as `jaxmux eval`."""

from jaxmux.cli.main import run_module

if __name__ == "__main__":
    raise SystemExit(run_module("eval"))
