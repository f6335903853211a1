"""`torchrun -m sce`, of which one process is hurt at a counted moment.

The launcher is torchrun's own. It is a fork of a server, which makes imports once, and so are its
processes. Moments are calls that change files, told by Python's audit events, and both ends of
torch's collectives, so that no function of sce needs to be known here.
"""

import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from errno import ENOSPC
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from tests.distributed.pool import forks

HANGS = 60.0  # seconds after which a launch is said to hang
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_OTHERS = ("os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link")
_COLLECTIVES = ("init_process_group", "all_to_all_single", "destroy_process_group")


Act = Literal["kill", "stop", "sleep", "refuse", "fill", "limit"]


@dataclass(frozen=True)
class Fault:
    """What happens to a rank, from the first to the last attempt that is hurt."""

    rank: int = -1
    when: int = 0
    """Number of the moment."""
    act: Act = "kill"
    """Refuse: the disk is said to be full, once. Fill: from then on no space is left. Limit: no
    file may have more than `when` bytes."""
    seconds: float = 0.0
    """Of sleep."""
    attempts: int = 1


@dataclass(frozen=True)
class Outcome:
    """What became of a launch."""

    well: bool
    launcher: str  # why not
    said: list[str]  # by each rank, in its last attempt
    moments: list[int]  # of each rank that ended by itself, else 0
    seconds: float


def launch(
    place: Path,
    arguments: Sequence[str],
    fault: Fault | None = None,
    *,
    size: int = 2,
    restarts: int = 0,
    timeout: float = 30.0,
    before: Callable[[], None] | None = None,
) -> Outcome:
    """Run `sce ARGUMENTS` in `place` by so many ranks, and wait for all of them to end.

    Args:
        place: Where.
        arguments: Of the command.
        fault: What happens to one of them.
        size: Number of ranks.
        restarts: Attempts after the first that failed.
        timeout: Seconds that a rank waits for the others.
        before: Called by each rank, before the command.
    """
    for left in place.glob(".rank-*"):
        left.unlink()
    files = [place / ".launcher", *(place / f".rank-{rank}" for rank in range(2 * size))]
    for file in files:
        file.write_text("")
    given = place, [*arguments], fault or Fault(), size, restarts, timeout, before
    launcher = forks().Process(target=_launch, args=given)
    begun = time.monotonic()
    launcher.start()
    launcher.join(HANGS)
    if hangs := launcher.is_alive():
        launcher.terminate()
        launcher.join()
    seconds = time.monotonic() - begun
    text, *ranks = (file.read_text(errors="replace") for file in files)
    counts = [int(n or 0) for n in ranks[size:]]
    found = Outcome(launcher.exitcode == 0, text, ranks[:size], counts, seconds)
    assert not hangs, found
    assert not any("Traceback" in said for said in found.said), found
    return found


def _launch(
    place: Path,
    arguments: list[str],
    fault: Fault,
    size: int,
    restarts: int,
    timeout: float,
    before: Callable[[], None] | None,
) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.environ["SCE_RANK_TIMEOUT"] = str(timeout)
    newer: Any = {"shutdown_timeout": 5} if hasattr(LaunchConfig, "shutdown_timeout") else {}
    config = LaunchConfig(
        *(1, 1, size),
        run_id="faults",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(log_dir=str(place / ".elastic")),
        **newer,
    )
    try:
        elastic_launch(config, _rank)(place, arguments, fault, size, before)
    except ChildFailedError as error:
        (place / ".launcher").write_text(str(error))
        sys.exit(1)


def _rank(
    place: Path,
    arguments: list[str],
    fault: Fault,
    size: int,
    before: Callable[[], None] | None,
) -> None:
    from sce.cli import main

    if before is not None:
        before()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # those of the launcher came with the fork
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(place)
    rank = int(os.environ["RANK"])
    for name, descriptor in ((f".rank-{rank}", 2), (os.devnull, 1)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_TRUNC), descriptor)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        time.sleep(rank)  # the first one must not meet a predecessor
    count = hurt(place, fault)
    code = main(arguments)
    moments = count()
    (place / f".rank-{size + rank}").write_text(str(moments))
    if code or _note(place).exists():
        os._exit(code)  # else the launcher makes it wait for the one that was killed


def _note(place: Path) -> Path:
    """A file that is there if a rank was killed in this attempt."""
    return place / f".rank-killed-{os.environ['TORCHELASTIC_RESTART_COUNT']}"


def hurt(here: Path, fault: Fault) -> Callable[[], int]:
    """Let the fault come to this process, if it is the rank; return what counts the moments."""
    due = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < fault.attempts
    due = due and int(os.environ["RANK"]) == fault.rank
    if due and fault.act == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, 2 * (fault.when,))
    return count_moments(here, fault if due else Fault(), _note(here))


def count_moments(here: Path, fault: Fault, note: Path | None = None) -> Callable[[], int]:
    """Hurt this process at a moment; return a function that counts them, and ends that.

    Args:
        here: Where calls that change files count.
        fault: What happens.
        note: A file to write before the process is killed.
    """
    seen, over, sync = 0, False, os.fsync

    def reached(*, needs_space: bool = False) -> None:
        nonlocal seen, over
        seen += not over
        full = fault.act == "fill" and 0 < fault.when <= seen and needs_space
        if not over and (full or (fault.act == "refuse" and seen == fault.when)):
            raise OSError(ENOSPC, "No space left on device")
        if seen != fault.when or over:
            return
        if fault.act == "sleep":
            time.sleep(fault.seconds)
        elif fault.act in ("kill", "stop"):
            over = fault.act == "kill"
            if over and note is not None:
                note.touch()
            os.kill(os.getpid(), signal.SIGKILL if over else signal.SIGSTOP)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "os.mkdir" or (event == "open" and arguments[2] & _WRITES)
        if event == "ctypes.dlsym" and "renameat2" in arguments:
            reached()
        # Names relative to a directory's descriptor are of `shutil.rmtree`.
        elif (writes or event in _OTHERS) and not isinstance(arguments[0], int):
            place = os.fsdecode(arguments[0])
            if not place.startswith("/") or place.startswith(str(here)):
                reached(needs_space=bool(writes))

    def synced(fd: Any) -> None:
        reached(needs_space=True)
        sync(fd)

    def at_both_ends(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **options: Any) -> Any:
            reached()
            found = call(*given, **options)
            reached()
            return found

        return counted

    def end() -> int:
        nonlocal over
        over = True
        return seen

    os.fsync = synced
    for name in _COLLECTIVES:
        setattr(dist, name, at_both_ends(getattr(dist, name)))
    sys.addaudithook(hook)
    return end
