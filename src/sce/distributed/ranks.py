"""The processes that train together: start, collectives, and who is missing when one fails."""

import itertools
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from sce.errors import InputError, RankError

TIMEOUT = 120.0  # seconds that a rank waits for the others
_SECONDS = "SCE_RANK_TIMEOUT"  # the variable that says other ones
_GROUPS = itertools.count()  # those of one process after another have keys of their own
_PATIENCE = 1.0  # seconds in which the ranks that are left answer, once one is missing
_ASKED, _VERDICT = "asked", "verdict"  # keys in the store


class Ranks:
    """R processes and the collectives between them; without a group, this process alone.

    Every collective is an exchange of rows, whose order is that of the ranks, so that sums over
    ranks are made in one order on any network. It takes place on `device`, and waits `timeout`
    seconds. In `reports` ranks say why they end, and who is left (see `start_ranks`).
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        reports: Store | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        self.group, self.device, self.reports = group, torch.device(device), reports
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        backends = "" if group is None else dist.get_backend_config(group)
        if group is not None and f"{self.device.type}:" not in backends:
            what = f"the process group has no backend for {self.device}, but {backends}"
            raise InputError(f"{what}; name another device, or make the group with one")
        # Where numbers that the host knows are exchanged; if it can be there, no device waits.
        self.host = torch.device("cpu") if "cpu:" in backends else self.device
        self.timeout = timeout
        self.bytes_sent = 0  # to other ranks, so far
        self.exchanges = 0  # begun so far, as many on every rank

    def exchange(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Send the first rows to rank 0, the next to rank 1, ...; return what came, by rank."""
        if self.size == 1:
            return rows
        self.exchanges += 1
        rows = rows.contiguous()
        there = len(rows) - send[self.rank]
        self.bytes_sent += there * rows[:1].numel() * rows.element_size()
        received = rows.new_empty(sum(receive), *rows.shape[1:])
        try:
            self._all_to_all(received, rows, receive, send)
        except RuntimeError as error:
            raise RankError(self._missing(error)) from error
        return received

    def _all_to_all(
        self, received: Tensor, rows: Tensor, receive: list[int], send: list[int]
    ) -> None:
        dist.all_to_all_single(received, rows, receive, send, group=self.group)

    def gather(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Return the rows of all ranks, by rank; `counts` says how many each has."""
        n = len(rows)
        return self.exchange(torch.cat([rows] * self.size), [n] * self.size, counts)

    def gather_counts(self, *numbers: int) -> list[list[int]]:
        """Return the numbers of each rank: a sync if the backend is NCCL alone."""
        own = torch.tensor([numbers]).to(self.host, non_blocking=True)
        found: list[list[int]] = self.gather(own, [1] * self.size).tolist()
        return found

    def gather_json(self, value: Any) -> list[Any]:
        """Return the value of each rank, each as JSON holds it."""
        text = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=self.host)
        counts = [n for (n,) in self.gather_counts(len(text))]
        parts = self.gather(text, counts).cpu().split(counts)
        return [json.loads(bytes(part.tolist())) for part in parts]

    def sum_gradients(
        self, parameters: Iterable[nn.Parameter], so_far: list[Tensor] | None = None
    ) -> list[Tensor]:
        """Replace gradients of replicated parameters by their sums over ranks, and return these.

        They are added up in rank order, to the sums `so_far` if there are any. Each rank adds up
        one part of all numbers: every rank has the same bits afterwards.
        """
        trained = [p for p in parameters if p.requires_grad]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        if self.size == 1:
            sums = grads
            if so_far is not None:
                sums = [one + other for one, other in zip(so_far, grads, strict=True)]
        else:
            flat = _flatten(grads, self.size)
            counts = [flat.shape[1]] * self.size
            parts = self.exchange(flat.flatten(), counts, counts).view_as(flat)
            if so_far is not None:
                parts = torch.cat([_flatten(so_far, self.size)[self.rank :][:1], parts])
            every = self.gather(add_in_order(parts), counts)
            sizes = [p.numel() for p in trained]
            cut = every[: sum(sizes)].split(sizes)
            sums = [part.view_as(p).clone() for part, p in zip(cut, trained, strict=True)]
        for p, total in zip(trained, sums, strict=True):
            p.grad = total
        return sums

    def _missing(self, error: RuntimeError) -> str:
        """Say which ranks are missing, and why those ended that said so: one sentence for all."""
        first = str(error).strip().partition("\n")[0]
        found = f"another rank ended or does not answer: {first}"
        if self.reports is None:
            return found
        others = {rank for rank in range(self.size) if rank != self.rank}
        with suppress(RuntimeError):  # with the rank or launcher that holds the store
            self.reports.set(_ASKED, "")
            until = time.monotonic() + _PATIENCE
            while time.monotonic() < until and not self.reports.check([_VERDICT]):
                if all(self._told("ended", rank) or self._told("alive", rank) for rank in others):
                    break
                time.sleep(0.1)
            found = self.reports.compare_set(_VERDICT, "", self._judge(others, first)).decode()
        return found

    def _judge(self, others: set[int], first: str) -> str:
        """Those that ended or are not there are missing, else those that have not come."""
        ended = {rank: reason for rank in others if (reason := self._told("ended", rank))}
        alive = {rank: int(n) for rank in others if (n := self._told("alive", rank))}
        told = [f"rank {rank} ended: {reason}" for rank, reason in ended.items()]
        if silent := others - set(ended) - set(alive):
            told.append(f"no answer from {_name(silent)}: killed, stopped, or cut off")
        late = {rank for rank, begun in alive.items() if begun < self.exchanges}
        if not told and late and "timed out" in first.lower():
            told.append(
                f"{_name(late)} is alive, but did not come within {self.timeout:g} s: slow, or "
                f"stuck; {_SECONDS}={10 * self.timeout:g} in the environment waits longer"
            )
        return "; ".join(told) or f"a collective of {self.size} ranks failed: {first}"

    def _told(self, what: str, rank: int) -> str:
        assert self.reports is not None
        key = f"{what} {rank}"
        return self.reports.get(key).decode() if self.reports.check([key]) else ""

    def answer(self, over: threading.Event) -> None:
        """Until it is over, wait for a rank to ask who is alive, and say how far this one is."""
        assert self.reports is not None
        with suppress(RuntimeError):  # the store is gone
            while not over.wait(_PATIENCE / 4):
                if self.reports.check([_ASKED]):
                    self.reports.set(f"alive {self.rank}", str(self.exchanges))
                    return


def _name(ranks: Iterable[int]) -> str:
    return f"rank {', '.join(map(str, sorted(ranks)))}"


def _flatten(tensors: list[Tensor], parts: int) -> Tensor:
    """Lay out all numbers as parts of equal size, with zeros behind them: [parts, n]."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    n = -(-len(flat) // parts)
    return nn.functional.pad(flat, (0, n * parts - len(flat))).view(parts, n)


def add_in_order(parts: Tensor) -> Tensor:
    """Add up parts [R, ...], the first two first."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def in_torchrun() -> bool:
    """True if this process is one of several that `torchrun` started."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def note_start(place: Path) -> None:
    """Let later attempts of this launch know what is at a place, where a run is now begun."""
    with suppress(RuntimeError):  # the launcher is gone
        if (store := _launcher()) is not None:
            store.set(f"sce began {place.absolute()}", _inode(place))


def was_started(place: Path | str) -> bool:
    """True if torchrun has started this command again, after an attempt that began a run there."""
    place = Path(place)
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" or not place.exists():
        return False
    with suppress(RuntimeError):
        if (store := _launcher()) is not None:
            key = f"sce began {place.absolute()}"
            return store.check([key]) and store.get(key).decode() != _inode(place)
    return True  # as far as one can know


def _launcher() -> Store | None:
    """The store of a launcher, which outlives the attempts; None if nobody holds one."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(host, port, timeout=timedelta(seconds=_timeout()), wait_for_workers=False)


def _inode(place: Path) -> str:
    return str(place.stat().st_ino) if place.exists() else ""


@contextmanager
def start_ranks(
    *, timeout: float | None = None, device: torch.device | str | None = None
) -> Iterator[Ranks]:
    """Join the other processes of a `torchrun`, for the block; outside of one, stay alone.

    A process group that is there already is used as it is. A rank that torchrun starts again after
    a failure finds the others: addresses of each attempt have keys of their own in the launcher's
    store. A rank that ends by an exception leaves the reason to the others.

    Args:
        timeout: Seconds that a rank waits for the others, at the start and in a collective, before
            a RankError. By default what SCE_RANK_TIMEOUT says in the environment, or 120.
        device: Where the ranks compute. By default a GPU each, shared where there are fewer.
    """
    given = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    rank, size, local, here = (int(os.environ.get(name, n)) for name, n in given.items())
    gpus = torch.cuda.device_count()
    if device is None:
        device = f"cuda:{local % gpus}" if gpus else "cpu"
    device = torch.device(device)
    if dist.is_initialized() or size == 1:
        if dist.is_initialized() and device.type == "cuda":
            torch.cuda.set_device(device)  # where kernels are launched
        yield Ranks(dist.group.WORLD if dist.is_initialized() else None, device)
        return
    seconds = _timeout() if timeout is None else timeout
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # NCCL wants a GPU each, and has no way for what is on the host.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and gpus >= here else "gloo"
    keys = _meet(rank, size, backend, seconds)
    ranks = Ranks(dist.group.WORLD, device, keys, seconds)
    over = threading.Event()
    answering = threading.Thread(target=ranks.answer, args=(over,), daemon=True)
    answering.start()
    try:
        yield ranks
    except BaseException as error:
        if not isinstance(error, RankError):
            with suppress(RuntimeError):  # the store may be gone
                keys.set(f"ended {rank}", str(error) or type(error).__name__)
        raise
    finally:
        over.set()
        answering.join()
        dist.destroy_process_group()


def _timeout() -> float:
    text = os.environ.get(_SECONDS, str(TIMEOUT))
    with suppress(ValueError):
        if 0 < float(text) < 1e6:
            return float(text)
    raise InputError(f"{_SECONDS} is a number of seconds; got {text!r}")


def _meet(rank: int, size: int, backend: str, seconds: float) -> Store:
    """Make the process group; return the store of this attempt's keys."""
    wait = timedelta(seconds=seconds)
    # The launcher holds the store, or rank 0 where nobody else does.
    held = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    come = set(range(size))
    try:
        store = TCPStore(
            host, port, size, rank == 0 and not held, timeout=wait, wait_for_workers=False
        )
        keys = PrefixStore(f"sce attempt {attempt} group {next(_GROUPS)}", store)
        keys.set(f"here {rank}", "")
        dist.init_process_group(backend, store=keys, rank=rank, world_size=size, timeout=wait)
    except RuntimeError as error:
        with suppress(RuntimeError):
            come = {each for each in range(size) if keys.check([f"here {each}"])}
        if missing := set(range(size)) - come:
            raise RankError(f"{_name(missing)} did not start within {seconds:g} s") from error
        first = str(error).strip().partition("\n")[0]
        raise RankError(f"ranks cannot reach each other at {host}:{port}: {first}") from error
    return keys
