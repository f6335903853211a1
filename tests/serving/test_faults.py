"""What goes wrong around a server: clients, files, and its own end. The servers have no torch."""

import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.client import HTTPException
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import uvicorn

from sce.serving.catalogue import Catalogue, Source
from sce.serving.protocol import ImpatientProtocol
from sce.serving.server import ServerSettings, Service
from tests.serving.malformed import http, requests
from tests.serving.running import Server, ask, raw, serving, without_torch
from tests.serving.tiny_export import make_engine, write_export

ASKED = {"history": [101, 102], "k": 5}
GONE = (OSError, HTTPException)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(write_export(tmp_path_factory.mktemp("serve") / "export")) as running:
        yield running


@contextmanager
def load(server: Server, clients: int = 4) -> Iterator[list[tuple[int, Any]]]:
    """Clients that ask without end, each on one connection; what they were answered.

    One that loses its connection ends.
    """
    answers: list[tuple[int, Any]] = []
    end = Event()

    def client() -> None:
        connection = server.connect()
        while not end.is_set():
            try:
                answers.append(ask(connection, "/recommend", ASKED))
            except GONE:
                answers.append((0, None))
                break
        connection.close()

    with ThreadPoolExecutor(clients) as threads:
        for _ in range(clients):
            threads.submit(client)
        try:
            wait_for(lambda: len(answers) > 3 * clients)
            yield answers
        finally:
            end.set()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_malformed_requests_get_4xx_and_nothing_else(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    counts: Counter[int] = Counter()
    given = requests()
    for request in given:
        status, answer = raw(server.port, request)
        assert 400 <= status < 500, (request[:200], answer[:300])
        assert b"root:" not in answer
        counts[status] += 1
    assert server.ask("/recommend", ASKED)[0] == 200
    assert server.log.read_text() == ""
    assert len(given) >= 200
    with capsys.disabled():
        print(f"\nmalformed requests: {len(given)} cases, {dict(sorted(counts.items()))}", end=" ")


def test_what_is_in_stock_is_read_again(tmp_path: Path) -> None:
    path, stock = write_export(tmp_path / "export"), tmp_path / "stock.txt"
    stock.write_text("101\n102\n103\n")
    with serving(path, "--allow", str(stock), "--watch") as server:

        def items(**wishes: Any) -> list[int]:
            found = server.ask("/recommend", {"history": [110], **wishes})[1]
            return sorted(item["item"] for item in found["items"])

        assert items() == [101, 102, 103]
        assert items(allow=[102, 120]) == [102]
        stock.write_text("120\n121\n")
        wait_for(lambda: items() == [120, 121])
        stock.write_text("")
        server.send(signal.SIGHUP)
        wait_for(lambda: "(--allow) names no item" in server.log.read_text())
        assert items() == [120, 121]


def test_a_new_version_is_taken_up_without_a_dropped_request(tmp_path: Path) -> None:
    path = write_export(tmp_path / "export")
    with serving(path, "--watch") as server, load(server) as answers:
        versions = [server.ask("/healthz")[1]["version"]]

        def taken_up() -> bool:
            found = server.ask("/healthz")[1]["version"]
            return found != versions[-1] and not versions.append(found)  # type: ignore[func-returns-value]

        for seed in (1, 2):
            write_export(path, seed=seed)
            server.send(signal.SIGHUP)
            wait_for(taken_up)
        write_export(path, seed=3)  # seen without a signal
        wait_for(taken_up)
        new = tmp_path / "items.jsonl"
        new.write_text('{"item_id": 7, "similar_to": [101], "title": "Novelty"}')
        done = without_torch("add-items", str(path), str(new), "--out", str(path), "--force")
        assert done.returncode == 0, done.stderr
        wait_for(taken_up)
        found = server.ask("/recommend", {"history": [7], "k": 1, "keep_seen": True})[1]
        assert found["items"][0].items() >= {"item": 7, "title": "Novelty"}.items()
        with (path / "items.safetensors").open("r+b") as file:
            file.truncate(500)
        server.send(signal.SIGHUP)
        wait_for(lambda: "refused a new version" in server.log.read_text())
        counted = len(answers)
        wait_for(lambda: len(answers) > counted + 8)
    assert {status for status, _ in answers} == {200}
    assert {found["version"] for _, found in answers} == {*versions}
    assert f"goes on with {versions[-1][:12]}: {path} is half-written" in server.log.read_text()


def test_killed_under_load_a_server_begins_again(tmp_path: Path) -> None:
    path = write_export(tmp_path / "export")
    with serving(path) as server, load(server) as answers:
        assert server.end(signal.SIGKILL) == -signal.SIGKILL
    assert {status for status, _ in answers} == {200, 0}
    with serving(path, port=server.port) as again, load(again) as answers:
        pass
    assert {status for status, _ in answers} == {200}


@pytest.mark.parametrize(
    ("told", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 0)], ids=["term", "int"]
)
def test_told_to_end_a_server_answers_what_is_under_way(
    told: signal.Signals, code: int, tmp_path: Path
) -> None:
    with serving(write_export(tmp_path / "export")) as server:
        body = b'{"history": [101]}'
        request = http("POST", "/recommend", body)
        with socket.create_connection(("127.0.0.1", server.port)) as half:
            half.sendall(request[: -len(body)])
            server.ask("/healthz")  # until it is under way
            server.send(told)
            wait_for(lambda: not is_open(server.port))
            half.sendall(body)
            assert half.recv(1 << 16).startswith(b"HTTP/1.1 200 OK")
        assert server.process.wait(30) == code
        assert server.log.read_text() == ""


@contextmanager
def in_a_thread(settings: ServerSettings, patience: float) -> Iterator[int]:
    """The port of a server in this process that waits so long for the head of a request."""
    service = Service(Source(Path("none")), Catalogue.of(make_engine()), settings, print)
    protocol = type("Protocol", (ImpatientProtocol,), {"patience": patience})
    config = uvicorn.Config(service.app(), http=protocol, ws="none", log_config=None, lifespan="on")
    server, listening = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
    thread = Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def test_slow_clients_stall_nobody_and_are_left() -> None:
    request = http("POST", "/recommend", b'{"history": [101]}')
    with in_a_thread(ServerSettings(patience=1.0), patience=1.0) as port, ExitStack() as opened:
        slow = []
        for sent in (0, 10, len(request) - 5) * 20:
            client = opened.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.sendall(request[:sent])
            slow.append((sent, client))
        assert all(raw(port, request)[0] == 200 for _ in range(20))
        for sent, client in slow:
            client.settimeout(30)
            answer = client.recv(1 << 16)
            assert answer[:12] == (b"HTTP/1.1 408" if sent > 10 else b"")


def test_a_connection_is_kept_for_many_requests_and_through_a_refusal(server: Server) -> None:
    connection = server.connect()
    for body, status in ((ASKED, 200), ("x" * (2 << 20), 413), (ASKED, 200), ({}, 400)):
        assert ask(connection, "/recommend", body)[0] == status
    connection.close()


def test_titles_of_a_file_outlast_a_new_version(tmp_path: Path) -> None:
    path = write_export(tmp_path / "export")
    titles = tmp_path / "titles.tsv"
    titles.write_text("sort\tcode\twords\nx\t101\tThe one\n")
    options = ["--titles", str(titles), "--titles-columns", "code", "words"]
    with serving(path, *options, torch=True) as server:
        assert server.ask("/items?q=one")[1] == {"items": [{"item": 101, "title": "The one"}]}
        server.send(signal.SIGHUP)
        wait_for(lambda: "loaded version " in server.log.read_text())
        assert server.ask("/items?q=one")[1] == {"items": [{"item": 101, "title": "The one"}]}
