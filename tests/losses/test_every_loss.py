"""What holds for every loss alike."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sce import losses
from sce.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    GeneralizedBinaryCrossEntropy,
    InBatchNegatives,
    PopularityNegatives,
    SampledCrossEntropy,
    ScalableCrossEntropy,
    UniformNegatives,
)
from sce.losses.negatives import Draw

LOSSES: dict[str, nn.Module] = {
    "sce": ScalableCrossEntropy(bucket_size_y=9),
    "sce without mix": ScalableCrossEntropy(bucket_size_y=9, mix=False),
    "sce of four": ScalableCrossEntropy(bucket_size_y=9, mix_of=4),
    "sce with noise": ScalableCrossEntropy(bucket_size_y=9, mix_of=4, noise=2.0),
    "ce": CrossEntropy(),
    "ce in chunks": CrossEntropy(chunk_size=7),
    "ce-": SampledCrossEntropy(5),
    "ce- by position": SampledCrossEntropy(5, shared="position"),
    "ce- by batch": SampledCrossEntropy(5, shared="batch", negatives=InBatchNegatives()),
    "bce": BinaryCrossEntropy(),
    "bce+": BinaryCrossEntropy(5),
    "gbce": GeneralizedBinaryCrossEntropy(5),
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def problem(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    states = torch.randn(4, 10, 8, generator=g).to(dtype).requires_grad_()
    catalogue = torch.randn(30, 8, generator=g).to(dtype).requires_grad_()
    targets = torch.randint(30, (4, 10), generator=g)
    targets[1, 6:] = -100
    return states, catalogue, targets


def run(loss: nn.Module, *inputs: Tensor, cast: torch.dtype | None = None) -> list[Tensor]:
    """Return the loss, in a region of autocast if wanted, and both gradients."""
    with torch.autocast("cpu", dtype=cast, enabled=cast is not None):
        value = loss(*inputs, generator=torch.Generator().manual_seed(3))
    return [value, *torch.autograd.grad(value, inputs[:2])]


@every_loss
def test_a_generator_repeats_value_and_gradients_bit_for_bit(loss: nn.Module) -> None:
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        runs = [run(loss, *problem()) for _ in range(3)]
    finally:
        torch.set_num_threads(threads)
    for other in runs[1:]:
        assert all(map(torch.equal, runs[0], other))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("function", "settings", "loss"),
    [
        (losses.scalable_cross_entropy, {"bucket_size_y": 9}, LOSSES["sce"]),
        (losses.cross_entropy, {"chunk_size": 7}, LOSSES["ce in chunks"]),
        (losses.sampled_cross_entropy, {"n_negatives": 5}, LOSSES["ce-"]),
        (losses.binary_cross_entropy, {"n_negatives": 5}, LOSSES["bce+"]),
        (losses.generalized_binary_cross_entropy, {"n_negatives": 5}, LOSSES["gbce"]),
    ],
    ids=["sce", "ce", "ce-", "bce+", "gbce"],
)
def test_as_functions_they_are_called_alike(
    function: Any, settings: dict[str, int], loss: nn.Module
) -> None:
    g = torch.Generator()
    found = function(*problem(), generator=g.manual_seed(3), **settings)
    assert torch.equal(found, loss(*problem(), generator=g.manual_seed(3)))


@every_loss
def test_strided_inputs_work_and_are_not_modified(loss: nn.Module) -> None:
    wide = torch.randn(4, 10, 16)[:, :, ::2].requires_grad_()
    turned = torch.randn(8, 30).T.requires_grad_()
    spaced = torch.stack([problem()[2]] * 2, dim=2)[:, :, 0]
    before = copy.deepcopy((wide.detach(), turned.detach(), spaced))
    found = run(loss, wide, turned, spaced)
    packed = [x.detach().contiguous().requires_grad_() for x in (wide, turned)]
    for a, b in zip(found, run(loss, *packed, spaced.contiguous()), strict=True):
        torch.testing.assert_close(a, b)
    for now, then in zip((wide, turned, spaced), before, strict=True):
        assert torch.equal(now, then)


@every_loss
@pytest.mark.parametrize("cast", [None, torch.float16])
def test_logits_beyond_the_range_of_float16_are_what_float32_says(
    loss: nn.Module, cast: torch.dtype | None
) -> None:
    # Logits of 400 × 400 × ±1: float16 ends at 65,504.
    signs = torch.tensor([[1.0], [-1.0]]).repeat(5, 1)
    targets = torch.arange(10).view(2, 5) % 3
    single = [400 * signs.view(2, 5, 1), 400 * signs]
    half = [x.half() for x in single]
    wanted = run(loss, *(x.requires_grad_() for x in single), targets)
    found = run(loss, *(x.requires_grad_() for x in half), targets, cast=cast)
    assert found[0].dtype == torch.float32
    for a, b in zip(found, wanted, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a.float(), b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("size", [1e3, 1e5, 3e7])
@pytest.mark.parametrize(
    "loss",
    [
        CrossEntropy(),
        CrossEntropy(chunk_size=7),
        SampledCrossEntropy(64, negatives=UniformNegatives(replacement=False)),
        ScalableCrossEntropy(n_buckets=2, bucket_size_x=32, bucket_size_y=64, backend="torch"),
        ScalableCrossEntropy(n_buckets=2, bucket_size_x=32, bucket_size_y=64, backend="triton"),
    ],
    ids=["ce", "ce in chunks", "ce-", "sce", "sce, kernels"],
)
def test_large_logits_that_are_equal(loss: nn.Module, size: float) -> None:
    # A log-sum-exp is these logits plus log(64): where it is kept, the logarithm is rounded away.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    states = torch.full((32, 1), size, device=device, requires_grad=True)
    catalogue = torch.ones(64, 1, device=device, requires_grad=True)
    targets = torch.arange(32, device=device)
    value = loss(states, catalogue, targets)
    assert float(value.detach()) == pytest.approx(math.log(64), rel=1e-5)
    found = torch.autograd.grad(value, catalogue)[0].squeeze(1)
    wanted = torch.full_like(found, size / 64)
    wanted[:32] -= size / 32
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("loss", [x for name, x in LOSSES.items() if "sce" not in name], ids=str)
def test_autocast_changes_no_other_loss_than_scalable_cross_entropy(loss: nn.Module) -> None:
    plain = run(loss, *problem())
    assert all(map(torch.equal, plain, run(loss, *problem(), cast=torch.bfloat16)))


@every_loss
def test_only_what_needs_a_gradient_gets_one(loss: nn.Module) -> None:
    states, catalogue, targets = problem()
    loss(states, catalogue.detach(), targets).backward()
    loss(states.detach(), catalogue, targets).backward()
    for tensor in (states, catalogue):
        assert tensor.grad is not None
        assert tensor.grad.abs().sum() > 0


@every_loss
def test_a_transform_of_torch_func_is_refused_where_it_does_not_work(loss: nn.Module) -> None:
    states, catalogue, targets = problem()
    g = torch.Generator().manual_seed(0)

    def of(x: Tensor, y: Tensor) -> Any:
        return loss(x, y, targets, generator=g.manual_seed(0))

    with pytest.raises(TypeError, match=r"does not work inside torch.func \(vmap\)"):
        torch.vmap(of, in_dims=(0, None))(states.detach().expand(2, *states.shape), catalogue)
    transformed = torch.func.grad(of, argnums=(0, 1))
    if loss is LOSSES["ce"]:  # written in nothing but torch's own operations
        wanted = torch.autograd.grad(of(states, catalogue), (states, catalogue))
        for a, b in zip(transformed(states, catalogue), wanted, strict=True):
            torch.testing.assert_close(a, b)
    else:
        with pytest.raises(TypeError, match=r"does not work inside torch.func \(grad, jacrev"):
            transformed(states, catalogue)


def by_row(self: Any, rows: int, k: int, n_items: int, *_: Any, generator: Any = None) -> Draw:
    """Draw the same negatives for the first rows, however many there are."""
    return Draw((torch.arange(rows)[:, None] * 7 + torch.arange(k) * 3) % n_items, None)


WITH_ROOM = {
    name: loss
    for name, loss in LOSSES.items()
    if not isinstance(loss, ScalableCrossEntropy) and name != "ce- by batch"
} | {"ce- by batch": SampledCrossEntropy(5, shared="batch")}


class Counted(UniformNegatives):
    """A sampler that is not ours, though it is derived from one of ours."""


@pytest.mark.parametrize(
    "negatives", [InBatchNegatives(), InBatchNegatives(torch.ones(30)), Counted()]
)
def test_room_has_no_targets_to_look_at(negatives: Any) -> None:
    states, catalogue, targets = problem()
    loss = SampledCrossEntropy(5, negatives=negatives)
    with pytest.raises(ValueError, match="room is for samplers that do not look at the targets"):
        loss(states, catalogue, targets, room=40)
    assert loss(states, catalogue, targets).isfinite()


@every_loss
def test_any_number_can_mean_that_a_position_does_not_count(loss: nn.Module) -> None:
    states, catalogue, targets = problem(torch.float64)
    targets = targets.where(targets != 3, 4)
    other: Any = copy.copy(loss)
    other.ignore_index = 3
    found = []
    for each, given in ((loss, targets), (other, targets.where(targets != -100, 3))):
        value = each(states, catalogue, given, generator=torch.Generator().manual_seed(0))
        found.append((value, *torch.autograd.grad(value, (states, catalogue))))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", WITH_ROOM)
def test_room_changes_nothing(name: str, reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UniformNegatives, "forward", by_row)
    loss: Any = copy.copy(WITH_ROOM[name])
    loss.reduction = reduction
    states, catalogue, targets = problem(torch.float64)
    count = int((targets != -100).sum())
    # What is left over must not end up in the first place, whether that counts or not.
    without_first = targets.clone()
    without_first[0, 0] = -100
    weights = torch.randn(4, 10, dtype=torch.float64) if reduction == "none" else 1.0
    for given in (targets, without_first, torch.full_like(targets, -100)):
        with torch.no_grad():
            states[given < 0] = torch.nan
        wanted = loss(states, catalogue, given)
        grads = torch.autograd.grad((wanted * weights).sum(), (states, catalogue))
        for room in (count, count + 1, 40, 57):
            found = loss(states, catalogue, given, room=room)
            torch.testing.assert_close(found, wanted)
            both = torch.autograd.grad((found * weights).sum(), (states, catalogue))
            torch.testing.assert_close(both, grads)


@pytest.mark.parametrize("loss", WITH_ROOM.values(), ids=WITH_ROOM)
def test_room_where_there_are_no_positions(loss: nn.Module) -> None:
    states, catalogue = torch.zeros(0, 5, 8, requires_grad=True), torch.randn(30, 8)
    value = loss(states, catalogue, torch.zeros(0, 5, dtype=torch.long), room=3)
    assert value == 0
    assert torch.autograd.grad(value, states)[0].shape == (0, 5, 8)


@pytest.mark.parametrize("loss", WITH_ROOM.values(), ids=WITH_ROOM)
def test_too_little_room_is_refused(loss: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"more positions count than there is room for \(35\)"):
        loss(*problem(), room=35)
    with pytest.raises(ValueError, match="room must be at least 1, got 0"):
        loss(*problem(), room=0)


@pytest.mark.parametrize(
    ("loss", "waits"),
    [
        (CrossEntropy(), False),
        (SampledCrossEntropy(3), False),
        (BinaryCrossEntropy(3, negatives=PopularityNegatives(torch.ones(30))), False),
        (GeneralizedBinaryCrossEntropy(3), False),
        (SampledCrossEntropy(3, negatives=UniformNegatives(replacement=False)), True),
        (SampledCrossEntropy(3, negatives=InBatchNegatives()), True),
        (SampledCrossEntropy(3, negatives=Counted()), True),
    ],
)
def test_what_makes_the_host_wait_is_known(loss: Any, waits: bool) -> None:
    assert loss.never_waits(torch.zeros(30, 8)) is not waits
    half = torch.zeros(30, 8, dtype=torch.bfloat16)
    assert loss.never_waits(half) is isinstance(loss, CrossEntropy)
