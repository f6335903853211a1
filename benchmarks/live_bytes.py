"""Peak memory of a training step as a GPU would have it, counted on a CPU.

The step runs on the CPU with the operations that a GPU would run, as far as memory goes: dropout
that keeps a mask of bytes, attention that keeps no matrix of weights, layer norms in float32 under
autocast, and the kernels of Scalable Cross-Entropy and all matrix products as their allocations
alone (what they would compute is not computed). Every tensor that is made is counted until it is
freed. What libraries keep for themselves, and what an operation takes and gives back inside, is not
seen.
"""

import importlib
import os
import pkgutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils import _pytree as pytree

from sce.experiments.step_memory import MemoryMeter

_ROUNDED = 512  # the allocator of a GPU gives multiples of it
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


class LiveBytes(MemoryMeter):
    """Counts the bytes of all tensors alive, and remembers the most there were.

    Args:
        parameters: Tensors that are there already; gradients of their shape add up in place, as
            they do where nobody is counting.
        present: Other tensors that are there already.
    """

    def __init__(self, parameters: Sequence[Tensor] = (), present: object = ()) -> None:
        super().__init__(torch.device("cpu"))
        self._shapes = {parameter.shape for parameter in parameters}
        self._count([list(parameters), present])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _PRODUCTS:
            out = args[-1].new_empty([*args[-2].shape[:-1], args[-1].shape[-1]])
        elif func is torch.ops.aten.bmm.out:
            out = kwargs["out"]
        elif func is torch.ops.aten.add.Tensor and self._adds_gradients(*args[:2]):
            out = args[0].add_(args[1])
        else:
            out = func(*args, **(kwargs or {}))
        self._count(out)
        return out

    def _adds_gradients(self, one: object, other: object) -> bool:
        return (
            torch._C._current_graph_task_id() != -1
            and isinstance(one, Tensor)
            and isinstance(other, Tensor)
            and one.shape == other.shape
            and one.shape in self._shapes
        )

    def _count(self, tree: object) -> None:
        for tensor in pytree.tree_leaves(tree):
            if isinstance(tensor, Tensor):
                parts = [tensor._indices(), tensor._values()] if tensor.is_sparse else [tensor]
                for part in parts:
                    storage = part.untyped_storage()
                    self._add(storage, -(-storage.nbytes() // _ROUNDED) * _ROUNDED)


@contextmanager
def gpu_like() -> Iterator[None]:
    """For a while, let operations on the CPU keep and make what those on a GPU do."""
    os.environ.setdefault("TRITON_INTERPRET", "1")  # the kernels then take tensors on the CPU
    from sce.losses import full, gradients, kernels, sampled, scoring
    from sce.losses.kernels import catalogue

    layer_norm = F.layer_norm

    def norm(states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        wide = states.float() if torch.is_autocast_enabled("cpu") else states
        return layer_norm(wide, *args, **kwargs)

    def dropout(states: Tensor, p: float, training: bool, inplace: bool = False) -> Tensor:
        return torch.native_dropout(states, p, training)[0] if training and p else states

    with ExitStack() as patches:
        for owner, name, new in (
            (F, "dropout", dropout),
            (F, "layer_norm", norm),
            (F, "scaled_dot_product_attention", _attention),
            (sampled, "logsigmoid", _log_sigmoid),
            (gradients, "add_rows", gradients._add_captured),
            (full, "_is_faster_by_torch", lambda *_: False),  # on a CPU alone
            (scoring, "_can_count", lambda *_: False),
            (full, "why_not_triton", lambda *_: None),
            (catalogue, "_capturing", lambda: True),
        ):
            patches.enter_context(mock.patch.object(owner, name, new))
        for module in _modules(kernels):
            if hasattr(module, "launch"):
                patches.enter_context(mock.patch.object(module, "launch", _launch_nothing))
        yield


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Tensor, **options: float) -> Tensor:
    attended: Tensor = _Attention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return attended


class _Attention(torch.autograd.Function):
    """What fused attention allocates: forward the result and a number a row, backward gradients."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            query, key, value = (part.bfloat16() for part in (query, key, value))
        out = torch.zeros_like(query)
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1]).float())
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(part) for part in ctx.saved_tensors[:3])


def _log_sigmoid(logits: Tensor) -> Tensor:
    found: Tensor = _LogSigmoid.apply(logits)  # type: ignore[no-untyped-call]
    return found


class _LogSigmoid(torch.autograd.Function):
    """As on a GPU: a CPU would keep exp(-|logits|) as well."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return torch.empty_like(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.empty_like(grad)


def _modules(package: ModuleType) -> Iterator[ModuleType]:
    for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        yield importlib.import_module(found.name)


def _launch_nothing(kernel: object, grid: object, *arguments: object, **_: object) -> None:
    """Do nothing, but for valid indices and flags that are set."""
    for value in arguments:
        if isinstance(value, Tensor) and not value.is_floating_point():
            value.fill_(1)
