"""The kernels as a whole, against the plain path and the reference."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sce.losses import ScalableCrossEntropy, bucketed, buckets
from sce.losses.backend import Backend
from tests.losses.kernels.made_problem import DEVICE, DTYPES, GPU, problem
from tests.losses.noisy_problem import rows_touched

pytest.importorskip("triton")
from sce.losses import kernels
from sce.losses.kernels import backward, function
from tests.losses.reference import scalable_cross_entropy

WIDTHS = [24, 72, 136, 264, 512]  # one for each way to cut rows into tiles
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def integers(seed: int, *low_high: tuple[int, int]) -> tuple[int, ...]:
    g = torch.Generator().manual_seed(seed)
    return tuple(int(torch.randint(low, high + 1, (), generator=g)) for low, high in low_high)


def check_against_the_plain_path(
    seed: int, n: int, c: int, d: int, b: int, size_x: int, size_y: int, dtype: torch.dtype
) -> None:
    states, catalogue, targets = problem(seed, n, c, d, dtype)
    valid = targets >= 0
    with torch.no_grad():
        centres = buckets.draw_centres(states[valid], b, "mix").float()
        if size_x:
            members = buckets.of_equal_size(buckets.top_rows(centres, states[valid], size_x))
        else:
            centres = buckets.round_centres(centres, dtype)
            nearest = buckets.nearest_centres(states[valid].float(), centres.float())
            members = buckets.group_by_bucket(nearest, b)
        plain = buckets.Buckets(members, buckets.top_rows(centres.float(), catalogue, size_y))
    options = kernels.FusedOptions([b, size_x, size_y], reduction="none")
    result = kernels.fused_cross_entropy(states, catalogue, targets, options, centres=centres)
    found, fused = result.loss, kernels.buckets_of(result)
    assert torch.equal(result.targets.long(), targets.masked_fill(~valid, -1))
    assert torch.equal(fused.items.long().sort(dim=1).values, plain.items)
    index = valid.nonzero().squeeze(1)
    if size_x == 0:
        assert torch.equal(fused.members.offsets, members.offsets)
        assert torch.equal(fused.members.states[: len(index)], index[members.states])
    elif size_x <= len(index):
        chosen = fused.members.states.long().view(b, size_x).sort(dim=1).values
        assert torch.equal(chosen, index[members.states].view(b, size_x))
    expected, _ = bucketed.bucketed_cross_entropy(states[valid], catalogue, targets[valid], plain)
    assert (found[~valid] == 0).all()
    scale = d**0.5
    torch.testing.assert_close(found[valid], expected, rtol=1e-5, atol=1e-5 * scale)
    weights = torch.linspace(-1, 1, len(states), device=DEVICE)
    inputs = (states, catalogue)
    grads = torch.autograd.grad((found * weights).sum(), inputs)
    plain_grads = torch.autograd.grad((expected * weights[valid]).sum(), inputs)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for g, h in zip(grads, plain_grads, strict=True):
        assert g.dtype == dtype
        torch.testing.assert_close(g, h, rtol=tolerance, atol=tolerance * scale / 4)


@every_dtype
@pytest.mark.parametrize("seed", range(300 if GPU else 6))
def test_fuzz_against_the_plain_path(seed: int, dtype: torch.dtype) -> None:
    n, c, d8, b, size_x, size_y = integers(
        seed, (1, 90), (1, 200), (1, 8), (1, 6), (1, 100), (1, 210)
    )
    size_x *= seed % 2  # 0: each state in its nearest bucket
    check_against_the_plain_path(seed, n, c, 8 * d8, b, size_x, size_y, dtype)


@every_dtype
@pytest.mark.parametrize("d", [16, 24, 40, 72, 128, 136, 256, 264, 512] if GPU else WIDTHS)
def test_every_width_against_the_plain_path(d: int, dtype: torch.dtype) -> None:
    n, c, b, size_x, size_y = (500, 3000, 20, 100, 150) if GPU else (20, 30, 3, 9, 8)
    for size in (size_x, 0):
        check_against_the_plain_path(d, n, c, d, b, size, size_y, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size_x", [0, 20])
def test_full_tiles_of_items(size_x: int, dtype: torch.dtype) -> None:
    check_against_the_plain_path(5, 40, 300, 16, 2, size_x, 128, dtype)


@pytest.mark.parametrize("sizes", [{}, {"coverage": False, "bucket_size_x": 10}], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_front_door_gives_the_same_with_either_backend(
    reduction: str, sizes: dict[str, Any]
) -> None:
    states, catalogue, targets = problem(1, *((60, 150) if GPU else (25, 40)), 16)
    centres = buckets.draw_centres(states[targets >= 0].detach(), 4, "mix")
    results = []
    for backend in ("triton", "torch"):
        loss = ScalableCrossEntropy(bucket_size_y=12, reduction=reduction, backend=backend, **sizes)
        value, stats = loss.with_statistics(states, catalogue, targets, centres=centres)
        assert value.shape == (targets.shape if reduction == "none" else ())
        grads = torch.autograd.grad(value.sum(), (states, catalogue))
        results.append((value, *grads, *stats))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [{}, {"coverage": False, "bucket_size_x": 10}], ids=str)
def test_what_is_given_to_ignored_positions_goes_nowhere(sizes: dict[str, Any]) -> None:
    states, catalogue, targets = problem(1, 25, 40, 16)
    kernels_alone: Any = {"backend": "triton", "reduction": "none"}
    loss = ScalableCrossEntropy(bucket_size_y=12, n_buckets=4, **kernels_alone, **sizes)
    weights = torch.where(targets >= 0, 1.0, torch.inf)
    value = loss(states, catalogue, targets)
    for grad in torch.autograd.grad(value, (states, catalogue), weights):
        assert grad.isfinite().all()
    loss.reduction = "sum"
    (grad,) = torch.autograd.grad(loss(states, catalogue, targets) * torch.inf, states)
    assert (grad[targets < 0] == 0).all()


@pytest.mark.parametrize("sizes", [{}, {"coverage": False, "bucket_size_x": 3}], ids=str)
def test_given_items_are_those_of_the_buckets(sizes: dict[str, Any]) -> None:
    states, catalogue, targets = problem(1, *((60, 150) if GPU else (25, 40)), 16)
    centres = buckets.of_length_one(torch.randn(4, 16, device=DEVICE))
    items = torch.stack([torch.randperm(40)[:7].sort().values for _ in centres]).to(DEVICE)
    results = []
    for backend in ("triton", "torch"):
        loss = ScalableCrossEntropy(reduction="sum", backend=backend, **sizes)
        value, placed = loss.in_buckets(states, catalogue, targets, centres, items)
        grads = torch.autograd.grad(value, (states, catalogue))
        assert 0 < placed <= (targets >= 0).sum()
        assert set(grads[1].any(1).nonzero().flatten().tolist()) <= {
            *items.flatten().tolist(),
            *targets[targets >= 0].tolist(),
        }
        results.append((value, placed, *grads))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["random", "states", "mix"])
def test_a_generator_repeats_bit_for_bit_and_leaves_the_global_one_alone(kind: Any) -> None:
    states, catalogue, targets = problem(2, 15, 20, 16)
    loss = ScalableCrossEntropy(
        n_buckets=2,
        coverage=False,
        bucket_size_x=5,
        bucket_size_y=4,
        centres=kind,
        backend="triton",
    )
    before = torch.cuda.get_rng_state() if GPU else torch.get_rng_state()
    runs = []
    for seed in (5, 5, 6):
        value = loss(
            states, catalogue, targets, generator=torch.Generator(DEVICE).manual_seed(seed)
        )
        runs.append((value, *torch.autograd.grad(value, (states, catalogue))))
    assert all(map(torch.equal, runs[0], runs[1]))
    assert not torch.equal(runs[0][0], runs[2][0])
    assert torch.equal(before, torch.cuda.get_rng_state() if GPU else torch.get_rng_state())


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_gradient_of_the_states_in_either_pass(
    reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where most positions have a target it is found in the forward pass."""
    states, catalogue, targets = problem(3, 40, 60, 16)
    loss = ScalableCrossEntropy(n_buckets=4, bucket_size_y=9, reduction=reduction, backend="triton")
    found, before = [], []
    later = backward.grad_states

    def spy(saved: Any, *given: Any) -> Tensor:
        before.append(len(saved.own_grads))
        return later(saved, *given)

    monkeypatch.setattr(function, "grad_states", spy)
    for most in (None, 20, 19):
        generator = torch.Generator(DEVICE).manual_seed(0)
        value = loss(states, catalogue, targets, max_targets=most, generator=generator)
        weights = torch.linspace(1, 2, value.numel(), device=DEVICE).view(value.shape)
        found.append(torch.autograd.grad(value, states, weights)[0])
    assert before == [40, 40, 0]
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[1], found[2])


def test_no_valid_position_and_strided_inputs() -> None:
    states, catalogue, targets = problem(3, 15, 20, 8)
    loss = ScalableCrossEntropy(
        n_buckets=2, coverage=False, bucket_size_x=5, bucket_size_y=6, backend="triton"
    )
    nothing = loss(states, catalogue, torch.full_like(targets, -100))
    assert nothing == 0
    for grad in torch.autograd.grad(nothing, (states, catalogue)):
        assert (grad == 0).all()
    wide = torch.randn(15, 16, device=DEVICE)[:, ::2]
    turned = torch.randn(8, 20, device=DEVICE).T
    g = torch.Generator(DEVICE)
    a = loss(wide, turned, targets, generator=g.manual_seed(0))
    b = loss(wide.contiguous(), turned.contiguous(), targets, generator=g.manual_seed(0))
    torch.testing.assert_close(a, b)


def test_sizes_by_the_rule_and_any_number_for_what_does_not_count() -> None:
    states, catalogue, targets = problem(6, 25, 40, 16)
    targets = targets.where(targets != 3, 4)
    found = []
    cases: list[tuple[Backend, int]] = [("triton", -100), ("triton", 3), ("torch", 3)]
    for backend, ignored in cases:
        loss = ScalableCrossEntropy(bucket_size_y=12, ignore_index=ignored, backend=backend)
        given = targets.where(targets != -100, ignored)
        sizes = loss.sizes(len(catalogue), given.numel(), cpu=True)
        centres = torch.randn(sizes[0], 16, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        value = loss(states, catalogue, given, centres=centres)
        found.append((*sizes, value, *torch.autograd.grad(value, (states, catalogue))))
    assert found[0][:3] == (10, 0, 12)
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[1], found[2], rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(GPU, reason="the file is on the host")
def test_rows_further_apart_than_32_bits_count(tmp_path: Path) -> None:
    far = 1 << 28  # numbers between two rows

    def spread(name: str, rows: Tensor) -> Tensor:
        numbers = (len(rows) - 1) * far + rows.shape[1]
        base = torch.from_file(str(tmp_path / name), shared=True, size=numbers)
        return base.as_strided(rows.shape, (far, 1)).copy_(rows).requires_grad_()

    states, catalogue, targets = problem(4, 12, 12, 16)
    centres = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    found = []
    with torch.no_grad():
        far_states, far_catalogue = spread("states", states), spread("catalogue", catalogue)
    for x, y in ((states, catalogue), (far_states, far_catalogue)):
        value = scalable_cross_entropy(
            x,
            y,
            targets,
            centres=centres,
            coverage=False,
            bucket_size_x=8,
            bucket_size_y=5,
            backend="triton",
        )
        found.append((value, *torch.autograd.grad(value, (x, y))))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("backend", ["torch", "triton", "compiled"])
def test_states_as_centres_look_where_the_states_are(backend: str) -> None:
    options: dict[str, Any] = {"device": str(DEVICE), "backend": backend}
    if backend == "compiled":
        call = partial(torch.compile, fullgraph=True, backend="aot_eager")
        options |= {"backend": "triton", "call": call}
    assert rows_touched(**options, centres="states") <= set(range(10))
    assert len(rows_touched(**options, centres="random")) > 10


def test_torch_func_is_refused() -> None:
    states, catalogue, targets = problem(3, 9, 20, 8)
    loss = ScalableCrossEntropy(
        n_buckets=1, coverage=False, bucket_size_x=5, bucket_size_y=6, backend="triton"
    )
    with pytest.raises(TypeError, match="does not work inside torch"):
        torch.func.grad(lambda x: loss(x, catalogue, targets))(states.detach())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_tensors_need_not_be_on_the_current_gpu() -> None:
    results = []
    for device in ("cuda:0", "cuda:1"):
        g = torch.Generator(device).manual_seed(0)
        states, catalogue, targets = (x.detach().to(device) for x in problem(3, 30, 50, 8))
        catalogue.requires_grad_()
        value = scalable_cross_entropy(
            states, catalogue, targets, n_buckets=3, coverage=False, bucket_size_x=5,
            bucket_size_y=6, backend="triton", generator=g,
        )  # fmt: skip
        results.append([x.cpu() for x in (value, *torch.autograd.grad(value, catalogue))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
