"""`sce serve`: a run or an export behind HTTP."""

import logging
import os
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from importlib import import_module
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from sce.cli import say
from sce.cli.lists import offered, titles_for
from sce.data.titles import given_titles
from sce.errors import InputError, needing
from sce.serving.asking import Limits
from sce.training.signals import as_ctrl_c
from sce.units import plural

_ENDING = 10  # seconds for the requests that are under way when the server is told to end
_IDLE = 65  # seconds that a connection is kept: longer than balancers keep theirs
_LIMITS = Limits()
TOKEN = "SCE_TOKEN"


def serve(
    path: Annotated[Path, Parameter(name="RUN_OR_EXPORT")],
    /,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    titles: Path | None = None,
    titles_columns: tuple[str, str] | None = None,
    data: Path | None = None,
    allow: Path | None = None,
    block: Path | None = None,
    index: Annotated[bool | None, Parameter(negative="--no-index")] = None,
    watch: bool = False,
    token_file: Path | None = None,
    batch: int = 64,
    queue: int = 512,
    threads: int | None = None,
    limits: Limits = _LIMITS,
) -> None:
    """Serve recommendations over HTTP, and a page to try them on.

    POST /recommend {"history": [...], "k": 10} or {"user": ...}, GET /similar/ITEM, GET /items?q=,
    /healthz, /metrics, /openapi.json. SIGHUP takes up a new version without dropping a request.

    Args:
        path: Directory that "sce export" or "sce train" wrote. A run is exported first.
        host: Address to listen on; 0.0.0.0 for all of this machine's.
        port: Port to listen on; 0 for any that is free.
        titles: File with ids and titles of items (csv, tsv, jsonl or parquet; the extra
            "prepare"), in place of the export's titles.
        titles_columns: Its columns of ids and titles, if they have no usual names.
        data: Dataset of the run, for requests that name a user of the log instead of a history.
            [default: that of a run, if it is where it was; of an export none]
        allow: File of the items that may be recommended at all, such as those in stock: one id a
            line, or a csv, jsonl or parquet file with a column item_id, or of another usual name
            such as sku (the extra "prepare"); every row counts. It is read again at SIGHUP, with
            --watch when it changes. A request's own "allow" narrows it.
        block: Likewise, of items never to be recommended.
        index: Search an index of the export instead of scoring all items. [default: from 2,000,000
            items on, where it takes less time, if the export has one, and without such lists]
        watch: Take up a new version as soon as the files change.
        token_file: File with a token that clients must send as "Authorization: Bearer TOKEN".
            [default: that in the variable SCE_TOKEN; without, anybody may ask]
        batch: Requests that are computed together, at most.
        queue: Requests that may wait; beyond, they are refused with 503.
        threads: Batches computed at the same time, each by one core. [default: one a core]
        limits: What is refused beyond.
    """
    told: list[int] = []
    signal.signal(signal.SIGHUP, lambda number, _: told.append(number))  # until it serves
    if threads is None:
        affinity = getattr(os, "sched_getaffinity", None)  # on Linux
        threads = len(affinity(0)) if affinity else os.cpu_count() or 1
    for name, value in {"batch": batch, "queue": queue, "threads": threads}.items():
        if value < 1:
            raise InputError(f"--{name} must be at least 1; got {value}")
    if queue < limits.requests:
        raise InputError(
            f"--queue must be at least --limits.requests, {limits.requests}, for a list of so many "
            f"requests waits as a whole; got {queue}"
        )
    token = _read_token(token_file)
    server = _needs("server")
    named = partial(titles_for, file=titles, columns=titles_columns)
    offer = partial(offered, allow=allow, block=block)
    files = tuple(file for file in (titles, allow, block) if file is not None)
    source = _needs("catalogue").Source(path, files, data, index, named, offer)
    _listen(host, port).close()  # whether it can, before what takes long
    if source.is_run:
        given_titles(titles, titles_columns)  # refused now, if at all
        say(f"exporting {path}; serving what sce export wrote begins sooner")
    # SIGTERM too ends the process that exports, and removes what it wrote. A thread starts that
    # process, for no signal interrupts a thread: it is never there without somebody to end it.
    with ThreadPoolExecutor(1) as loading, as_ctrl_c():
        try:
            catalogue = loading.submit(copy_context().run, source.load).result()
        finally:
            source.ended.set()
    source.ended.clear()
    listening = _listen(host, port)  # until now clients are refused, instead of left waiting
    every = 1.0 if watch else None
    settings = server.ServerSettings(limits, token, batch, threads, queue, watch=every)
    if token is None and not _is_local(host):
        say(f"anybody who reaches {host} may ask: there is no token (see --token-file)")
    engine, where = catalogue.engine, f"[{host}]" if ":" in host else host
    what = f"{plural(engine.n_items, 'item')}, version {engine.version[:12]}"
    what += "" if engine.index is None else ", by its index"
    line = f"serving {what}, on http://{where}:{listening.getsockname()[1]}"

    def begin() -> None:
        print(line, flush=True)
        if told:
            signal.raise_signal(signal.SIGHUP)

    service = server.Service(source, catalogue, settings, say, begin)
    _run(service.app(), listening)


def _run(app: Any, listening: socket.socket) -> None:
    """Answer until SIGTERM or Ctrl-C, and then what is under way."""
    import uvicorn

    _needs("engine").one_core_a_call()
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    sys.setswitchinterval(0.001)  # the event loop waits for the thread that computes
    config = uvicorn.Config(
        app,
        http=_needs("protocol").ImpatientProtocol,
        ws="none",
        proxy_headers=False,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_IDLE,
        timeout_graceful_shutdown=_ENDING,
    )
    server = uvicorn.Server(config)
    with suppress(KeyboardInterrupt):  # by now all that was under way has been answered
        server.run(sockets=[listening])
    if not server.started:
        raise InputError("the server could not start")


def _needs(module: str) -> Any:
    with needing("serve", "serving"):
        return import_module(f"sce.serving.{module}")


def _read_token(path: Path | None) -> str | None:
    if path is None:
        token, name = os.environ.get(TOKEN), TOKEN
    else:
        try:
            token, name = path.read_text(encoding="ascii").strip(), str(path)
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read a token from {path}: {error}") from error
    if token is not None and (not token.isascii() or not token.isprintable() or len(token) < 8):
        raise InputError(f"the token in {name} needs 8 characters of ASCII or more")
    return token


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise InputError(f"cannot listen on {host}, port {port}: {error}") from error


def _is_local(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
