import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sce.cli import serve as module
from tests.complaint import complaint
from tests.serving.running import without_torch
from tests.serving.tiny_export import write_export

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_export(tmp_path_factory.mktemp("serve") / "export")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--index", "--port", "0"], "export has no index; make one with: sce export RUN --index"),
        (["--batch", "0"], "--batch must be at least 1; got 0"),
        (["--queue", "99", "--limits.requests", "100"], "--queue must be at least --limits.reques"),
        (["--limits.k", "0"], "--limits.k must be at least 1; got 0"),
        (["--port", "70000"], "cannot listen on 127.0.0.1, port 70000: "),
        (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1, port 8000: "),
        (["--token-file", "short"], "the token in short needs 8 characters of ASCII or more"),
        (["--token-file", "nowhere"], "cannot read a token from nowhere: "),
        (["--titles", "nowhere.csv", "--port", "0"], "nowhere.csv: no such file"),
        (["--titles-columns", "a", "b", "--port", "0"], "--titles-columns are those of --titles"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    options: list[str],
    message: str,
    export: Path,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short").write_text("secret\n")
    assert message in complaint(["serve", export, *options], capsys)


def test_a_port_that_is_taken(export: Path, capsys: Capture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        line = complaint(["serve", export, "--port", str(port)], capsys)
    assert f"cannot listen on 127.0.0.1, port {port}: " in line


def test_exports_that_are_not_whole_are_refused(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "export"
    command: list[str | Path] = ["serve", path, "--port", "0"]
    assert "does not exist; make it with: sce export" in complaint(command, capsys)
    path.mkdir()
    assert "it has no export.json" in complaint(command, capsys)
    for name in ("encoder.onnx", "items.safetensors", "items_values.npy", "export.json"):
        write_export(path)
        file = path / name
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        for damaged in (content, content[:-1], b""):
            file.write_bytes(damaged)
            assert "export the run again" in complaint(command, capsys)
        file.unlink()
        assert str(path) in complaint(command, capsys)


def test_without_the_extra_its_installation_is_named(
    export: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name="uvicorn")

    monkeypatch.setattr(module, "import_module", missing)
    line = complaint(["serve", export], capsys)
    assert "needs uvicorn, which is not installed" in line
    assert "pip install 'scalable-cross-entropy[serve]'" in line


@pytest.fixture
def exporting(export: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server that exports a run until there is a file "go", and its port."""
    run, temporary, exporter = tmp_path / "run", tmp_path / "temporary", tmp_path / "exporter"
    for directory in (run, temporary):
        directory.mkdir()
    (run / "run.json").write_text("{}")
    exporter.write_text(
        f"#!/bin/sh\ncd {tmp_path}\necho $$ > pid.new\nmv pid.new pid\n"
        f'while [ ! -e go ]; do sleep 0.02; done\ncp -r {export} "$6"\n'
    )
    exporter.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    start = f"import sys; sys.executable = {str(exporter)!r}; from sce.cli import main; "
    command = [sys.executable, "-c", start + "sys.exit(main())", "serve", str(run)]
    with subprocess.Popen(
        [*command, "--port", str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(temporary)},
    ) as server:
        while not (tmp_path / "pid").exists():
            assert server.poll() is None
            time.sleep(0.01)
        yield server, port
        (tmp_path / "go").touch()  # ends the export too, where the server has left it behind
        server.kill()


def test_until_a_run_is_exported_clients_are_refused_and_sighup_waits(
    exporting: tuple[subprocess.Popen[str], int], tmp_path: Path
) -> None:
    server, port = exporting
    assert server.stdout
    assert server.stderr
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED
    server.send_signal(signal.SIGHUP)
    (tmp_path / "go").touch()
    assert server.stdout.readline().endswith(f":{port}\n")
    assert "exporting" in server.stderr.readline()
    assert "loaded version " in server.stderr.readline()


def test_told_to_end_while_it_exports_a_server_leaves_nothing(
    exporting: tuple[subprocess.Popen[str], int], tmp_path: Path
) -> None:
    server, _ = exporting
    assert [*(tmp_path / "temporary").iterdir()]
    server.terminate()
    assert server.wait(30) == 128 + signal.SIGTERM
    assert not [*(tmp_path / "temporary").iterdir()]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_told_to_end_while_it_exports_a_new_version_a_server_ends(
    exporting: tuple[subprocess.Popen[str], int], tmp_path: Path
) -> None:
    server, _ = exporting
    (tmp_path / "go").touch()
    assert server.stdout
    server.stdout.readline()
    for name in ("go", "pid"):
        (tmp_path / name).unlink()
    server.send_signal(signal.SIGHUP)
    while not (tmp_path / "pid").exists():
        time.sleep(0.01)
    server.terminate()
    assert server.wait(30) == -signal.SIGTERM  # the export would never end
    assert not [*(tmp_path / "temporary").glob("sce-*")]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_wrong_titles_of_a_run_are_refused_before_it_is_exported(
    tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "run.json").write_text("{}")
    command: list[str | Path] = ["serve", tmp_path, "--port", "0", "--titles", "nowhere.csv"]
    assert "nowhere.csv: no such file" in complaint(command, capsys)  # and no line on exporting


def test_without_torch_a_run_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    for command in (["add-items", str(tmp_path), "items.jsonl"], ["export", str(tmp_path)]):
        done = without_torch(*command, "--out", str(tmp_path / "out"))
        assert done.returncode == 2
        assert done.stderr.startswith("sce: error: torch is not installed; install it as README")


def test_without_polars_titles_of_a_file_are_refused(
    export: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "polars", None)
    line = complaint(["serve", export, "--titles", "any.csv", "--port", "0"], capsys)
    assert "reading titles needs polars, which is not installed" in line


@pytest.mark.parametrize(
    ("host", "told"), [("127.0.0.1", False), ("::1", False), ("0.0.0.0", True)]
)
def test_an_open_address_without_a_token_is_told(
    host: str, told: bool, export: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(app: Any, listening: socket.socket) -> None:
        listening.close()

    monkeypatch.setattr(module, "_run", run)
    monkeypatch.delenv(module.TOKEN, raising=False)
    module.serve(export, host=host, port=0)
    assert ("there is no token" in capsys.readouterr().err) == told
    monkeypatch.setenv(module.TOKEN, "long-enough")
    module.serve(export, host=host, port=0)
    assert capsys.readouterr().err == ""
