"""Graphs in place of a loss; without a GPU what is recorded runs again, into the same memory."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sce import GraphedLoss
from sce.losses import CrossEntropy, ScalableCrossEntropy, graphed
from tests.losses.kernels.made_problem import DEVICE, GPU, problem

close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)  # states are added in any order
SIZES: dict[str, Any] = {"bucket_size_y": 60}  # all items: the centres do not matter


class Again:
    """Stands for a graph: runs what was recorded, and keeps what it gives in one place."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.replay = work


class Rerun(graphed._Recorded):
    def __init__(self, loss: nn.Module, *given: Any) -> None:
        states, catalogue, targets, most = given
        self._states = states.detach().clone().requires_grad_(states.requires_grad)
        self._targets, self._last = targets.clone(), lambda: None
        self.address = catalogue.data_ptr()
        self._inputs = self._states, catalogue.detach().requires_grad_(catalogue.requires_grad)
        wanted = [each for each in self._inputs if each.requires_grad]
        shape = targets.shape if loss.reduction == "none" else ()
        self._value, self._grad = torch.zeros(shape), torch.zeros(shape)
        self._grads = tuple(torch.zeros_like(each) for each in wanted)

        @torch.enable_grad()
        def forward() -> None:
            made = loss(*self._inputs, self._targets, max_targets=most)
            self._value.copy_(made.detach())
            self._made = made

        def backward() -> None:
            found = torch.autograd.grad(self._made, wanted, self._grad)
            for kept, each in zip(self._grads, found, strict=True):
                kept.copy_(each)

        self._forward, self._backward = Again(forward), Again(backward)  # type: ignore[assignment]


class WithParameter(ScalableCrossEntropy):
    pass


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if not GPU:
        monkeypatch.setattr(graphed, "_Recorded", Rerun)
        monkeypatch.setattr(graphed, "_on_one_gpu", lambda *_: True)
        monkeypatch.setattr(graphed, "_surroundings", lambda catalogue: (catalogue.data_ptr(),))


def batch(seed: int, catalogue: Tensor, n: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    states, _, targets = problem(seed, n, 60, 16)
    return states, catalogue, targets


def recorded(**settings: Any) -> tuple[GraphedLoss, Tensor]:
    """Return a loss that has a graph for batches with a catalogue, and the catalogue."""
    loss = GraphedLoss(ScalableCrossEntropy(**SIZES | settings))
    catalogue = problem(0, 40, 60, 16)[1]
    for seed in range(3):
        loss(*batch(seed, catalogue)).sum().backward()
    assert len(loss._recorded) == 1
    return loss, catalogue


def check(loss: GraphedLoss, inputs: tuple[Tensor, ...], **options: Any) -> None:
    value, expected = loss(*inputs, **options), loss.loss(*inputs, **options)
    close(value, expected)
    wanted = [each for each in inputs if each.requires_grad]
    weights = torch.linspace(1, 2, value.numel(), device=DEVICE).view(value.shape)
    own = torch.autograd.grad(expected, wanted, weights)
    for g1, g2 in zip(torch.autograd.grad(value, wanted, weights), own, strict=True):
        close(g1, g2)


@pytest.mark.parametrize("settings", [{}, {"reduction": "none"}, {"coverage": False}], ids=str)
def test_a_graph_gives_what_the_loss_gives(settings: dict[str, Any]) -> None:
    loss, catalogue = recorded(**settings)
    if "coverage" in settings:
        loss.loss.n_buckets, loss.loss.bucket_size_x = 1, 40
    for seed in range(3, 6):
        check(loss, batch(seed, catalogue))


@pytest.mark.parametrize("frozen", [0, 1], ids=["states", "catalogue"])
def test_one_of_both_wants_a_gradient(frozen: int) -> None:
    loss = GraphedLoss(ScalableCrossEntropy(**SIZES))
    catalogue = nn.Parameter(problem(0, 40, 60, 16)[1].detach(), requires_grad=frozen != 1)
    for seed in range(4):
        inputs = batch(seed, catalogue)
        check(loss, (inputs[0].detach().requires_grad_(frozen != 0), *inputs[1:]))
    assert len(loss._recorded) == 1


def test_random_centres_are_those_of_the_loss() -> None:
    loss, catalogue = recorded(bucket_size_y=20)
    for seed in range(3, 6):
        inputs, values = batch(seed, catalogue), []
        for call in (loss, loss.loss):
            torch.manual_seed(seed)
            values.append(call(*inputs))
        close(*values)


def test_it_follows_the_catalogue_and_the_settings() -> None:
    loss, catalogue = recorded()
    with torch.no_grad():
        catalogue.mul_(2)
    check(loss, batch(3, catalogue))
    check(loss, batch(4, catalogue.detach().clone().requires_grad_()))
    assert len(loss._recorded) == 1
    loss.loss.reduction = "sum"
    check(loss, batch(5, catalogue))
    check(loss, batch(5, catalogue), max_targets=20)


def test_results_are_not_overwritten() -> None:
    loss, catalogue = recorded()
    values, grads = [], []
    for seed in (3, 4):
        values.append(loss(*batch(seed, catalogue)))
        grads.append(torch.autograd.grad(values[-1], catalogue)[0])
    for seed, value, grad in zip((3, 4), values, grads, strict=True):
        expected = loss.loss(*batch(seed, catalogue))
        close(value, expected)
        close(grad, torch.autograd.grad(expected, catalogue)[0])


def test_two_forward_passes_before_the_backward_pass() -> None:
    loss, catalogue = recorded()
    catalogue.grad = None
    (loss(*batch(3, catalogue)) + loss(*batch(4, catalogue))).backward()
    expected = loss.loss(*batch(3, catalogue)) + loss.loss(*batch(4, catalogue))
    close(catalogue.grad, torch.autograd.grad(expected, catalogue)[0])


def test_a_result_that_nobody_wants_does_not_wait() -> None:
    loss, catalogue = recorded()
    (only,) = loss._recorded.values()
    assert only is not None
    value = loss(*batch(3, catalogue))
    assert only.waits()
    del value
    assert not only.waits()


def test_a_result_has_one_backward_pass() -> None:
    loss, catalogue = recorded()
    value = loss(*batch(3, catalogue))
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        value.backward()


def test_a_catalogue_that_changes_before_the_backward_pass_is_refused() -> None:
    loss, catalogue = recorded()
    value = loss(*batch(3, catalogue))
    with torch.no_grad():
        catalogue.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_gradient_checkpointing_calls_the_loss() -> None:
    loss, catalogue = recorded()
    for seed in (3, 4):
        inputs = batch(seed, catalogue)
        found: Any = checkpoint(loss, *inputs, use_reentrant=False)
        (grad,) = torch.autograd.grad(found, catalogue)
        expected = torch.autograd.grad(loss.loss(*inputs), catalogue)[0]
        close(grad, expected)


def test_what_no_graph_can_stand_in_for() -> None:
    loss, catalogue = recorded()
    states, _, targets = batch(3, catalogue)
    generator = torch.Generator(DEVICE)
    for inputs, options in (
        ((states, catalogue, targets), {"generator": generator}),
        ((states, catalogue * 2, targets), {}),
        ((states, catalogue.detach().clone(), targets), {}),
        ((states[:0], catalogue, targets[:0]), {}),
    ):
        for _ in range(3):
            close(loss(*inputs, **options), loss.loss(*inputs, **options))
    loss.loss.register_forward_hook(lambda *_: seen.append(1))
    seen: list[int] = []
    for _ in range(3):
        loss(states, catalogue, targets)
    assert len(seen) == 3
    biased = nn.Linear(16, 60, device=DEVICE)
    for _ in range(3):
        with pytest.raises(ValueError, match="no bias"):
            loss(states, biased, targets)
    assert len(loss._recorded) == 1


def test_only_so_many_kinds_are_recorded() -> None:
    loss, catalogue = recorded()
    loss.most = 2
    for n in (30, 31, 32, 30, 31, 32, 30, 31):
        check(loss, batch(0, catalogue, n))
    assert len(loss._recorded) == 2


def test_moved_it_lets_go_of_what_was_recorded() -> None:
    loss, catalogue = recorded()
    loss.to(DEVICE)
    assert loss._recorded == {}
    for seed in range(3):
        check(loss, batch(seed, catalogue))


def test_a_copy_records_its_own() -> None:
    loss, catalogue = recorded()
    other = copy.deepcopy(loss)
    assert other._recorded == {}
    assert other.state_dict() == {}
    for seed in range(3):
        check(other, batch(seed, catalogue))


def test_what_cannot_be_recorded_is_refused() -> None:
    with pytest.raises(TypeError, match="takes a ScalableCrossEntropy"):
        GraphedLoss(CrossEntropy())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes a ScalableCrossEntropy"):
        GraphedLoss(WithParameter())
    with pytest.raises(ValueError, match="sparse gradient"):
        GraphedLoss(ScalableCrossEntropy(sparse_grad=True))
    with pytest.raises(ValueError, match="most must be at least 1"):
        GraphedLoss(ScalableCrossEntropy(), most=0)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_autocast_is_part_of_what_is_recorded() -> None:
    loss, catalogue = recorded()
    for seed in range(3):
        inputs = batch(seed, catalogue)
        with torch.autocast("cuda", torch.bfloat16):
            value, expected = loss(*inputs), loss.loss(*inputs)
        close(value, expected)
        own = torch.autograd.grad(expected, inputs[:2])
        for g1, g2 in zip(torch.autograd.grad(value, inputs[:2]), own, strict=True):
            close(g1, g2)
    assert len(loss._recorded) == 2


def test_on_a_cpu_the_loss_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    loss = GraphedLoss(ScalableCrossEntropy(**SIZES))
    states, catalogue, targets = (each.detach().cpu() for each in problem(0, 40, 60, 16))
    for _ in range(3):
        value = loss(states.requires_grad_(), catalogue.requires_grad_(), targets)
        value.backward()
    assert loss._recorded == {}
