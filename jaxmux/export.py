"""Lets `python -m jaxmux.export` run `jaxmux/cli/export_command.py`."""

import sys

from jaxmux.cli.export_command import main

if __name__ == "__main__":
    sys.exit(main())
