"""Lets `python -m jaxmux.generate` run `jaxmux/cli/generate_command.py`."""

import sys

from jaxmux.cli.generate_command import main

if __name__ == "__main__":
    sys.exit(main())
