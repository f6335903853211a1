"""LiGR against the same blocks out of torch's own parts, one history at a time."""

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from sce.data.batches import PADDING
from sce.errors import InputError
from sce.models.ligr import LiGR, LiGRSettings
from tests.models.small import scaled_up, torch_parts

HISTORIES = torch.tensor([[3, 7, 5, 7], [2, 9, PADDING, PADDING], [8] + 3 * [PADDING]])


def plain_states(model: LiGR, history: Tensor) -> Tensor:
    """One history, padded on the left with events whose normalised states are zero."""
    dim = model.settings.dim
    pads = model.max_length - len(history) if model.settings.sink else 0
    states = model.catalogue[history] + model.positions[model.max_length - len(history) :]
    later = torch.ones(pads + len(history), pads + len(history), dtype=torch.bool).triu(1)
    for layer in model.blocks:
        block, attention = torch_parts(layer, model.settings.heads)

        def norm(states: Tensor, name: str, block: Mapping[str, Tensor] = block) -> Tensor:
            return F.layer_norm(states, (dim,), block[f"{name}.weight"], block[f"{name}.bias"])

        def gate(states: Tensor, name: str, block: Mapping[str, Tensor] = block) -> Tensor:
            return torch.sigmoid(F.linear(states, block[f"{name}.weight"], block[f"{name}.bias"]))

        normed = F.pad(norm(states, "attention_norm"), (0, 0, pads, 0))[None]
        attended, _ = attention(normed, normed, normed, attn_mask=later)
        states = states + gate(states, "attention_gate") * attended[0, pads:]
        normed = norm(states, "forward_norm")
        inner = F.silu(normed @ block["inner_gate.weight"].T) * (normed @ block["inner.weight"].T)
        states = states + gate(states, "forward_gate") * (inner @ block["outer.weight"].T)
    return states


@pytest.mark.parametrize("sink", [True, False])
@pytest.mark.parametrize("heads", [1, 2])
def test_states_equal_those_of_plain_parts(heads: int, sink: bool) -> None:
    model = LiGR(12, dim=8, heads=heads, blocks=2, max_length=6, sink=sink, seed=1)
    model = scaled_up(model).double().eval()
    states = model(HISTORIES)
    for row, history in enumerate(HISTORIES):
        real = history[history != PADDING]
        expected = plain_states(model, real)
        torch.testing.assert_close(states[row, : len(real)], expected, rtol=1e-9, atol=1e-9)


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(InputError, match="widening must be at least 1"):
        LiGRSettings(widening=0)
    with pytest.raises(InputError, match="settings must be LiGRSettings or None"):
        LiGR(12, "dim 8")
