"""What is kept of training: the best weights in memory, and on disk everything, now and then."""

import time

from torch import Tensor

from sce.training.checkpoint import (
    MODEL,
    Progress,
    Trained,
    load_state,
    save_state,
    with_prefix,
    write_tensors,
)
from sce.training.run import Run

# Saving takes no more than one part in so many of the time: at most that much work is lost.
_SHARE = 20


class Keeper:
    """Keeps the state of training in a run, if there is one."""

    def __init__(self, trained: Trained, run: Run | None) -> None:
        self.trained, self.run = trained, run
        self.best: dict[str, Tensor] = {}  # on the host: there may be gigabytes of it
        self._best_on_disk = 0  # the epoch
        self._saved_at, self._seconds = time.monotonic(), 0.0

    def take_up(self) -> Progress | None:
        """Put everything back as it was saved, if it was."""
        if self.run is None or not self.run.resume_state.exists():
            return None
        progress, best = load_state(self.run.resume_state, self.trained)
        if progress.best_epoch:
            self.best = best or self._weights()
            self.save_best(progress)  # a crash may have come between the two files
        return progress

    def keep_best(self) -> None:
        """Remember the weights as they are now."""
        self.best = self._weights()

    def restore_best(self) -> None:
        """Give model and loss the weights that were best."""
        self.trained.restore_weights(self.best)

    def due(self, at_least: float = 0.0) -> bool:
        """Whether it is time to save again; `at_least` so many seconds after the last time."""
        since = time.monotonic() - self._saved_at
        return self.run is not None and since >= max(at_least, _SHARE * self._seconds)

    def save(self, progress: Progress) -> None:
        """Write the state to go on from, and the best weights if they are new."""
        if self.run is None:
            return
        begun = time.monotonic()
        best_is_last = progress.best_epoch == progress.epoch and progress.current.step == 0
        best = None if best_is_last else self.best
        save_state(self.run.resume_state, self.trained, progress, best)
        self.save_best(progress)
        self._saved_at = time.monotonic()
        self._seconds = self._saved_at - begun

    def save_best(self, progress: Progress) -> None:
        """Write the best weights of the model, if they are new."""
        if self.run is not None and progress.best_epoch != self._best_on_disk:
            weights, epoch = with_prefix(self.best, MODEL), progress.best_epoch
            write_tensors(self.run.best_weights, weights, {"epoch": str(epoch)})
            self._best_on_disk = epoch

    def _weights(self) -> dict[str, Tensor]:
        weights = self.trained.weights()
        return {name: value.detach().to("cpu", copy=True) for name, value in weights.items()}
