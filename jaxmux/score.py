"""`python -m jaxmux.score` is the same command as `jaxmux score`."""

from jaxmux.cli.main import run_module

if __name__ == "__main__":
    raise SystemExit(run_module("score"))
