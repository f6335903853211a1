"""Four processes over gloo, started once, that run what tests give them."""

import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sce.distributed import Ranks

MOST = 4
Run = Callable[..., list[Any]]


def _serve(rank: int, meeting: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=MOST)
    groups = {size: dist.new_group(list(range(size))) for size in range(2, MOST + 1)}
    while (task := pipe.recv()) is not None:
        work, size, arguments = task
        try:
            pipe.send((work(Ranks(groups.get(size)), *arguments), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))


@contextmanager
def start_pool(meeting: Path) -> Iterator[Run]:
    """Yield a function that runs `work(ranks, *arguments)` on so many ranks."""
    # Imports are made once, by a server, of which the processes are forks.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "sce.distributed"])
    pipes, processes = [], []
    for rank in range(MOST):
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(rank, str(meeting), there), daemon=True)
        process.start()
        pipes.append(here)
        processes.append(process)

    def run(size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        for pipe in pipes[:size]:
            pipe.send((work, size, arguments))
        found = [pipe.recv() for pipe in pipes[:size]]
        faults = [f"rank {rank}: {fault}" for rank, (_, fault) in enumerate(found) if fault]
        assert not faults, "\n".join(faults)
        return [result for result, _ in found]

    yield run
    for pipe in pipes:
        pipe.send(None)
    for process in processes:
        process.join(timeout=20)
        process.kill()
