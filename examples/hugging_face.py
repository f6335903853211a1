"""Scalable Cross-Entropy in Hugging Face's Trainer: python examples/hugging_face.py novels.txt.gz.

Needs the extra `examples`. Evaluation is exact: the perplexity is exp(eval_loss).
"""

import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from language_model import CHUNK, read_words, split
from sce import CrossEntropy, ScalableCrossEntropy


class ScalableTrainer(Trainer):  # type: ignore[misc]
    """A Trainer of any causal language model whose output layer has no bias."""

    loss_is_scaled_for_ga = False  # a mean of each batch: the Trainer divides when it accumulates
    loss, exact = ScalableCrossEntropy(), CrossEntropy(chunk_size=CHUNK)

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, **_: Any
    ) -> Any:
        """Return the loss of the hidden states; of all logits, only the last are computed."""
        given = {name: value for name, value in inputs.items() if name != "labels"}
        outputs = model(**given, output_hidden_states=True, logits_to_keep=1, use_cache=False)
        labels = pad(inputs["labels"][:, 1:], (0, 1), value=-100)  # of each word, the next
        head = self.accelerator.unwrap_model(model).get_output_embeddings()
        loss = self.loss if model.training else self.exact
        value = loss(outputs.hidden_states[-1], head, labels)
        return (value, {"logits": outputs.logits}) if return_outputs else value


def main(files: list[str], out: str = "runs/hugging-face", length: int = 64, **given: Any) -> float:
    """Train a small GPT-2 on text files; return the exact perplexity of held-out text."""
    words, n_words = read_words([Path(file) for file in files], vocabulary=100_000)
    text, held_out = split(words, length - 1)
    sizes = {"n_embd": 128, "n_layer": 2, "n_head": 2, "n_positions": length}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=n_words, bos_token_id=0, eos_token_id=0, **sizes))
    options: dict[str, Any] = {"learning_rate": 1e-3, "max_steps": 500, "report_to": "none"}
    options |= {"prediction_loss_only": True, "remove_unused_columns": False, **given}
    trainer = ScalableTrainer(
        model=model,
        args=TrainingArguments(out, **options),
        train_dataset=[{"input_ids": some, "labels": some} for some in text.view(-1, length)],
        eval_dataset=[{"input_ids": some, "labels": some} for some in held_out],
    )
    trainer.train()
    return math.exp(trainer.evaluate()["eval_loss"])


if __name__ == "__main__":
    torch.manual_seed(0)
    print(f"exact perplexity of held-out text: {main(sys.argv[1:]):,.1f}")
