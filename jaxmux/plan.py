"""`python -m jaxmux.plan` is the same command as `jaxmux plan`."""

import sys

from jaxmux.cli.main import run_module

if __name__ == "__main__":
    sys.exit(run_module("plan"))
