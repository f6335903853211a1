"""Processes over gloo, started once, that run what tests give them."""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sce.distributed import Ranks

KILLED = "killed"
Run = Callable[..., list[Any]]


def _serve(rank: int, most: int, meeting: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.fsync = lambda descriptor: None  # takes most of the time, and shows in no test
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=most)
    groups = {size: dist.new_group(list(range(size))) for size in range(2, most + 1)}
    while (task := pipe.recv()) is not None:
        work, size, arguments = task
        try:
            pipe.send((work(Ranks(groups.get(size)), *arguments), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))


@contextmanager
def start_pool(meeting: Path, most: int = 4) -> Iterator[Run]:
    """Yield a function that runs `work(ranks, *arguments)` on so many ranks: the result of each."""
    # Imports are made once, by a server, of which the processes are forks.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "sce.distributed"])
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
