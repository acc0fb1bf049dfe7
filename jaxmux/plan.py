"""`python -m jaxmux.plan` is the same command as `jaxmux plan`."""

from jaxmux.cli.main import run_module

if __name__ == "__main__":
    raise SystemExit(run_module("plan"))
