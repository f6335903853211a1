"""Tests that hold for every loss alike: those of the table, with its defaults, and variants."""

import copy
import inspect
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sce.losses import (
    LOSSES,
    BinaryCrossEntropy,
    CrossEntropy,
    DataSummary,
    GeneralizedBinaryCrossEntropy,
    InBatchNegatives,
    Loss,
    MixedNegatives,
    PopularityNegatives,
    SampledCrossEntropy,
    ScalableCrossEntropy,
    UniformNegatives,
)
from sce.losses.inputs import unwrap_catalogue
from sce.losses.negatives import Draw

DATA = DataSummary(30, 4.0, 10.0, torch.arange(30) + 1)
SIZES: dict[str, Any] = {
    "n_buckets": 13,
    "coverage": False,
    "bucket_size_x": 13,
    "bucket_size_y": 20,
}
EVERY: dict[str, Loss] = {name: entry.settings().build(DATA) for name, entry in LOSSES.items()} | {
    "ce in chunks": CrossEntropy(chunk_size=7),
    "ce- by position": SampledCrossEntropy(5, shared="position"),
    "ce- by batch": SampledCrossEntropy(5, shared="batch"),
    "ce- in batch": SampledCrossEntropy(5, negatives=InBatchNegatives()),
    "ce- mixed": SampledCrossEntropy(5, negatives=MixedNegatives()),
    "ce- scaled": SampledCrossEntropy(5, negatives=UniformNegatives(correct=True)),
    "ce- cut": SampledCrossEntropy(5, cut=True),
    "ce- cut by position": SampledCrossEntropy(5, cut=True, shared="position"),
    "ce- cut by batch": SampledCrossEntropy(5, cut=True, shared="batch"),
    "sce by states": ScalableCrossEntropy(centres="states", **SIZES),
    "sce by mix": ScalableCrossEntropy(centres="mix", **SIZES),
}
every_loss = pytest.mark.parametrize("loss", EVERY.values(), ids=EVERY)
# Negatives of the batch take no max_targets.
OF_THE_BATCH = EVERY["ce- in batch"], EVERY["ce- mixed"]
with_max_targets = pytest.mark.parametrize(
    "name", [name for name, loss in EVERY.items() if loss not in OF_THE_BATCH]
)


def problem(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    states = torch.randn(4, 10, 8, generator=g).to(dtype).requires_grad_()
    catalogue = torch.randn(30, 8, generator=g).to(dtype).requires_grad_()
    targets = torch.randint(30, (4, 10), generator=g)
    targets[1, 6:] = -100
    return states, catalogue, targets


def run(loss: Loss, *inputs: Any, cast: torch.dtype | None = None, **given: Any) -> list[Tensor]:
    """Return the loss, in a region of autocast if given, and both gradients."""
    with torch.autocast("cpu", dtype=cast, enabled=cast is not None):
        value = loss(*inputs, generator=torch.Generator().manual_seed(3), **given)
    states, catalogue = inputs[0], unwrap_catalogue(inputs[1])[0]
    return [value, *torch.autograd.grad(value.sum(), (states, catalogue))]


def with_reduction(loss: Loss, reduction: str) -> Loss:
    other = copy.copy(loss)
    other.reduction = reduction
    return other


@every_loss
def test_a_generator_repeats_value_and_gradients_bit_for_bit(loss: Loss) -> None:
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        runs = [run(loss, *problem()) for _ in range(3)]
    finally:
        torch.set_num_threads(threads)
    for other in runs[1:]:
        assert all(map(torch.equal, runs[0], other))
    assert torch.equal(before, torch.get_rng_state())
    if loss is not EVERY["sce"]:  # whose buckets hold all items here
        other_seed = loss(*problem(), generator=torch.Generator().manual_seed(4))
        assert torch.equal(runs[0][0], other_seed) is isinstance(loss, CrossEntropy)


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", [*EVERY, "sce, kernels"])
def test_the_default_dtype_changes_nothing(
    name: str, reduction: str, default_dtype: torch.dtype
) -> None:
    loss = EVERY.get(name) or ScalableCrossEntropy(n_buckets=3, bucket_size_y=9, backend="triton")
    loss, inputs = with_reduction(loss, reduction), problem()
    if name == "sce, kernels":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("inputs are on the CPU")
    expected = run(loss, *inputs)
    torch.set_default_dtype(default_dtype)
    assert all(map(torch.equal, expected, run(loss, *inputs)))


@every_loss
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(loss: Loss, reentrant: bool) -> None:
    inputs = problem()

    def call(*given: Tensor) -> Any:
        return loss(*given, generator=torch.Generator().manual_seed(3))

    value = checkpoint(call, *inputs, use_reentrant=reentrant)
    value.backward()
    own = run(loss, *inputs)
    for found, expected in zip((value, *(i.grad for i in inputs[:2])), own, strict=True):
        assert torch.equal(found, expected)


@every_loss
def test_checkpointing_goes_back_through_what_was_drawn_anew(loss: Loss) -> None:
    inputs = problem()
    moving = torch.Generator().manual_seed(3)

    def call(*given: Tensor) -> Any:
        return loss(*given, generator=moving)

    checkpoint(call, *inputs, use_reentrant=False).backward()
    again = torch.Generator().manual_seed(3)
    loss(*inputs, generator=again)
    expected = torch.autograd.grad(loss(*inputs, generator=again), inputs[:2])
    assert all(map(torch.equal, [i.grad for i in inputs[:2]], expected))  # type: ignore[arg-type]


@every_loss
def test_the_backward_pass_in_a_region_of_autocast(loss: Loss) -> None:
    if loss is EVERY["ce"]:
        return  # torch's own operations, which round there
    expected, inputs = run(loss, *problem())[1:], problem()
    value = loss(*inputs, generator=torch.Generator().manual_seed(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.autograd.grad(value, inputs[:2])
    assert all(map(torch.equal, found, expected))


@every_loss
def test_strided_inputs_work_and_are_not_modified(loss: Loss) -> None:
    wide = torch.randn(4, 10, 16)[:, :, ::2].requires_grad_()
    turned = torch.randn(8, 30).T.requires_grad_()
    spaced = torch.stack([problem()[2]] * 2, dim=2)[:, :, 0]
    before = copy.deepcopy((wide.detach(), turned.detach(), spaced))
    found = run(loss, wide, turned, spaced)
    packed = [x.detach().contiguous().requires_grad_() for x in (wide, turned)]
    torch.testing.assert_close(found, run(loss, *packed, spaced.contiguous()))
    assert all(map(torch.equal, (wide, turned, spaced), before))


@every_loss
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_valid_position_gives_zero_and_a_zero_gradient(loss: Loss, reduction: str) -> None:
    states, catalogue, targets = problem()
    loss = with_reduction(loss, reduction)
    for tensor in run(loss, states, catalogue, torch.full_like(targets, -100)):
        assert (tensor == 0).all()
    for shape in ((0,), (0, 5), (3, 0)):
        empty = torch.zeros(*shape, 8, requires_grad=True)
        found = run(loss, empty, catalogue, torch.zeros(shape, dtype=torch.long))
        assert all((tensor == 0).all() for tensor in found)


@every_loss
def test_ignored_positions_hold_anything(loss: Loss) -> None:
    states, catalogue, targets = problem()
    spoiled = states.detach().masked_fill((targets < 0).unsqueeze(2), torch.nan).requires_grad_()
    wanted = run(loss, states, catalogue, targets)
    assert all(map(torch.equal, run(loss, spoiled, catalogue, targets), wanted))


@every_loss
def test_any_number_can_mean_that_a_position_does_not_count(loss: Loss) -> None:
    states, catalogue, targets = problem(torch.float64)
    targets = targets.where(targets != 3, 4)
    other = copy.copy(loss)
    other.ignore_index = 3
    found = run(other, states, catalogue, targets.where(targets != -100, 3))
    torch.testing.assert_close(found, run(loss, states, catalogue, targets))


@every_loss
def test_reductions_agree(loss: Loss) -> None:
    each, total, mean = (
        run(with_reduction(loss, reduction), *problem(torch.float64))
        for reduction in ("none", "sum", "mean")
    )
    assert each[0].shape == (4, 10)
    assert (each[0][1, 6:] == 0).all()
    torch.testing.assert_close([each[0].sum(), *each[1:]], total)
    # The buckets of Scalable Cross-Entropy may leave out a state.
    count = (each[0] != 0).sum()
    assert 30 <= count <= 36
    torch.testing.assert_close([x * count for x in mean], total)


@every_loss
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(loss: Loss, dtype: torch.dtype) -> None:
    states, catalogue, targets = problem(dtype)
    found = run(loss, states, catalogue, targets)
    single = [x.detach().float().requires_grad_() for x in (states, catalogue)]
    wanted = run(loss, *single, targets)
    assert [x.dtype for x in found] == [torch.float32, dtype, dtype]
    # The centres of Scalable Cross-Entropy are rounded too: its buckets may differ.
    tolerance = 0.2 if isinstance(loss, ScalableCrossEntropy) else 2e-2
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=tolerance, atol=tolerance)


@every_loss
@pytest.mark.parametrize("cast", [None, torch.float16])
def test_logits_beyond_the_range_of_float16_are_what_float32_says(
    loss: Loss, cast: torch.dtype | None
) -> None:
    # Logits of 400 × 400 × ±1: float16 ends at 65,504.
    signs = torch.tensor([[1.0], [-1.0]]).repeat(15, 1)
    targets = torch.arange(10).view(2, 5) % 3
    single = [400 * signs[:10].view(2, 5, 1), 400 * signs]
    half = [x.half() for x in single]
    wanted = run(loss, *(x.requires_grad_() for x in single), targets)
    found = run(loss, *(x.requires_grad_() for x in half), targets, cast=cast)
    assert found[0].dtype == torch.float32
    for a, b in zip(found, wanted, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a.float(), b, rtol=1e-3, atol=1e-3)


class AllItems:
    """A sampler that draws the whole catalogue."""

    correct = False

    def __call__(self, rows: int, k: int, n_items: int, targets: Tensor, **_: Any) -> Draw:
        return Draw(torch.arange(n_items, device=targets.device).expand(rows, n_items), None)


@pytest.mark.parametrize("size", [1e3, 1e5, 3e7])
@pytest.mark.parametrize(
    "loss",
    [
        CrossEntropy(),
        CrossEntropy(chunk_size=7),
        CrossEntropy(chunk_size=7, reduction="none"),  # which is not torch's to compute
        SampledCrossEntropy(64, negatives=AllItems()),
        SampledCrossEntropy(64, negatives=AllItems(), cut=True),
        ScalableCrossEntropy(
            n_buckets=2, coverage=False, bucket_size_x=32, bucket_size_y=64, backend="torch"
        ),
        ScalableCrossEntropy(
            n_buckets=2, coverage=False, bucket_size_x=32, bucket_size_y=64, backend="triton"
        ),
    ],
    ids=["ce", "ce in chunks", "ce in chunks of ours", "ce-", "ce- cut", "sce", "sce, kernels"],
)
def test_large_logits_that_are_equal(loss: Loss, size: float) -> None:
    # A log-sum-exp is these logits plus log(64): where it is kept, the logarithm is rounded away.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    states = torch.full((32, 1), size, device=device, requires_grad=True)
    catalogue = torch.ones(64, 1, device=device, requires_grad=True)
    targets = torch.arange(32, device=device)
    value = loss(states, catalogue, targets).mean()
    assert float(value.detach()) == pytest.approx(math.log(64), rel=1e-5)
    found = torch.autograd.grad(value, catalogue)[0].squeeze(1)
    wanted = torch.full_like(found, size / 64)
    wanted[:32] -= size / 32
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=0.0)


@every_loss
def test_autocast_changes_no_other_loss_than_scalable_cross_entropy(loss: Loss) -> None:
    plain, cast = run(loss, *problem()), run(loss, *problem(), cast=torch.bfloat16)
    assert [x.dtype for x in cast] == [torch.float32] * 3
    same = all(map(torch.equal, plain, cast))
    assert same is not isinstance(loss, ScalableCrossEntropy)


@every_loss
def test_what_is_no_number_is_never_swallowed(loss: Loss) -> None:
    for spoiled in range(2):  # a state, and the row of a target
        given = [tensor.detach() for tensor in problem()]
        row = (2, 5) if spoiled == 0 else int(given[2][2, 5])
        given[spoiled][row] = torch.nan
        assert loss(*given, generator=torch.Generator().manual_seed(3)).isnan()


@pytest.mark.parametrize("name", [name for name in EVERY if "sce" not in name])
def test_a_bias_of_minus_infinity_rules_an_item_out(name: str) -> None:
    states, catalogue, targets = problem(torch.float64)
    targets = targets.where(targets < 0, targets % 10 + 20)
    bias = torch.zeros(30, dtype=torch.float64)
    low = bias.index_fill(0, torch.arange(20), -1e4)  # as good as out
    bias[:20] = -torch.inf
    found = run(EVERY[name], states, catalogue, targets, bias=bias)
    torch.testing.assert_close(found, run(EVERY[name], states, catalogue, targets, bias=low))


@every_loss
def test_only_what_needs_a_gradient_gets_one(loss: Loss) -> None:
    states, catalogue, targets = problem()
    loss(states, catalogue.detach(), targets).backward()
    loss(states.detach(), catalogue, targets).backward()
    for tensor in (states, catalogue):
        assert tensor.grad is not None
        assert tensor.grad.abs().sum() > 0


@every_loss
def test_a_transform_of_torch_func_works_or_is_refused(loss: Loss) -> None:
    states, catalogue, targets = problem()
    g = torch.Generator().manual_seed(0)

    def of(x: Tensor, y: Tensor) -> Any:
        return loss(x, y, targets, generator=g.manual_seed(0))

    with pytest.raises(TypeError, match="does not work inside torch"):
        torch.vmap(of, in_dims=(0, None))(states.detach().expand(2, *states.shape), catalogue)
    transformed = torch.func.grad(of, argnums=(0, 1))
    if loss is EVERY["ce"]:  # written in nothing but torch's own operations
        wanted = torch.autograd.grad(of(states, catalogue), (states, catalogue))
        torch.testing.assert_close(transformed(states, catalogue), wanted)
    else:
        with pytest.raises(TypeError, match="does not work inside torch"):
            transformed(states, catalogue)


@every_loss
def test_a_module_as_the_catalogue(loss: Loss) -> None:
    states, catalogue, targets = problem()
    wanted = run(loss, states, catalogue, targets)
    linear = nn.Linear(8, 30, bias=False)
    linear.weight = nn.Parameter(catalogue.detach())
    embedding = nn.Embedding.from_pretrained(catalogue.detach(), freeze=False)
    for module in (linear, embedding):
        assert all(map(torch.equal, run(loss, states, module, targets), wanted))
    linear.bias = nn.Parameter(torch.randn(30))
    if "bias" in inspect.signature(loss.forward).parameters:
        wanted = run(loss, states, catalogue, targets, bias=linear.bias)
        assert all(map(torch.equal, run(loss, states, linear, targets), wanted))
    else:
        with pytest.raises(ValueError, match="takes no bias"):
            loss(states, linear, targets)


def by_row(self: Any, rows: int, k: int, n_items: int, *_: Any, generator: Any = None) -> Draw:
    """Draw the same negatives for the first rows, however many there are."""
    items = (torch.arange(rows)[:, None] * 7 + torch.arange(k) * 3) % n_items
    return Draw(items, torch.full((rows, k), -1.5) if self.correct else None)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@with_max_targets
def test_max_targets_change_nothing(
    name: str, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(UniformNegatives, "forward", by_row)
    loss = with_reduction(EVERY[name], reduction)
    states, catalogue, targets = problem(torch.float64)
    count = int((targets != -100).sum())
    # Places that are not in use must not end up at the first position, valid or not.
    without_first = targets.clone()
    without_first[0, 0] = -100
    for given in (targets, without_first, torch.full_like(targets, -100)):
        with torch.no_grad():
            states[given < 0] = torch.nan
        wanted = run(loss, states, catalogue, given)
        for most in (count, count + 1, 40, 57, 10**12):
            found = run(loss, states, catalogue, given, max_targets=most)
            torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("all_of_item_0", [False, True])
@pytest.mark.parametrize("name", [name for name in EVERY if "sce" not in name])
def test_max_targets_where_the_bias_rules_item_0_out(
    name: str, all_of_item_0: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = EVERY[name]
    if loss in OF_THE_BATCH:
        return  # takes none

    def draw(self: Any, rows: int, k: int, n_items: int, *given: Any, generator: Any) -> Draw:
        drawn = by_row(self, rows, k, n_items)
        return drawn._replace(items=drawn.items * 0) if all_of_item_0 else drawn

    monkeypatch.setattr(UniformNegatives, "forward", draw)
    states, catalogue, targets = problem(torch.float64)
    targets = targets.where(targets != 0, 1)
    bias = torch.zeros(30, dtype=torch.float64).index_fill(0, torch.tensor(0), -torch.inf)
    found = [run(loss, states, catalogue, targets, bias=bias, max_targets=m) for m in (None, 40)]
    assert all(tensor.isfinite().all() for tensor in found[1])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    "loss", [x for x in EVERY.values() if "bias" in inspect.signature(x.forward).parameters]
)
def test_the_gradient_of_a_bias_has_its_dtype_with_max_targets_too(
    loss: Loss, monkeypatch: pytest.MonkeyPatch
) -> None:
    if loss in OF_THE_BATCH:
        return  # takes none
    monkeypatch.setattr(UniformNegatives, "forward", by_row)
    bias = torch.randn(30, dtype=torch.bfloat16, requires_grad=True)
    values = [
        loss(*problem(), bias=bias, max_targets=m, generator=torch.Generator().manual_seed(3))
        for m in (None, 40)
    ]
    grads = [torch.autograd.grad(value, bias)[0] for value in values]
    assert grads[0].dtype == torch.bfloat16
    torch.testing.assert_close(*values)
    torch.testing.assert_close(*grads)


@every_loss
def test_sizes_may_be_numbers_of_numpy(loss: Loss) -> None:
    settings = inspect.signature(type(loss)).parameters
    sizes = [name for name in ("n_negatives", "n_buckets", "chunk_size") if name in settings]
    make: Any = type(loss)
    results: list[Any] = []
    for size in (int, np.int16):
        made = make(**dict.fromkeys(sizes, size(4)), ignore_index=size(-100))
        most: Any = {} if loss in OF_THE_BATCH else {"max_targets": size(37)}
        results.append([repr(made), *run(made, *problem(), **most)])
    assert results[0][0] == results[1][0]
    assert all(map(torch.equal, results[0][1:], results[1][1:]))


@with_max_targets
def test_max_targets_where_there_are_no_positions(name: str) -> None:
    states, catalogue = torch.zeros(0, 5, 8, requires_grad=True), torch.randn(30, 8)
    value = EVERY[name](states, catalogue, torch.zeros(0, 5, dtype=torch.long), max_targets=3)
    assert value == 0
    assert torch.autograd.grad(value, states)[0].shape == (0, 5, 8)


@every_loss
def test_too_few_max_targets_are_refused(loss: Loss) -> None:
    if loss in OF_THE_BATCH:
        return  # takes none
    with pytest.raises(ValueError, match="max_targets must be at least 1, got 0"):
        loss(*problem(), max_targets=0)
    if not isinstance(loss, ScalableCrossEntropy):  # which gathers no targets
        with pytest.raises(ValueError, match="there are more targets than max_targets, 35"):
            loss(*problem(), max_targets=35)


class Counted(UniformNegatives):
    """A sampler that is not ours, though it is derived from one of ours."""


@pytest.mark.parametrize(
    "negatives", [InBatchNegatives(), InBatchNegatives(torch.ones(30)), Counted()]
)
def test_max_targets_with_negatives_that_look_at_targets(negatives: Any) -> None:
    loss = SampledCrossEntropy(5, negatives=negatives)
    with pytest.raises(ValueError, match="max_targets is for UniformNegatives and"):
        loss(*problem(), max_targets=40)
    assert loss(*problem()).isfinite()


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (CrossEntropy(), True),
        (SampledCrossEntropy(3), True),
        (BinaryCrossEntropy(3, negatives=PopularityNegatives(torch.ones(30))), True),
        (GeneralizedBinaryCrossEntropy(3), True),
        (SampledCrossEntropy(3, negatives=InBatchNegatives()), False),
        (SampledCrossEntropy(3, negatives=Counted()), False),
        (ScalableCrossEntropy(), False),  # on a CPU
    ],
)
def test_is_capturable(loss: Loss, expected: bool) -> None:
    for dtype, wanted in (
        (torch.float32, expected),
        (torch.bfloat16, isinstance(loss, CrossEntropy)),
    ):
        linear = nn.Linear(8, 30, bias=False, dtype=dtype)
        embedding = nn.Embedding(30, 8, dtype=dtype)
        for catalogue in (linear.weight, linear, embedding):
            assert loss.is_capturable(catalogue) is wanted


@every_loss
def test_statistics_come_with_the_same_loss(loss: Loss) -> None:
    g = torch.Generator()
    value, statistics = loss.with_statistics(*problem(), generator=g.manual_seed(3))
    assert torch.equal(value, loss(*problem(), generator=g.manual_seed(3)))
    assert len(statistics) == len(loss.statistics)
