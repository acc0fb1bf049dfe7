"""Lets `python -m jaxmux.train` run `jaxmux/cli/train_command.py`."""

import sys

from jaxmux.cli.train_command import main

if __name__ == "__main__":
    sys.exit(main())
