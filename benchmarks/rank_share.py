"""What does one of R ranks that share a catalogue have to do in a step, and how long does it take?

    python benchmarks/rank_share.py                                          # an H200: one minute
    python benchmarks/rank_share.py --items 200_000 --ranks 8 --batch 8 --length 20 --device cpu

One GPU does the whole share of one rank: C/R rows, the centres of all ranks, the merge of what all
would send, buckets, gradients home, and the update of its rows. Nothing is sent: in place of what
other ranks would send come its own numbers, changed such that there is as much to do (other
centres, items of other shards). The time of each phase is by the GPU's clock, median of the steps,
and holds the host's part where the GPU waits for it. Beside it is what `sce plan --gpus` models:
time of scoring and selecting, and of sending with two kinds of network. Bytes are counted where
they would be sent, and compared with the formulas, in which no row is asked for twice.
"""

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from rows import keep, parser_of, provenance, show
from sce import RowwiseAdagrad, SASRec, ScalableCrossEntropy
from sce.distributed import Ranks, ShardedCrossEntropy, ShardedTable, nearest
from sce.distributed.plan import LINKS, RankPlan, plan_ranks
from sce.models.sasrec import SASRecSettings
from sce.planning import Job
from sce.training.device import PeakMemory, resolve_device

DIM, WARM_UP = 64, 3
LOSS: dict[str, Any] = {"alpha": 2.0, "bucket_size_y": 256}  # the default of huge catalogues
SIZES = ("items", "ranks", "batch", "length", "dtype", "at_once")
Row = dict[str, Any]


class OneOf(Ranks):
    """One of several ranks, without the others."""

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__(device=device)
        self.size = size

    def gather(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Return as many rows as of all ranks."""
        found = super().gather(rows, counts)
        if rows.shape[1:] != (DIM,):
            return found
        # Centres: each rank's are others, as long, and none is near to rows of this shard alone.
        return torch.cat([part.flip(1).roll(n, 1) for n, part in enumerate(found.split(counts))])

    def _all_to_all(
        self, received: Tensor, rows: Tensor, receive: list[int], send: list[int]
    ) -> None:
        received.copy_(rows)
        if rows.dtype == torch.int64 and rows[:1].numel() > 1:
            # Keys hold the complement of an id: those of each rank are of its own items.
            ranks = torch.arange(self.size, device=rows.device)
            received -= ranks.repeat_interleave(len(rows) // self.size).unsqueeze(1)


class Clock:
    """Milliseconds of phases in each step, by the clock of the device."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.marks: dict[str, list[tuple[Any, Any]]] = defaultdict(list)  # of the step under way
        self.steps: list[dict[str, float]] = []

    def now(self) -> Any:
        """Mark a moment."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block."""
        begun = self.now()
        yield
        self.marks[name].append((begun, self.now()))

    def watch(self, owner: Any, function: str, name: str) -> None:
        """Time all calls of a function."""
        call: Callable[..., Any] = getattr(owner, function)

        def timed(*given: Any, **options: Any) -> Any:
            with self.phase(name):
                return call(*given, **options)

        setattr(owner, function, timed)

    def end_step(self) -> None:
        """Wait for the device, and add up each phase."""
        if self.on_gpu:
            torch.cuda.synchronize()
        self.steps.append({name: sum(map(self._ms, pairs)) for name, pairs in self.marks.items()})
        self.marks.clear()

    def _ms(self, pair: tuple[Any, Any]) -> float:
        begun, ended = pair
        return float(begun.elapsed_time(ended) if self.on_gpu else 1000 * (ended - begun))

    def medians(self) -> dict[str, float]:
        """Return the median of each phase."""
        steps = self.steps[WARM_UP:]
        return {name: statistics.median(step[name] for step in steps) for name in steps[0]}


def main() -> None:
    sizes = {"items": [10**8, 10**9], "ranks": [8, 64], "batch": 128, "length": 200}
    parser = parser_of(__doc__, "rank_share", **sizes, steps=7, device="auto")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--at-once", type=int, default=nearest._CENTRES_AT_ONCE, help="centres")
    options = parser.parse_args()
    device, found = resolve_device(options.device), []
    nearest._CENTRES_AT_ONCE = options.at_once
    for items in options.items:
        for ranks in options.ranks:
            cell = {size: getattr(options, size) for size in SIZES}
            row = measure(cell | {"items": items, "ranks": ranks}, options.steps, device)
            found.append(row)
            keep("rank_share", [row | provenance("torch", "triton")], to=options.out, beside=SIZES)
            print("\n".join(f"{name}: {value}" for name, value in row.items()), end="\n\n")
    columns = ["step ms", "selection ms", "modelled selection ms", "MB", "MB by the formulas"]
    links = [f"{what} {name}" for name in LINKS for what in ("ms by", "tokens/s by")]
    print(show(found, ["items", "ranks", *columns, *links, "fallbacks", "peak MiB"]))


def measure(cell: Row, steps: int, device: torch.device) -> Row:
    """Take the steps of one rank."""
    gc.collect()  # the table of the cell before
    torch.manual_seed(0)
    ranks, clock, memory = OneOf(cell["ranks"], device), Clock(device), PeakMemory(device)
    with memory.phase():
        table = make_table(cell, ranks)
        loss = ShardedCrossEntropy(ScalableCrossEntropy(**LOSS), table)
        watch(clock, loss)
        work = make_step(cell, table, loss, clock)
        for _ in range(WARM_UP + steps):
            ranks.bytes_sent = 0
            asked = work()
            clock.end_step()
    settings = SASRecSettings(dim=DIM, max_length=cell["length"])
    job = Job(cell["items"], cell["batch"], settings, "bf16", LOSS)
    plan, ms = plan_ranks(job, cell["ranks"]), clock.medians()
    whole = ms.pop("step")
    inside = ("keys", "merge", "rows of buckets", "buckets")
    ms["rest of the loss"] = ms.pop("loss") - sum(ms[name] for name in inside)
    ms["norm and bounds"] = ms.pop("keys") - ms["selection"] - ms["scores"]
    formula = formulas(cell, plan, table.shard.element_size())
    tokens = cell["batch"] * cell["length"] * cell["ranks"]
    network = {name: 1e3 * ranks.bytes_sent / speed for name, speed in LINKS.items()}
    return cell | {
        "rows": plan.rows,
        "centres": plan.ranks * plan.sizes["n_buckets"],
        "bucket_size_y": plan.sizes["bucket_size_y"],
        "candidates": plan.candidates,
        "step ms": round(whole, 2),
        **{f"{name} ms": round(value, 3) for name, value in ms.items()},
        "modelled selection ms": round(plan.pass_ms + plan.selecting_ms, 2),
        "MB": round(ranks.bytes_sent / 1e6, 2),
        "MB by the formulas": round(sum(formula.values()) / 1e6, 2),
        "MB of each": {name: round(size / 1e6, 2) for name, size in formula.items()},
        "MB planned": round(sum(plan.sends.values()) / 1e6, 2),
        "rows asked for, of places": round(asked, 3),
        **{f"ms by {name}": round(value, 2) for name, value in network.items()},
        **{f"tokens/s by {n}": round(1e3 * tokens / (whole + v)) for n, v in network.items()},
        "fallbacks": loss.nearest.fallbacks,
        "peak MiB": round(memory.peak()),
        "planned MiB": round(sum(plan.holds.values()) / 2**20),
    }


def make_table(cell: Row, ranks: Ranks) -> ShardedTable:
    """Make a shard of random rows, where they are used: new ones would be drawn by all ranks."""
    dtype = getattr(torch, cell["dtype"])
    table = ShardedTable(1, DIM, ranks, dtype=dtype, rows=torch.empty(1, DIM))
    table.n_items = cell["items"]
    rows = -(-cell["items"] // cell["ranks"])
    table.shard.data = torch.empty(rows, DIM, dtype=dtype, device=ranks.device).normal_(0, 0.1)
    return table


def watch(clock: Clock, loss: ShardedCrossEntropy) -> None:
    """Time the phases inside of the loss."""
    clock.watch(loss.nearest, "_keys", "keys")
    clock.watch(loss.nearest, "_candidates", "selection")
    clock.watch(loss.nearest, "_pack", "scores")
    clock.watch(loss.nearest, "_merge", "merge")
    clock.watch(loss, "_fetch", "rows of buckets")
    clock.watch(loss._local, "in_buckets", "buckets")


def make_step(
    cell: Row, table: ShardedTable, loss: ShardedCrossEntropy, clock: Clock
) -> Callable[[], float]:
    """Return a step as of examples/sharded_loop.py, which returns the share of rows asked for."""
    ranks, device = table.ranks, table.ranks.device
    model = SASRec(1, dim=DIM, max_length=cell["length"]).to(device)
    weights = [weight for name, weight in model.named_parameters() if name != "catalogue"]
    # A step moves the rows that all ranks asked for, but of one shard: hardly, to leave it random.
    optimizers = [RowwiseAdagrad([table.shard], lr=1e-9), torch.optim.Adam(weights)]
    shape = (cell["batch"], cell["length"] + 1)
    rounding = torch.autocast(device.type, torch.bfloat16)

    def step() -> float:
        events = torch.randint(cell["items"], shape, device=device)
        histories, targets = events[:, :-1], events[:, 1:]
        with clock.phase("step"):
            with clock.phase("look-up"):
                rows = loss.look_up(events, targets)
            with clock.phase("model"), rounding:
                known = {"catalogue": rows.values}
                states = functional_call(model, known, rows.places(histories))
            with clock.phase("loss"), rounding:
                value = loss(states, rows, targets)
            asked = sum(len(fetch.values) for fetch in table._fetches)
            with clock.phase("backward"):
                value.backward()
            with clock.phase("gradients home"):
                table.send_gradients()
            with clock.phase("gradients of the model"):
                ranks.sum_gradients(weights)
            with clock.phase("update"):
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        n_buckets, _, size_y = loss.loss.sizes(cell["items"], targets.numel())
        return asked / (events.numel() + n_buckets * size_y)

    return step


def formulas(cell: Row, plan: RankPlan, size: int) -> dict[str, float]:
    """Bytes that a rank sends, where rows and centres have numbers of so many bytes."""
    others, away = plan.ranks - 1, (plan.ranks - 1) / plan.ranks
    n_buckets = plan.sizes["n_buckets"]
    states, places = cell["batch"] * cell["length"], n_buckets * plan.sizes["bucket_size_y"]
    return {
        "look-up": away * states * (DIM * size + 4),
        "centres": others * n_buckets * DIM * 2,  # in bfloat16
        "candidates": others * n_buckets * (plan.candidates + 1) * 8,
        "rows of buckets": away * places * (DIM * size + 4),
        "gradients of rows": away * (places + states) * 4 * DIM,
        "gradients of the model": plan.sends["gradients of the model"],
    }


if __name__ == "__main__":
    main()
