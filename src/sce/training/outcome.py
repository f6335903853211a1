"""What came of training: the test metrics of the best weights, beside popularity's."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from sce.data.storage import write_text
from sce.evaluation.ranking import Popularity
from sce.training.device import device_name
from sce.training.epochs import Record, Training

Values = dict[str, float]


@dataclass(frozen=True)
class FitResult:
    """What training gave. Metrics are by name, such as "ndcg@10"."""

    best_epoch: int
    """Whose weights the model has now."""
    epochs: int
    """How many were trained."""
    stopped: str
    """By "patience", or because the "epochs" were over."""
    validation: Values | None
    """Of the best epoch."""
    test: Values | None
    """Of the best epoch; None when the dataset has no test users."""
    popularity: dict[str, Values] | None
    """Of the most popular items, on "validation" and "test"; None without test users."""
    seconds: dict[str, float]
    """Of "training" alone, and of "evaluation"."""
    memory_mib: dict[str, float | None]
    """Peaks of "training" alone, and of "evaluation"."""
    memory_measured: str
    """What these peaks are of."""
    tokens_per_second: float
    """Targets trained on, over the seconds of training."""
    device: str
    """The processor."""
    history: list[Record]
    """A record for each epoch, as in metrics.jsonl."""

    def to_json(self) -> str:
        """As result.json has it: all but the history."""
        content: dict[str, Any] = asdict(self)
        del content["history"]
        return json.dumps(content, indent=2, allow_nan=False) + "\n"


def conclude(training: Training) -> FitResult:
    """Evaluate the model, which has its best weights now, and complete its run."""
    history, progress = training.progress.history, training.progress
    best = next((r for r in history if r["epoch"] == progress.best_epoch), None)
    test, popularity, seconds = None, None, 0.0
    if len(training.dataset.test):
        model: Any = training.trained.model.eval()
        test, seconds = training.measure(model, "test")
    peak = training.memory.take("evaluation")
    if test is not None:
        popularity = _popularity(training)
    evaluations = [r["memory_mib"]["evaluation"] for r in history if r["validation"] is not None]
    trained_for = sum(r["seconds"]["training"] for r in history)
    result = FitResult(
        best_epoch=progress.best_epoch,
        epochs=progress.epoch,
        stopped=progress.stopped or "epochs",
        validation=best["validation"] if best else None,
        test=test,
        popularity=popularity,
        seconds={
            "training": trained_for,
            "evaluation": seconds + sum(r["seconds"]["evaluation"] for r in history),
        },
        memory_mib={
            "training": max(r["memory_mib"]["training"] for r in history),
            "evaluation": max([peak, *evaluations]) if test is not None else None,
        },
        memory_measured=training.memory.measures,
        tokens_per_second=sum(r["targets"] for r in history) / max(trained_for, 1e-9),
        device=device_name(training.step.device),
        history=history,
    )
    if training.run is not None:
        write_text(training.run.result_file, result.to_json())
    return result


def _popularity(training: Training) -> dict[str, Values]:
    dataset = training.dataset
    popular = Popularity(dataset.train, dataset.n_items, device=training.step.device)
    return {
        "validation": training.measure(popular, "validation")[0],
        "test": training.measure(popular, "test")[0],
    }
