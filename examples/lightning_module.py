"""Scalable Cross-Entropy in a LightningModule: python examples/lightning_module.py novels.txt.gz.

Needs lightning. Validation is exact: the perplexity is exp(validation).
"""

import math
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from language_model import CHUNK, LanguageModel, read_words, split
from sce import CrossEntropy, ScalableCrossEntropy


class ScalableModule(lightning.LightningModule):  # type: ignore[misc]
    """A language model; its batches are pieces of text [b, length + 1]."""

    def __init__(self, n_words: int, dim: int = 128, layers: int = 2, length: int = 63) -> None:
        super().__init__()
        self.model = LanguageModel(n_words, dim, layers, length)
        self.loss, self.exact = ScalableCrossEntropy(), CrossEntropy(chunk_size=CHUNK)

    def training_step(self, pieces: Tensor) -> Tensor:
        """Return the loss; its value says how training goes, and is no cross-entropy."""
        value: Tensor = self.loss(self.model(pieces[:, :-1]), self.model.lm_head, pieces[:, 1:])
        return value

    def validation_step(self, pieces: Tensor) -> None:
        """Log the exact cross-entropy over all words."""
        value = self.exact(self.model(pieces[:, :-1]), self.model.lm_head, pieces[:, 1:])
        self.log("validation", value, batch_size=len(pieces), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of all weights."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(files: list[str], length: int = 63, **given: Any) -> float:
    """Train on text files; return the exact perplexity of held-out text."""
    words, n_words = read_words([Path(file) for file in files], vocabulary=100_000)
    text, held_out = split(words, length)
    module = ScalableModule(n_words, length=length)
    pieces = text.view(-1, length + 1)
    trainer = lightning.Trainer(**{"max_steps": 500, **given})
    trainer.fit(module, DataLoader(pieces, 8, shuffle=True))  # type: ignore[arg-type]
    (found,) = trainer.validate(module, DataLoader(held_out, 8), verbose=False)  # type: ignore[arg-type]
    return math.exp(found["validation"])


if __name__ == "__main__":
    torch.manual_seed(0)
    print(f"exact perplexity of held-out text: {main(sys.argv[1:]):,.1f}")
