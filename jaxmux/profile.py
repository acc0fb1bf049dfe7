"""Lets `python -m jaxmux.profile` run `jaxmux/cli/profile_command.py`."""

import sys

from jaxmux.cli.profile_command import main

if __name__ == "__main__":
    sys.exit(main())
