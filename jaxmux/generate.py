"""`python -m jaxmux.generate` is the same command as `jaxmux generate`."""

from jaxmux.cli.main import run_module

if __name__ == "__main__":
    raise SystemExit(run_module("generate"))
