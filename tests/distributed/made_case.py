"""A training problem of R slices: by R ranks, and by one process that runs the slices in turn."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from sce import RowwiseAdagrad, ScalableCrossEntropy
from sce.distributed import Ranks, ShardedCrossEntropy, ShardedTable
from sce.evaluation.ranking import rescore
from sce.losses.buckets import of_length_one

STEPS = 10


@dataclass(frozen=True)
class Case:
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
    steps: int = STEPS

    def table(self) -> Tensor:
        g = torch.Generator().manual_seed(1)
        table = torch.randn(self.n_items, self.dim, generator=g)
        if self.kind == "popularity":  # ids by popularity: early rows are longer
            table *= (4 * torch.arange(1, self.n_items + 1.0) ** -0.4)[:, None]
        if self.kind == "ties":
            table = table[torch.randint(self.n_items // 8 + 1, (self.n_items,), generator=g)]
        if self.kind == "equal":
            table = table[:1].repeat(self.n_items, 1)
        return table.to(self.dtype)

    def batch(self, step: int, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return histories and targets [rows, 5] of a slice, and its centres."""
        g = torch.Generator().manual_seed(1000 * step + number)
        histories, targets = torch.randint(self.n_items, (2, self.rows, 5), generator=g)
        padding = torch.arange(5) >= torch.randint(1, 6, (self.rows, 1), generator=g)
        targets = targets.masked_fill(padding, -100)
        if number in self.empty:
            targets = torch.full_like(targets, -100)
        centres = torch.randn(self.n_buckets, self.dim, generator=g)
        return histories.masked_fill(padding, -1), targets, centres

    def loss(self, **options: Any) -> ScalableCrossEntropy:
        return ScalableCrossEntropy(bucket_size_y=self.size_y, **self.settings, **options)

    def body(self) -> nn.Linear:
        torch.manual_seed(3)
        return nn.Linear(self.dim, self.dim)

    def rounding(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext()


def hidden(body: nn.Module, catalogue: Tensor, histories: Tensor) -> Tensor:
    items = F.embedding(histories.clamp(min=0), catalogue)
    states: Tensor = torch.tanh(body(items.cumsum(1)))
    states.retain_grad()
    return states


def as_ranks(ranks: Ranks, case: Case) -> dict[str, Any]:
    """Train as one of R ranks."""
    table = ShardedTable(case.n_items, case.dim, ranks, dtype=case.dtype)
    table.shard.data = case.table()[ranks.rank :: ranks.size].clone()
    body = case.body()
    loss = ShardedCrossEntropy(case.loss(), table, case.candidates)
    optimizers = [RowwiseAdagrad([table.shard], lr=0.1), torch.optim.Adam(body.parameters())]
    found: dict[str, Any] = {"loss": [], "states": [], "table": [], "body": [], "items": []}
    loss.nearest.register(found["items"])
    return found
