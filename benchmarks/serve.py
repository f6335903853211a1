"""How many requests a second does `sce serve` answer, and how fast?

    python benchmarks/serve.py
    python benchmarks/serve.py --items 100000 --concurrency 128 --soak 10

An export of a SASRec with random weights is served by `sce serve`, exactly and with its index, and
the same run by a straightforward handler beside them: FastAPI under uvicorn, and in the handler
torch, one request at a time. All share the machine with the generator, a process of its own: so
many clients, each with one connection, on which it sends a request as soon as the last one is
answered. They are measured in turn, in one run. Histories have 1 to 50 events, ten items are asked
for. Items lie in clusters, as those of a trained run do more or less: without, no index finds much.

A row has requests a second, the percentiles of the time that clients waited, in milliseconds,
answers that were none, the server's own seconds of a core for a thousand requests, and its memory
before and after. With --soak there is one row for each server but the plain one, with its memory
at twenty moments. On two cores all of it takes half an hour, most of it for an index of a million
items, and a soak as long as is said.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from rows import keep, parser_of, provenance, show

SCE, INDEX, PLAIN = "sce serve", "sce serve --index", "FastAPI + torch, one at a time"
_WARM = 1.0  # seconds that are not counted
_CHOICES = 512  # different requests
_CLUSTER = 100  # items
_MOMENTS = 20  # of a soak


def main() -> None:
    options = read_options()
    if options.plain is not None:
        serve_plainly(options.plain)
        return
    packages = ("torch", "numpy", "onnxruntime", "voyager", "starlette", "uvicorn", "fastapi")
    where = provenance(*packages)
    rows: list[dict[str, Any]] = []
    only = [name for name in options.only if not options.soak or name != PLAIN]
    for items in options.items:
        with tempfile.TemporaryDirectory() as place, ExitStack() as servers:
            size = {"items": items, "dim": options.dim, "length": options.length}
            run, export = make_run(Path(place), **size, index=INDEX in only)
            found = json.loads((export / "export.json").read_text()).get("index", {})
            running = {
                name: servers.enter_context(server(name, run, export, options.threads))
                for name in only
            }
            for clients in options.concurrency:
                for name, (process, port) in running.items():
                    cell = {"server": name, "concurrency": clients, **size}
                    cell |= {"threads": None if name == PLAIN else options.threads}
                    cell |= {"soak": options.soak} if options.soak else {}
                    seconds = 60 * options.soak or options.seconds
                    row = cell | measure(process.pid, port, size, clients, seconds, options.soak)
                    row |= found if name == INDEX else {}
                    print(row, file=sys.stderr, flush=True)
                    rows.append(row)
                    keep("serve", [row | where], to=options.out, beside=[*cell, "soak"])
    columns = ["items", "concurrency", "server", "requests/s", "p50", "p90", "p99", "errors"]
    print(show(rows, [*columns, "recall@10", "core seconds", "MiB before", "MiB after"]))


def read_options() -> argparse.Namespace:
    sizes = {"items": [10_000, 100_000, 1_000_000], "dim": 64, "length": 50}
    parser = parser_of(__doc__, "serve", **sizes, concurrency=[1, 16, 128], seconds=15.0)
    servers = [SCE, INDEX, PLAIN]
    parser.add_argument("--only", nargs="+", choices=servers, default=servers)
    parser.add_argument("--threads", type=int, help="of sce serve; default: its own")
    parser.add_argument("--soak", type=float, default=0, metavar="MINUTES")
    parser.add_argument("--plain", type=Path, help=argparse.SUPPRESS)  # the other server itself
    return parser.parse_args()


def make_run(
    place: Path, items: int, dim: int, length: int, *, index: bool = False
) -> tuple[Path, Path]:
    """A run with random weights, and its export; in a process that ends, with its memory."""
    process = multiprocessing.get_context("spawn").Process(
        target=_make_run, args=(place, items, dim, length, index)
    )
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit("the run could not be exported")
    return place / "run", place / "export"


def _make_run(place: Path, items: int, dim: int, length: int, index: bool) -> None:
    import torch

    from sce.data.prepared import Sequences, write_prepared
    from sce.data.vocabulary import Vocabulary
    from sce.export import export
    from sce.models.sasrec import SASRec, SASRecSettings
    from sce.training.checkpoint import write_tensors
    from sce.training.run_start import start_run

    random = np.random.default_rng(0)
    events = random.integers(items, size=(64, length)).astype(np.int32)
    offsets = np.arange(65) * length
    sequences = Sequences(events.ravel(), offsets, np.arange(64, dtype=np.int32))
    dataset = write_prepared(
        place / "data",
        train=sequences,
        test=sequences,
        user_ids=Vocabulary.from_integers(range(64)),
        item_ids=Vocabulary.from_integers(np.arange(items)),
        settings={},
        counts={},
    )
    model = SASRecSettings(dim=dim, max_length=length)
    config = {"model": {"name": "sasrec", **asdict(model)}, "loss": {"name": "sce"}, "training": {}}
    run = start_run(place / "run", dataset, config=config, derived={}, model="sasrec")
    weights = SASRec(items, model, seed=0).state_dict()
    centres = random.standard_normal((-(-items // _CLUSTER), dim))[np.arange(items) // _CLUSTER]
    vectors = centres + random.standard_normal((items, dim)) / 2
    weights["catalogue"].copy_(torch.from_numpy(vectors / dim**0.5))
    write_tensors(run.best_weights, weights, {"run": run.identity})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that the training has not ended
        export(run, place / "export", index=index)


@contextmanager
def server(
    name: str, run: Path, export: Path, threads: int | None = None
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The process of a server, and its port."""
    command = [sys.executable, "-m", "sce", "serve", str(export), "--port", "0"]
    command += ["--index" if name == INDEX else "--no-index"]
    command += [] if threads is None else ["--threads", str(threads)]
    if name == PLAIN:
        command = [sys.executable, __file__, "--plain", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if "http://" not in line:
            raise SystemExit(f"{name} did not start")
        yield process, int(line.rpartition(":")[2])
    finally:
        process.terminate()
        process.wait()


def resident(pid: int) -> float:
    """MiB of a process that are in memory and its own."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return int(fields["RssAnon"].split()[0]) / 1024


def core_seconds(pid: int) -> float:
    """Seconds of a core that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(
    pid: int, port: int, size: dict[str, int], clients: int, seconds: float, soak: float
) -> dict[str, Any]:
    """Let clients ask a server for so long, from another process."""
    before, used = resident(pid), core_seconds(pid)
    moments = []
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        asked = (port, size["items"], size["length"], clients, seconds)
        answer = pool.apply_async(_generate, asked)
        while soak and not answer.ready():
            answer.wait(seconds / _MOMENTS)
            moments.append(round(resident(pid), 1))
        found = answer.get()
    answered = found["requests/s"] * (found["seconds"] + _WARM)
    found["core seconds"] = 1000 * (core_seconds(pid) - used) / answered
    found |= {"MiB before": before, "MiB after": resident(pid)}
    return found | ({"MiB": moments} if soak else {})


def _generate(port: int, items: int, length: int, clients: int, seconds: float) -> dict[str, Any]:
    import uvloop

    return uvloop.run(generate(port, items, length, clients, seconds))


async def generate(
    port: int, items: int, length: int, clients: int, seconds: float
) -> dict[str, Any]:
    """What clients were answered: how many in a second, after how long."""
    random = np.random.default_rng(1)
    lengths = random.integers(1, length + 1, _CHOICES)
    asked = [_request(random.integers(items, size=n).tolist()) for n in lengths]
    waited: list[float] = []
    errors = 0
    begin = time.perf_counter() + _WARM
    end = begin + seconds

    async def client(number: int) -> None:
        nonlocal errors
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while (sent := time.perf_counter()) < end:
            writer.write(asked[number % _CHOICES])
            number += clients
            head = await reader.readuntil(b"\r\n\r\n")
            size = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            body = await reader.readexactly(int(size))
            if sent < begin:
                continue
            if head.startswith(b"HTTP/1.1 200") and body.count(b'"score"') == 10:
                waited.append(time.perf_counter() - sent)
            else:
                errors += 1
        writer.close()

    await asyncio.gather(*(client(number) for number in range(clients)))
    passed = time.perf_counter() - begin
    times = {f"p{q}": float(np.percentile(waited, q)) * 1000 for q in (50, 90, 99) if waited}
    return {
        "requests/s": len(waited) / passed,
        **times,
        "errors": errors,
        "seconds": round(passed, 1),
    }


def _request(history: list[int]) -> bytes:
    body = json.dumps({"history": history, "k": 10}).encode()
    head = "POST /recommend HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


def serve_plainly(run: Path) -> None:
    """The straightforward server: what one would write in an afternoon."""
    import socket

    import torch
    import uvicorn
    from fastapi import FastAPI

    from sce.training.run import Run, load_model

    model: Any = load_model(Run.open(run)).eval()

    async def recommend(asked: dict[str, Any]) -> dict[str, Any]:
        history = torch.tensor([asked["history"][-model.max_length :]])
        with torch.inference_mode():
            scores = model.catalogue @ model(history)[0, -1]
            scores[history[0]] = -torch.inf
            best = scores.topk(asked["k"])
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return {"items": [{"item": item, "score": score} for item, score in pairs]}

    app = FastAPI()
    app.add_api_route("/recommend", recommend, methods=["POST"])
    listening = socket.create_server(("127.0.0.1", 0), backlog=2048)
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])


if __name__ == "__main__":
    main()
