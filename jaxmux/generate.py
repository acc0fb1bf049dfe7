"""`python -m jaxmux.generate` is the same command as `jaxmux generate`."""

import sys

from jaxmux.cli.main import run_module

if __name__ == "__main__":
    sys.exit(run_module("generate"))
