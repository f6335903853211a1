"""The base class of every loss, and the sizes that losses are built and planned from."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from sce.losses.inputs import (
    Catalogue,
    Inputs,
    Reduction,
    check_choice,
    check_inputs,
    check_size,
    reduce,
)


@dataclass(frozen=True)
class DataSummary:
    """The training data as far as a loss may depend on it."""

    n_items: int
    sequences: float  # of a batch
    mean_length: float  # targets of a sequence, once it is cut to the model's maximum length
    item_counts: Tensor  # [n_items]: occurrences in the training data
    cpu: bool = False  # where it is trained

    @property
    def targets(self) -> float:
        """Mean number of targets in a batch."""
        return self.sequences * self.mean_length


@dataclass(frozen=True)
class BatchShape:
    """The sizes of a training batch that decide how much memory a step takes."""

    n_items: int
    sequences: int
    length: int  # positions of a sequence, padding included
    dim: int
    targets: float  # of a mean batch
    max_targets: float  # of the fullest batch: its peak is the peak
    half: bool = False  # matrix products in half precision, by autocast on a GPU

    @property
    def positions(self) -> int:
        """Positions of the batch, padding included."""
        return self.sequences * self.length

    @property
    def state_bytes(self) -> int:
        """Bytes of the hidden states, and of their gradient, in float32."""
        return 4 * self.positions * self.dim

    @property
    def catalogue_bytes(self) -> int:
        """Bytes of the catalogue, and of its dense gradient, in float32."""
        return 4 * self.n_items * self.dim


class LossMemory(NamedTuple):
    """Bytes that a loss takes beyond its inputs, at the peak of each pass, in float32."""

    forward: float
    backward: float  # without the catalogue's gradient, less what is freed of the inputs
    gradient_rows: float | None = None  # of a sparse gradient of the catalogue; None: dense


class Loss(nn.Module):
    """A loss over a catalogue of items, called `loss(states, catalogue, targets)`.

    Any function of these can be trained with; one derived from this class is also given the
    generator of the step and the number of targets, can be captured, and is known to `sce plan`.

    Args:
        ignore_index: Target of positions that do not count, such as padding.
        reduction: "mean" over the positions that count, "sum", or "none".
    """

    statistics: tuple[str, ...] = ()
    """Names of the statistics that `with_statistics` returns."""
    sized_by_targets: bool = False
    """Whether sizes follow from `max_targets`; `fit` then gives that of the mean batch."""

    def __init__(self, *, ignore_index: int = -100, reduction: str = "mean") -> None:
        super().__init__()
        check_choice("reduction", reduction, Reduction)
        self.ignore_index = check_size("ignore_index", ignore_index, least=-(2**63))
        self.reduction = reduction

    def forward(
        self,
        states: Tensor,
        catalogue: Catalogue,
        targets: Tensor,
        *,
        generator: Generator | None = None,
        max_targets: int | None = None,
    ) -> Tensor:
        """Return the loss.

        Args:
            states: Hidden states, [..., d].
            catalogue: Item embeddings, [items, d]: a tensor, an `nn.Embedding` or an `nn.Linear`.
            targets: The correct item of each state, [...]; `ignore_index` where there is none.
            generator: Source of random numbers; None: torch's default.
            max_targets: An upper bound of the number of targets, where it is known: the host then
                does not wait for the device to count them.
        """
        raise NotImplementedError

    def with_statistics(self, *inputs: Any, **options: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the loss of such a call and its `statistics`, as scalar tensors."""
        return self(*inputs, **options), ()

    def is_capturable(self, catalogue: Catalogue) -> bool:
        """True if the call, given `max_targets`, can be captured in a CUDA graph."""
        return False

    def memory(self, shape: BatchShape) -> LossMemory | None:
        """Return the bytes that a call takes, for `sce plan`; None: not known.

        The shape is a `sce.losses.base.BatchShape`: items, sequences, length, dim and targets.
        """
        return None

    def extra_repr(self) -> str:
        """Show the settings; those that are modules show themselves."""
        settings = {k: v for k, v in vars(self).items() if k != "training" and k[0] != "_"}
        return ", ".join(f"{k}={v!r}" for k, v in settings.items())


class LossOfPositions(Loss):
    """Base of the losses that are one number for each valid position, and take a bias per item."""

    def forward(
        self,
        states: Tensor,
        catalogue: Catalogue,
        targets: Tensor,
        *,
        generator: Generator | None = None,
        max_targets: int | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Return the loss; see `Loss.forward`.

        `bias` [items] is added to the logits of each item; an `nn.Linear` brings its own.
        """
        inputs = check_inputs(states, catalogue, targets, self.ignore_index, bias, max_targets)
        return reduce(self._losses(inputs, generator), None, inputs, self.reduction)

    def _losses(self, inputs: Inputs, generator: Generator | None) -> Tensor:
        """Return the loss of each valid position [v], or their sum."""
        raise NotImplementedError


TINY_DATA = DataSummary(1, 1.0, 1.0, torch.ones(1, dtype=torch.int64))


@dataclass(frozen=True)
class LossSettings:
    """Base of the frozen dataclass beside a loss: fields are its options, docstrings their help."""

    def __post_init__(self) -> None:
        self.build(TINY_DATA)  # the constructor of the loss checks the settings

    def build(self, data: DataSummary) -> Loss:
        """Make the loss, with what the settings leave open taken from the data."""
        raise NotImplementedError
