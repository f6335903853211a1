"""GRU4Rec: a recurrent network over a user's history (arXiv 1511.06939 and 1706.03847).

One table holds the items at the input and at the output, as in the authors' "constrained
embedding". All events of a history are trained on at once, instead of event after event with a
hidden state that is carried over: the same gradients, but for those cut off there. Items have no
bias at the output, which theirs have.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

from sce.data.length_groups import LengthGroups
from sce.documented import documented
from sce.models.base import BackboneSettings, ConfiguredBackbone
from sce.models.packing import check_groups, join, split, unpack


@documented
@dataclass(frozen=True)
class GRU4RecSettings(BackboneSettings):
    """Settings of GRU4Rec."""

    blocks: int = 1
    """Blocks, one after another."""
    dropout: float = 0.2
    """Share of embeddings, and of the states after each layer, dropped in training."""


class GRU4Rec(ConfiguredBackbone):
    """Histories in, one hidden state per event out; scores are `states @ catalogue.T`.

    >>> GRU4Rec(1000, dim=32, max_length=50)(torch.tensor([[3, 7, 5]])).shape
    torch.Size([1, 3, 32])

    Settings may be given by name, as here: see `GRU4RecSettings`.
    """

    settings_class = GRU4RecSettings
    settings: GRU4RecSettings

    def _build(self) -> None:
        dim = self.settings.dim
        # The constructor would draw weights from the global generator.
        self.blocks = nn.ModuleList(
            nn.GRU(dim, dim, batch_first=True, device="meta").to_empty(
                device=torch.get_default_device()
            )
            for _ in range(self.settings.blocks)
        )

    def forward(self, histories: Tensor, length_groups: LengthGroups | None = None) -> Tensor:
        """Turn histories [b, l] into hidden states [b, l, d]: see `Transformer.forward`."""
        self.check(histories)
        groups, length = check_groups(histories, length_groups), histories.shape[1]
        states = self.dropout(self.embed(histories, groups))
        for layer in self.blocks:
            found = [_whole(layer, part).flatten(0, 1) for part in split(states, groups)]
            states = self.dropout(join(found))
        return unpack(states, groups, length)

    def encode(self, embedded: Tensor, lengths: Tensor, *times: Tensor) -> Tensor:
        """Return the hidden state after each history, [b, d]: see `Backbone.encode`."""
        states = embedded
        for layer in self.blocks:
            # Exported, torch's own layer has histories of one length.
            exporting = torch.compiler.is_exporting()
            states = (_run if exporting else _whole)(layer, states)
        final = (lengths - 1)[:, None, None].expand(-1, -1, states.shape[2])
        return states.gather(1, final)[:, 0]

    def _fill(self, generator: torch.Generator) -> None:
        nn.init.xavier_uniform_(self.catalogue, generator=generator)
        bound = 1 / math.sqrt(self.settings.dim)
        for weight in self.blocks.parameters():
            nn.init.uniform_(weight, -bound, bound, generator=generator)

    def activation_bytes(self, sequences: int, positions: int, *, half: bool) -> float:
        """Return the bytes that are kept for the backward pass, with the hidden states."""
        # Input, result and what cuDNN keeps of both gates and the candidate, in a layer; the
        # embeddings with their mask, and the hidden states; indices.
        each = 8 * 4 * self.settings.blocks + 4 + 1 + 4
        return float((each * self.settings.dim + 16) * positions)

    def backward_bytes(self, positions: int, *, half: bool) -> float:
        """Return what cuDNN takes for the backward pass of a layer, as measured on an H200."""
        return 23.0 * 4 * positions * self.settings.dim


def _whole(layer: nn.Module, inputs: Tensor) -> Tensor:
    """Run a layer in the precision of its weights.

    Under autocast torch has cuDNN run it in float16, also where bfloat16 was asked for, and rounds
    its small gradients away.
    """
    with torch.autocast(inputs.device.type, enabled=False):
        found: Tensor = layer(inputs)[0]
        return found


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
