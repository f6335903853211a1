"""A training problem of R slices: by R ranks, and by one process that runs the slices in turn."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from sce import RowwiseAdagrad, ScalableCrossEntropy
from sce.distributed import Ranks, ShardedCrossEntropy, ShardedTable
from sce.evaluation.ranking import rescore
from sce.losses.buckets import of_length_one

Found = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A problem; everything in it follows from these."""

    slices: int
    n_items: int = 500
    dim: int = 16
    rows: int = 6  # histories of a slice
    n_buckets: int = 7
    size_y: int = 24
    kind: str = "random"  # of the table
    empty: tuple[int, ...] = ()  # slices without a target
    candidates: int | None = None
    autocast: bool = False
    dtype: torch.dtype = torch.float32
    settings: dict[str, Any] = field(default_factory=dict)
    max_targets: int | None = None
    steps: int = 10
    device: str = "cpu"

    def table(self) -> Tensor:
        """Return the whole table."""
        g = torch.Generator().manual_seed(1)
        table = torch.randn(self.n_items, self.dim, generator=g)
        if self.kind == "popularity":  # the lower the id, the longer the row
            table *= (4 * torch.arange(1, self.n_items + 1.0) ** -0.4)[:, None]
        if self.kind == "ties":
            table = table[torch.randint(self.n_items // 8 + 1, (self.n_items,), generator=g)]
        if self.kind == "equal":
            table = table[:1].repeat(self.n_items, 1)
        if self.kind == "near":  # scores differ by less than products are rounded
            table = table[:1] * (1 + 2.0**-22 * torch.randn(table.shape, generator=g))
        return table.to(self.device, self.dtype)

    def batch(self, step: int, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return histories and targets [rows, 5] of a slice, and its centres."""
        g = torch.Generator().manual_seed(1000 * step + number)
        histories, targets = torch.randint(self.n_items, (2, self.rows, 5), generator=g)
        padding = torch.arange(5) >= torch.randint(1, 6, (self.rows, 1), generator=g)
        targets = targets.masked_fill(padding | torch.tensor(number in self.empty), -100)
        centres = torch.randn(self.n_buckets, self.dim, generator=g)
        histories = histories.masked_fill(padding, -1)
        return histories.to(self.device), targets.to(self.device), centres.to(self.device)

    def loss(self, **options: Any) -> ScalableCrossEntropy:
        """Make the loss of one process."""
        return ScalableCrossEntropy(bucket_size_y=self.size_y, **self.settings, **options)

    def body(self) -> nn.Linear:
        """Make the backbone, replicated."""
        torch.manual_seed(3)
        return nn.Linear(self.dim, self.dim).to(self.device)

    def rounding(self) -> AbstractContextManager[Any]:
        """Round factors of products to bfloat16, or not."""
        return torch.autocast(self.device, torch.bfloat16) if self.autocast else nullcontext()


def hidden(body: nn.Module, catalogue: Tensor, histories: Tensor) -> Tensor:
    """Compute hidden states, of which the gradient is kept."""
    items = F.embedding(histories.clamp(min=0), catalogue)
    states: Tensor = torch.tanh(body(items.cumsum(1)))
    states.retain_grad()
    return states


def best_items(centres: Tensor, table: Tensor, k: int, dtype: torch.dtype | None) -> Tensor:
    """Look at every item: the k with the largest scores, of equal ones the lowest; ascending."""
    everything = torch.arange(len(table), device=table.device).expand(len(centres), -1)
    scores = rescore(centres.float(), table, everything, dtype)
    order = scores.sort(dim=1, descending=True, stable=True).indices
    return order[:, :k].sort(dim=1).values


def as_ranks(ranks: Ranks, case: Case) -> Found:
    """Train as one of R ranks."""
    ranks = Ranks(ranks.group, case.device)
    table = ShardedTable(case.n_items, case.dim, ranks, dtype=case.dtype)
    table.shard.data = case.table()[ranks.rank :: ranks.size].clone()
    loss = ShardedCrossEntropy(case.loss(), table, case.candidates)
    body, items, settle = case.body(), [], loss.nearest.settle

    def recorded(*given: Any) -> Tensor:
        found = settle(*given)
        items.append(found.cpu())
        return found

    loss.nearest.settle = recorded  # type: ignore[method-assign, assignment]

    def backward(step: int) -> tuple[Tensor, list[Tensor]]:
        histories, targets, centres = case.batch(step, ranks.rank)
        with case.rounding():
            rows = table.look_up(histories)
            states = hidden(body, rows.values, rows.places(histories))
            given = {"centres": centres, "max_targets": case.max_targets}
            value = loss(states, rows, targets, **given)
        value.backward()
        table.send_gradients()
        ranks.sum_gradients(body.parameters())
        assert table.shard.grad is not None
        assert table.shard.grad.is_coalesced()
        return value, [states]

    return train(case, table.shard, body, backward) | {
        "items": items,
        "fallbacks": loss.nearest.fallbacks,
    }


def in_turn(_: Ranks, case: Case) -> Found:
    """Run the slices in turn on the whole table, and add up in their order."""
    table, body = nn.Parameter(case.table()), case.body()
    every: list[Tensor] = []
    loss = case.loss(reduction="sum")

    def backward(step: int) -> tuple[Tensor, list[Tensor]]:
        wide = table.detach().float().requires_grad_()
        totals: list[Tensor] = []
        placed: list[Tensor] = []
        slices: list[Tensor] = []
        for number in range(case.slices):
            histories, targets, centres = case.batch(step, number)
            centres = of_length_one(centres) if loss.coverage else centres
            dtype = torch.bfloat16 if case.autocast else None
            items = best_items(centres, table.detach(), case.size_y, dtype)
            with case.rounding():
                states = hidden(body, wide, histories)
                total, n = loss.in_buckets(states, wide, targets, centres, items)
            every.append(items.cpu())
            for found, one in ((totals, total), (placed, n), (slices, states)):
                found.append(one)
        count = torch.stack(placed).sum().clamp(min=1)
        for total in totals:
            (total / count).backward()
        assert wide.grad is not None
        table.grad = wide.grad.to(table.dtype)
        return sum(totals[1:], totals[0]) / count, slices

    return train(case, table, body, backward) | {"items": every}


def plainly(_: Ranks, case: Case) -> Found:
    """Train as everybody does in one process: a slice is a batch."""
    table, body, loss = nn.Parameter(case.table()), case.body(), case.loss()

    def backward(step: int) -> tuple[Tensor, list[Tensor]]:
        histories, targets, centres = case.batch(step, 0)
        with case.rounding():
            states = hidden(body, table, histories)
            given = {"centres": centres, "max_targets": case.max_targets}
            value = loss(states, table, targets, **given)
        value.backward()
        return value, [states]

    return train(case, table, body, backward)


def train(
    case: Case,
    table: nn.Parameter,
    body: nn.Linear,
    backward: Callable[[int], tuple[Tensor, list[Tensor]]],
) -> Found:
    """Take the steps; return everything that there is to compare."""
    row_wise = RowwiseAdagrad([table], lr=0.1)
    optimizers = [row_wise, torch.optim.Adam(body.parameters())]
    losses, grad_states, grad_table, grad_body = [], [], [], []
    for step in range(case.steps):
        value, slices = backward(step)
        losses.append(value.detach())
        grad_states += [torch.zeros_like(s) if s.grad is None else s.grad for s in slices]
        assert table.grad is not None
        grad_table.append(table.grad.to_dense())
        grad_body += [p.grad.clone() for p in body.parameters() if p.grad is not None]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = {
        "loss": losses,
        "states": grad_states,
        "table": [*grad_table, table.detach(), row_wise.state[table]["sum"]],
        "body": [*grad_body, *(p.detach() for p in body.parameters())],
    }
    return {name: [tensor.cpu() for tensor in tensors] for name, tensors in found.items()}
