"""Serves the page of a run until a signal comes."""

import contextlib
import errno
import ipaddress
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from .run_reader import RunReader, UIError

DEFAULT_PORT = 6006
# If the default port is taken, this many further ports are tried.
_TRIED = 50


def serve_run(
    run_dir: str | Path,
    host: str,
    port: int | None,
    say: Callable[[str], None],
    child: bool = False,
) -> None:
    """Serves the page of a run until a signal comes.

    Args:
      run_dir: the directory of a training run or of a server.
      host: address or name of the network interface.
      port: the port; None takes the first free port from 6006 on, 0 any free port.
      say: prints one line; it is called with the address of the page.
      child: whether a training run has started this process for its page. The run may then begin
        later, and the page ends when standard input does.

    Raises:
      UIError: the directory holds no run, the port is taken, or packages are missing.
    """
    refuse_missing_packages()
    import uvicorn

    from .app import run_app

    reader = RunReader(run_dir, wait=child)
    listening = _listen(host, port)
    app = run_app(reader)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="on",
        ws="none",
        timeout_graceful_shutdown=1,
        server_header=False,
    )

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            await app.state.changes.end()
            # uvicorn would print a traceback for a page that does not read its stream.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            await super().shutdown(sockets)

    server = Server(config)
    if child:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=_end_with_parent, args=(server,), daemon=True).start()
    shown = f"[{host}]" if ":" in host else host
    say(f"{reader.path}: http://{shown}:{listening.getsockname()[1]}/")
    if not ipaddress.ip_address(listening.getsockname()[0].partition("%")[0]).is_loopback:
        say(
            f"warning: --host {host}: everybody who reaches this port can see the run, because the "
            "page has no password"
        )
    if not child:
        say("Ctrl-C ends the page; training is not affected")
    with listening:
        server.run(sockets=[listening])


def refuse_missing_packages() -> None:
    """Raises UIError if a package of the extra `ui` is missing; the message says how to install
    it."""
    try:
        import starlette
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as e:
        raise UIError(f"the package {e.name} is missing; pip install 'jaxmux[ui]'") from None
    del starlette


@contextlib.contextmanager
def page_beside(run_dir: str | Path, host: str, port: int | None) -> Iterator[None]:
    """While the context lasts, serves the page of a run in another process. Arguments are as for
    `serve_run`; the run may begin later. Raises UIError if packages are missing."""
    refuse_missing_packages()
    arguments = [sys.executable, "-m", "jaxmux.ui", "--child", f"--host={host}", str(run_dir)]
    if port is not None:
        arguments.append(f"--port={port}")
    # When this process ends for any reason, the page's standard input ends, and with it the page.
    page = subprocess.Popen(arguments, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        page.stdin.close()
        try:
            page.wait(timeout=5)
        except subprocess.TimeoutExpired:
            page.kill()


def _end_with_parent(server: object) -> None:
    while os.read(0, 4096):
        pass
    server.should_exit = True


def _listen(host: str, port: int | None) -> socket.socket:
    """A socket that listens on a port. Raises UIError if there is no such interface, or the port is
    taken."""
    try:
        family, *_, address = socket.getaddrinfo(
            host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as e:
        raise UIError(f"--host {host}: {e.strerror}") from None
    ports = range(DEFAULT_PORT, DEFAULT_PORT + _TRIED) if port is None else [port]
    for number in ports:
        listening = socket.socket(family, socket.SOCK_STREAM)
        # Without this option, a port that was in use a minute ago could not be used again.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((address[0], number, *address[2:]))
            listening.listen(128)
            return listening
        except OSError as e:
            listening.close()
            if e.errno == errno.EADDRINUSE:
                continue
            raise UIError(f"{host}:{number}: {e.strerror}") from None
    if port is None:
        raise UIError(f"ports {ports[0]} to {ports[-1]} are taken; choose another --port")
    raise UIError(f"port {port} is taken; choose another --port")
