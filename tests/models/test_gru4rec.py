"""GRU4Rec against torch's cell, event after event."""

import torch
from torch import nn

from sce.data.batches import PADDING
from sce.models.gru4rec import GRU4Rec

HISTORIES = torch.tensor([[3, 7, 5, 7], [2, 9, PADDING, PADDING], [8] + 3 * [PADDING]])


def test_states_equal_those_of_cells() -> None:
    model = GRU4Rec(12, dim=8, blocks=2, max_length=6, seed=1).double().eval()
    states = model(HISTORIES)
    for row, history in enumerate(HISTORIES):
        events = model.catalogue[history[history != PADDING]]
        for layer in model.blocks:
            cell = nn.GRUCell(8, 8).double()
            weights = {name.removesuffix("_l0"): w for name, w in layer.state_dict().items()}
            cell.load_state_dict(weights)
            state, found = torch.zeros(8, dtype=torch.float64), []
            for event in events:
                state = cell(event, state)
                found.append(state)
            events = torch.stack(found)
        torch.testing.assert_close(states[row, : len(events)], events, rtol=1e-9, atol=1e-9)


def test_autocast_does_not_round_the_layers() -> None:
    model = GRU4Rec(12, dim=8, blocks=2, max_length=6, seed=1).eval()
    lengths = torch.tensor([4])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        states, last = model(HISTORIES), model.encode(model.catalogue[HISTORIES[:1]], lengths)
    assert torch.equal(states, model(HISTORIES))
    assert torch.equal(last, model.encode(model.catalogue[HISTORIES[:1]], lengths))
