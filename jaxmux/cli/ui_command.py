"""The command `jaxmux ui`: serves a page that shows a training run."""

import argparse

from jaxmux.ui.serving import serve_run


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code. Raises InputError for an unusable directory or
    port."""

    def say(text: str) -> None:
        print(text, flush=True)

    serve_run(options.run_dir, options.host, options.port, say, options.child)
    return 0
