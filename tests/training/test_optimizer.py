import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from sce.training.optimizer import make_optimizer, rate_factor, set_rate

CPU = torch.device("cpu")


def test_adam_as_the_paper_has_it() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = make_optimizer(
        [weight], learning_rate=0.1, betas=(0.9, 0.98), weight_decay=0.0, device=CPU
    )
    weight.grad = torch.tensor([1.0, -2.0, 0.5])
    optimizer.step()
    # The first step of Adam has the size of the learning rate, whatever the gradient's.
    torch.testing.assert_close(weight.data, torch.tensor([0.9, 1.1, 0.9]), rtol=0, atol=1e-6)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.98)


def test_weight_decay_is_decoupled() -> None:
    weight = nn.Parameter(torch.tensor([10.0]))
    optimizer = make_optimizer(
        [weight], learning_rate=0.1, betas=(0.9, 0.98), weight_decay=0.5, device=CPU
    )
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


def test_a_rate_is_set_for_every_group() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(1))]} for _ in range(2)]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    set_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
