import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from sce.optim import RowwiseAdagrad
from sce.training.optimizer import make_optimizer, rate_factor, set_rate
from sce.training.settings import TrainingSettings

CPU = torch.device("cpu")


def test_adam_as_the_paper_has_it() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = make_optimizer([weight], TrainingSettings(learning_rate=0.1), device=CPU)
    weight.grad = torch.tensor([1.0, -2.0, 0.5])
    optimizer.step()
    # The first step of Adam has the size of the learning rate, whatever the gradient's.
    torch.testing.assert_close(weight.data, torch.tensor([0.9, 1.1, 0.9]), rtol=0, atol=1e-6)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.98)


def test_gradients_need_not_lie_in_memory_as_weights_do() -> None:
    weight = nn.Parameter(torch.ones(2, 3).t())
    optimizer = make_optimizer([weight], TrainingSettings(learning_rate=0.1), device=CPU)
    weight.grad = torch.tensor([[1.0, -2.0], [0.5, 3.0], [-1.0, -4.0]])
    optimizer.step()
    expected = 1 - 0.1 * weight.grad.sign()
    torch.testing.assert_close(weight.data, expected, rtol=0, atol=1e-6)


def test_weight_decay_is_decoupled() -> None:
    weight = nn.Parameter(torch.tensor([10.0]))
    settings = TrainingSettings(learning_rate=0.1, weight_decay=0.5)
    optimizer = make_optimizer([weight], settings, device=CPU)
    weight.grad = torch.zeros(1)
    optimizer.step()
    assert weight.item() == pytest.approx(10.0 * (1 - 0.1 * 0.5))


def test_the_warm_up_rises_and_the_cosine_falls_to_nothing() -> None:
    rates = [rate_factor("warmup-cosine", step, 100, 10) for step in range(101)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert all(a >= b for a, b in pairwise(rates[10:]))
    assert rates[55] == pytest.approx(0.5)
    assert rates[100] == pytest.approx(0.0)


def test_the_default_warm_up_is_a_twentieth() -> None:
    assert rate_factor("warmup-cosine", 4, 100, None) == 1.0
    assert rate_factor("warmup-cosine", 3, 100, None) == pytest.approx(0.8)
    assert rate_factor("warmup-cosine", 0, 1, 0) == 1.0
    assert all(math.isfinite(rate_factor("warmup-cosine", s, 1, 1)) for s in range(3))


def both(rate: float = 0.1, table_rate: float = 0.5) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    weight, table = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(4, 2))
    settings = TrainingSettings(
        learning_rate=rate, row_wise=True, catalogue_learning_rate=table_rate
    )
    return make_optimizer([table, weight], settings, device=CPU, row_wise=table)


def move(weight: torch.Tensor, table: torch.Tensor, *optimizers: torch.optim.Optimizer) -> None:
    weight.grad = weight.detach().clone()
    index = torch.tensor([[1, 3, 1]])
    table.grad = torch.sparse_coo_tensor(
        index, table.detach()[index[0]], table.shape, check_invariants=True
    )
    for optimizer in optimizers:
        optimizer.step()


def test_the_table_is_moved_by_row_wise_adagrad_and_the_rest_by_adam() -> None:
    one = both()
    weight, table = (group["params"][0] for group in one.param_groups)
    apart = nn.Parameter(weight.detach().clone()), nn.Parameter(table.detach().clone())
    adam = torch.optim.Adam([apart[0]], lr=0.1, betas=(0.9, 0.98))
    adagrad = RowwiseAdagrad([apart[1]], lr=0.5)
    for _ in range(3):
        move(weight, table, one)
        move(*apart, adam, adagrad)
    assert torch.equal(weight, apart[0])
    assert torch.equal(table, apart[1])
    assert one.state[weight].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert one.state[table].keys() == {"sum"}
    one.zero_grad()
    assert weight.grad is None
    assert table.grad is None


def test_what_is_put_into_the_state_is_what_the_next_step_uses() -> None:
    # As a run that is resumed does it.
    one, other = both(), both()
    weights = [[group["params"][0] for group in each.param_groups] for each in (one, other)]
    for _ in range(2):
        move(*weights[0], one)
    for mine, theirs in zip(*weights, strict=True):
        theirs.data.copy_(mine.data)
        for key, value in one.state[mine].items():
            other.state[theirs][key] = value.clone()
    move(*weights[0], one)
    move(*weights[1], other)
    for mine, theirs in zip(*weights, strict=True):
        assert torch.equal(mine, theirs)


def test_two_optimizers_in_one_ask_for_the_loss_once() -> None:
    asked: list[float] = []

    def closure() -> float:
        asked.append(3.0)
        return 3.0

    assert both().step(closure) == 3.0
    assert asked == [3.0]


def test_rates_are_shares_of_their_own() -> None:
    optimizer = both(rate=0.1, table_rate=0.5)
    for factor in (0.25, 0.5):  # of the first rates, not of the last
        set_rate(optimizer, factor)
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == [0.1 * factor, 0.5 * factor]


def test_a_rate_on_the_device_stays_there() -> None:
    optimizer = RowwiseAdagrad([nn.Parameter(torch.ones(2, 2))], lr=torch.tensor(0.5))
    (group,) = optimizer.param_groups
    group["initial_lr"] = 0.5
    rate = group["lr"]
    set_rate(optimizer, 0.5)
    assert group["lr"] is rate
    assert rate.item() == 0.25


def test_a_warmup_is_a_twentieth_of_all_steps_and_at_least_one() -> None:
    for total, warmup in ((6, 1), (20, 1), (30, 2), (100, 5)):
        assert rate_factor("warmup-cosine", 0, total, None) == 1 / warmup
