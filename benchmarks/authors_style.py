"""The straightforward model and evaluation that train_step.py compares with.

Written from the description of the paper's code: SASRec on nn.MultiheadAttention with histories
padded on the left, and an evaluation that takes users one at a time.
"""

import math

import torch
from torch import Tensor, nn

from sce.data.prepared import Sequences
from sce.models.sasrec import SASRec


class MultiheadSASRec(nn.Module):
    """SASRec as one writes it with nn.MultiheadAttention; item 0 is padding."""

    def __init__(
        self, items: int, dim: int, length: int, *, blocks: int = 2, dropout: float = 0.2
    ) -> None:
        super().__init__()
        self.item_embedding = nn.Embedding(items + 1, dim, padding_idx=0)
        self.position_embedding = nn.Embedding(length, dim)
        nn.init.xavier_uniform_(self.item_embedding.weight)
        self.dropout = nn.Dropout(dropout)
        self.attention_norms = nn.ModuleList(nn.LayerNorm(dim, eps=1e-8) for _ in range(blocks))
        self.attentions = nn.ModuleList(
            nn.MultiheadAttention(dim, 1, dropout) for _ in range(blocks)
        )
        self.forward_norms = nn.ModuleList(nn.LayerNorm(dim, eps=1e-8) for _ in range(blocks))
        self.forwards = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(dim, dim, 1),
                nn.Dropout(dropout),
                nn.ReLU(),
                nn.Conv1d(dim, dim, 1),
                nn.Dropout(dropout),
            )
            for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(dim, eps=1e-8)

    def forward(self, histories: Tensor) -> Tensor:
        """Map histories [b, l], padded on the left with 0, to states [b, l, d]."""
        length = histories.shape[1]
        places = torch.arange(length, device=histories.device)
        states = self.item_embedding(histories) * math.sqrt(self.item_embedding.embedding_dim)
        states = self.dropout(states + self.position_embedding(places))
        padding = (histories == 0).unsqueeze(2)
        states = states * ~padding
        future = ~torch.ones(length, length, dtype=torch.bool, device=histories.device).tril()
        for attention_norm, attention, forward_norm, feed_forward in zip(
            self.attention_norms, self.attentions, self.forward_norms, self.forwards, strict=True
        ):
            states = states.transpose(0, 1)
            queries = attention_norm(states)
            attended, _ = attention(queries, states, states, attn_mask=future)
            states = forward_norm((queries + attended).transpose(0, 1))
            states = states + feed_forward(states.transpose(1, 2)).transpose(1, 2)
            states = states * ~padding
        normed: Tensor = self.norm(states)
        return normed


@torch.no_grad()
def evaluate_one_by_one(model: SASRec, test: Sequences, length: int) -> float:
    """NDCG@10 of the last events, user after user; what was seen is not ranked."""
    items, offsets = test.items, test.offsets
    device = model.catalogue.device
    gains = []
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        history, target = items[start : end - 1], int(items[end - 1])
        states = model(torch.tensor(history[-length:], device=device).long().unsqueeze(0))
        scores = model.catalogue @ states[0, -1]
        scores[torch.tensor(history, device=device).long()] = -torch.inf
        rank = int((scores > scores[target]).sum())
        gains.append(1 / math.log2(rank + 2) if rank < 10 and scores[target] > -math.inf else 0.0)
    return sum(gains) / len(gains)
