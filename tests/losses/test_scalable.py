"""The numbered lines of the specification of Scalable Cross-Entropy, each against the reference."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from sce.losses import ScalableCrossEntropy
from sce.losses.bucketed import MAX_LOGITS
from sce.losses.buckets import MAX_SCORES, draw_centres, of_length_one, top_rows
from tests.losses.reference import reference_scalable_cross_entropy, scalable_cross_entropy

SEED = st.integers(0, 2**31)


def problem(
    seed: int,
    *,
    n: int = 40,
    c: int = 60,
    d: int = 8,
    ignored: float = 0.25,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    states = torch.randn(n, d, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    catalogue = torch.randn(c, d, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(c, (n,), generator=g)
    targets[torch.rand(n, generator=g) < ignored] = -100
    return states, catalogue, targets


def gradients(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(loss, inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]


def assert_same(a: Tensor, b: Tensor, *inputs: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b.to(a.dtype), rtol=tolerance, atol=tolerance)
    for g, h in zip(gradients(a, *inputs), gradients(b, *inputs), strict=True):
        torch.testing.assert_close(g, h.to(g.dtype), rtol=tolerance, atol=tolerance)


@settings(max_examples=60, deadline=None)
@given(
    seed=SEED,
    n=st.integers(0, 20),
    c=st.integers(1, 30),
    d=st.integers(1, 9),
    n_buckets=st.integers(1, 6),
    size_x=st.integers(0, 25),
    size_y=st.integers(1, 40),
    ignored=st.sampled_from([0.0, 0.3, 1.0]),
    whole=st.booleans(),
    reduction=st.sampled_from(["mean", "sum", "none"]),
)
def test_equals_the_reference_on_ragged_shapes_ties_and_clamped_sizes(
    seed: int,
    n: int,
    c: int,
    d: int,
    n_buckets: int,
    size_x: int,
    size_y: int,
    ignored: float,
    whole: bool,
    reduction: str,
) -> None:
    states, catalogue, targets = problem(seed, n=n, c=c, d=d, ignored=ignored)
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(n_buckets, d, generator=g, dtype=torch.float64)
    if size_x == 0:  # with coverage, where centres are scaled: equal ones need not stay so
        whole = False
    if whole:  # small whole numbers: duplicated rows and equal scores everywhere, exactly
        states = states.detach().round().clamp(-1, 1).requires_grad_()
        catalogue = catalogue.detach().round().clamp(-1, 1).requires_grad_()
        centres = centres.round().clamp(-1, 1)
    sizes: dict[str, Any] = {"coverage": size_x == 0, "bucket_size_y": size_y}
    sizes["bucket_size_x"] = size_x or None
    found = scalable_cross_entropy(
        states, catalogue, targets, centres=centres, reduction=reduction, **sizes
    )
    expected = reference_scalable_cross_entropy(
        states, catalogue, targets, centres, reduction=reduction, **sizes
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weights = torch.linspace(-1, 2, max(1, found.numel()), dtype=torch.float64)
    weights = weights[: found.numel()].view_as(found)
    if not whole:  # with exact ties between buckets, rounding picks the winner
        assert_same((found * weights).sum(), (expected * weights).sum(), states, catalogue)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("centres", ["random", "states", "mix"])
@pytest.mark.parametrize("sizes", [{}, {"coverage": False, "bucket_size_x": 50}])
def test_buckets_of_everything_are_cross_entropy(
    dtype: torch.dtype, tolerance: float, centres: Any, sizes: dict[str, Any]
) -> None:
    states, catalogue, targets = problem(1, n=50, c=70, dtype=dtype)
    loss = ScalableCrossEntropy(n_buckets=3, bucket_size_y=70, centres=centres, **sizes)
    exact = functional.cross_entropy(states @ catalogue.T, targets)
    assert_same(loss(states, catalogue, targets), exact, states, catalogue, tolerance=tolerance)


CROWDS: dict[str, Callable[[Tensor], Tensor]] = {
    "all alike": lambda x: x[:1].expand_as(x),
    "two clusters": lambda x: x[:1] * (torch.arange(len(x)) % 2 * 2 - 1)[:, None] + 1e-3 * x,
    "one far away": lambda x: torch.cat([1e3 * x[:1], 1e-3 * x[1:]]),
    "at nought": torch.zeros_like,
}


@settings(max_examples=60, deadline=None)
@given(
    crowd=st.sampled_from([*CROWDS]),
    seed=st.integers(0, 10**6),
    n=st.integers(1, 20),
    n_buckets=st.integers(1, 50),
    size_y=st.integers(1, 40),
)
def test_crowded_states_are_all_in_a_bucket(
    crowd: str, seed: int, n: int, n_buckets: int, size_y: int
) -> None:
    states, catalogue, targets = problem(seed, n=n)
    states = CROWDS[crowd](states.detach()).clone().requires_grad_()
    centres = torch.randn(n_buckets, 8, generator=torch.Generator().manual_seed(seed)).double()
    loss = ScalableCrossEntropy(bucket_size_y=size_y)
    found, statistics = loss.with_statistics(states, catalogue, targets, centres=centres)
    assert statistics.placed == statistics.picked_once == float((targets >= 0).any())
    expected = reference_scalable_cross_entropy(
        states, catalogue, targets, centres, bucket_size_y=size_y, coverage=True
    )
    assert_same(found, expected, states, catalogue, tolerance=1e-9)


def test_the_paper_s_states_in_a_bucket_are_refused_with_coverage() -> None:
    with pytest.raises(ValueError, match="needs coverage=False; leave one"):
        ScalableCrossEntropy(bucket_size_x=3)
    assert not ScalableCrossEntropy.paper().coverage
    assert ScalableCrossEntropy().coverage


def test_a_loss_of_zero_still_counts_in_the_mean() -> None:
    # State 0 is alone with its own target: loss exactly 0. State 1 has one other item.
    inputs = torch.eye(2), torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 1.0]]), torch.tensor([0, 2])
    given: dict[str, Any] = {
        "centres": torch.eye(2),
        "coverage": False,
        "bucket_size_x": 1,
        "bucket_size_y": 1,
    }
    per_state = scalable_cross_entropy(*inputs, reduction="none", **given)
    assert per_state[0] == 0 < per_state[1]
    torch.testing.assert_close(scalable_cross_entropy(*inputs, **given), per_state[1] / 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_scored_in_float32(dtype: torch.dtype) -> None:
    states, catalogue, targets = problem(7, dtype=dtype)
    centres = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    sizes: dict[str, Any] = {"coverage": False, "bucket_size_x": 12, "bucket_size_y": 9}
    loss = scalable_cross_entropy(states, catalogue, targets, centres=centres, **sizes)
    expected = reference_scalable_cross_entropy(states, catalogue, targets, centres, **sizes)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected.float(), rtol=1e-5, atol=1e-5)
    for g, h in zip(
        gradients(loss, states, catalogue), gradients(expected, states, catalogue), strict=True
    ):
        assert g.dtype == dtype
        torch.testing.assert_close(g, h, rtol=2e-2, atol=1e-3)


def test_many_small_gradients_of_a_half_precision_catalogue_are_not_rounded_away() -> None:
    # 512 equal states push on the same item: summed in bfloat16, the sum would stop growing at 256.
    n = 512
    states = torch.ones(n, 1, dtype=torch.bfloat16)
    catalogue = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    loss = ScalableCrossEntropy(
        n_buckets=1, coverage=False, bucket_size_x=n, bucket_size_y=2, reduction="sum"
    )(states, catalogue, torch.zeros(n, dtype=torch.long))
    (grad,) = torch.autograd.grad(loss, catalogue)
    assert grad.flatten().tolist() == [-n / 2, n / 2]


def test_statistics_are_what_a_loop_counts() -> None:
    states, catalogue, targets = problem(11, n=30, c=40)
    centres = torch.randn(5, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    loss = ScalableCrossEntropy(coverage=False, bucket_size_x=7, bucket_size_y=11)
    value, stats = loss.with_statistics(states, catalogue, targets, centres=centres)
    assert torch.equal(value, loss(states, catalogue, targets, centres=centres))
    valid = [i for i in range(30) if targets[i] != -100]
    picks = dict.fromkeys(valid, 0)
    correct = 0
    for b in centres:
        items = set((catalogue @ b).topk(11).indices.tolist())
        for i in sorted(valid, key=lambda i: -float((states[i] @ b).detach()))[:7]:
            picks[i] += 1
            correct += int(targets[i]) in items
    assert stats.picked_once.item() == pytest.approx(
        sum(p == 1 for p in picks.values()) / len(valid)
    )
    assert stats.placed.item() == pytest.approx(sum(p > 0 for p in picks.values()) / len(valid))
    assert stats.correct_in_bucket.item() == pytest.approx(correct / 35)


@pytest.mark.parametrize("where", ["states", "catalogue"])
@pytest.mark.parametrize("centres", ["random", "states", "mix"])
def test_nan_is_never_swallowed(where: str, centres: Any) -> None:
    for row in (0, 17, 39):
        states, catalogue, targets = problem(13, ignored=0.0, dtype=torch.float32)
        with torch.no_grad():
            (states if where == "states" else catalogue)[row, 2] = float("nan")
        loss = ScalableCrossEntropy(
            n_buckets=2, coverage=False, bucket_size_x=3, bucket_size_y=4, centres=centres
        )
        assert loss(states, catalogue, targets).isnan()


def test_inside_a_compiled_model_the_result_is_the_same() -> None:
    states, catalogue, targets = problem(15, dtype=torch.float32)
    loss = ScalableCrossEntropy(n_buckets=4, coverage=False, bucket_size_x=9, bucket_size_y=60)
    head = torch.nn.Linear(8, 8)

    def step(x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        value: Tensor = loss(head(x), catalogue, targets, generator=generator)
        return value * 2

    compiled = torch.compile(step, backend="aot_eager")
    assert_same(compiled(states), step(states), states, catalogue, tolerance=1e-6)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"n_buckets": 0}, "n_buckets must be at least 1, got 0"),
        ({"bucket_size_x": -3}, "bucket_size_x must be at least 1, got -3"),
        ({"bucket_size_y": 2.5}, "bucket_size_y must be an integer, got 2.5"),
        ({"bucket_size_y": float("inf")}, "bucket_size_y must be an integer, got inf"),
        ({"alpha": float("nan")}, "alpha must be finite, got nan"),
        ({"alpha": "2"}, "alpha must be a number, got .2."),
        ({"centres": "paper"}, "centres must be one of .*, got 'paper'"),
        ({"sparse_grad": 1}, "sparse_grad must be True or False, got 1"),
        ({"beta": 0.0}, "beta must be above 0, got 0"),
        ({"backend": "cuda"}, "backend must be one of .*, got 'cuda'"),
    ],
)
def test_bad_settings_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        ScalableCrossEntropy(**setting)


def test_every_setting_is_in_the_repr() -> None:
    chosen: dict[str, Any] = {
        "ignore_index": -1,
        "reduction": "sum",
        "bucket_size_y": 5,
        "centres": "mix",
        "coverage": False,
        "n_buckets": 3,
        "bucket_size_x": 4,
        "alpha": 1.5,
        "beta": 0.5,
        "backend": "torch",
        "sparse_grad": True,
    }
    assert chosen.keys() == inspect.signature(ScalableCrossEntropy).parameters.keys()
    shown = ", ".join(f"{name}={value!r}" for name, value in chosen.items())
    assert repr(ScalableCrossEntropy(**chosen)) == f"ScalableCrossEntropy({shown})"


@pytest.mark.parametrize(
    ("centres", "message"),
    [
        ([[1.0] * 8], "centres must be a tensor, got list"),
        (torch.ones(3, 8, dtype=torch.long), r"floating point, on cpu, got .*, torch.int64"),
        (torch.ones(3, 8, dtype=torch.cfloat), r"floating point, on cpu, got .*, torch.complex64"),
        (torch.ones(3, 8, device="meta"), r"on cpu, got \(3, 8\), torch.float32, on meta"),
        (torch.ones(3, 7), r"centres must be \[n_buckets, 8\], .* got \(3, 7\)"),
        (torch.full((2, 8), torch.nan), "centres must be finite numbers"),
    ],
)
def test_centres_of_another_kind_are_refused(centres: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        scalable_cross_entropy(*problem(16), centres=centres)


def test_a_sparse_gradient_is_for_a_parameter() -> None:
    table = torch.nn.Parameter(torch.randn(6, 4))
    states, targets = torch.randn(3, 4), torch.zeros(3, dtype=torch.long)
    loss = ScalableCrossEntropy(sparse_grad=True)
    with pytest.raises(ValueError, match="needs the parameter itself"):
        loss(states, table[1:], targets)
    loss(states, table, targets).backward()
    assert table.grad is not None
    assert table.grad.is_sparse


def test_an_infinite_state_in_no_bucket_is_noticed() -> None:
    states, catalogue, targets = problem(18, ignored=0.0)
    with torch.no_grad():
        states[7, 0] = -float("inf")
    centres = torch.ones(1, 8, dtype=torch.float64)
    loss = scalable_cross_entropy(
        states,
        catalogue,
        targets,
        centres=centres,
        coverage=False,
        bucket_size_x=3,
        bucket_size_y=4,
    )
    assert loss.isnan()


@pytest.mark.parametrize("rule", [{}, {"coverage": False, "bucket_size_x": 64}])
def test_no_tensor_grows_with_buckets_by_catalogue_or_by_bucket_logits(
    rule: dict[str, Any], largest_tensor: Any
) -> None:
    # Buckets × catalogue would be 12.8 M numbers, buckets × their states × their items 16.8 M.
    states = torch.randn(4096, 4, requires_grad=True)
    catalogue = torch.randn(200_000, 4, requires_grad=True)
    targets = torch.randint(200_000, (4096,))
    loss = ScalableCrossEntropy(n_buckets=64, bucket_size_y=4096, **rule)
    with largest_tensor() as largest:
        loss(states, catalogue, targets).backward()
    assert largest.numel <= max(MAX_SCORES, MAX_LOGITS) < 12_800_000


@pytest.mark.parametrize(
    ("n_items", "settings", "sizes"),
    [
        (60, {}, (20, 0, 60)),
        (5000, {}, (20, 0, 2048)),
        (5000, {"sparse_grad": True}, (20, 0, 256)),
        (100, {"sparse_grad": True}, (20, 0, 100)),
        (5000, {"coverage": False}, (20, 20, 2048)),
        (5000, {"bucket_size_y": 9, "alpha": 3.0, "beta": 4.0}, (15, 0, 9)),
        (5000, {"n_buckets": 7, "bucket_size_y": 9000}, (7, 0, 5000)),
        (5000, {"coverage": False, "alpha": 3.0, "beta": 4.0}, (15, 60, 2048)),
    ],
)
def test_nothing_need_be_said_of_sizes(
    n_items: int, settings: dict[str, Any], sizes: tuple[int, int, int]
) -> None:
    # 100 positions, whatever their targets, or 100 targets at most.
    states, catalogue, targets = problem(12, n=100, c=n_items)
    loss = ScalableCrossEntropy(**settings)
    assert loss.sizes(n_items, 100, cpu=True) == sizes
    n_buckets, size_x, size_y = sizes
    more_on_a_gpu = 4 if loss.coverage and settings.keys().isdisjoint({"alpha", "n_buckets"}) else 1
    assert loss.sizes(n_items, 100) == (more_on_a_gpu * n_buckets, size_x, size_y)
    named = ScalableCrossEntropy(
        n_buckets=n_buckets,
        coverage=loss.coverage,
        bucket_size_x=size_x or None,
        bucket_size_y=size_y,
        sparse_grad=loss.sparse_grad,
    )
    seeded = torch.Generator().manual_seed
    expected = named(states, catalogue, targets, generator=seeded(0))
    assert torch.equal(loss(states, catalogue, targets, generator=seeded(0)), expected)
    padded = torch.cat([states, states.new_full((50, 8), torch.nan)])
    more = torch.cat([targets, torch.full((50,), -100)])
    given = loss(padded, catalogue, more, generator=seeded(0), max_targets=100)
    assert torch.equal(given, expected)
    torch.autograd.grad(given, catalogue)


@pytest.mark.parametrize("mix", [True, False])
def test_the_papers_loss_is_the_reference_around_its_centres(mix: bool) -> None:
    states, catalogue, targets = problem(19, n=30, c=300, ignored=0.0)
    loss = ScalableCrossEntropy.paper(mix=mix)
    n_buckets, size_x, size_y = loss.sizes(300, 30)
    assert (n_buckets, size_x, size_y) == (11, 11, 256)
    seeded = torch.Generator().manual_seed
    centres = draw_centres(
        states.detach(), n_buckets, "mix" if mix else "random", generator=seeded(0)
    )
    found = loss(states, catalogue, targets, generator=seeded(0))
    expected = reference_scalable_cross_entropy(
        states,
        catalogue,
        targets,
        centres,
        coverage=False,
        bucket_size_x=size_x,
        bucket_size_y=size_y,
    )
    assert_same(found, expected, states, catalogue)
    with pytest.raises(TypeError, match="mix must be True or False, got 'no'"):
        ScalableCrossEntropy.paper(mix="no")  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", [{}, {"coverage": False, "bucket_size_x": 6}], ids=str)
def test_in_given_buckets_it_is_the_loss_that_found_them(rule: dict[str, Any]) -> None:
    states, catalogue, targets = problem(5)
    centres = of_length_one(torch.randn(4, 8, dtype=torch.float64))
    loss = ScalableCrossEntropy(bucket_size_y=9, reduction="sum", **rule)
    expected = loss(states, catalogue, targets, centres=centres)
    items = top_rows(centres, catalogue, 9)
    value, placed = loss.in_buckets(states, catalogue, targets, centres, items)
    assert_same(value, expected, states, catalogue)
    _, shares = loss.with_statistics(states, catalogue, targets, centres=centres)
    assert placed == (shares.placed * (targets >= 0).sum()).round()
    assert (placed == (targets >= 0).sum()) == loss.coverage
    for wrong in (-1, len(catalogue)):
        items[0, 2] = wrong
        with pytest.raises(ValueError, match="items must lie in"):
            loss.in_buckets(states, catalogue, targets, centres, items)
