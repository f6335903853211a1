"""Scalable Cross-Entropy in CUDA graphs: the host launches a pass at once, not kernel by kernel."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from sce.losses.backend import why_not_triton
from sce.losses.inputs import Catalogue, apply, check_size, once, unwrap_catalogue
from sce.losses.scalable import ScalableCrossEntropy

_WARM_UP = 3  # eager calls before one is recorded: kernels compile, libraries make buffers
_REMEMBERED = 64  # kinds that came once


class GraphedLoss(nn.Module):
    """Scalable Cross-Entropy for eager loops on a GPU, where the host launches kernels too slowly.

    Make one, and keep it: it is called as the loss is, and gives the same. Inputs of a kind
    (shapes, types, `max_targets`, the same catalogue in memory, the settings of the loss) are
    recorded as CUDA graphs when they come for the second time, for up to `most` kinds. The loss
    itself is called for all others, and where a graph cannot stand in: where its kernels do not
    run, without gradients, with a `generator` or `centres`, with a catalogue that is computed or
    no parameter, in another graph, in a compiled model, with hooks, with saved-tensor hooks such as
    those of gradient checkpointing, and while the last result of that kind waits for its backward
    pass.

    Each result has one backward pass, and nothing that is returned is overwritten later. A graph
    keeps the catalogue and the memory of both passes, and of the gradients once more: that is why
    it is asked for, and not the default. Calls from several host threads need one each.

    Example:
        >>> from sce import GraphedLoss, ScalableCrossEntropy
        >>> loss = GraphedLoss(ScalableCrossEntropy())
        >>> loss(torch.randn(8, 32), torch.randn(100, 32), torch.randint(100, (8,))).shape
        torch.Size([])
    """

    def __init__(self, loss: ScalableCrossEntropy, most: int = 4) -> None:
        super().__init__()
        if type(loss) is not ScalableCrossEntropy:  # another may have parameters of its own
            raise TypeError(f"GraphedLoss takes a ScalableCrossEntropy, got {type(loss)}")
        if loss.sparse_grad:
            raise ValueError("a graph does not know how many rows a sparse gradient has")
        self.loss, self.most = loss, check_size("most", most)
        self._seen: set[Any] = set()
        self._recorded: dict[Any, _Recorded | None] = {}  # None: it failed

    def forward(
        self, states: Tensor, catalogue: Catalogue, targets: Tensor, **options: Any
    ) -> Tensor:
        """Return the loss; see `Loss.forward`."""
        weight, bias = unwrap_catalogue(catalogue)
        given = states, weight, targets
        asked = {name: value for name, value in options.items() if value is not None}
        most = asked.pop("max_targets", None)
        plain = bias is None and not asked and isinstance(most, int | None)
        if plain and _is_recordable(self.loss, *given):
            kind = (repr(self.loss), *map(_kind, given), most, *_surroundings(weight))
            room = len(self._recorded) < self.most
            if room and kind in self._seen and kind not in self._recorded:
                self._recorded[kind] = None
                self._recorded[kind] = _Recorded(self.loss, *given, most)
            if len(self._seen) == _REMEMBERED:
                self._seen.clear()
            self._seen.add(kind)
            recorded = self._recorded.get(kind)
            if recorded is not None and not recorded.waits():
                value: Tensor = apply(_Replay, *given, recorded)
                return value
        found: Tensor = self.loss(states, catalogue, targets, **options)
        return found

    def _apply(self, *given: Any, **options: Any) -> "GraphedLoss":
        """Move, and let go of what was recorded before."""
        self._seen.clear()
        self._recorded.clear()
        moved: GraphedLoss = super()._apply(*given, **options)  # type: ignore[no-untyped-call]
        return moved

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the graphs: a copy records its own."""
        return self.__dict__ | {"_seen": set(), "_recorded": {}}


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _surroundings(catalogue: Tensor) -> tuple[Any, ...]:
    stream = torch.cuda.current_stream(catalogue.device).cuda_stream
    return catalogue.data_ptr(), stream, _autocast_dtype()


def _autocast_dtype() -> torch.dtype | None:
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None


def _is_recordable(loss: nn.Module, *given: Any) -> bool:
    """True for what a step calls a loss with; the loss itself refuses what does not fit."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if not all(isinstance(each, Tensor) for each in given):
        return False
    states, catalogue, targets = given
    return (
        torch.is_grad_enabled()
        and catalogue.is_leaf
        and (catalogue.requires_grad or isinstance(catalogue, nn.Parameter))  # not made anew
        and (states.requires_grad or catalogue.requires_grad)
        and not (loss._forward_hooks or loss._forward_pre_hooks)
        and not (loss._backward_hooks or loss._backward_pre_hooks)
        and targets.numel() > 0
        and torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        and _on_one_gpu(loss, states, catalogue, targets)
    )


def _on_one_gpu(loss: Any, states: Tensor, catalogue: Tensor, targets: Tensor) -> bool:
    """True if the kernels run, and may be recorded now."""
    return (
        states.is_cuda
        and states.device == catalogue.device == targets.device
        and why_not_triton(states, catalogue, loss.backend) is None
        and not torch.cuda.is_current_stream_capturing()
    )


class _Call:
    """One forward pass: alive while its backward pass may come."""

    done = False  # its backward pass


class _Recorded:
    """Both passes of a loss as graphs, with inputs, loss and gradients at fixed places."""

    def __init__(
        self,
        loss: nn.Module,
        states: Tensor,
        catalogue: Tensor,
        targets: Tensor,
        max_targets: int | None,
    ) -> None:
        self._states, self._targets = states.detach().clone(), targets.clone()
        self._inputs = self._states, catalogue.detach()  # which is the catalogue's memory
        for held, given in zip(self._inputs, (states, catalogue), strict=True):
            held.requires_grad_(given.requires_grad)
        wanted = [held for held in self._inputs if held.requires_grad]
        self._last: Any = lambda: None
        self.address = catalogue.data_ptr()
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        current, stream = torch.cuda.current_stream(states.device), torch.cuda.Stream(states.device)
        dtype = _autocast_dtype()

        def call() -> Tensor:
            with torch.autocast("cuda", dtype, enabled=dtype is not None, cache_enabled=False):
                value: Tensor = loss(*self._inputs, self._targets, max_targets=max_targets)
            return value

        # Other threads, such as those of a data loader, go on meanwhile.
        record: Any = {"stream": stream, "capture_error_mode": "thread_local"}
        # The current stream is that of before again, also if recording fails.
        device, before = torch.cuda.device(states.device), torch.cuda.stream(current)
        with device, before, torch.autocast("cuda", enabled=False):
            random = torch.cuda.get_rng_state()
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UP):
                    value = call()
                    torch.autograd.grad(value, wanted, torch.ones_like(value))
            current.wait_stream(stream)
            torch.cuda.set_rng_state(random)
            with torch.cuda.graph(self._forward, **record):
                value = call()
            self._value, self._grad = value, torch.ones_like(value)
            with torch.cuda.graph(self._backward, pool=self._forward.pool(), **record):
                self._grads = torch.autograd.grad(value, wanted, self._grad)

    def waits(self) -> bool:
        """True if the last forward pass has not had its backward pass, which may still come."""
        call = self._last()
        return call is not None and not call.done

    def forward(self, states: Tensor, targets: Tensor) -> tuple[Tensor, _Call]:
        """Do a forward pass."""
        self._states.copy_(states)
        self._targets.copy_(targets)
        self._forward.replay()
        call = _Call()
        self._last = weakref.ref(call)
        return self._value.detach().clone(), call

    def backward(self, call: _Call, grad: Tensor) -> list[Tensor | None]:
        """Return the gradients of states and catalogue, given that of the loss."""
        if call.done:  # and what it read may be overwritten
            raise RuntimeError(
                "a result of GraphedLoss has one backward pass; for another, call the loss without"
            )
        call.done = True
        self._grad.copy_(grad)
        self._backward.replay()
        found = iter(self._grads)
        return [next(found).clone() if held.requires_grad else None for held in self._inputs]


class _Replay(Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, catalogue: Tensor, targets: Tensor, recorded: _Recorded
    ) -> Tensor:
        ctx.recorded = recorded
        ctx.save_for_backward(catalogue)
        value, ctx.call = recorded.forward(states, targets)
        return value

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (catalogue,) = ctx.saved_tensors  # refused if it has changed since
        if catalogue.data_ptr() != ctx.recorded.address:
            raise RuntimeError("the catalogue has moved in memory since the forward pass")
        return *ctx.recorded.backward(ctx.call, grad), None, None
