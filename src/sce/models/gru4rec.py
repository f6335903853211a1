"""GRU4Rec: a recurrent network over a user's history (arXiv 1511.06939 and 1706.03847).

One table holds the items at the input and at the output, as in the authors' "constrained
embedding". All events of a history are trained on at once, instead of event after event with a
hidden state that is carried over: the same gradients, but for those cut off there.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, get_type_hints

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

from sce.data.length_groups import LengthGroups
from sce.documented import documented
from sce.errors import InputError, check_types, checked
from sce.models.base import Backbone
from sce.models.packing import check_groups, join, split, unpack

_MOST = {"dim": 2**27, "blocks": 1000, "max_length": 2**27}


@documented
@dataclass(frozen=True)
class GRU4RecSettings:
    """Settings of GRU4Rec."""

    dim: int = 64
    """Width of item embeddings and hidden states."""
    blocks: int = 1
    """Blocks, one after another."""
    dropout: float = 0.2
    """Share of embeddings, and of the states after each layer, dropped in training."""
    max_length: int = 200
    """Maximum history length; of a longer one the last events count."""

    def __post_init__(self) -> None:
        vars(self).update(check_types(vars(self), get_type_hints(type(self)), "model."))
        for name, most in _MOST.items():
            value = getattr(self, name)
            if not 1 <= value <= most:
                bound = "at least 1" if value < 1 else f"at most {most:,}"
                raise InputError(f"{name} must be {bound}; got {value}")
        if not 0 <= self.dropout < 1:
            raise InputError(f"dropout is a share from 0 to below 1; got {self.dropout}")

    def build(self, n_items: int, *, seed: int = 0) -> "GRU4Rec":
        """Make the model with new weights."""
        return GRU4Rec(n_items, self, seed=seed)


class GRU4Rec(Backbone):
    """Histories in, one hidden state per event out; scores are `states @ catalogue.T`.

    >>> GRU4Rec(1000, dim=32, max_length=50)(torch.tensor([[3, 7, 5]])).shape
    torch.Size([1, 3, 32])

    Settings may be given by name, as here: see `GRU4RecSettings`.
    """

    settings: GRU4RecSettings

    @checked
    def __init__(
        self,
        n_items: int,
        settings: GRU4RecSettings | None = None,
        *,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """Make a model with new weights.

        Args:
            n_items: Items in the catalogue, C.
            settings: The settings, all at once.
            seed: The initial weights follow from it alone; the global random state is neither
                read nor moved.
            options: Settings by name, as in `GRU4Rec(n_items, dim=64)`: see `GRU4RecSettings`.
        """
        super().__init__()
        if n_items < 1:
            raise InputError(f"a model needs at least one item; got {n_items}")
        self.settings = replace(settings or GRU4RecSettings(), **options)
        dim, dropout = self.settings.dim, self.settings.dropout
        self.catalogue = nn.Parameter(torch.empty(n_items, dim))
        self.dropout = nn.Dropout(dropout)
        # The constructor would draw weights from the global generator.
        self.blocks = nn.ModuleList(
            nn.GRU(dim, dim, batch_first=True, device="meta").to_empty(
                device=torch.get_default_device()
            )
            for _ in range(self.settings.blocks)
        )
        self._initialise(seed)

    def forward(self, histories: Tensor, length_groups: LengthGroups | None = None) -> Tensor:
        """Turn histories [b, l] into hidden states [b, l, d]; those at padding are arbitrary.

        Padding before an event, or a history longer than its group is wide, is an error (on a GPU,
        where values are not looked at: an index out of bounds).
        """
        self.check(histories)
        groups, length = check_groups(histories, length_groups), histories.shape[1]
        states = self.dropout(self.embed(histories, groups))
        for layer in self.blocks:
            found = [layer(part)[0].flatten(0, 1) for part in split(states, groups)]
            states = self.dropout(join(found))
        return unpack(states, groups, length)

    def encode(self, embedded: Tensor, lengths: Tensor) -> Tensor:
        """Return the hidden state after each history, [b, d]: see `Backbone.encode`."""
        states = embedded
        for layer in self.blocks:
            # Exported, torch's own layer has histories of one length.
            exporting = torch.compiler.is_exporting()
            states = _run(layer, states) if exporting else layer(states)[0]
        final = (lengths - 1)[:, None, None].expand(-1, -1, states.shape[2])
        return states.gather(1, final)[:, 0]

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        if self.catalogue.is_meta:
            return  # made to be counted, or to be filled from a file
        generator = torch.Generator(device=self.catalogue.device).manual_seed(seed)
        nn.init.xavier_uniform_(self.catalogue, generator=generator)
        bound = 1 / math.sqrt(self.settings.dim)
        for weight in self.blocks.parameters():
            nn.init.uniform_(weight, -bound, bound, generator=generator)

    def activation_bytes(self, sequences: int, positions: int, *, half: bool) -> float:
        """Return the bytes that are kept for the backward pass, with the hidden states."""
        width = 2 if half else 4
        # Input, result and what cuDNN keeps of both gates and the candidate, in a layer; the
        # embeddings with their mask, and the hidden states; indices.
        each = 8 * width * self.settings.blocks + 4 + 1 + 4
        return float((each * self.settings.dim + 16) * positions)

    def backward_bytes(self, positions: int, *, half: bool) -> float:
        """Return what cuDNN takes for the backward pass of a layer, as measured on an H200."""
        return 23.0 * (2 if half else 4) * positions * self.settings.dim


def _run(layer: nn.Module, inputs: Tensor) -> Tensor:
    """Run a layer event after event, [b, l, d], for any l."""
    weights: Any = layer
    given = F.linear(inputs, weights.weight_ih_l0, weights.bias_ih_l0).transpose(0, 1)

    def step(state: Tensor, event: Tensor) -> tuple[Tensor, Tensor]:
        before = F.linear(state, weights.weight_hh_l0, weights.bias_hh_l0).chunk(3, dim=-1)
        now = event.chunk(3, dim=-1)
        reset, update = (torch.sigmoid(now[n] + before[n]) for n in range(2))
        candidate = torch.tanh(now[2] + reset * before[2])
        state = candidate + update * (state - candidate)
        return state, state.clone()  # torch.export wants two tensors

    _, states = scan(step, inputs.new_zeros(inputs.shape[0], inputs.shape[2]), given)
    found: Tensor = states.transpose(0, 1)
    return found
