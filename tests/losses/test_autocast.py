"""Scalable Cross-Entropy under torch.autocast: products of rounded rows, gradients that are not."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sce.losses import ScalableCrossEntropy, scalable
from sce.losses.buckets import MAX_SCORES, Buckets, count_buckets

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# Small: without a GPU the kernels run in an interpreter.
SIZES: dict[str, Any] = {"n_buckets": 2, "bucket_size_y": 9}
PAPER: dict[str, Any] = {"coverage": False, "bucket_size_x": 8}
HALF = [torch.bfloat16, torch.float16]


BACKENDS = ["torch", "triton"] if find_spec("triton") else ["torch"]
each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_half = pytest.mark.parametrize("dtype", HALF, ids=str)


def problem(seed: int = 0, n: int = 20, c: int = 48, d: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Return a problem in which rounding makes rows equal that differ, and so changes buckets."""
    g = torch.Generator().manual_seed(seed)
    states = torch.randn(n, d, generator=g)
    catalogue = torch.randn(c // 6, d, generator=g).bfloat16().float().repeat(6, 1)
    catalogue *= 1 + 1e-4 * torch.rand(len(catalogue), d, generator=g)
    targets = torch.randint(len(catalogue), (n,), generator=g)
    targets[torch.rand(n, generator=g) < 0.25] = -100
    inputs = states.to(DEVICE).requires_grad_(), catalogue.to(DEVICE).requires_grad_()
    return *inputs, targets.to(DEVICE)


def centres(n: int = 2, d: int = 8) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(9)).to(DEVICE)


def cast(dtype: torch.dtype | None) -> torch.autocast:
    return torch.autocast(DEVICE, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def in_half(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to(dtype).requires_grad_()


def run(loss: ScalableCrossEntropy, *inputs: Tensor, **options: Any) -> list[Tensor]:
    """Return the loss and both gradients; autocast is over by the time of the backward pass."""
    under = options.pop("under", None)
    with cast(under):
        g = torch.Generator(DEVICE).manual_seed(3)
        value = loss(*inputs, generator=g, **options)
    return [value.detach(), *torch.autograd.grad(value.sum(), inputs[:2])]


@each_backend
@each_half
@pytest.mark.parametrize(
    "settings",
    [{"centres": kind} for kind in ("random", "states", "mix")] + [{"given": True}],
    ids=str,
)
def test_buckets_and_value_are_those_of_inputs_in_half_precision(
    backend: Any, dtype: torch.dtype, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    filled: list[Buckets] = []

    def spy(buckets: Buckets, *arguments: Any) -> Any:
        filled.append(buckets)
        return count_buckets(buckets, *arguments)

    monkeypatch.setattr(scalable, "count_buckets", spy)
    settings = dict(settings)
    given: dict[str, Any] = {"centres": centres()} if settings.pop("given", False) else {}
    sizes, (states, catalogue, targets) = SIZES | PAPER, problem()
    if GPU or backend == "torch":  # so many that rounded centres, too, make a difference
        sizes = {"n_buckets": 30, "coverage": False, "bucket_size_x": 100, "bucket_size_y": 500}
        states, catalogue, targets = problem(n=400, c=6000)
    loss = ScalableCrossEntropy(backend=backend, reduction="none", **sizes, **settings)
    values = []
    for x, y, under in (
        (states, catalogue, dtype),
        (in_half(states, dtype), in_half(catalogue, dtype), None),
        (states, catalogue, None),
    ):
        g = torch.Generator(DEVICE).manual_seed(3)
        with cast(under):
            value, _ = loss.with_statistics(x, y, targets, generator=g, **given)
        values.append(value)
    found, expected, unrounded = (
        [
            part.long().sort(dim=1).values
            for part in (each.members.states.view(len(each.items), -1), each.items)
        ]
        for each in filled
    )
    assert all(map(torch.equal, found, expected))
    torch.testing.assert_close(values[0], values[1], rtol=1e-6, atol=1e-6)
    if dtype == torch.bfloat16:  # that makes rows equal
        assert not torch.equal(found[1], unrounded[1])
        assert not torch.allclose(values[0], values[2], rtol=1e-5, atol=1e-5)


@each_backend
@each_half
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("rule", [{}, {"coverage": False, "bucket_size_x": 12}], ids=str)
def test_gradients_are_those_of_rounded_values_and_not_rounded(
    backend: Any, dtype: torch.dtype, reduction: str, rule: dict[str, Any]
) -> None:
    *inputs, targets = problem(1, n=30, c=60)
    exact = [in_half(x, dtype).detach().double().requires_grad_() for x in inputs]
    options: dict[str, Any] = {"bucket_size_y": 20, "reduction": reduction, **rule}
    middle = centres(3)
    expected = ScalableCrossEntropy(backend="torch", **options)(
        *exact, targets, centres=middle.double()
    )
    loss = ScalableCrossEntropy(backend=backend, **options)
    found = run(loss, *inputs, targets, centres=middle, under=dtype)
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-6, atol=1e-5)
    for g, h in zip(found[1:], torch.autograd.grad(expected.sum(), exact), strict=True):
        assert g.dtype == torch.float32
        assert (g - h).norm() < 1e-5 * h.norm()


@each_backend
@each_half
@pytest.mark.parametrize("rule", [{}, PAPER], ids=["coverage", "paper"])
def test_a_sparse_gradient_is_the_dense_one(
    backend: Any, dtype: torch.dtype, rule: dict[str, Any]
) -> None:
    *inputs, targets = problem(2, n=8)
    losses = [
        ScalableCrossEntropy(backend=backend, sparse_grad=sparse, **SIZES, **rule)
        for sparse in (False, True)
    ]
    dense, sparse = (run(loss, *inputs, targets, under=dtype)[2] for loss in losses)
    assert sparse.is_sparse
    assert sparse.dtype == torch.float32
    assert torch.equal(sparse.to_dense(), dense)
    assert len(sparse.indices()[0]) < len(dense)


@each_backend
def test_where_autocast_has_no_say_it_changes_nothing(backend: Any) -> None:
    loss = ScalableCrossEntropy(backend=backend, **SIZES)
    states, catalogue, targets = problem(3)
    plain = run(loss, states, catalogue, targets)
    with cast(torch.bfloat16):  # and an inner region that is off
        assert all(map(torch.equal, plain, run(loss, states, catalogue, targets)))
    every = [HALF[:1] * 2, HALF[1:] * 2, HALF, [torch.float16, torch.float32]]
    for kinds in every if GPU or backend == "torch" else every[3:]:
        inputs = [in_half(x, kind) for x, kind in zip((states, catalogue), kinds, strict=True)]
        plain = run(loss, *inputs, targets)
        assert all(map(torch.equal, plain, run(loss, *inputs, targets, under=torch.bfloat16)))
    if backend == "torch":
        wide = [in_half(states, torch.float64), catalogue]
        plain = run(loss, *wide, targets)
        assert all(map(torch.equal, plain, run(loss, *wide, targets, under=torch.bfloat16)))


@each_backend
def test_one_input_in_half_precision_is_enough_to_spare(backend: Any) -> None:
    loss = ScalableCrossEntropy(backend=backend, **SIZES)
    states, catalogue, targets = problem(4)
    both = run(loss, states, catalogue, targets, under=torch.bfloat16)
    for which in (0, 1):
        mixed = [states, catalogue]
        mixed[which] = in_half(mixed[which], torch.bfloat16)
        found = run(loss, *mixed, targets, under=torch.bfloat16)
        torch.testing.assert_close(found[0], both[0], rtol=1e-6, atol=1e-6)
        for x, g, h in zip(mixed, found[1:], both[1:], strict=True):
            assert g.dtype == x.dtype
            assert (g - h).norm() < (1e-5 if x.dtype == torch.float32 else 1e-2) * h.norm()


@each_backend
def test_a_state_that_rounding_makes_infinite_is_noticed(backend: Any) -> None:
    states, catalogue, targets = problem(5)
    targets[0] = 1
    with torch.no_grad():
        states[0] = -1e5  # float16 ends at 65,504
    loss = ScalableCrossEntropy(backend=backend, coverage=False, bucket_size_x=2, bucket_size_y=3)
    middle = states[-1:].detach().abs()  # whose bucket it is not in
    assert run(loss, states, catalogue, targets, centres=middle)[0].isfinite()
    assert run(loss, states, catalogue, targets, centres=middle, under=torch.bfloat16)[0] > 0
    assert run(loss, states, catalogue, targets, centres=middle, under=torch.float16)[0].isnan()


class Made(TorchDispatchMode):
    """Remembers the size of the largest tensor that shares no memory with the catalogue."""

    def __init__(self, catalogue: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known, self.numel = catalogue.data_ptr(), 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if not isinstance(tensor, Tensor) or tensor.is_sparse:
                continue
            if tensor.untyped_storage().data_ptr() != self.known:
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("n_buckets", [1, 64])
def test_the_catalogue_is_never_copied(n_buckets: int) -> None:
    catalogue = torch.randn(150_000, 64, requires_grad=True)
    assert catalogue.numel() > MAX_SCORES
    states, targets = torch.randn(20, 64, requires_grad=True), torch.randint(150_000, (20,))
    loss = ScalableCrossEntropy(
        n_buckets=n_buckets,
        coverage=False,
        bucket_size_x=9,
        bucket_size_y=30,
        backend="torch",
        sparse_grad=True,
    )
    with Made(catalogue) as made:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss(states, catalogue, targets)
        value.backward()
    assert 0 < made.numel <= MAX_SCORES
