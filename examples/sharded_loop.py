"""A sharded catalogue in a loop of one's own: torchrun --nproc-per-node 2 examples/sharded_loop.py.

Each rank holds a part of the item table, and trains on its own batches. With another number of
ranks the same table is trained on more, or fewer, batches a step.
"""

import torch
from torch import Tensor
from torch.func import functional_call

from sce import RowwiseAdagrad, SASRec, ScalableCrossEntropy
from sce.distributed import ShardedCrossEntropy, ShardedTable, sharded_top_k, start_ranks

N_ITEMS, DIM, LENGTH, STEPS = 5_000, 32, 10, 30


def batch(seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Make histories in which every item is followed by the next; targets are one ahead."""
    generator = torch.Generator().manual_seed(seed)
    items = torch.randint(200, (32, 1), generator=generator) + torch.arange(LENGTH + 1)
    return items[:, :-1].to(device), items[:, 1:].to(device)


with start_ranks() as ranks:
    table = ShardedTable(N_ITEMS, DIM, ranks)
    model = SASRec(1, dim=DIM, max_length=LENGTH).to(ranks.device)  # on rows that are looked up
    weights = [weight for name, weight in model.named_parameters() if name != "catalogue"]
    loss = ShardedCrossEntropy(ScalableCrossEntropy(bucket_size_y=128), table)
    optimizers = [RowwiseAdagrad([table.shard], lr=0.1), torch.optim.Adam(weights, lr=3e-3)]
    for step in range(STEPS):
        seed = step * ranks.size + ranks.rank
        torch.manual_seed(seed)  # dropout and centres: other ones on each rank
        histories, targets = batch(seed, ranks.device)
        rows = loss.look_up(histories, targets)
        states = functional_call(model, {"catalogue": rows.values}, rows.places(histories))
        value = loss(states, rows, targets)
        value.backward()
        table.send_gradients()
        ranks.sum_gradients(weights)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        histories, targets = batch(-1 - ranks.rank, ranks.device)
        rows = table.look_up(histories)
        states = functional_call(model.eval(), {"catalogue": rows.values}, rows.places(histories))
        found = sharded_top_k(states[:, -1], table, 10).items
    hits = (found == targets[:, -1:]).any(1).float().mean()
    print(f"rank {ranks.rank} of {ranks.size}: loss {value.item():.3f}, hit rate@10 {hits:.2f}")
