"""What is kept of training: the best weights in memory, and on disk everything, now and then."""

import time

from torch import Tensor

from sce.training.checkpoint import Progress, Trained, load_state, save_state, write_tensors
from sce.training.run import Run

# Saving takes no more than one part in so many of the time: at most that much work is lost.
_SHARE = 20


class Keeper:
    """Keeps the state of training in a run, if there is one."""

    def __init__(self, trained: Trained, run: Run | None) -> None:
        self.trained, self.run = trained, run
        self.best: dict[str, Tensor] = {}  # on the host: there may be gigabytes of it
        self.best_on_disk = 0  # the epoch
        self._saved_at, self._seconds = time.monotonic(), 0.0

    def take_up(self) -> Progress | None:
        """Put everything back as it was saved, if it was."""
        if self.run is None or not self.run.resume_state.exists():
            return None
        progress, best = load_state(self.run.resume_state, self.trained)
        if progress.best_epoch:
            self.best = best or self._weights()
            self._write_best(progress.best_epoch)  # a crash may have come between the two files
        return progress

    def keep_best(self) -> None:
        """Remember the weights as they are now."""
        self.best = self._weights()

    def restore_best(self) -> None:
        """Give the model the weights that were best."""
        self.trained.model.load_state_dict(self.best)

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
        save_state(
            self.run.resume_state, self.trained, progress, None if best_is_last else self.best
        )
        if progress.best_epoch != self.best_on_disk:
            self._write_best(progress.best_epoch)
        self._saved_at = time.monotonic()
        self._seconds = self._saved_at - begun

    def _write_best(self, epoch: int) -> None:
        assert self.run is not None
        write_tensors(self.run.best_weights, self.best, {"epoch": str(epoch)})
        self.best_on_disk = epoch

    def _weights(self) -> dict[str, Tensor]:
        weights = self.trained.model.state_dict()
        return {name: value.detach().to("cpu", copy=True) for name, value in weights.items()}
