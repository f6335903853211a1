"""Processes over gloo, started once, that run what tests give them."""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from sce.distributed import Ranks
from tests.losses.kernels.interpreter import hasten

KILLED = "killed"
Run = Callable[..., list[Any]]


def _serve(rank: int, most: int, meeting: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    hasten()
    os.fsync = lambda fd: None  # takes most of the time, and shows in no test
    patience = timedelta(seconds=30)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=most, timeout=patience
    )
    groups = {n: dist.new_group(list(range(n)), timeout=patience) for n in range(2, most + 1)}
    while (task := pipe.recv()) is not None:
        work, size, arguments = task
        try:
            pipe.send((work(Ranks(groups.get(size)), *arguments), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))


def forks() -> Any:
    """Return a context whose processes are forks of a server, which makes imports once."""
    context = multiprocessing.get_context("forkserver")
    first = ["torch._dynamo", "torch.distributed.launcher.api", "triton", "pytest"]
    first += ["torch.distributed.elastic.rendezvous.c10d_rendezvous_backend", "sce.cli.train"]
    context.set_forkserver_preload(first)
    return context


def hold_store() -> TCPStore:
    """Hold a store, as a launcher does."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def run_launched(
    size: int,
    work: Callable[..., None],
    *arguments: Any,
    held: bool = True,
    store: TCPStore | None = None,
) -> list[int]:
    """Run `work(rank, *arguments)` in processes that find each other as torchrun's do.

    With `held` their store is here, as torchrun holds it, else on rank 0; `store`, if it is that
    of another attempt.
    """
    store = store or hold_store()
    port = store.port
    if not held:
        del store
    given = [(rank, size, port, held, work, arguments) for rank in range(size)]
    processes = [forks().Process(target=_launch, args=each, daemon=True) for each in given]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def _launch(
    rank: int,
    size: int,
    port: int,
    held: bool,
    work: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(held)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    work(rank, *arguments)


@contextmanager
def start_pool(meeting: Path, most: int = 4) -> Iterator[Run]:
    """Yield a function that runs `work(ranks, *arguments)` on so many ranks: the result of each."""
    context = forks()
    pipes, processes = [], []
    for rank in range(most):
        here, there = context.Pipe()
        given = (rank, most, str(meeting), there)
        process = context.Process(target=_serve, args=given, daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)

    def result(pipe: Connection) -> tuple[Any, str | None]:
        try:
            found: tuple[Any, str | None] = pipe.recv()
        except EOFError:
            return KILLED, None
        return found

    def run(size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        for pipe in pipes[:size]:
            pipe.send((work, size, arguments))
        found = [result(pipe) for pipe in pipes[:size]]
        faults = [f"rank {rank}: {fault}" for rank, (_, fault) in enumerate(found) if fault]
        assert not faults, "\n".join(faults)
        return [each for each, _ in found]

    try:
        yield run
    finally:
        for process in processes:
            process.kill()
            process.join()
