"""The outcome of training: `FitResult`, and result.json."""

from dataclasses import asdict, dataclass
from typing import Any

from sce.data.storage import write_json
from sce.evaluation.ranking import Popularity
from sce.training.device import device_name
from sce.training.run import write_ranks
from sce.training.trainer import Record, Trainer
from sce.units import plural, show_duration, show_memory, show_metric

Values = dict[str, float]


@dataclass(frozen=True)
class FitResult:
    """Outcome of training. Metrics are by name, such as "ndcg@10"."""

    best_epoch: int
    """The epoch whose weights the model has now."""
    epochs: int
    """Epochs trained."""
    stopped: str
    """By "patience", or because the "epochs" or "max_steps" were over."""
    validation: Values | None
    """Validation metrics of the best epoch."""
    test: Values | None
    """Test metrics of the best epoch; None when the dataset has no test users."""
    users: dict[str, int]
    """Users evaluated on "validation", a sample with `validation_users`, and on "test": all."""
    by_popularity: dict[str, dict[str, Values]]
    """The metrics on "validation" and "test", apart for "popular" and "rare" targets: see
    `Metrics`."""
    popularity: dict[str, Values] | None
    """Metrics of the most popular items on "validation" and "test", of the same users."""
    seconds: dict[str, float]
    """Seconds of "training" alone, and of "evaluation"."""
    memory_mib: dict[str, float | None]
    """Peak memory of "training" alone, and of "evaluation"."""
    memory_measured: str
    """The kind of memory that was measured."""
    tokens_per_second: float
    """Targets trained on, over the seconds of training."""
    device: str
    """The processor."""
    history: list[Record]
    """A record for each epoch, as in metrics.jsonl."""
    start: dict[str, Any] | None = None
    """What was carried over from another run (`start_from`); its evaluation is epoch 0."""

    def __repr__(self) -> str:
        lines = [
            f"FitResult(best epoch {self.best_epoch} of {self.epochs}, ended by {self.stopped}"
        ]
        for split in ("validation", "test"):
            if values := getattr(self, split):
                users = plural(self.users[split], "user")
                shown = (f"{name} {show_metric(values[name])}" for name in ("ndcg@10", "hr@10"))
                lines.append(f"  {split}: {', '.join(shown)} of {users}")
        if self.popularity:
            lines[-1] += f"; popularity ndcg@10 {show_metric(self.popularity['test']['ndcg@10'])}"
        time, peak = show_duration(self.seconds["training"]), self.memory_mib["training"]
        memory = f"peak {show_memory(peak)} ({self.memory_measured})"
        return "\n".join([*lines, f"  training: {time}, {memory}, on {self.device})"])


def conclude(trainer: Trainer, start: dict[str, Any] | None = None) -> FitResult:
    """Evaluate the model, which has its best weights now, and complete its run."""
    progress, dataset = trainer.progress, trainer.dataset
    history = progress.records
    trainer.trained.model.eval()
    best = next((r for r in history if r["epoch"] == progress.best_epoch), {})
    by_popularity = dict(best.get("by_popularity", {}))
    test = trainer.measure(trainer.ranker, "test") if len(dataset.test) else None
    popularity, ranks = None, {}
    if test is not None:
        before = trainer.best_ranks
        if before is None:  # the best epoch was that of an interrupted process
            before = trainer.measure(trainer.ranker, "validation").metrics.ranks
        ranks = {"test": test.metrics.ranks, "validation": before}
        by_popularity["test"] = test.metrics.by_popularity
        popular = Popularity(dataset.train, dataset.n_items, device=trainer.step.device)
        popularity = {
            "validation": trainer.measure(popular, "validation").metrics.values,
            "test": trainer.measure(popular, "test").metrics.values,
        }
    phases = ("training", "evaluation")
    seconds = {phase: sum(record["seconds"][phase] for record in history) for phase in phases}
    peaks = [record["memory_mib"] for record in history]
    peak = {"training": max(one["training"] or 0.0 for one in peaks), "evaluation": None}
    if test is not None:
        seconds["evaluation"] += test.seconds
        peak["evaluation"] = max([test.mib, *(one["evaluation"] or 0.0 for one in peaks)])
    result = FitResult(
        best_epoch=progress.best_epoch,
        epochs=progress.epoch,
        stopped=progress.stopped or "epochs",
        validation=best.get("validation"),
        test=None if test is None else test.metrics.values,
        users={"validation": len(trainer.validation.test), "test": len(dataset.test)},
        by_popularity=by_popularity,
        popularity=popularity,
        seconds=seconds,
        memory_mib=peak,
        memory_measured=trainer.memory.measures,
        tokens_per_second=sum(r["targets"] for r in history) / max(seconds["training"], 1e-9),
        device=device_name(trainer.step.device),
        history=history,
        start=start,
    )
    if trainer.run is not None:
        content: dict[str, Any] = asdict(result)
        del content["history"]
        for split, one in ranks.items():
            content[f"{split}_ranks"] = write_ranks(trainer.run.path, one, split)
        write_json(trainer.run.result_file, content)
    return result
