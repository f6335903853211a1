"""The server: HTTP around a catalogue that may be replaced while it runs."""

import asyncio
import hmac
import json
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from itertools import islice
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sce import __version__
from sce.data.requests import Request as Asked
from sce.errors import InputError, show_value
from sce.serving.asking import Limits, OfUser, read_k, read_requests
from sce.serving.batching import Batcher, OverloadError
from sce.serving.catalogue import NO_USERS, Catalogue, Source, Work
from sce.serving.metrics import Metrics
from sce.serving.openapi import describe
from sce.serving.page import PAGE, POLICY

OPEN = {"/", "/healthz"}  # without a token: they tell nothing of the catalogue's content
_SIMILAR = "/similar/"
_LABELS = {"/", "/healthz", "/items", "/metrics", "/openapi.json", "/recommend", "/similar/{item}"}
_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
]


@dataclass(frozen=True)
class ServerSettings:
    """How a catalogue is served."""

    limits: Limits = field(default_factory=Limits)
    token: str | None = None
    """That clients must send; without, anybody may ask."""
    batch: int = 64
    """Requests computed together, at most."""
    threads: int = 1
    """Batches computed at the same time."""
    queue: int = 512
    """Requests that may wait; beyond, they are refused."""
    patience: float = 30.0
    """Seconds for a request, from its head to the end of its answer."""
    watch: float | None = None
    """Seconds between looks at the files."""


class Service:
    """A catalogue that is served, and the next one taking its place."""

    def __init__(
        self,
        source: Source,
        catalogue: Catalogue,
        settings: ServerSettings,
        say: Callable[[str], object],
        on_start: Callable[[], object] = lambda: None,
    ) -> None:
        self.source, self.catalogue, self.settings, self.say = source, catalogue, settings, say
        self.on_start = on_start
        self.metrics = Metrics()
        self.batcher: Batcher[Work] = Batcher(
            lambda works: self.catalogue.answer(works),
            most=settings.batch,
            room=settings.queue,
            threads=settings.threads,
            on_batch=self.metrics.sizes.add,
        )
        self._loading = asyncio.Lock()
        self.refused = False  # the newest version

    def app(self) -> ASGIApp:
        """The ASGI application."""
        routes = [
            Route("/recommend", self.recommend, methods=["POST"]),
            Route("/", self.page),
            Route("/healthz", self.health),
            Route("/metrics", self.show_metrics),
            Route("/openapi.json", self.openapi),
            Route("/items", self.items),
            Route(_SIMILAR + "{item:path}", self.similar),
        ]
        handlers: Mapping[Any, Any] = {
            HTTPException: lambda _, error: _refuse(error.status_code, error.detail, error.headers),
            InputError: lambda _, error: _refuse(400, str(error)),
            OverloadError: lambda _, error: _refuse(
                503, "too many requests are waiting; try again", {"Retry-After": "1"}
            ),
            ClientDisconnect: lambda _, error: _refuse(400, "the request ended too early"),
            Exception: lambda _, error: _refuse(500, "the server failed; its log says why"),
        }
        inner = Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan)
        inner.router.redirect_slashes = False
        return Gate(inner, self.metrics, self.settings)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self.batcher.run())]
        if self.settings.watch is not None:
            tasks.append(loop.create_task(self.watch(self.settings.watch)))
        with suppress(ValueError, RuntimeError):  # not in the main thread
            loop.add_signal_handler(
                signal.SIGHUP, lambda: tasks.append(loop.create_task(self.reload()))
            )
        self.on_start()
        yield
        self.source.ended.set()
        async with self._loading:  # until what was being loaded is given up, and removed
            for task in tasks:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # A new version.

    async def reload(self, *, told: bool = True) -> None:
        """Take up the lists and the version that the source has now; not what is bad of them.

        Lists go first and alone, for the served version needs them whatever the next one is like.
        Of the same version, it is loaded again if this was `told`.
        """
        async with self._loading:
            version, lists = self.source.state()
            if lists != self.catalogue.state[1]:
                again = partial(self.source.read_again, self.catalogue)
                if await self._take(again, "new lists"):
                    self.say(f"read the lists again, for version {self._version()}")
                else:
                    told = False  # a new version they may fit, the same one they do not
            if told or version not in (None, self.catalogue.state[0]):
                old = self._version()
                self.refused = not await self._take(self.source.load, "a new version")
                if not self.refused:
                    new = self._version()
                    instead = f"serves version {new} instead of {old}"
                    self.say(instead if new != old else f"loaded version {new} again")

    async def _take(self, load: Callable[[], Catalogue], what: str) -> bool:
        """Serve what this loads; False if it is bad, and all goes on as it was."""
        try:
            self.catalogue = await asyncio.to_thread(load)
        except Exception as error:
            if not self.source.ended.is_set():
                self.metrics.loads["refused"] += 1
                self.say(f"refused {what}, and goes on with {self._version()}: {error}")
            return False
        self.metrics.loads["taken"] += 1
        return True

    def _version(self) -> str:
        return self.catalogue.engine.version[:12]

    async def watch(self, seconds: float) -> None:
        """Reload when the files have changed, and have stopped changing."""
        tried = seen = self.catalogue.state
        while True:
            await asyncio.sleep(seconds)
            before, seen = seen, self.source.state()
            known = zip(seen, tried, self.catalogue.state, strict=True)
            if seen == before and any(one not in (None, *others) for one, *others in known):
                tried = seen
                await self.reload(told=False)

    # What clients ask.

    async def recommend(self, request: Request) -> Response:
        """POST /recommend."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HTTPException(415, "send JSON, with the header Content-Type: application/json")
        body = await _read_body(request, self.settings.limits.body)
        asked, many = read_requests(body, self.settings.limits)
        if self.catalogue.users is None and any(isinstance(one, OfUser) for one in asked):
            raise InputError(NO_USERS)
        found = await self.batcher.do(asked)
        if many:
            return _json({"results": found})
        strange = asked[0].history  # ids of another catalogue
        if not found[0]["known"] and (strange or found[0]["source"] == "model"):
            raise HTTPException(422, _why_nothing(asked[0]))
        return _json(found[0])

    async def similar(self, request: Request) -> Response:
        """GET /similar/{item}."""
        item, k = request.path_params["item"], self._depth(request)
        try:
            return await self._list(lambda catalogue: catalogue.similar(item, k))
        except InputError as error:
            raise HTTPException(404, str(error)) from None

    async def items(self, request: Request) -> Response:
        """GET /items?q=."""
        query, k = request.query_params.get("q", ""), self._depth(request)
        if len(query) > 200:
            raise InputError(f"q has at most 200 characters; got {len(query):,}")
        return await self._list(lambda catalogue: catalogue.find(query, k))

    async def _list(self, work: Callable[[Catalogue], Any]) -> Response:
        (found,) = await self.batcher.do([work])
        return _json({"items": found})

    def _depth(self, request: Request) -> int:
        if unknown := request.query_params.keys() - {"q", "k"}:
            raise InputError(f"{show_value(min(unknown))} is no part of this request: q, k")
        given = request.query_params.get("k", "10")
        digits = given.isascii() and given.isdigit() and len(given) < 10
        return read_k(int(given) if digits else given, self.settings.limits)

    # About the server.

    async def page(self, _: Request) -> Response:
        """GET /."""
        return Response(PAGE, media_type="text/html", headers={"Content-Security-Policy": POLICY})

    async def health(self, _: Request) -> Response:
        """GET /healthz."""
        engine = self.catalogue.engine
        return _json({"status": "ok", "version": engine.version, "items": engine.n_items})

    async def show_metrics(self, _: Request) -> Response:
        """GET /metrics."""
        engine = self.catalogue.engine
        gauges = {
            "sce_queue_length": ("Requests that wait.", len(self.batcher)),
            "sce_items": ("Items in the catalogue.", engine.n_items),
            "sce_newest_refused": ("1 while an older version is served.", int(self.refused)),
        }
        info = {"version": engine.version, "sce": __version__}
        text = self.metrics.text(gauges, info)
        return Response(text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def openapi(self, _: Request) -> Response:
        """GET /openapi.json."""
        return _json(describe(self.settings.limits, with_token=self.settings.token is not None))


class Gate:
    """Around everything: who may ask, for how long, and what is counted."""

    def __init__(self, inner: ASGIApp, metrics: Metrics, settings: ServerSettings) -> None:
        self.inner, self.metrics, self.settings = inner, metrics, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.inner(scope, receive, send)
            return
        begin, status = time.perf_counter(), 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                passed = (time.perf_counter() - begin) * 1000
                timing = (b"server-timing", b"app;dur=%.3f" % passed)
                message["headers"] = [*message.get("headers", ()), *_HEADERS, timing]
            await send(message)

        inner = self.inner if self._may_ask(scope) else _UNAUTHORIZED
        try:
            async with asyncio.timeout(self.settings.patience):
                await inner(scope, receive, answer)
        except TimeoutError:
            if status:
                raise  # the answer had begun: the connection is closed
            late = _refuse(408, f"the request took more than {self.settings.patience:g} seconds")
            await late(scope, receive, answer)
        finally:
            path = _SIMILAR + "{item}" if scope["path"].startswith(_SIMILAR) else scope["path"]
            self.metrics.requests[path if path in _LABELS else "other", status] += 1
            self.metrics.seconds.add(time.perf_counter() - begin)

    def _may_ask(self, scope: Scope) -> bool:
        token = self.settings.token
        if token is None or scope["path"] in OPEN:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, given = given.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), token.encode())


def _why_nothing(asked: Asked) -> str:
    """No event is known of a history; or of a user, nor what is popular."""
    if isinstance(asked, OfUser):
        return f"user {show_value(asked.user)} has no item of the catalogue"
    given = ", ".join(map(show_value, islice(asked.history, 3))) or "it is empty"
    return f"no item of the history is in the catalogue: {given}"


async def _read_body(request: Request, most: int) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise HTTPException(413, f"the body has more than {most:,} bytes (--limits.body)")
    return bytes(body)


def _json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    # ASCII, for half a surrogate pair among the ids could not be written otherwise.
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return Response(text, status, headers, media_type="application/json")


def _refuse(status: int, error: str, headers: Mapping[str, str] | None = None) -> Response:
    return _json({"error": error or HTTPStatus(status).phrase}, status, headers)


_UNAUTHORIZED = _refuse(
    401, "this server needs a token: Authorization: Bearer TOKEN", {"WWW-Authenticate": "Bearer"}
)
