"""Do processes that share a catalogue on one GPU give the bits of one process, and do they work?

    python benchmarks/rank_processes.py                                    # a GPU: two minutes
    python benchmarks/rank_processes.py --items 5000 --batch 4 --length 10 --steps 5   # a CPU

torchrun starts 1, 2 and 4 processes, which train SASRec with a sharded table as in
examples/sharded_loop.py. Then the first trains alone on the batches of all, one after another. The
table, its accumulators and the model must be the same in every bit. NCCL wants a GPU for each
process: what these send goes over gloo and the host. Tokens a second show that it works, and
nothing of how it scales: the processes share one GPU. Ends with code 1 if a bit differs.
"""

import argparse
import hashlib
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.func import functional_call

from rows import keep, kept, parser_of, provenance, show
from sce import RowwiseAdagrad, SASRec, ScalableCrossEntropy
from sce.distributed import Ranks, ShardedCrossEntropy, ShardedTable, start_ranks
from sce.training.device import same_bits

DIM, WARM_UP = 64, 3
SIZES = ("items", "batch", "length", "steps")


def main() -> None:
    parser = parser_of(__doc__, "rank_processes", items=1_000_000, batch=64, length=100)
    # A mean over slices is exact for powers of two.
    parser.add_argument("--processes", type=int, nargs="+", choices=[1, 2, 4], default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=20, help=f"after {WARM_UP} of warm-up")
    parser.add_argument("--one-of-them", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one_of_them:
        work(options)
        return
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    for processes in options.processes:
        again = [str(processes), __file__, "--one-of-them", *sys.argv[1:]]
        subprocess.run([*launch, *again], check=True)
    columns = ["processes", "same bits", "tokens/s", "tokens/s in turn", "MB sent a step"]
    rows = [row for row in kept("rank_processes", to=options.out) if is_of(row, options)]
    print(show(rows, columns))
    sys.exit(not all(row["same bits"] for row in rows))


def is_of(row: dict[str, object], options: argparse.Namespace) -> bool:
    """True if a row was measured with these options."""
    same = all(row[size] == getattr(options, size) for size in SIZES)
    return same and row["processes"] in options.processes


def work(options: argparse.Namespace) -> None:
    """Train as one of the processes; the first one compares."""
    with start_ranks() as ranks, same_bits(ranks.device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what has no deterministic form
        speed, shard, weights = train(ranks, [ranks.rank], options)
        found = [digest(shard), digest(weights)]
        row = {size: getattr(options, size) for size in SIZES}
        row |= {"processes": ranks.size, "tokens/s": round(speed)}
        row["MB sent a step"] = round(ranks.bytes_sent / 1e6 / (WARM_UP + options.steps), 2)
        if ranks.rank == 0:
            alone, slices = Ranks(device=ranks.device), range(ranks.size)
            speed, table, weights = train(alone, slices, options)
            row["tokens/s in turn"] = round(speed)
            parts = ([tensor[rank :: ranks.size] for tensor in table] for rank in slices)
            expected = [[digest(part), digest(weights)] for part in parts]
        every = ranks.gather_json(found)
        if ranks.rank == 0:
            row |= {"same bits": every == expected, **provenance("torch", "triton")}
            keep("rank_processes", [row], to=options.out, beside=(*SIZES, "processes", "machine"))
            print(row, flush=True)


def train(
    ranks: Ranks, slices: Iterable[int], options: argparse.Namespace
) -> tuple[float, list[Tensor], list[Tensor]]:
    """Train on slices of each step, one for each process; or alone on all of them, in turn.

    Returns:
        Tokens a second of all ranks; the shard with its accumulators; the model.
    """
    device, slices = ranks.device, list(slices)
    table = ShardedTable(options.items, DIM, ranks)
    model = SASRec(1, dim=DIM, max_length=options.length).to(device)
    weights = [weight for name, weight in model.named_parameters() if name != "catalogue"]
    loss = ShardedCrossEntropy(ScalableCrossEntropy(bucket_size_y=256), table)
    adagrad, adam = RowwiseAdagrad([table.shard], lr=0.03), torch.optim.Adam(weights)
    total, shape = ranks.size * len(slices), (options.batch, options.length + 1)
    for step in range(WARM_UP + options.steps):
        if step == WARM_UP:
            ranks.gather_counts(0)  # all are here
            begun = time.perf_counter()
        for number in slices:
            torch.manual_seed(total * step + number)  # dropout and centres too
            events = torch.randint(options.items, shape).to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                targets = events[:, 1:]
                rows = loss.look_up(events, targets)
                known = {"catalogue": rows.values}
                states = functional_call(model, known, rows.places(events[:, :-1]))
                value = loss(states, rows, targets) / len(slices)
            value.backward()
        table.send_gradients()
        ranks.sum_gradients(weights)
        for optimizer in (adagrad, adam):
            optimizer.step()
            optimizer.zero_grad()
    value.item()
    speed = options.steps * total * options.batch * options.length / (time.perf_counter() - begun)
    return speed, [table.shard, adagrad.state[table.shard]["sum"]], [*weights]


def digest(tensors: Iterable[Tensor]) -> str:
    """Hash the bits of tensors."""
    found = hashlib.blake2b()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().numpy().data)
    return found.hexdigest()


if __name__ == "__main__":
    main()
