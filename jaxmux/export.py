"""`python -m jaxmux.export` is the same command as `jaxmux export`."""

import sys

from jaxmux.cli.main import run_module

if __name__ == "__main__":
    sys.exit(run_module("export"))
