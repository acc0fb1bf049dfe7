"""`python -m jaxmux.profile` is the same command as `jaxmux profile`."""

import sys

from jaxmux.cli.main import run_module

if __name__ == "__main__":
    sys.exit(run_module("profile"))
