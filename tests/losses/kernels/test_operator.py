"""The kernels inside compiled models."""

import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sce.losses import ScalableCrossEntropy
from tests.losses.kernels.made_problem import DEVICE, GPU, problem

pytest.importorskip("triton")
from sce.losses.kernels import operator
from sce.losses.kernels.function import Computed

SIZES: dict[str, Any] = {"n_buckets": 3, "bucket_size_y": 7}
PAPER: dict[str, Any] = {"coverage": False, "bucket_size_x": 6}
CENTRES = torch.randn(2, 8, generator=torch.Generator().manual_seed(1)).to(DEVICE)


class Net(nn.Module):
    """A model with its loss: compiled as one."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.items = nn.Parameter(torch.randn(40, 8))
        self.loss = ScalableCrossEntropy(**{"backend": "triton", **SIZES, **settings})
        self.to(DEVICE)

    def forward(self, inputs: Tensor, targets: Tensor, **options: Any) -> Any:
        call = self.loss.with_statistics if options.pop("statistics", False) else self.loss
        return call(self.body(inputs), self.items, targets, **options)


def run(net: Net, call: Callable[..., Any]) -> list[Tensor]:
    """Return the loss, its statistics if wanted, and all gradients."""
    inputs, _, targets = problem(2, 24, 40, 8)
    torch.manual_seed(5)
    found = call(inputs.view(2, 12, 8), targets.view(2, 12))
    loss, *stats = (found[0], *found[1]) if isinstance(found, tuple) else (found,)
    grads = torch.autograd.grad(loss.sum(), list(net.parameters()))
    return [loss, *stats, *(g.to_dense() if g.is_sparse else g for g in grads)]


def check(net: Net, *, call: Callable[..., Any] | None = None, **compiling: Any) -> None:
    call = call or net
    compiled = torch.compile(call, **compiling)
    for a, b in zip(run(net, compiled), run(net, call), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.fixture(autouse=True)
def _compile_anew() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("backend", "dynamic"), [("eager", False), ("aot_eager", False), ("aot_eager", True)]
)
@pytest.mark.parametrize("rule", [{}, PAPER], ids=["coverage", "paper"])
def test_one_graph_gives_the_same_bits(backend: str, dynamic: bool, rule: dict[str, Any]) -> None:
    check(Net(**rule), fullgraph=True, backend=backend, dynamic=dynamic)


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"reduction": "none", "centres": "mix", **PAPER}, {}),
        ({"n_buckets": None}, {"max_targets": 20}),
        ({"reduction": "sum"}, {"centres": CENTRES}),
        ({}, {"statistics": True}),
    ],
    ids=["mix, each state's loss", "default sizes", "given centres", "statistics"],
)
def test_one_graph_holds_what_else_a_call_may_ask_for(
    settings: dict[str, Any], options: dict[str, Any]
) -> None:
    net = Net(**settings)
    check(net, call=partial(net, **options), fullgraph=True, backend="aot_eager")


def test_every_call_draws_buckets_of_its_own() -> None:
    inputs, _, targets = problem(2, 24, 40, 8)
    compiled = torch.compile(Net(), fullgraph=True, backend="aot_eager")
    assert len({compiled(inputs, targets).item() for _ in range(3)}) > 1


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, {"generator": torch.Generator(DEVICE)}),
        ({"sparse_grad": True}, {"centres": CENTRES}),
        ({"sparse_grad": True, **PAPER}, {"centres": CENTRES}),
        ({"backend": "torch"}, {"centres": CENTRES}),
    ],
    ids=["generator", "sparse gradient", "paper's, sparse", "plain path"],
)
def test_where_the_graph_breaks_the_result_is_the_same(
    settings: dict[str, Any], options: dict[str, Any]
) -> None:
    net = Net(**settings)

    def call(*inputs: Tensor) -> Any:
        if "generator" in options:
            options["generator"].manual_seed(0)
        return net(*inputs, **options)

    inputs, _, targets = problem(2, 24, 40, 8)
    with pytest.raises(Exception, match="disable"):
        torch.compile(net, fullgraph=True, backend="eager")(inputs, targets, **options)
    torch._dynamo.reset()
    check(net, call=call, backend="aot_eager")


@pytest.mark.parametrize("dtype", [None, torch.float16])
@pytest.mark.parametrize("size_x", [9, 0])
def test_the_operations_keep_their_contracts(size_x: int, dtype: torch.dtype | None) -> None:
    # One bucket of all states, all valid: no number of the result is left as it was in memory.
    states, catalogue, targets = problem(3, 9, 20, 8)
    targets = targets.abs() % 20
    seed = torch.tensor([5], device=DEVICE)
    sizes = [1, size_x, 4]
    call = (states, catalogue, targets, None, seed, sizes, "states", -100, True, "mean", dtype)
    torch.library.opcheck(operator.scalable_cross_entropy, call)
    computed = Computed(*operator.scalable_cross_entropy(*call))
    saved = [tensor.detach() for tensor in (states, catalogue, *computed[2:])]
    grad = torch.ones_like(computed.loss).detach()
    for gradient in (operator.grad_states, operator.grad_catalogue):
        torch.library.opcheck(gradient, (grad, saved, "mean", dtype))


@pytest.mark.parametrize("inside", [True, False], ids=["within the graph", "around the graph"])
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_autocast_is_the_same_in_a_compiled_model(backend: str, inside: bool) -> None:
    net = Net(backend=backend)
    cast = torch.autocast(DEVICE, dtype=torch.bfloat16)
    net.body = nn.LayerNorm(8, device=DEVICE)  # type: ignore[assignment]  # float32 states

    def step(*inputs: Tensor) -> Any:
        with cast if inside else nullcontext():
            return net(*inputs, centres=CENTRES)

    compiled = torch.compile(step, fullgraph=backend == "triton", backend="aot_eager")
    results = []
    for call in (compiled, step):
        with nullcontext() if inside else cast:
            results.append(run(net, call))
    assert all(map(torch.equal, *results))
    plain = run(net, partial(net, centres=CENTRES))
    assert not torch.equal(plain[0], results[0][0])
    if not inside:  # without autocast there is another graph
        assert all(map(torch.equal, run(net, compiled), plain))


def test_a_second_derivative_is_refused() -> None:
    net = Net()
    inputs, _, targets = problem(2, 24, 40, 8)
    value = torch.compile(net, fullgraph=True, backend="eager")(inputs, targets)
    (grad,) = torch.autograd.grad(value, net.items, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        grad.sum().backward()


def test_importing_the_kernels_does_not_import_the_compiler() -> None:
    code = (
        "import sys, sce.losses; print('triton' in sys.modules);"
        "import sce.losses.kernels; print('torch._dynamo' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_inductor_gives_the_same_in_the_same_memory() -> None:
    states = torch.randn(25_600, 64, device="cuda", requires_grad=True)
    catalogue = torch.randn(1_000_000, 64, device="cuda", requires_grad=True)
    targets = torch.randint(1_000_000, (25_600,), device="cuda")
    centres = torch.randn(320, 64, device="cuda")
    loss = ScalableCrossEntropy(n_buckets=320, coverage=False, bucket_size_x=320, bucket_size_y=256)
    results, peaks = [], []
    for call in (loss, torch.compile(loss, fullgraph=True)):
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            value = call(states, catalogue, targets, centres=centres)
            grads = torch.autograd.grad(value, (states, catalogue))
            peak = torch.cuda.max_memory_allocated() - before
            result = [value.detach(), *grads]
            del value, grads
        results.append(result)
        peaks.append(peak)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert peaks[1] < peaks[0] + (4 << 20)
    compiled = torch.compile(loss, fullgraph=True)  # and it draws its own centres
    assert len({compiled(states, catalogue, targets).item() for _ in range(3)}) > 1
