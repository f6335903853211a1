"""Servers for tests: processes that cannot import torch or polars, and raw requests to them."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_COMMAND = (
    "import sys; sys.modules |= dict.fromkeys(['torch', 'polars']); "
    "from sce.cli import main; sys.exit(main())"
)


def without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command."""
    command = [sys.executable, "-c", _COMMAND, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


class Server:
    """A process of `sce serve`."""

    def __init__(self, path: Path, *options: str, port: int = 0, torch: bool = False) -> None:
        start = ["-m", "sce"] if torch else ["-c", _COMMAND]
        command = [sys.executable, *start, "serve", str(path), "--port", str(port), *options]
        self.log = path.parent / f"server-{os.urandom(4).hex()}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("serving "), (line, self.log.read_text())
        self.url = line.split()[-1]
        self.port = int(self.url.rpartition(":")[2])

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Status and JSON of one request on a connection of its own."""
        connection = self.connect()
        try:
            return ask(connection, path, body, **headers)
        finally:
            connection.close()

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end."""
        self.send(number)
        code = self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def ask(
    connection: http.client.HTTPConnection, path: str, body: Any = None, **headers: str
) -> tuple[int, Any]:
    if body is None:
        connection.request("GET", path, headers=headers)
    else:
        headers = {"Content-Type": "application/json"} | headers
        connection.request("POST", path, json.dumps(body), headers)
    response = connection.getresponse()
    text = response.read()
    is_json = response.headers.get_content_type() == "application/json"
    return response.status, json.loads(text) if is_json else text.decode()


@contextmanager
def serving(path: Path, *options: str, **more: Any) -> Iterator[Server]:
    server = Server(path, *options, **more)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.end(signal.SIGKILL)


def raw(port: int, request: bytes) -> tuple[int, bytes]:
    """Send bytes; the status of the answer, and all that follows it."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sent:
        with suppress(BrokenPipeError, ConnectionResetError):  # refused before its end
            sent.sendall(request)
        answer = http.client.HTTPResponse(sent)
        answer.begin()
        told = answer.headers.as_bytes()
        with suppress(ConnectionResetError):  # left by the server, as it did not read to the end
            told += answer.read()
        return answer.status, told
