import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sce.losses import ScalableCrossEntropy
from sce.optim import RowwiseAdagrad

Sparse = tuple[list[int], Tensor]
LOSS: dict[str, Any] = {"n_buckets": 3, "coverage": False, "sparse_grad": True}


def entries(seed: int, rows: int, d: int, n: int) -> Sparse:
    """Rows of which some repeat, and a value for each."""
    g = torch.Generator().manual_seed(seed)
    some = torch.randint(rows, (n,), generator=g)
    # Some rows again and again, as padding is.
    some[torch.rand(n, generator=g) < 0.4] = int(torch.randint(rows, (), generator=g))
    return some.tolist(), torch.randn(n, d, generator=g, dtype=torch.float64)


def sparse(index: list[int], values: Tensor, rows: int) -> Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([index], dtype=torch.int64).reshape(1, -1),
        values,
        (rows, values.shape[1]),
        check_invariants=True,
    )


def by_hand(table: Tensor, sums: list[float], given: Sparse, lr: float, eps: float) -> None:
    """One row after the other, one number after the other."""
    total: dict[int, list[float]] = {}
    for row, value in zip(given[0], given[1].tolist(), strict=True):
        total[row] = [a + b for a, b in zip(total.get(row, [0.0] * len(value)), value, strict=True)]
    for row, gradient in total.items():
        sums[row] += sum(g * g for g in gradient) / len(gradient)
        for column, g in enumerate(gradient):
            table[row, column] -= lr * g / (math.sqrt(sums[row]) + eps)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 12),
    d=st.integers(1, 5),
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    start=st.sampled_from([0.0, 0.1]),
)
def test_steps_are_those_of_a_loop_over_rows(
    seed: int, rows: int, d: int, counts: list[int], start: float
) -> None:
    before = torch.randn(rows, d, generator=torch.Generator().manual_seed(seed)).double()
    tables = [nn.Parameter(before.clone()) for _ in range(3)]
    options: dict[str, Any] = {"lr": 0.3, "eps": 1e-3, "initial_accumulator_value": start}
    optimizer = RowwiseAdagrad(tables, **options)
    expected, sums = before.clone(), [start] * rows
    touched: set[int] = set()
    for step, n in enumerate(counts):
        index, values = entries(seed + step, rows, d, n)
        gradient = sparse(index, values, rows)
        for table, grad in zip(
            tables, (gradient, gradient.coalesce(), gradient.to_dense()), strict=True
        ):
            table.grad = grad
        optimizer.step()
        by_hand(expected, sums, (index, values), 0.3, 1e-3)
        touched |= set(index)
    wanted = torch.tensor(sums, dtype=torch.float64)
    untouched = [row for row in range(rows) if row not in touched]
    for table in tables:
        torch.testing.assert_close(table.data, expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(optimizer.state[table]["sum"], wanted, rtol=1e-10, atol=1e-12)
        assert torch.equal(table.data[untouched], before[untouched])
        assert optimizer.state[table]["sum"][untouched].eq(start).all()


def test_many_entries_of_few_rows_are_added_up() -> None:
    # Long enough that a row is in many pieces, and ends and begins inside them.
    index, values = entries(3, 7, 2, 10_000)
    table = nn.Parameter(torch.zeros(7, 2, dtype=torch.float64))
    table.grad = sparse(index, values, 7)
    expected = torch.zeros(7, 2, dtype=torch.float64)
    by_hand(expected, [0.0] * 7, (index, values), 0.1, 1e-8)
    RowwiseAdagrad([table], lr=0.1).step()
    torch.testing.assert_close(table.data, expected)


def test_the_same_bits_each_time_and_others_in_another_order() -> None:
    index, values = entries(5, 4, 16, 20_000)
    shuffle = torch.randperm(20_000)
    orders = [torch.arange(20_000), torch.arange(20_000), shuffle]
    found = []
    for order in orders:
        table = nn.Parameter(torch.zeros(4, 16))
        table.grad = sparse([index[i] for i in order], values[order].float(), 4)
        RowwiseAdagrad([table], lr=0.1).step()
        found.append(table.data)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_the_bits_of_a_row_do_not_depend_on_other_rows() -> None:
    values = torch.randn(900, 3)
    alone, among = torch.zeros(600).long(), torch.zeros(900).long()
    among[::3] = torch.arange(300) % 4 + 1
    moved = []
    for rows, numbers in ((alone, values[among == 0]), (among, values)):
        table = nn.Parameter(torch.ones(5, 3))
        table.grad = sparse(rows.tolist(), numbers, 5)
        RowwiseAdagrad([table]).step()
        moved.append(table[0].detach())
    assert torch.equal(*moved)


def test_entries_of_zeros_move_nothing() -> None:
    # As a recorded step has them: what is no item goes to the last row.
    table = nn.Parameter(torch.randn(5, 3))
    before = table.data.clone()
    table.grad = sparse([4, 4, 0], torch.zeros(3, 3), 5)
    optimizer = RowwiseAdagrad([table], lr=0.1)
    optimizer.step()
    assert torch.equal(table.data, before)
    assert not optimizer.state[table]["sum"].any()


def test_nothing_of_the_size_of_the_table_is_made(largest_tensor: Any) -> None:
    table = nn.Parameter(torch.zeros(3000, 8))
    optimizer = RowwiseAdagrad([table], lr=0.1)
    table.grad = sparse([5, 2999, 5], torch.ones(3, 8), 3000)
    made = largest_tensor()
    made.known = table.data_ptr()
    with made:
        optimizer.step()
    assert table.any(dim=1).nonzero().flatten().tolist() == [5, 2999]
    assert 3 * 8 <= made.numel <= 3000  # the accumulators


def test_nothing_depends_on_values() -> None:
    # Tensors on the meta device have no values: looking at one, as a wait for a GPU would, raises.
    table = nn.Parameter(torch.zeros(20, 3, device="meta"))
    index = torch.zeros(1, 9, dtype=torch.int64, device="meta")
    values = torch.zeros(9, 3, device="meta")
    table.grad = torch.sparse_coo_tensor(index, values, (20, 3), check_invariants=False)
    RowwiseAdagrad([table], lr=0.1).step()


def test_half_precision_is_added_up_and_kept_wide() -> None:
    table = nn.Parameter(torch.ones(3, 4, dtype=torch.bfloat16))
    optimizer = RowwiseAdagrad([table], lr=2**-6)
    values = torch.full((300, 4), 2.0**-9, dtype=torch.bfloat16)
    table.grad = sparse([1] * 300, values, 3)
    optimizer.step()
    # 300 of them, which bfloat16 could not add up: (300 / 512)².
    assert optimizer.state[table]["sum"].tolist() == [0.0, pytest.approx((300 / 512) ** 2), 0.0]
    assert table.dtype == torch.bfloat16
    assert table[1].tolist() == [1 - 2**-6] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_going_on_from_a_saved_state_is_exact(dtype: torch.dtype) -> None:
    def begin() -> tuple[nn.Parameter, RowwiseAdagrad]:
        table = nn.Parameter(torch.ones(6, 3, dtype=dtype))
        return table, RowwiseAdagrad([table], lr=0.1)

    def move(table: nn.Parameter, optimizer: RowwiseAdagrad, seed: int) -> None:
        index, values = entries(seed, 6, 3, 9)
        table.grad = sparse(index, values.to(dtype), 6)
        optimizer.step()

    one, first = begin()
    move(one, first, 1)
    other, second = begin()
    other.data.copy_(one.data)
    saved = first.state_dict()
    second.load_state_dict(saved)
    assert second.state[other]["sum"].dtype == torch.float32
    assert second.state[other]["sum"].data_ptr() != first.state[one]["sum"].data_ptr()
    for seed in (2, 3):
        move(one, first, seed)
        move(other, second, seed)
    assert torch.equal(one, other)
    assert torch.equal(first.state[one]["sum"], second.state[other]["sum"])


def test_a_rate_that_is_a_tensor_is_read_at_each_step() -> None:
    table = nn.Parameter(torch.zeros(2, 2))
    rate = torch.tensor(0.0)
    optimizer = RowwiseAdagrad([table], lr=rate)
    table.grad = sparse([1], torch.ones(1, 2), 2)
    optimizer.step()
    assert not table.any()
    rate.fill_(1.0)
    optimizer.step()
    assert table[1].tolist() == pytest.approx([-(0.5**0.5)] * 2)


def test_a_number_and_a_tensor_are_the_same_rate_to_the_bit() -> None:
    found = []
    for rate in (0.3, torch.tensor(0.3)):
        table = nn.Parameter(torch.zeros(50, 4))
        index, values = entries(1, 50, 4, 90)
        table.grad = sparse(index, values.float(), 50)
        RowwiseAdagrad([table], lr=rate).step()
        found.append(table.data)
    assert torch.equal(*found)


def test_a_closure_is_called() -> None:
    table = nn.Parameter(torch.ones(2, 2))

    def closure() -> float:
        loss = table.square().sum()
        loss.backward()
        return loss.item()

    assert RowwiseAdagrad([table], lr=0.1).step(closure) == 4.0
    assert table.flatten().tolist() == pytest.approx([0.9] * 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be"),
        ({"lr": math.nan}, "lr must be"),
        ({"eps": 0.0}, "eps must be above 0"),
        ({"initial_accumulator_value": -1.0}, "initial_accumulator_value must be"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RowwiseAdagrad([nn.Parameter(torch.zeros(2, 2))], **options)


def test_what_is_no_table_is_refused() -> None:
    with pytest.raises(ValueError, match=r"for tables \[rows, d\]"):
        RowwiseAdagrad([nn.Parameter(torch.zeros(2))])
    table = nn.Parameter(torch.zeros(2, 2))
    table.grad = torch.eye(2).to_sparse()
    with pytest.raises(ValueError, match="must name whole rows"):
        RowwiseAdagrad([table]).step()


@pytest.mark.parametrize(
    "make",
    [lambda table: RowwiseAdagrad([table], lr=0.1), lambda table: torch.optim.SparseAdam([table])],
)
def test_the_gradient_of_the_loss_moves_its_rows_alone(make: Callable[..., Any]) -> None:
    table = nn.Parameter(torch.randn(60, 8))
    before = table.data.clone()
    loss = ScalableCrossEntropy(**LOSS, bucket_size_x=4, bucket_size_y=5, backend="torch")
    loss(torch.randn(20, 8), table, torch.arange(20)).backward()
    assert table.grad is not None
    assert table.grad.is_sparse
    touched = table.grad.coalesce().indices()[0].tolist()
    make(table).step()
    moved = (table.data != before).any(dim=1).nonzero().squeeze(1).tolist()
    assert set(moved) <= set(touched)
    assert 0 < len(moved) < 60


def test_a_gradient_of_static_size_moves_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    # As the kernels give it while a stream is captured: with zeros in place of what is not there.
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    start = torch.randn(60, 16, device=device)
    states, targets = torch.randn(20, 16, device=device), torch.arange(20, device=device)
    targets[:5] = -100
    tables = []
    for capturing in (False, True):
        table = nn.Parameter(start.clone())
        loss = ScalableCrossEntropy(**LOSS, bucket_size_x=8, bucket_size_y=10, backend="triton")
        value = loss(states, table, targets, generator=torch.Generator(device).manual_seed(0))
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(
                torch.cuda, "is_current_stream_capturing", lambda answer=capturing: answer
            )
            value.backward()
        assert table.grad is not None
        assert (table.grad._nnz() == 3 * 10 + 20) == capturing
        RowwiseAdagrad([table], lr=0.1).step()
        tables.append(table.data)
    torch.testing.assert_close(*tables)
    untouched = (tables[0] == start).all(dim=1)
    assert untouched.any()
    assert torch.equal(tables[1][untouched], start[untouched])


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def on_gpu(seed: int) -> tuple[nn.Parameter, Tensor]:
    """A table, and a gradient of which a quarter is of one row."""
    index, values = entries(seed, 5000, 64, 20_000)
    index[:5000] = [7] * 5000
    table = nn.Parameter(torch.ones(5000, 64, device="cuda"))
    return table, sparse(index, values.float(), 5000).cuda()


@needs_gpu
def test_on_a_gpu_the_host_does_not_wait_and_the_rows_are_the_same() -> None:
    table, gradient = on_gpu(0)
    host = nn.Parameter(table.detach().cpu().double())
    host.grad = gradient.cpu().double()
    RowwiseAdagrad([host], lr=0.1).step()
    table.grad = gradient
    optimizer = RowwiseAdagrad([table], lr=torch.tensor(0.1, device="cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(table.detach().cpu().double(), host.detach(), rtol=1e-5, atol=1e-6)


@needs_gpu
def test_on_a_gpu_a_recorded_step_is_the_step_to_the_bit() -> None:
    eager, gradient = on_gpu(1)
    optimizer = RowwiseAdagrad([eager], lr=0.1)
    for rate in (0.1, 0.2, 0.3):
        optimizer.param_groups[0]["lr"] = rate
        eager.grad = gradient
        optimizer.step()

    table, _ = on_gpu(1)
    rate_there = torch.tensor(0.1, device="cuda")
    recorded = RowwiseAdagrad([table], lr=rate_there)
    table.grad = gradient
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        recorded.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded.step()
    for rate in (0.2, 0.3):
        rate_there.fill_(rate)
        graph.replay()
    assert torch.equal(table, eager)
    assert torch.equal(recorded.state[table]["sum"], optimizer.state[eager]["sum"])


@needs_gpu
def test_on_a_gpu_memory_is_that_of_the_entries() -> None:
    table = nn.Parameter(torch.zeros(2_000_000, 64, device="cuda"))  # 488 MiB
    optimizer = RowwiseAdagrad([table], lr=0.1)
    index, values = entries(2, 2_000_000, 64, 10_000)
    table.grad = sparse(index, values.float(), len(table)).cuda()  # 2.4 MiB of values
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    assert torch.cuda.max_memory_allocated() - before < 20 * 2**20


@pytest.mark.parametrize("other", [torch.zeros(6, 2), torch.zeros(3, 2)])
def test_the_state_of_another_table_is_refused(other: Tensor) -> None:
    table = nn.Parameter(torch.zeros(4, 2))
    optimizer = RowwiseAdagrad([table])
    with pytest.raises(ValueError, match=f"of {len(other)} rows, and the table has 4"):
        optimizer.load_state_dict(RowwiseAdagrad([other]).state_dict())
    adam = torch.optim.Adam([table])
    table.grad = torch.ones(4, 2)
    adam.step()
    with pytest.raises(ValueError, match="of no accumulators"):
        optimizer.load_state_dict(adam.state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state": {}}, "of no accumulators, and the table has 4"),
        ({"state": {0: {}}}, "of no accumulators"),
        ({"state": {0: {"sum": "x"}}}, "of no accumulators"),
        ({"state": {0: {"sum": torch.tensor(1.0)}}}, "of no accumulators"),
        ({"state": {5: {"sum": torch.zeros(4)}}}, "of no accumulators"),
        ({"state": {0: {"sum": torch.zeros(4)}, 5: {}}}, "that of 2 tables, and there are 1"),
        ({"state": []}, "a state is a dictionary"),
        ({"param_groups": None}, "a state is a dictionary"),
        ({"param_groups": [{"params": [0], "lr": 1.0}]}, "another optimizer: it has no eps"),
        ({"param_groups": []}, "parameter groups"),
    ],
)
def test_a_state_that_is_none_is_refused(change: dict[str, Any], message: str) -> None:
    optimizer = RowwiseAdagrad([nn.Parameter(torch.zeros(4, 2))])
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(optimizer.state_dict() | change)
    with pytest.raises(ValueError, match="a state is a dictionary"):
        optimizer.load_state_dict({})


def test_a_step_size_is_one_number() -> None:
    with pytest.raises(ValueError, match=r"lr must be one number; got a tensor of shape \[2\]"):
        RowwiseAdagrad([torch.zeros(2, 2)], lr=torch.ones(2))
