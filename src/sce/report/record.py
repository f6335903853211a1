"""What a run wrote down about itself, as far as it got: the page's one source of numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sce.training.begin import describe_divergence
from sce.training.run import Run
from sce.units import is_number

METRIC = "ndcg@10"  # what training stops by, and what the page is headed by

_LOSSES = {"bce": "BCE", "bce+": "BCE⁺", "gbce": "gBCE", "ce-": "CE⁻", "ce": "CE", "sce": "SCE"}


@dataclass(frozen=True)
class Record:
    """A run's notes. Any number may be missing: the run may be young, or another's."""

    name: str
    model: str
    version: str
    """Of the sce that trained."""
    config: Mapping[str, Any]
    """Every setting, and under "derived" what followed from them."""
    dataset: Mapping[str, Any]
    epochs: Sequence[Mapping[str, Any]] = ()
    """One entry per epoch, as in metrics.jsonl."""
    result: Mapping[str, Any] | None = None
    """What result.json says; None while training has not ended."""
    diverged: str | None = None
    """Where the loss stopped being a number, and what to do; None where it did not."""

    @classmethod
    def read(cls, run: Run) -> "Record":
        """Read what a run has written so far."""
        return cls(
            name=run.path.resolve().name,
            model=run.model,
            version=run.sce_version,
            config={**run.config, "derived": run.derived} if run.derived else run.config,
            dataset=asdict(run.dataset),
            epochs=run.metrics(),
            result=run.result(),
            diverged=describe_divergence(run),
        )

    @property
    def loss_name(self) -> str:
        """The loss that was trained with, as papers write it."""
        loss = self.config.get("loss")
        name = str(loss.get("name", "another loss") if isinstance(loss, Mapping) else loss)
        return _LOSSES.get(name, name)

    @property
    def numbers_of_epochs(self) -> list[int]:
        """The epochs' own numbers, from 1."""
        return [int(number(one, "epoch") or place) for place, one in enumerate(self.epochs, 1)]

    def column(self, *keys: str) -> list[float | None]:
        """One number of every epoch, None where an epoch has none."""
        return [number(epoch, *keys) for epoch in self.epochs]

    @property
    def best_epoch(self) -> int | None:
        """The epoch whose weights are kept."""
        written = number(self.result or {}, "best_epoch")
        if written:
            return int(written)
        pairs = zip(self.numbers_of_epochs, self.epochs, strict=True)
        return max((n for n, epoch in pairs if epoch.get("best")), default=None)

    def metric(self, split: str, name: str, *, of: str = "model") -> float | None:
        """A metric of the best weights, or of popularity, on validation or test events."""
        keys = (split, name) if of == "model" else (of, split, name)
        written = number(self.result or {}, *keys)
        if written is not None or of != "model" or split != "validation":
            return written
        # While training has not ended, its epochs know.
        pairs = zip(self.numbers_of_epochs, self.column("validation", name), strict=True)
        return dict(pairs).get(self.best_epoch or 0)


def number(record: Mapping[str, Any], *keys: str) -> float | None:
    """A number deep in a record, None where there is none, or none that is finite."""
    found: Any = record
    for key in keys:
        if not isinstance(found, Mapping):
            return None
        found = found.get(key)
    return found if is_number(found) else None
