"""What every loss checks and flattens before it computes anything."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd import Function

Reduction = Literal["mean", "sum", "none"]
Catalogue = Tensor | torch.nn.Embedding | torch.nn.Linear

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Inputs:
    """The arguments of a loss, checked, and reduced to the valid positions.

    What a state holds at an ignored position (padding may hold anything) never enters a loss.
    """

    states: Tensor  # [v, d]
    catalogue: Tensor  # [c, d]
    targets: Tensor  # [v] int64
    index: Tensor  # [v] where each valid position lies
    positions: torch.Size  # the leading shape of the states as they were given
    there: Tensor | None = None  # [v] with `max_targets`: which of them are valid; None: all

    @property
    def dtype(self) -> torch.dtype:
        """What the loss computes in: float64 when either input is, float32 otherwise."""
        wide = torch.float64 in (self.states.dtype, self.catalogue.dtype)
        return torch.float64 if wide else torch.float32

    def put(self, values: Tensor) -> Tensor:
        """Put values [v, ...] of the valid positions where they lie, [n, ...]; 0 elsewhere."""
        n, index = self.positions.numel(), self.index
        if self.there is None:
            return values.new_zeros(n, *values.shape[1:]).index_put((index,), values)
        index = index.where(self.there, n)  # what is not valid goes behind the last
        return values.new_zeros(n + 1, *values.shape[1:]).index_put((index,), values)[:n]


def check_inputs(
    states: Tensor,  # [..., d]
    catalogue: Tensor,  # [c, d]
    targets: Tensor,  # [...]
    *,
    ignore_index: int,
    max_targets: int | None = None,
) -> Inputs:
    """Check the arguments of a loss, and take the valid positions out.

    With `max_targets`, into as many places, which must be enough: counting the targets would be a
    sync. Places left over hold zeros, and target 0.
    """
    check_arguments(states, catalogue, targets, ignore_index=ignore_index)
    flat = targets.reshape(-1).long()
    valid = flat != ignore_index
    _check_range(flat, valid, n_items=catalogue.shape[0], ignore_index=ignore_index)
    every = states.reshape(-1, states.shape[-1])
    if max_targets is not None:
        check_size("max_targets", max_targets)
    if max_targets is None or len(flat) == 0:
        index = valid.nonzero().squeeze(1)
        return Inputs(every.index_select(0, index), catalogue, flat[index], index, targets.shape)
    count = valid.sum()
    _check(count <= max_targets, f"there are more targets than max_targets, {max_targets}")
    number = torch.arange(max(len(flat), max_targets), device=flat.device)
    place = (valid.cumsum(0) - 1).where(valid, max_targets)
    index = number.new_zeros(max_targets + 1).scatter(0, place, number[: len(flat)])[:max_targets]
    there = number[:max_targets] < count
    x = every.index_select(0, index).where(there.unsqueeze(1), 0)
    return Inputs(x, catalogue, flat[index].where(there, 0), index, targets.shape, there)


def check_arguments(
    states: Tensor, catalogue: Tensor, targets: Tensor, *, ignore_index: int
) -> None:
    """Refuse what does not fit together, with a message that says what was given.

    Values are not looked at: the host never waits for the device here.
    """
    check_ignore_index(ignore_index)
    for name, given in (("states", states), ("catalogue", catalogue), ("targets", targets)):
        check_tensor(name, given)
    _refuse(torch._C._functorch.is_batchedtensor, "vmap", states, catalogue, targets)
    for name, tensor in (("states", states), ("catalogue", catalogue)):
        if tensor.dtype not in _DTYPES:
            raise TypeError(
                f"{name} must be floating point (float64, float32, bfloat16 or float16), got "
                f"{tensor.dtype}"
            )
    if targets.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"targets must be int64 or int32 item indices, got {targets.dtype}")
    if states.dim() < 1:
        raise ValueError("states must have a last dimension of size d, got a scalar")
    if catalogue.dim() != 2:
        raise ValueError(f"catalogue must be [items, d], got shape {tuple(catalogue.shape)}")
    if catalogue.shape[0] == 0:
        raise ValueError("catalogue has no rows: there is nothing to predict")
    if states.shape[-1] != catalogue.shape[1]:
        raise ValueError(
            f"states and catalogue differ in their last dimension: states {tuple(states.shape)}, "
            f"catalogue {tuple(catalogue.shape)}"
        )
    if catalogue.shape[1] == 0:
        raise ValueError(
            f"states and catalogue have rows of no numbers: states {tuple(states.shape)}, "
            f"catalogue {tuple(catalogue.shape)}"
        )
    if targets.shape != states.shape[:-1]:
        raise ValueError(
            f"targets must have the shape of states without the last dimension, "
            f"{tuple(states.shape[:-1])}, got {tuple(targets.shape)}"
        )
    if not states.device == catalogue.device == targets.device:
        raise ValueError(
            f"states, catalogue and targets must be on one device, got {states.device}, "
            f"{catalogue.device} and {targets.device}"
        )


def check_tensor(name: str, given: object) -> None:
    """Refuse what is no tensor."""
    if not isinstance(given, Tensor):
        hint = "; give its weight" if isinstance(given, torch.nn.Module) else ""
        raise TypeError(f"{name} must be a tensor, got {type(given).__name__}{hint}")


def autocast_rounding(states: Tensor, catalogue: Tensor) -> torch.dtype | None:
    """Return what torch.autocast rounds the factors of matrix products to; None: nothing.

    It has a say where an input is float32 and the other one is too, or is in its precision already.
    """
    kind = states.device.type
    if not torch.is_autocast_enabled(kind):
        return None
    dtype = torch.get_autocast_dtype(kind)
    given = (states.dtype, catalogue.dtype)
    fits = torch.float32 in given and all(x in (torch.float32, dtype) for x in given)
    return dtype if fits and dtype in (torch.bfloat16, torch.float16) else None


def rounded(tensor: Tensor, rounding: torch.dtype | None) -> Tensor:
    """Round what is to be a factor of a matrix product, unless there is nothing to round to."""
    return tensor if rounding is None else tensor.to(rounding)


def _check_range(targets: Tensor, valid: Tensor, *, n_items: int, ignore_index: int) -> None:
    wrong = valid & ((targets < 0) | (targets >= n_items))
    message = f"targets must lie in [0, {n_items}) or equal ignore_index ({ignore_index})"
    if targets.device.type == "cpu" and wrong.any():
        message = f"{message}, got {targets[wrong][0].item()}"
    _check(wrong.any().logical_not(), message)


def _check(holds: Tensor, message: str) -> None:
    if holds.device.type != "cpu":
        # Asserted on the device: as loud as an exception, and the host does not wait for it.
        torch._assert_async(holds, message)
    elif not holds:
        raise ValueError(message)


def check_reduction(reduction: str) -> None:
    """Refuse a reduction that PyTorch's own losses would not know."""
    if reduction not in get_args(Reduction):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")


def check_ignore_index(value: int) -> None:
    """Refuse what no target can equal."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(
            f"ignore_index must be an integer, got {value!r}; to ignore nothing, leave it at -100"
        )
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"ignore_index must fit into 64 bits, got {value}")


def check_size(name: str, value: int) -> None:
    """Refuse a size that is not a whole number, or is below 1."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def check_flag(name: str, value: bool) -> None:
    """Refuse what is neither True nor False: any text would count as true."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_number(name: str, value: float) -> None:
    """Refuse what is not a number."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number, got {value!r}")


def apply(function: type[Function], *arguments: Any) -> Any:
    """Apply an autograd function of ours, or say that torch.func cannot transform it."""
    tensors = (argument for argument in arguments if isinstance(argument, Tensor))
    _refuse(torch._C._functorch.is_functorch_wrapped_tensor, "grad, jacrev, ...", *tensors)
    return function.apply(*arguments)


def _refuse(is_transformed: Callable[[Tensor], bool], name: str, *tensors: Tensor) -> None:
    if not torch.compiler.is_compiling() and any(is_transformed(tensor) for tensor in tensors):
        raise TypeError(
            f"this loss does not work inside torch.func ({name}): its gradient is written by hand. "
            "Call backward() or torch.autograd.grad on its result"
        )


def reduce(losses: Tensor, counted: Tensor | None, inputs: Inputs, reduction: str) -> Tensor:
    """Reduce the losses [v] of the valid positions.

    Only the `counted` [v] enter the mean (None: all); the others must hold 0. A mean over nothing
    is 0, not NaN. "none" gives the losses in the shape of the positions, 0 where ignored.
    """
    if inputs.there is not None:
        losses, counted = losses.where(inputs.there, 0), inputs.there
    if reduction == "none":
        return inputs.put(losses).reshape(inputs.positions)
    if reduction == "sum":
        return losses.sum()
    count = len(losses) if counted is None else counted.sum()
    return losses.sum() / torch.as_tensor(count, device=losses.device).clamp(min=1)


def unwrap_catalogue(catalogue: Catalogue) -> tuple[Tensor, Tensor | None]:
    """Return the item embeddings [items, d], and the bias of each item, if there is one."""
    if isinstance(catalogue, torch.nn.Linear):
        return catalogue.weight, catalogue.bias
    if isinstance(catalogue, torch.nn.Embedding):
        return catalogue.weight, None
    return catalogue, None
