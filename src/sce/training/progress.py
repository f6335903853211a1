"""Progress of training on stderr: steps and users as they are done, and a line per epoch."""

from collections.abc import Mapping
from typing import Any

from sce.progress import ProgressDisplay
from sce.training.device import PeakMemory
from sce.units import show_clock


class TrainingProgress(ProgressDisplay):
    """Shows how far training is."""

    def __init__(self, *, memory: PeakMemory, **options: Any) -> None:
        super().__init__(**options)
        self._memory, self._score = memory, ""
        self.epochs = 0  # of the whole training: the trainer knows how many its steps come to

    def training(self, epoch: int, step: int, of: int, loss: float, seconds_left: float) -> None:
        """Show the progress of the epoch."""
        facts = f"loss {loss:.4f}  {self._score}{self._memory.peak():,.0f} MiB"
        doing = f"epoch {epoch}/{self.epochs}"
        self.update(doing, step, of, "steps", facts=facts, left=seconds_left)

    def epoch(self, record: Mapping[str, Any], seconds_left: float) -> None:
        """Leave a line about a finished epoch."""
        epoch, stepped = record["epoch"], record["loss"] is not None
        words = [f"epoch {epoch}/{self.epochs}"]
        words.append(f"loss {record['loss']:.4f}" if stepped else "as it begins")
        if record["validation"] is not None:
            score = f"ndcg@10 {record['validation']['ndcg@10']:.4f}"
            self._score = score + "  "
            words.append(score + (" *" if record["best"] else "  "))
        if stepped:
            words.append(f"{record['tokens_per_second']:,.0f} tokens/s")
            words.append(f"{record['memory_mib']['training']:,.0f} MiB")
        seconds = record["seconds"]
        words.append(f"{seconds['training']:.1f} s")
        if record["validation"] is not None:
            words[-1] += f" + {seconds['evaluation']:.1f} s evaluation"
        if stepped and epoch < self.epochs:
            words.append(f"at most {show_clock(seconds_left)} left")
        self.print("  ".join(words))
