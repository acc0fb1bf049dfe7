"""`python -m jaxmux COMMAND …`, the same as the console command `jaxmux`."""

from .cli.main import main

raise SystemExit(main())
