"""The epochs of training: steps, evaluation, record, checkpoint, early stop, divergence."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from sce.data.batches import shuffled_batches, trainable_rows
from sce.data.prepared import PreparedDataset
from sce.errors import InputError
from sce.evaluation.evaluate import evaluate
from sce.evaluation.ranking import Ranker
from sce.training.capture import StepResult
from sce.training.checkpoint import Checkpointer, EpochSoFar, Progress, Trained
from sce.training.device import PeakMemory, matmul_precision
from sce.training.optimizer import rate_factor, set_rate
from sce.training.progress import ProgressBar
from sce.training.run import Run, resume_hint
from sce.training.run_start import MetricsLog
from sce.training.settings import TrainingSettings
from sce.training.signals import Interrupts, StopRequested, TrainingInterrupted
from sce.training.step import TrainingStep, seeds_of_epoch

Record = dict[str, Any]  # of an epoch: a line of metrics.jsonl

SCORE = "ndcg@10"  # by which epochs are compared

_SAVE_WITHIN_EPOCH = 600.0  # seconds after which an epoch is saved half-way
_STATISTICS_PER_EPOCH = 20  # at most
CHECK_EVERY = 50  # steps: at most so many are done on broken weights


class DivergenceError(InputError):
    """The loss or the weights are not finite any more."""

    def __init__(self, message: str, *, epoch: int, step: int) -> None:
        super().__init__(message)
        self.epoch, self.step = epoch, step


class LossMonitor:
    """Keeps the losses of steps on the device; `check` adds them to the epoch's sums, or raises.

    `statistics` are the names of the loss's; `explain` makes a message from what happened and the
    rows of the batch.
    """

    def __init__(
        self,
        so_far: EpochSoFar,
        *,
        epoch: int,
        device: torch.device,
        statistics: Sequence[str] = (),
        explain: Callable[[str, Sequence[int]], str],
    ) -> None:
        self.so_far, self.epoch, self._names, self._explain = so_far, epoch, statistics, explain
        self.last = math.nan  # the latest loss that was checked
        self._losses = torch.zeros(CHECK_EVERY, device=device)
        self._statistics: list[Tensor] = []
        self._pending: list[tuple[int, Tensor, int]] = []  # step, rows, targets

    @property
    def full(self) -> bool:
        """True if nothing more can be added before a check."""
        return len(self._pending) == CHECK_EVERY

    def add(self, result: StepResult, step: int, rows: Tensor, targets: int) -> None:
        """Take the result of a step (counted from 1), without a sync."""
        self._losses[len(self._pending)].copy_(result.loss, non_blocking=True)
        self._pending.append((step, rows, targets))
        if result.statistics is not None:
            self._statistics.append(result.statistics)

    def check(self) -> None:
        """Wait for the steps so far, and count them.

        Raises:
            DivergenceError: At the first loss that is not finite.
        """
        losses = self._losses[: len(self._pending)].tolist()
        for loss, (step, rows, targets) in zip(losses, self._pending, strict=True):
            if not math.isfinite(loss):
                what = f"the loss became {loss} at step {step} of epoch {self.epoch}"
                message = self._explain(what, rows.tolist())
                raise DivergenceError(message, epoch=self.epoch, step=step)
            self.so_far.loss_sum += loss * targets
            self.so_far.targets += targets
            self.so_far.step = step
            self.last = loss
        sums = self.so_far.statistics
        for found in self._statistics:
            self.so_far.samples += 1
            for name, value in zip(self._names, found.tolist(), strict=True):
                sums[name] = sums.get(name, 0.0) + value
        self._pending.clear()
        self._statistics.clear()


class Trainer:
    """Trains a model until the epochs or the patience are over; writes nothing without a run."""

    def __init__(
        self,
        trained: Trained,
        step: TrainingStep,
        dataset: PreparedDataset,
        settings: TrainingSettings,
        *,
        run: Run | None,
        bar: ProgressBar,
        memory: PeakMemory,
        interrupts: Interrupts,
    ) -> None:
        self.trained, self.step, self.dataset, self.settings = trained, step, dataset, settings
        self.run, self.bar, self.memory, self.interrupts = run, bar, memory, interrupts
        self.rows = trainable_rows(step.sequences)
        self.steps = math.ceil(len(self.rows) / settings.batch_size)
        self.progress = Progress()
        files = (None, None) if run is None else (run.resume_state, run.best_weights)
        self.checkpointer = Checkpointer(trained, *files)

    def resume(self) -> None:
        """Go on from the checkpoint of the run, if there is one."""
        found = self.checkpointer.resume()
        if self.run is None or found is None:
            return
        self.progress = found
        if found.epoch > self.settings.epochs:
            raise InputError(
                f"{self.run.path} has {found.epoch} epochs already, and {self.settings.epochs} are "
                "asked for"
            )
        if found.stopped == "epochs" and found.epoch < self.settings.epochs:
            found.stopped = None
        if found.stopped is None and found.epoch == self.settings.epochs:
            self._end_here(found, self.run)
        if found.stopped is not None:
            self.bar.note(f"training has ended already, after epoch {found.epoch}")
            return
        self.run.result_file.unlink(missing_ok=True)
        step = f"step {found.current.step + 1} of {self.steps}"
        if found.current.step == self.steps:
            step = "its evaluation"
        self.bar.note(f"going on at epoch {found.epoch + 1}, {step}")

    def _end_here(self, found: Progress, run: Run) -> None:
        """More epochs were to come, and now no more are wanted than are done."""
        unevaluated = len(self.dataset.test) and found.history[-1]["validation"] is None
        if unevaluated and found.current.step == 0:
            # The last epoch is evaluated in any case: open it again, at its end.
            found.current = EpochSoFar.whole(found.history.pop())
            return
        if not found.best_epoch:
            raise InputError(
                f"{run.path} is in the middle of epoch {found.epoch + 1}, and none of the "
                f"{found.epoch} before it was evaluated; ask for more epochs"
            )
        found.stopped, found.current = "epochs", EpochSoFar()

    def run_epochs(self, on_epoch: Callable[[Record], object] | None = None) -> None:
        """Train, and leave the model with the weights of its best epoch.

        Raises:
            TrainingInterrupted: After a signal, when the state has been saved.
        """
        log = None if self.run is None else MetricsLog(self.run, self.progress.history)
        try:
            while self.progress.stopped is None:
                self.interrupts.check()
                self._train()
                record = self._finish(*self._evaluate())
                if log is not None:
                    log.write(record)
                self.bar.epoch(record, self._seconds_left())
                if self.progress.stopped is not None or self.checkpointer.due():
                    self.save()
                if on_epoch is not None:
                    on_epoch(record)
            self.interrupts.check()
        except StopRequested as stop:
            self.save()
            assert self.run is not None  # otherwise nothing listens to signals
            progress = self.progress
            raise TrainingInterrupted(
                f"stopped in epoch {progress.epoch + 1} after step {progress.current.step} of "
                f"{self.steps}; everything is saved in {self.run.path}",
                stop.signal_number,
            ) from stop
        self.checkpointer.restore_best()

    def _train(self) -> None:
        """Do the steps of the epoch that are still to be done."""
        settings, so_far, epoch = self.settings, self.progress.current, self.progress.epoch + 1
        order_seed, seeds = seeds_of_epoch(settings.seed, epoch, self.steps)
        batches, targets = self._batches(order_seed)
        monitor = LossMonitor(
            so_far,
            epoch=epoch,
            device=self.step.device,
            statistics=self.step.statistics,
            explain=self._explain_divergence,
        )
        total = settings.epochs * self.steps
        statistics_every = -(-self.steps // _STATISTICS_PER_EPOCH)
        self.trained.model.train()
        begun = time.perf_counter()
        with matmul_precision(self.step.device, settings.precision), self._measured(so_far):
            for number in range(so_far.step, self.steps):
                done = (epoch - 1) * self.steps + number
                factor = rate_factor(settings.schedule, done, total, settings.warmup_steps)
                set_rate(self.step.optimizer, factor)
                result = self.step(
                    batches[number],
                    seeds[number],
                    with_statistics=number % statistics_every == 0,
                )
                monitor.add(result, number + 1, batches[number], targets[number])
                if not (monitor.full or self.bar.due or self.interrupts.received):
                    continue
                monitor.check()
                so_far.seconds += time.perf_counter() - begun
                self.bar.step(epoch, number + 1, self.steps, monitor.last, self._seconds_left())
                if number + 1 < self.steps:
                    self.interrupts.check()
                if self.checkpointer.due(_SAVE_WITHIN_EPOCH):
                    self.save()
                begun = time.perf_counter()
            monitor.check()
            so_far.seconds += time.perf_counter() - begun
        self._check_weights()

    @contextmanager
    def _measured(self, so_far: EpochSoFar) -> Iterator[None]:
        try:
            with self.memory.phase("training"):
                yield
        finally:
            so_far.memory_mib = max(so_far.memory_mib, self.memory.take("training"))

    def _batches(self, seed: int) -> tuple[Sequence[Tensor], list[int]]:
        """The rows of each batch of an epoch, and how many targets each has."""
        size = self.settings.batch_size
        generator = torch.Generator().manual_seed(seed)
        order = torch.cat(list(shuffled_batches(self.rows, size, generator=generator)))
        lengths = (self.step.sequences.lengths[order] - 1).clamp(max=self.step.max_length)
        return order.split(size), [int(part.sum()) for part in lengths.split(size)]

    def _evaluate(self) -> tuple[dict[str, float] | None, float]:
        """The metrics on the validation events if it is time for them, and the seconds taken."""
        epoch = self.progress.epoch + 1
        due = epoch % self.settings.evaluate_every == 0 or epoch == self.settings.epochs
        if not due or not len(self.dataset.test):
            return None, 0.0
        model: Any = self.trained.model
        return self.measure(model, "validation")

    def measure(
        self, ranker: Ranker, split: Literal["validation", "test"]
    ) -> tuple[dict[str, float], float]:
        """Evaluate a model or a baseline, with its memory; return the metrics and the seconds."""
        users = len(self.dataset.test)

        def tell(done: int) -> None:
            self.interrupts.check()
            if self.bar.due:
                self.bar.evaluating(split, done, users)

        begun = time.perf_counter()
        with self.memory.phase("evaluation"):
            metrics = self.step.on_capture_stream(
                lambda: evaluate(
                    ranker,
                    self.dataset,
                    split=split,
                    batch_size=self.settings.evaluation_batch_size,
                    progress=tell,
                )
            )
        return metrics.values, time.perf_counter() - begun

    def _finish(self, validation: dict[str, float] | None, seconds: float) -> Record:
        """Close the epoch: its record, whether it is the best, and whether it is the last."""
        progress, so_far = self.progress, self.progress.current
        epoch = progress.epoch + 1
        # Without anything to compare by, the latest is the best.
        score = validation[SCORE] if validation is not None else None
        is_best = not len(self.dataset.test) if score is None else score > progress.best_score
        if is_best:
            progress.best_epoch, progress.stale = epoch, 0
            progress.best_score = -1.0 if score is None else score
            self.checkpointer.keep_best()
        elif score is not None:
            progress.stale += 1
        record: Record = {
            "epoch": epoch,
            **so_far.summary(),
            "steps": self.steps,
            "targets": so_far.targets,
            "seconds": {"training": so_far.seconds, "evaluation": seconds},
            "tokens_per_second": so_far.targets / max(so_far.seconds, 1e-9),
            "memory_mib": {
                "training": so_far.memory_mib,
                "evaluation": self.memory.take("evaluation") if validation else None,
            },
            "validation": validation,
            "best": is_best,
        }
        progress.history.append(record)
        progress.current = EpochSoFar()
        if self.settings.patience and progress.stale >= self.settings.patience:
            progress.stopped = "patience"
        elif epoch >= self.settings.epochs:
            progress.stopped = "epochs"
        return record

    def save(self) -> None:
        """Write a checkpoint, unless the weights are broken."""
        self._check_weights()
        with self.interrupts.held():
            self.checkpointer.save(self.progress)

    def _check_weights(self) -> None:
        if not self.trained.finite():
            epoch = self.progress.epoch + 1
            what = f"the weights stopped being numbers in epoch {epoch}"
            message = self._explain_divergence(what)
            raise DivergenceError(message, epoch=epoch, step=self.progress.current.step)

    def _explain_divergence(self, what: str, rows: Sequence[int] = ()) -> str:
        if rows:
            train, ids = self.dataset.train, self.dataset.user_ids
            users = ", ".join(repr(ids[int(train.users[row])]) for row in rows[:3])
            more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
            what += f", in the batch of users {users}{more}"
        catalogue = "--training.catalogue-learning-rate"
        other = catalogue if self.settings.row_wise else "--training.clip-norm 1"
        hint = f"try a lower --learning-rate or {other}"
        if self.settings.precision != "float32":
            hint += ", or --training.precision float32"
        kept = ""
        if self.run is not None:
            kept = f", {resume_hint(self.run)}"
            if best := self.progress.best_epoch:
                kept += f"; the best epoch so far, {best}, is in {self.run.path}"
        return f"{what}; {hint}{kept}"

    def _seconds_left(self) -> float:
        """Seconds until the last epoch ends."""
        history, so_far = self.progress.history, self.progress.current
        share = so_far.step / self.steps
        left = self.settings.epochs - len(history) - share
        if not history:
            return left * so_far.seconds / max(share, 1e-9)
        spent = sum(sum(record["seconds"].values()) for record in history)
        return float(left * spent / len(history))
