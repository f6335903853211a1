"""Real sce commands in processes that are killed, or refused a system call, at a chosen moment.

A server imports sce once and forks a child for each command: python -m tests.attack.faulty. For
moments see `count_moments`.
"""

import json
import os
import random
import resource
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import sce
from tests.attack.elastic import Act, Fault, count_moments


def sample(moments: int, default: int) -> list[int]:
    """Moments to attack at: `default` of them, or as many as SCE_ATTACK says."""
    wanted = int(os.environ.get("SCE_ATTACK", default))
    return sorted(random.Random(0).sample(range(1, moments + 1), min(wanted, moments)))


@dataclass(frozen=True)
class Outcome:
    """What became of a command."""

    code: int  # negative: the signal that killed it
    moments: int  # counted until then; 0 if it was killed
    error: str


class Server:
    """Runs commands in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # A sweep starts processes of its own, in that directory.
        self.environment = {**os.environ, "PYTHONPATH": str(Path(sce.__file__).parents[1])}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.attack.faulty", str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.environment,
        )

    def run(
        self,
        arguments: Sequence[str],
        *,
        when: int = 0,
        refuse: bool = False,
        exchange: bool = True,
        handles: int = 0,
        full: str = "",
    ) -> Outcome:
        """Run a command.

        Args:
            arguments: Of sce.
            when: Number of the moment at which it is killed; 0: none.
            refuse: Say that the disk is full then, instead of killing.
            exchange: False: a system that cannot exchange two names.
            handles: Number of files that may be open at once.
            full: "stdout" or "stderr": which of them nothing can be written to.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"arguments": list(arguments), "when": when, "refuse": refuse}
        request |= {"exchange": exchange, "handles": handles, "full": full}
        (self.directory / ".stderr").write_text("")
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        status, moments = json.loads(self._process.stdout.readline())
        error = (self.directory / ".stderr").read_text(errors="replace")
        assert "Traceback" not in error, error
        return Outcome(os.waitstatus_to_exitcode(status), moments, error)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _serve() -> None:
    import importlib

    from sce.cli import VERBS

    for verb in VERBS:
        importlib.import_module(f"sce.cli.{verb.replace('-', '_')}")
    for name in ("polars", "sce.data.reading", "sce.training.fit", "torch._dynamo"):
        importlib.import_module(name)
    os.chdir(sys.argv[1])
    for line in sys.stdin:
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            _run(json.loads(line), writer)
        os.close(writer)
        status = os.waitpid(child, 0)[1]
        with os.fdopen(reader) as pipe:
            print(json.dumps([status, int(pipe.read() or 0)]), flush=True)


def _run(request: dict[str, Any], report: int) -> NoReturn:
    from sce.cli import main
    from sce.data import storage

    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        place = "/dev/full" if request["full"] == name else f".{name}"
        opened = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    if request["handles"]:
        resource.setrlimit(resource.RLIMIT_NOFILE, 2 * (request["handles"],))
    if not request["exchange"]:
        storage._exchange = lambda *_: False
    act: Act = "refuse" if request["refuse"] else "kill"
    count = count_moments(Path.cwd(), Fault(when=request["when"], act=act))
    code = 1
    with suppress(SystemExit):
        code = main(request["arguments"])
    moments = count()
    with suppress(OSError):
        sys.stdout.flush()
    os.write(report, str(moments).encode())
    os._exit(code)


if __name__ == "__main__":
    _serve()
