"""The web application of a run's page: static files, the state of the run, and a stream of changes.

Requests only read, and name rounds and tasks, never files of the run directory.
"""

import asyncio
import contextlib
import ipaddress
import json
import socket
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .run_reader import RunReader

STATIC = Path(__file__).with_name("static")
# Seconds between two checks of the files, and between two messages on an idle stream that keep it
# open.
_EVERY, _ALIVE = 0.5, 15.0
# Number of changes that are kept for pages that connect again.
_KEPT = 32
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def run_app(reader: RunReader) -> Starlette:
    """The application. While it runs, it follows the run's files and streams the changes. Its
    attribute `state.changes` is the `Changes`."""
    changes = Changes(reader)

    async def page(request: Request) -> FileResponse:
        return FileResponse(STATIC / "index.html")

    async def state(request: Request) -> JSONResponse:
        return JSONResponse(await run_in_threadpool(reader.state))

    async def details(request: Request) -> JSONResponse:
        line = await run_in_threadpool(reader.details, request.path_params["number"])
        if line is None:
            return JSONResponse({"error": "this round has no details"}, 404)
        return JSONResponse(line)

    async def task(request: Request) -> JSONResponse:
        content = await run_in_threadpool(reader.task, request.query_params.get("name", ""))
        if content is None:
            return JSONResponse({"error": "the run has no task of this name"}, 404)
        return JSONResponse(content)

    async def stream(request: Request) -> StreamingResponse | PlainTextResponse:
        since = request.query_params.get("since", "")
        if not since.isdecimal() or len(since) > 15:
            return PlainTextResponse("since should be a version of the state", 400)
        return StreamingResponse(changes.after(int(since)), media_type="text/event-stream")

    @contextlib.asynccontextmanager
    async def following(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(changes.follow())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    app = Starlette(
        routes=[
            Route("/", page),
            Route("/api/state", state),
            Route("/api/rounds/{number:int}", details),
            Route("/api/task", task),
            Route("/api/stream", stream),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[Middleware(_Guard), Middleware(GZipMiddleware, minimum_size=2048)],
        lifespan=following,
    )
    app.state.changes = changes
    return app


class Changes:
    """The newest changes of a run, streamed to any number of pages."""

    def __init__(self, reader: RunReader):
        self._reader = reader
        self._changed = asyncio.Condition()
        self._newest: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        self._has_ended = False

    async def follow(self) -> None:
        while True:
            try:
                change = await run_in_threadpool(self._reader.poll)
            except OSError:
                # A file system that does not respond now may respond later.
                await asyncio.sleep(_EVERY)
                continue
            if change is not None:
                async with self._changed:
                    self._newest.append(change)
                    self._changed.notify_all()
            if not self._reader.unread:
                await asyncio.sleep(_EVERY)

    async def end(self) -> None:
        async with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    async def after(self, version: int) -> AsyncIterator[str]:
        """Yields the changes after a version, as server-sent events."""
        yield "retry: 2000\n\n"
        while not self._has_ended:
            changes = [change for change in self._newest if change["version"] > version]
            if self._reader.version < version or (changes and changes[0]["version"] > version + 1):
                # The page has missed changes, or was loaded from an earlier process.
                changes = [{"version": self._reader.version, "reload": True}]
            for change in changes:
                yield f"data: {json.dumps(change, separators=(',', ':'))}\n\n"
            if changes:
                version = changes[-1]["version"]
            async with self._changed:
                nothing_new = not self._newest or self._newest[-1]["version"] <= version
                if nothing_new and not self._has_ended:
                    try:
                        await asyncio.wait_for(self._changed.wait(), _ALIVE)
                    except TimeoutError:
                        yield ": alive\n\n"


class _Guard:
    """Answers only requests that read and whose Host header names this machine, and adds headers to
    the answers.

    Otherwise a foreign page could let its host name point to this machine (DNS rebinding), and read
    the run through a user's browser. IP addresses are permitted, because they are not names.
    """

    def __init__(self, app: ASGIApp):
        self._app = app
        self._names = {"localhost", socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(k.lower().encode(), v.encode()) for k, v in _HEADERS.items()]
                names = {name for name, _ in added}
                kept = [pair for pair in message["headers"] if pair[0].lower() not in names]
                message["headers"] = [*kept, *added]
            await send(message)

        app = self._app
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or not self._permits(hosts[0].decode("latin-1")):
            app = PlainTextResponse("the Host header names another machine", 421)
        elif scope["method"] not in ("GET", "HEAD"):
            app = PlainTextResponse("this page only reads", 405, {"Allow": "GET, HEAD"})
        await app(scope, receive, send_with_headers)

    def _permits(self, host: str) -> bool:
        name, _, end = host.lower().rpartition(":")
        if not name or not end.isdecimal():
            name = host.lower()
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True
