"""CE⁻, BCE, BCE⁺ and gBCE against their equations, written as loops."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sce.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    GeneralizedBinaryCrossEntropy,
    InBatchNegatives,
    PopularityNegatives,
    SampledCrossEntropy,
    UniformNegatives,
    scoring,
)
from sce.losses.base import TINY_DATA
from sce.losses.negatives import Draw
from sce.losses.sampled import BCEPlusSettings, SampledCrossEntropySettings

SHARING = ["position", "sequence", "batch"]


class Fixed(UniformNegatives):
    """A sampler that returns what it is given, to hold the loss against the equation."""

    def __init__(self, items: Tensor, log_expected: Tensor | None = None) -> None:
        super().__init__()
        self.drawn, self.correct = Draw(items, log_expected), log_expected is not None

    def forward(self, rows: int, k: int, *_: Any, **__: Any) -> Draw:
        assert self.drawn.items.shape == (rows, k)
        return self.drawn


def softmax_loss(own: Tensor, others: list[Tensor]) -> Tensor:
    return torch.logsumexp(torch.stack([own, *others]), dim=0) - own


def binary_loss(own: Tensor, others: list[Tensor], weight: float = 1.0) -> Tensor:
    loss = -weight * torch.log(torch.sigmoid(own))
    for other in others:
        loss = loss - torch.log(1 - torch.sigmoid(other))
    return loss


def make(name: str, **settings: Any) -> nn.Module:
    if name in ("ce-", "cce-"):
        return SampledCrossEntropy(4, cut=name == "cce-", **settings)
    if name == "gbce":
        return GeneralizedBinaryCrossEntropy(4, t=0.75, **settings)
    return BinaryCrossEntropy(1 if name == "bce" else 4, **settings)


C = 11
# gBCE by the formula of its paper, not by our simplification of it.
A = 4 / (C - 1)
BETA = A * (0.75 * (1 - 1 / A) + 1 / A)
EQUATIONS: dict[str, Callable[[Tensor, list[Tensor]], Tensor]] = {
    "ce-": softmax_loss,
    "cce-": softmax_loss,
    "bce": binary_loss,
    "bce+": binary_loss,
    "gbce": lambda own, others: binary_loss(own, others, BETA),
}


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    states = torch.randn(3, 5, 6, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    catalogue = torch.randn(C, 6, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(C, (3, 5), generator=g)
    targets[0, 3:] = -100
    targets[2, :] = -100
    return states, catalogue, targets


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shared", SHARING)
@pytest.mark.parametrize(
    ("name", "biased", "corrected"),
    [(name, biased, False) for name in EQUATIONS for biased in (False, True)]
    + [("ce-", True, True), ("cce-", True, True)],
)
def test_equals_its_equation(
    name: str, shared: str, reduction: str, biased: bool, corrected: bool
) -> None:
    states, catalogue, targets = problem()
    bias = torch.randn(C, dtype=torch.float64, requires_grad=True) if biased else None
    offset = torch.zeros(C) if bias is None else bias
    valid = (targets != -100).nonzero().tolist()
    k = 1 if name == "bce" else 4
    rows = {"position": len(valid), "sequence": 3, "batch": 1}[shared]
    items = torch.randint(C, (rows, k), generator=torch.Generator().manual_seed(1))
    if k > 1:
        items[0, 0] = targets[0, 0]  # a collision with the positive
    log_expected = torch.randn(rows, k, dtype=torch.float64) if corrected else None
    less = torch.zeros(rows, k) if log_expected is None else log_expected
    losses: dict[tuple[int, int], Tensor] = {}
    for number, (i, j) in enumerate(valid):
        row = {"position": number, "sequence": i, "batch": 0}[shared]
        target = int(targets[i, j])
        logits = catalogue @ states[i, j] + offset
        drawn = zip(items[row].tolist(), less[row], strict=True)
        others = [logits[item] - by for item, by in drawn if item != target]
        losses[i, j] = EQUATIONS[name](logits[target], others)
    wanted = torch.stack(list(losses.values())).sum()
    if reduction == "mean":
        wanted = wanted / len(valid)
    loss = make(name, shared=shared, reduction=reduction, negatives=Fixed(items, log_expected))
    found = loss(states, catalogue, targets, bias=bias)
    if reduction == "none":
        assert found.shape == targets.shape
        for i in range(3):
            for j in range(5):
                value = losses.get((i, j), torch.zeros((), dtype=torch.float64))
                torch.testing.assert_close(found[i, j], value, rtol=1e-10, atol=1e-10)
        found = found.sum()
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    inputs = (states, catalogue) if bias is None else (states, catalogue, bias)
    torch.testing.assert_close(
        torch.autograd.grad(found, inputs),
        torch.autograd.grad(wanted, inputs),
        rtol=1e-10,
        atol=1e-10,
    )


def test_corrected_negatives_estimate_the_whole_softmax() -> None:
    # The sum inside the logarithm is unbiased: averaged over draws it is the sum over all items
    # but the target.
    g = torch.Generator().manual_seed(0)
    states = torch.randn(1, 4, generator=g) * 0.3
    catalogue = torch.randn(20, 4, generator=g)
    target = torch.tensor([3])
    counts = torch.randint(1, 30, (20,), generator=g)
    counts[3] = 10
    loss = SampledCrossEntropy(64, negatives=PopularityNegatives(counts, correct=True))
    draws = torch.stack([loss(states, catalogue, target, generator=g) for _ in range(400)])
    own = states[0] @ catalogue[3]
    estimate = (torch.exp(draws + own) - torch.exp(own)).mean()
    wanted = torch.exp(states[0] @ catalogue.T).sum() - torch.exp(own)
    torch.testing.assert_close(estimate, wanted, rtol=0.03, atol=0.0)


def test_gradients_are_those_of_the_corrected_logq() -> None:
    """Of arXiv 2507.09331: the positive, which is not drawn, is outside of the sum and a weight.

    (1 - P(target)) (log-sum-exp of the corrected negatives - logit of the target), where the weight
    has no gradient.
    """
    states, catalogue, _ = problem()
    states, targets = states.flatten(0, 1), torch.arange(15) % C
    items = torch.randint(C, (1, 6), generator=torch.Generator().manual_seed(1))
    log_expected = torch.randn(1, 6, dtype=torch.float64)
    sampler = Fixed(items, log_expected)
    ours = SampledCrossEntropy(6, negatives=sampler, shared="batch")(states, catalogue, targets)
    logits = states @ catalogue.T
    own = logits.gather(1, targets[:, None])[:, 0]
    collides = items == targets[:, None]
    others = (logits[:, items[0]] - log_expected).masked_fill(collides, -torch.inf).logsumexp(1)
    weight = 1 - torch.exp(own - torch.logaddexp(own, others)).detach()
    theirs = (weight * (others - own)).mean()
    for found, wanted in zip(
        torch.autograd.grad(ours, [states, catalogue], retain_graph=True),
        torch.autograd.grad(theirs, [states, catalogue]),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted)


def test_all_items_as_negatives_is_cross_entropy() -> None:
    states, catalogue, targets = problem()
    loss = SampledCrossEntropy(C, negatives=Fixed(torch.arange(C).expand(3, C)))
    torch.testing.assert_close(
        loss(states, catalogue, targets), CrossEntropy()(states, catalogue, targets)
    )


@pytest.mark.parametrize(
    ("shape", "targets_each", "k", "shared", "max_gathered", "most"),
    [
        # [positions, 1 + k] is 3,300; [positions, k, d] would be 51,200.
        *(((4, 25, 16), 25, 32, shared, 2048, 3300) for shared in SHARING),
        # The states are 2,000 numbers; logits of all padding would be 4,000.
        ((40, 25, 2), 1, 4, "sequence", 512, 2000),
        # [sequences + 1, k] is up to 2,624; of all sequences at once there would be 40,960.
        ((40, 1, 16), 1, 64, "sequence", 2048, 2624),
        ((20, 64, 1), 1, 32, "sequence", 2048, 2624),
    ],
)
def test_the_largest_tensor_of_a_step(
    shape: tuple[int, int, int],
    targets_each: int,
    k: int,
    shared: Any,
    max_gathered: int,
    most: int,
    monkeypatch: pytest.MonkeyPatch,
    largest_tensor: Any,
) -> None:
    monkeypatch.setattr(scoring, "MAX_GATHERED", max_gathered)
    states = torch.randn(shape, requires_grad=True)
    catalogue = torch.randn(50, shape[2], requires_grad=True)
    targets = torch.randint(50, shape[:2])
    targets[:, targets_each:] = -100
    with largest_tensor() as largest:
        SampledCrossEntropy(k, shared=shared)(states, catalogue, targets).backward()
    assert largest.numel <= most


@pytest.mark.parametrize("cut", [False, True])
def test_short_sequences_take_no_room_of_long_ones(cut: bool, largest_tensor: Any) -> None:
    states = torch.randn(40, 50, 2, requires_grad=True)
    catalogue = torch.randn(50, 2, requires_grad=True)
    targets = torch.randint(50, (40, 50))
    targets[1:, 1:] = -100
    with largest_tensor() as largest:
        SampledCrossEntropy(32, cut=cut)(states, catalogue, targets).backward()
    assert largest.numel == states.numel()  # of all positions there would be 64,000 logits


@pytest.mark.parametrize("shared", ["sequence", "batch"])
def test_cut_keeps_no_logits(
    shared: Any, monkeypatch: pytest.MonkeyPatch, largest_tensor: Any
) -> None:
    monkeypatch.setattr(scoring, "MAX_GATHERED", 2048)
    states = torch.randn(16, 10, 8, requires_grad=True)
    catalogue = torch.randn(50, 8, requires_grad=True)
    targets = torch.randint(50, (16, 10))
    with largest_tensor() as largest:
        SampledCrossEntropy(64, shared=shared, cut=True)(states, catalogue, targets).backward()
    assert largest.numel <= 2048  # of logits there are 10,240


@pytest.mark.parametrize("shared", SHARING)
@pytest.mark.parametrize("max_targets", [None, 12])
@pytest.mark.parametrize("cut", [False, True])
def test_gathering_in_parts_changes_nothing(
    shared: Any, max_targets: int | None, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, catalogue, targets = problem()
    results = []
    for size in (1 << 21, 2 * 5 * 6, 1):
        monkeypatch.setattr(scoring, "MAX_GATHERED", size)
        g = torch.Generator().manual_seed(0)
        loss = SampledCrossEntropy(4, shared=shared, cut=cut, reduction="sum")
        value = loss(states, catalogue, targets, generator=g, max_targets=max_targets)
        results.append((value, *torch.autograd.grad(value, (states, catalogue))))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shared", SHARING)
def test_where_nothing_drawn_is_a_negative(shared: Any) -> None:
    states = torch.full((2, 3, 1), -10.0, requires_grad=True)
    catalogue = torch.full((4, 1), 10.0, requires_grad=True)
    targets = torch.ones(2, 3, dtype=torch.long)
    drawn = Fixed(torch.ones({"position": 6, "sequence": 2, "batch": 1}[shared], 5).long())
    settings: dict[str, Any] = {"shared": shared, "negatives": drawn, "reduction": "sum"}
    value = SampledCrossEntropy(5, **settings)(states, catalogue, targets)
    assert value == 0
    assert all((g == 0).all() for g in torch.autograd.grad(value, (states, catalogue)))
    assert BinaryCrossEntropy(5, **settings)(states, catalogue, targets) == 600


@pytest.mark.parametrize("shared", SHARING)
def test_what_is_no_negative_may_be_expected_never(shared: Any) -> None:
    drawn = torch.tensor([[1, 2]]).expand({"position": 3, "sequence": 1, "batch": 1}[shared], 2)
    never = Fixed(drawn, torch.where(drawn == 1, -torch.inf, 0.0))
    loss = SampledCrossEntropy(2, shared=shared, negatives=never)
    states, catalogue, _ = problem()
    value = loss(states[:1, :3], catalogue, torch.ones(1, 3, dtype=torch.long))
    logits = states[0, :3] @ catalogue[1:3].T
    torch.testing.assert_close(value, -logits.log_softmax(1)[:, 0].mean())


def test_large_logits_to_the_last_digit() -> None:
    logits = torch.linspace(-60, 60, 121, dtype=torch.float64)
    items = torch.ones(121, 1, dtype=torch.long)
    loss = BinaryCrossEntropy(1, negatives=Fixed(items), reduction="none")
    catalogue = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    found = loss(logits.unsqueeze(1), catalogue, torch.zeros(121, dtype=torch.long))
    wanted = torch.logaddexp(logits, torch.zeros_like(logits)) + math.log(2)
    torch.testing.assert_close(found, wanted, rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("narrow", [0, 1])
@pytest.mark.parametrize("shared", SHARING)
def test_computes_in_the_wider_precision(shared: Any, narrow: int) -> None:
    given = list(problem())
    given[narrow] = given[narrow].detach().float().requires_grad_()
    wide = [given[0].detach().double(), given[1].detach().double(), given[2]]
    loss, g = SampledCrossEntropy(4, shared=shared), torch.Generator()
    found = loss(*given, generator=g.manual_seed(0))
    assert found.dtype == torch.float64
    assert torch.equal(found, loss(*wide, generator=g.manual_seed(0)))
    grads = torch.autograd.grad(found, given[:2])
    assert [grad.dtype for grad in grads] == [one.dtype for one in given[:2]]


@pytest.mark.parametrize("shared", SHARING)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_items_of_any_integers(shared: Any, dtype: torch.dtype) -> None:
    given = problem()
    items = torch.randint(C, ({"position": 8, "sequence": 3, "batch": 1}[shared], 4))
    found = [
        SampledCrossEntropy(4, shared=shared, negatives=Fixed(some))(*given)
        for some in (items, items.to(dtype))
    ]
    assert torch.equal(*found)


def test_a_state_that_is_not_finite_stays_with_its_own_sequence() -> None:
    states, catalogue, targets = problem()
    targets[1, 4] = -100
    states = states.detach().clone()
    states[1, 3] = float("nan")  # the last that counts
    items = torch.tensor([[1, 2], [3, 4], [5, 6]])
    loss = SampledCrossEntropy(2, negatives=Fixed(items), reduction="none")
    losses = loss(states.requires_grad_(), catalogue, targets)
    assert losses[0].isfinite().all()
    _, grad = torch.autograd.grad(losses[0].sum(), (states, catalogue))
    touched = {3, 4, *targets[1, :4].tolist()}  # of its own sequence
    assert all(grad[item].isfinite().all() for item in range(C) if item not in touched)


@pytest.mark.parametrize(("k", "t"), [(4, 0.0), (50, 0.75)])
def test_gbce_without_calibration_is_bce_plus(k: int, t: float) -> None:
    g = torch.Generator()  # sampling everything leaves nothing to calibrate
    torch.testing.assert_close(
        GeneralizedBinaryCrossEntropy(k, t=t)(*problem(), generator=g.manual_seed(0)),
        BinaryCrossEntropy(k)(*problem(), generator=g.manual_seed(0)),
    )


def test_the_repr_shows_every_setting() -> None:
    shown = repr(GeneralizedBinaryCrossEntropy(4, t=0.5, reduction="sum"))
    settings = "ignore_index=-100, reduction='sum', n_negatives=4, shared='sequence', t=0.5"
    assert settings in shown
    assert "(negatives): UniformNegatives()" in shown
    assert "n_negatives=1, shared='position'" in repr(BinaryCrossEntropy())
    shown = repr(SampledCrossEntropy(4, negatives=PopularityNegatives(torch.ones(7), power=0.5)))
    assert "PopularityNegatives(items=7, power=0.5, correct=False)" in shown


@pytest.mark.parametrize(
    ("k", "settings", "message"),
    [
        (4, {"t": 1.5}, r"t must lie in \[0, 1\], got 1.5"),
        (4, {"t": "a"}, "t must be a number, got 'a'"),
        (4, {"shared": "user"}, r"shared must be one of .* got 'user'"),
        (4, {"negatives": InBatchNegatives()}, "logQ correction is for a softmax"),
        *((k, {}, f"n_negatives must be .* got {k!r}") for k in (0, -1, 2.5, "4", None)),
    ],
)
def test_bad_settings_are_refused(k: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        GeneralizedBinaryCrossEntropy(k, **settings)


@pytest.mark.parametrize("shared", SHARING)
def test_many_gradients_of_a_half_precision_catalogue_are_not_rounded_away(shared: Any) -> None:
    catalogue = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    n = 2048
    items = torch.ones({"position": n, "sequence": 1, "batch": 1}[shared], 1, dtype=torch.long)
    loss = SampledCrossEntropy(1, reduction="sum", shared=shared, negatives=Fixed(items))
    value = loss(
        torch.ones(n, 1, dtype=torch.bfloat16), catalogue, torch.zeros(n, dtype=torch.long)
    )
    (grad,) = torch.autograd.grad(value, catalogue)
    assert grad.flatten().tolist() == [-n / 2, n / 2]


def test_compiled_with_another_number_of_valid_positions() -> None:
    loss = BinaryCrossEntropy()
    compiled = torch.compile(loss, backend="aot_eager")
    states, catalogue, targets = problem(torch.float32)
    for valid in (7, 5):
        some = targets.flatten().masked_fill(torch.arange(15) >= valid, -100).view(3, 5)
        g = torch.Generator()
        torch.testing.assert_close(
            compiled(states, catalogue, some, generator=g.manual_seed(0)),
            loss(states, catalogue, some, generator=g.manual_seed(0)),
        )


@pytest.mark.parametrize("negatives", ["popularity", "in-batch", "mixed"])
def test_by_its_settings_only_a_softmax_corrects_for_how_negatives_are_drawn(
    negatives: Any,
) -> None:
    softmax = SampledCrossEntropySettings(negatives=negatives).build(TINY_DATA)
    binary = BCEPlusSettings(negatives=negatives).build(TINY_DATA)
    assert (softmax.negatives.correct, binary.negatives.correct) == (True, False)


def test_scaled_negatives_are_uniform_ones_for_a_softmax() -> None:
    loss = SampledCrossEntropySettings(negatives="scaled").build(TINY_DATA)
    assert isinstance(loss.negatives, UniformNegatives)
    assert loss.negatives.correct
    with pytest.raises(ValueError, match="is for a softmax"):
        BCEPlusSettings(negatives="scaled").build(TINY_DATA)
