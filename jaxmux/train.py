"""`python -m jaxmux.train` is the same command as `jaxmux train`."""

import sys

from jaxmux.cli.main import run_module

if __name__ == "__main__":
    sys.exit(run_module("train"))
