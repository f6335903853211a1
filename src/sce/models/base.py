"""The base class of every backbone: a model from histories to hidden states."""

from typing import Any, Protocol

from torch import Tensor, nn

from sce.data.length_groups import LengthGroups


class Backbone(nn.Module):
    """Maps histories [b, l] to hidden states [b, l, d]; scores are `states @ catalogue.T`.

    Derive from it for a model of your own that wants what training can give: batches cut by length,
    row-wise updates, capture in a CUDA graph, a place in `sce plan`. Any module from histories to
    states with a `catalogue` can be trained as well.
    """

    catalogue: nn.Parameter
    """Item embeddings, [items, d]: input of the model and, live, its output layer."""
    settings: Any
    """The settings that it was built from, a `BackboneSettings`."""
    sparse_grad: bool = False
    """Give the catalogue a sparse gradient, of the rows that were looked up."""

    @property
    def max_length(self) -> int:
        """Maximum history length."""
        return int(self.settings.max_length)

    def forward(self, histories: Tensor, length_groups: LengthGroups | None = None) -> Tensor:
        """Return the hidden states [b, l, d]; the one at a position predicts the item after it.

        Histories [b, l] are padded on the right with `sce.PADDING`. With `length_groups`, each a
        number of rows and a width, no history is longer than its group is wide: the rest of the
        padding need not be computed.
        """
        raise NotImplementedError

    def encode(self, embedded: Tensor, lengths: Tensor) -> Tensor:
        """Return the hidden state after each history, [b, d]: what is exported.

        In evaluation that is the last of `forward`, but for rounding. Nothing depends on the values
        in a batch but by operations on tensors, and the catalogue is not used.

        Args:
            embedded: Rows of the catalogue, [b, l, d]; those at padding are arbitrary.
            lengths: Events of each history, at least one, int64 [b].
        """
        raise NotImplementedError

    def activation_bytes(self, sequences: int, positions: int, *, half: bool) -> float:
        """Return the bytes that are kept for the backward pass, with the hidden states.

        Args:
            sequences: Histories in the batch.
            positions: Positions that are computed: those of all length groups.
            half: Run under autocast to half precision.
        """
        raise NotImplementedError


class BackboneSettings(Protocol):
    """A frozen dataclass beside its backbone: fields are the options, their docstrings the help."""

    @property
    def dim(self) -> int:
        """Dimensions of hidden states and items."""

    @property
    def max_length(self) -> int:
        """Maximum history length."""

    def build(self, n_items: int, *, seed: int = 0) -> Backbone:
        """Make the model with new weights, which follow from the seed alone."""
