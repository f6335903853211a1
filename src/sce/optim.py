"""Row-wise Adagrad: for tables of which each step touches few rows, such as huge catalogues.

An optimizer such as Adam reads and writes every row at each step, and keeps two more tables of the
same size. Here a step reads and writes the touched rows alone, and the state is one number a row.
That is another optimizer, not a faster Adam: there is no momentum, and steps become shorter as a
row gathers gradients.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from sce.errors import checked

_PIECE = 256  # entries of a row that are added up together


class RowwiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one accumulator for each row of a table, as TorchRec and FBGEMM have it.

    For a row w with gradient g, of d numbers: s += mean(g²), then w -= lr · g / (√s + eps).

    Gradients may be sparse (entries of the same row are added up first, always in the same order)
    or dense. With a sparse one, rows that it does not name stay as they are, to the bit, and
    nothing of the size of the table is allocated. Shapes do not depend on values and there is no
    sync, so that a step can be captured in a CUDA graph.

    >>> table = torch.nn.Parameter(torch.zeros(4, 2))
    >>> optimizer = RowwiseAdagrad([table], lr=0.5)
    >>> torch.nn.functional.embedding(torch.tensor([1, 3, 1]), table, sparse=True).sum().backward()
    >>> optimizer.step()
    >>> table.tolist()
    [[0.0, 0.0], [-0.5, -0.5], [0.0, 0.0], [-0.5, -0.5]]

    Args:
        params: Tables of shape [rows, d], or groups of them.
        lr: The step size: a number, or a tensor on the device of the tables. A captured step reads
            the tensor each time it is replayed; a number it would keep.
        eps: Keeps the step finite where a row has had no gradient yet.
        initial_accumulator_value: What each accumulator begins with.
    """

    @checked
    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-2,
        *,
        eps: float = 1e-8,
        initial_accumulator_value: float = 0.0,
    ) -> None:
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError(f"lr must be one number; got a tensor of shape {list(lr.shape)}")
        if not 0 < eps < math.inf:
            raise ValueError(f"eps must be above 0; got {eps}")
        defaults = {"lr": lr, "eps": eps, "initial_accumulator_value": initial_accumulator_value}
        for name, value in defaults.items():
            if not isinstance(value, Tensor) and not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and not negative; got {value}")
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add tables; their accumulators are made at once, so that no captured step makes them."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for table in group["params"]:
            if table.dim() != 2 or not table.is_floating_point():
                what = f"{table.dtype} of shape {list(table.shape)}"
                raise ValueError(f"it is for tables [rows, d] of floating point; got {what}")
            begin = group["initial_accumulator_value"]
            sums = torch.full((len(table),), begin, dtype=_wide(table), device=table.device)
            self.state[table]["sum"] = sums

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Move the rows that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for table in group["params"]:
                if table.grad is not None:
                    move = _move_rows if table.grad.is_sparse else _move_all
                    move(table, table.grad, self.state[table]["sum"], group["lr"], group["eps"])
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state up again, as `state_dict` gave it."""
        tables = [table for group in self.param_groups for table in group["params"]]
        _check_saved(state_dict, tables, {"params", *self.defaults})
        super().load_state_dict(state_dict)
        # The base class has rounded the accumulators to the precision of the tables.
        for number, saved in state_dict["state"].items():
            table = tables[number]
            self.state[table]["sum"] = saved["sum"].to(table.device, _wide(table), copy=True)


def _check_saved(saved: Any, tables: list[Tensor], settings: set[str]) -> None:
    """Refuse what is no state of row-wise Adagrad, or that of other tables."""
    whole = saved if isinstance(saved, dict) else {}
    state, groups = whole.get("state"), whole.get("param_groups")
    if not isinstance(state, dict) or not isinstance(groups, list):
        raise ValueError("a state is a dictionary, as state_dict() gives it; got something else")
    for number, table in enumerate(tables):
        one = state.get(number)
        sums = one.get("sum") if isinstance(one, dict) else None
        if not isinstance(sums, Tensor) or sums.shape != table.shape[:1]:
            rows = f"{len(sums):,} rows" if isinstance(sums, Tensor) and sums.dim() else ""
            had = rows or "no accumulators"
            raise ValueError(f"the state is that of {had}, and the table has {len(table):,}")
    if len(state) > len(tables):
        raise ValueError(f"the state is that of {len(state)} tables, and there are {len(tables)}")
    for group in groups:
        if missing := settings - (group.keys() if isinstance(group, dict) else set()):
            raise ValueError(f"the state is of another optimizer: it has no {min(missing)}")


def _move_all(
    table: Tensor, gradient: Tensor, sums: Tensor, lr: float | Tensor, eps: float
) -> None:
    gradient = gradient.to(sums.dtype)
    sums += gradient.square().mean(dim=1)
    table.copy_(table - gradient * _rates(sums, lr, eps))


def _move_rows(
    table: Tensor, gradient: Tensor, sums: Tensor, lr: float | Tensor, eps: float
) -> None:
    if gradient.sparse_dim() != 1:
        raise ValueError(f"a sparse gradient must name whole rows; got {gradient.sparse_dim()=}")
    if gradient._nnz() == 0:  # how many entries there are is known to the host
        return
    indices = gradient._indices()[0]
    if len(table) < 2**31:
        indices = indices.int()  # sorted in half the time
    rows, run, totals = _add_entries(indices, gradient._values().to(sums.dtype))
    # A row that occurs several times is written several times: with the same bits, since a mean is
    # taken once for all of them, and the rest is done number by number.
    moved = sums[rows] + totals.square().mean(dim=1)[run]
    sums[rows] = moved
    table[rows] = (table[rows] - totals[run] * _rates(moved, lr, eps)).to(table.dtype)


def update_bytes(entries: int, dim: int) -> int:
    """Return the bytes that a sparse gradient takes while its rows are moved."""
    return entries * (5 * 4 * dim + 48)


def _rates(sums: Tensor, lr: float | Tensor, eps: float) -> Tensor:
    # Not lr / (...): torch would round that otherwise for a number than for a tensor.
    return ((sums.sqrt() + eps).reciprocal() * lr).unsqueeze(1)


def _add_entries(indices: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Add up the entries of each row, in their order, without atomics and without a sync.

    One thread adds up one segment; since thousands of entries may be of one row (padding is), rows
    are first added up in pieces, and then the pieces. A row's bits depend on its own entries alone.

    Returns the rows in ascending order [n], each as often as it has entries; which of the sums is
    theirs [n]; and the sums [n, d], of which there are as many as different rows; zeros follow.
    """
    n = len(indices)
    rows, order = indices.sort(stable=True)
    places = torch.arange(n, device=rows.device)
    first = torch.ones_like(rows, dtype=torch.bool)
    torch.ne(rows[1:], rows[:-1], out=first[1:])
    run = first.cumsum(0) - 1  # 0, 0, 1, 2, 2, 2, ...: the number of each entry's row
    start = torch.where(first, places, 0).cummax(0).values
    piece = ((places - start) % _PIECE == 0).cumsum(0) - 1
    begins = _begins(piece)
    pieces = _segment_sums(values[order], begins)
    # There are fewer pieces than entries: those behind the last are empty, and of no row.
    begin = begins[:-1]
    run_of_piece = torch.where(begin < n, run[begin.clamp(max=n - 1)], n)
    totals = _segment_sums(pieces, _begins(run_of_piece))
    return rows.long(), run, totals


def _begins(segment: Tensor) -> Tensor:
    """Return where each of n segments begins, [n + 1], given the segment of each of n places."""
    return torch.searchsorted(segment, torch.arange(len(segment) + 1, device=segment.device))


def _segment_sums(values: Tensor, begins: Tensor) -> Tensor:
    sums: Tensor = torch.segment_reduce(values, "sum", offsets=begins, unsafe=True)
    return sums


def _wide(table: Tensor) -> torch.dtype:
    return torch.promote_types(table.dtype, torch.float32)
