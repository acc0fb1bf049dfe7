"""Lets `python -m jaxmux.plan` run `jaxmux/cli/plan_command.py`."""

import sys

from jaxmux.cli.plan_command import main

if __name__ == "__main__":
    sys.exit(main())
