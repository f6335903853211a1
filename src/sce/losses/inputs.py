"""Arguments of a loss: the kinds of catalogues, checks, valid positions, reduction."""

import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, SupportsFloat, SupportsIndex, get_args

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

Catalogue = Tensor | nn.Embedding | nn.Linear
Reduction = Literal["mean", "sum", "none"]

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32)
_NO_TRANSFORM = (
    "this loss does not work inside torch.func (grad, vmap, ...): its gradient is written by hand. "
    "Call backward() or torch.autograd.grad on its result"
)
_REFUSED = {
    "padding_idx": "and padding is no item: give embedding.weight, if that row may be scored as an "
    "item; or, without sparse_grad, the rows of items alone, and number targets by them",
    "max_norm": "which a loss does not apply: give embedding.weight to do without",
}


@dataclass(frozen=True)
class Inputs:
    """The arguments of a loss, checked, at the valid positions alone: padding may hold anything."""

    states: Tensor  # [v, d]
    catalogue: Tensor  # [items, d]
    targets: Tensor  # [v] int64
    index: Tensor  # [v]: flat index of each valid position
    positions: torch.Size  # shape of the targets as they were given
    bias: Tensor | None = None  # [items], in the dtype of the logits
    valid: Tensor | None = None  # [v]: places in use, with `max_targets`; None: all

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of logits and losses: float64 when states or catalogue are, float32 otherwise."""
        return compute_dtype(self.states, self.catalogue)

    def put(self, values: Tensor) -> Tensor:
        """Put values [v, ...] of the valid positions where they lie, [n, ...]; 0 elsewhere."""
        n, index = self.positions.numel(), self.index
        if self.valid is None:
            return values.new_zeros(n, *values.shape[1:]).index_put((index,), values)
        index = index.where(self.valid, n)  # places that are not in use go behind the last
        return values.new_zeros(n + 1, *values.shape[1:]).index_put((index,), values)[:n]


def compute_dtype(states: Tensor, catalogue: Tensor) -> torch.dtype:
    """Return the dtype that logits are computed in: float32, or float64 if either input is."""
    both = torch.promote_types(states.dtype, catalogue.dtype)
    return torch.promote_types(both, torch.float32)


def unwrap_catalogue(catalogue: Catalogue) -> tuple[Tensor, Tensor | None]:
    """Return the item embeddings [items, d] of a catalogue, and its bias [items] if it has one."""
    if isinstance(catalogue, Tensor):
        return catalogue, None
    kind = nn.Linear if isinstance(catalogue, nn.Linear) else nn.Embedding
    hooks = getattr(catalogue, "_forward_hooks", ()) or getattr(catalogue, "_forward_pre_hooks", ())
    if isinstance(catalogue, kind) and (
        type(catalogue).forward is not kind.forward or "forward" in catalogue.__dict__ or hooks
    ):
        raise TypeError(
            f"catalogue is an nn.{kind.__name__} with a forward or hooks of its own, which do not "
            "run: give the tensor [items, d] that it multiplies with"
        )
    if isinstance(catalogue, nn.Linear):
        return catalogue.weight, catalogue.bias
    if not isinstance(catalogue, nn.Embedding):
        raise TypeError(
            f"catalogue must be a tensor, an nn.Embedding or an nn.Linear, got {type(catalogue)}"
        )
    for name, remedy in _REFUSED.items():
        if getattr(catalogue, name) is not None:
            raise ValueError(f"catalogue is an nn.Embedding with {name}, {remedy}")
    return catalogue.weight, None


def check_inputs(
    states: Tensor,  # [..., d]
    catalogue: Catalogue,
    targets: Tensor,  # [...]
    ignore_index: int,
    bias: Tensor | None = None,  # [items]
    max_targets: int | None = None,
) -> Inputs:
    """Check the arguments of a loss, and gather the valid positions.

    With `max_targets` into as many places, without a sync; unused ones hold zeros, and target 0.
    """
    catalogue, own_bias = unwrap_catalogue(catalogue)
    if bias is not None and own_bias is not None:
        raise ValueError("bias is given twice: the catalogue is an nn.Linear that has one")
    bias = own_bias if bias is None else bias
    check_arguments(states, catalogue, targets, bias)
    if bias is not None:
        bias = bias.to(compute_dtype(states, catalogue))
    flat = targets.reshape(-1).long()
    valid = flat != ignore_index
    wrong = valid & ((flat < 0) | (flat >= len(catalogue)))
    message = f"targets must lie in [0, {len(catalogue)}) or equal ignore_index ({ignore_index})"
    if flat.device.type == "cpu" and wrong.any():
        message = f"{message}, got {flat[wrong][0].item()}"
    check_values(wrong.any().logical_not(), message)
    every = states.reshape(-1, states.shape[-1])
    if max_targets is not None:
        max_targets = check_size("max_targets", max_targets)
    if max_targets is None or len(flat) == 0:
        index = valid.nonzero().squeeze(1)
        x = every.index_select(0, index)
        return Inputs(x, catalogue, flat[index], index, targets.shape, bias)
    max_targets = min(max_targets, len(flat))  # there are no more places
    count = valid.sum()
    check_values(count <= max_targets, f"there are more targets than max_targets, {max_targets}")
    number = torch.arange(len(flat), device=flat.device)
    place = (valid.cumsum(0) - 1).where(valid, max_targets)
    index = number.new_zeros(max_targets + 1).scatter(0, place, number)[:max_targets]
    used = number[:max_targets] < count
    x = every.index_select(0, index).where(used.unsqueeze(1), 0)
    return Inputs(x, catalogue, flat[index].where(used, 0), index, targets.shape, bias, used)


def check_arguments(
    states: Tensor, catalogue: Tensor, targets: Tensor, bias: Tensor | None = None
) -> None:
    """Refuse arguments whose types, shapes, dtypes or devices do not fit together: no sync."""
    given = {"states": states, "catalogue": catalogue, "targets": targets}
    if bias is not None:
        given["bias"] = bias
    for name, tensor in given.items():
        check_tensor(name, tensor)
        dtypes = _INTEGERS if name == "targets" else _DTYPES
        if tensor.dtype not in dtypes:
            kind = "item indices" if name == "targets" else "floating point"
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise TypeError(f"{name} must be {kind} ({names}), got {tensor.dtype}")
    vmapped = torch._C._functorch.is_batchedtensor
    if not torch.compiler.is_compiling() and any(map(vmapped, given.values())):
        raise TypeError(_NO_TRANSFORM)
    x, y = tuple(states.shape), tuple(catalogue.shape)
    if len(y) != 2 or 0 in y:
        raise ValueError(f"catalogue must be [items, d] and not empty, got shape {y}")
    if x[-1:] != y[1:]:
        raise ValueError(f"states {x} and catalogue {y} differ in their last dimension")
    if targets.shape != x[:-1]:
        raise ValueError(
            f"targets must be {x[:-1]}, one for each state, got {tuple(targets.shape)}"
        )
    if bias is not None and bias.shape != y[:1]:
        raise ValueError(f"bias must be one number per item, {y[:1]}, got {tuple(bias.shape)}")
    if len({tensor.device for tensor in given.values()}) > 1:
        devices = ", ".join(f"{name} on {tensor.device}" for name, tensor in given.items())
        raise ValueError(f"the arguments of a loss must be on one device, got {devices}")
    if states.device.type == "meta":
        raise TypeError("a loss depends on numbers, and tensors on the device meta have none")


def check_tensor(name: str, given: object) -> None:
    """Refuse anything but a tensor on one device."""
    if not isinstance(given, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(given).__name__}")
    if given.is_nested or given.layout != torch.strided:
        kind = "a nested one" if given.is_nested else f"one of {given.layout}"
        raise TypeError(f"{name} must be a dense tensor, got {kind}")
    if hasattr(given, "full_tensor"):
        raise TypeError(f"{name} is a DTensor: give the whole tensor, {name}.full_tensor()")


def active_autocast_dtype(states: Tensor, catalogue: Tensor) -> torch.dtype | None:
    """Return the dtype that torch.autocast gives factors of matrix products; None: their own."""
    # It applies where an input is float32 and the other is too, or has its dtype already.
    device = states.device.type
    if not torch.is_autocast_enabled(device):
        return None
    dtype = torch.get_autocast_dtype(device)
    given = (states.dtype, catalogue.dtype)
    fits = torch.float32 in given and all(x in (torch.float32, dtype) for x in given)
    return dtype if fits and dtype in (torch.bfloat16, torch.float16) else None


def rounded(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Round a factor of a matrix product to the dtype of autocast; None: leave it."""
    return tensor if dtype is None else tensor.to(dtype)


def check_values(holds: Tensor, message: str) -> None:
    """Refuse tensors by what they hold; without a sync, on a GPU in an assertion of its own."""
    if holds.device.type != "cpu":
        torch._assert_async(holds, message)  # on the device: no sync
    elif not holds:
        raise ValueError(message)


def check_choice(name: str, value: object, choices: Any) -> None:
    """Refuse a value that is not among the choices of a Literal."""
    if value not in get_args(choices):
        raise ValueError(f"{name} must be one of {get_args(choices)}, got {value!r}")


def check_size(name: str, value: SupportsIndex, least: int = 1) -> int:
    """Return a size as an int; refuse one that is not a whole number, or is too small."""
    if isinstance(value, (bool, Tensor)) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    size = operator.index(value)
    if size < least:
        raise ValueError(f"{name} must be at least {least}, got {size}")
    if size >= 2**63:
        raise ValueError(f"{name} must be below 2**63")
    return size


def check_size_or_none(name: str, value: SupportsIndex | None) -> int | None:
    """Return a size as an int, or None where there is none; see `check_size`."""
    return None if value is None else check_size(name, value)


def check_flag(name: str, value: bool) -> None:
    """Refuse anything but True and False: any text would count as true."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_number(name: str, value: float) -> None:
    """Refuse anything but a finite number."""
    if isinstance(value, (bool, Tensor)) or not isinstance(value, SupportsFloat):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not -sys.float_info.max <= value <= sys.float_info.max:
        raise ValueError(f"{name} must be finite, got {value}")


def check_centres(centres: Tensor, catalogue: Tensor) -> None:
    """Refuse centres that are no vectors beside those of a catalogue."""
    check_tensor("centres", centres)
    d, device = catalogue.shape[1], catalogue.device
    fits = centres.dim() == 2 and centres.shape[1] == d and len(centres) > 0
    if not fits or not centres.is_floating_point() or centres.device != device:
        raise ValueError(
            f"centres must be [n_buckets, {d}], floating point, on {device}, got "
            f"{tuple(centres.shape)}, {centres.dtype}, on {centres.device}"
        )
    free = centres.device.type == "cpu" and not torch.compiler.is_compiling()  # to look at values
    if free and not centres.isfinite().all():
        raise ValueError("centres must be finite numbers")


def refuse_transforms() -> None:
    """Refuse torch.func, which cannot transform autograd functions of ours."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise TypeError(_NO_TRANSFORM)


def apply(function: type[Function], *arguments: Any) -> Any:
    """Apply an autograd function of ours."""
    refuse_transforms()
    return function.apply(*arguments)


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse a second derivative; torch's own mark gives zeros for what it leaves out."""
    marked = once_differentiable(backward)

    def call(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():  # by create_graph alone
            raise RuntimeError("this loss has no second derivative: leave out create_graph=True")
        return marked(ctx, *grads)

    return call


def reduce(losses: Tensor, counted: Tensor | None, inputs: Inputs, reduction: str) -> Tensor:
    """Reduce the losses [v] of the valid positions; but for "none", their sum may be given.

    The mean is over the `counted` [v] (None: all); losses that are not counted must be 0.
    """
    if inputs.valid is not None:
        losses, counted = losses.where(inputs.valid, 0), inputs.valid
    if reduction == "none":
        return inputs.put(losses).reshape(inputs.positions)
    if reduction == "sum":
        return losses.sum()
    count = len(inputs.index) if counted is None else counted.sum()
    return losses.sum() / torch.as_tensor(count, device=losses.device).clamp(min=1)
