"""`python -m jaxmux.train` is the same command as `jaxmux train`."""

from jaxmux.cli.main import run_module

if __name__ == "__main__":
    raise SystemExit(run_module("train"))
