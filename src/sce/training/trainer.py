"""The epochs of training: steps, evaluation, record, checkpoint, early stop, divergence."""

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sce.data.batches import trainable_rows
from sce.data.prepared import PreparedDataset, Sequences
from sce.distributed.ranking import ShardedRanker
from sce.errors import InputError, named
from sce.evaluation.evaluate import Metrics, evaluate
from sce.training.capture import StepResult
from sce.training.checkpoint import Checkpointer, EpochSoFar, Progress, Trained
from sce.training.device import PeakMemory, matmul_precision
from sce.training.optimizer import rate_factor, set_rate
from sce.training.progress import TrainingProgress
from sce.training.run import Run, resume_hint
from sce.training.settings import TrainingSettings
from sce.training.shards import ShardedCheckpointer
from sce.training.signals import Interrupts, StopRequested, TrainingInterrupted
from sce.training.slices import SlicedStep
from sce.training.step import TrainingStep, seeds_of_epoch

Record = dict[str, Any]  # of an epoch: a line of metrics.jsonl

SCORE = "ndcg@10"  # by which epochs are compared

_STATISTICS_PER_EPOCH = 20  # at most
CHECK_EVERY = 50  # steps: at most so many are done on broken weights


class DivergenceError(InputError):
    """The loss or the weights are not finite any more; `rows` are those of the batch, if known."""

    def __init__(self, message: str, *, epoch: int, step: int, rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.epoch, self.step, self.rows = epoch, step, rows


class LossMonitor:
    """Keeps the losses of steps on the device; `check` adds them to the epoch's sums, or raises."""

    def __init__(
        self,
        so_far: EpochSoFar,
        *,
        epoch: int,
        device: torch.device,
        statistics: Sequence[str] = (),
    ) -> None:
        self.so_far, self.epoch, self._names = so_far, epoch, statistics
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
        """Wait for the steps so far, and count them, up to the first loss that is not finite."""
        losses = self._losses[: len(self._pending)].tolist()
        for loss, (step, rows, targets) in zip(losses, self._pending, strict=True):
            if not math.isfinite(loss):
                what = f"the loss became {loss} at step {step} of epoch {self.epoch}"
                raise DivergenceError(what, epoch=self.epoch, step=step, rows=rows.tolist())
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


class Measured(NamedTuple):
    """An evaluation, its time and its peak memory."""

    metrics: Metrics
    seconds: float
    mib: float


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
        bar: TrainingProgress,
        memory: PeakMemory,
        interrupts: Interrupts,
        resume_from: tuple[str, str] | None = None,  # file and identity, also of another rank's run
        continued: bool = False,  # begins with weights that may be the best
    ) -> None:
        self.trained, self.step, self.dataset, self.settings = trained, step, dataset, settings
        self.run, self.bar, self.memory, self.interrupts = run, bar, memory, interrupts
        self.continued = continued
        if isinstance(step, SlicedStep):
            step.between = interrupts.check_between
        self.rows = trainable_rows(step.sequences)
        self.steps = math.ceil(len(self.rows) / settings.step_size)  # of a whole epoch
        self.total = min(settings.epochs * self.steps, settings.max_steps or math.inf)
        self.epochs = bar.epochs = math.ceil(self.total / self.steps)
        self.validation = _sample_users(dataset, settings.validation_users)
        self.progress = Progress()
        self.best_ranks: NDArray[np.int32] | None = None  # of validation, if found in this process
        keep, model = Checkpointer, cast("Any", trained.model)
        self.ranker: Any = model
        if trained.table is not None:
            keep, self.ranker = ShardedCheckpointer, ShardedRanker(model, trained.table)
        file, identity = (None, "") if resume_from is None else resume_from
        best = None if run is None else run.best_weights
        place = None if file is None else Path(file)
        self.checkpointer = keep(trained, place, best, identity, writes=run is not None)

    def resume(self) -> None:
        """Go on from the checkpoint of the run, if there is one."""
        found = self.checkpointer.resume()
        if found is None:
            return
        self.progress, place = found, self.checkpointer.place
        if found.epoch > self.epochs:
            raise InputError(f"{place} has {found.epoch} epochs, and {self.epochs} are asked for")
        if found.stopped == "epochs" and found.epoch < self.epochs:
            found.stopped = None
        if found.stopped is None and found.epoch == self.epochs:
            if not found.has_best:
                raise InputError(f"no epoch of {place} was evaluated; ask for more epochs")
            found.stopped, found.current = "epochs", EpochSoFar()
        if found.stopped is not None:
            self.bar.print(f"sce: training has ended already, after epoch {found.epoch}")
            return
        if self.run is not None:
            self.run.result_file.unlink(missing_ok=True)
        step = f"step {found.current.step + 1} of {self._steps()}"
        if found.current.step == self._steps():
            step = "its evaluation"
        self.bar.print(f"sce: going on at epoch {found.epoch + 1}, {step}")

    def run_epochs(self, on_epoch: Callable[[Record], object] | None = None) -> None:
        """Train, and leave the model with its best weights; after a signal, save and raise."""
        if self.run is not None:
            self.run.write_metrics(self.progress.records)
        try:
            begun = self.progress.epoch or self.progress.current.step
            if self.continued and self.progress.start is None and not begun:
                self._begin(on_epoch)
            while self.progress.stopped is None:
                self.interrupts.check()
                self._train()
                self._close(self._finish(), on_epoch)
            self.interrupts.check()
        except StopRequested as stop:
            self.save()
            progress, place = self.progress, self.checkpointer.place
            what = f"stopped in epoch {progress.epoch + 1} after step {progress.current.step} of "
            what += f"{self._steps()}; everything is saved in {place}"
            raise TrainingInterrupted(what, stop.signal_number) from stop
        self.checkpointer.restore_best()

    def _begin(self, on_epoch: Callable[[Record], object] | None) -> None:
        """Evaluate the weights that training begins with: they are the best until others are."""
        if not len(self.dataset.test):
            return
        measured = self.measure(self.ranker, "validation")
        self.progress.start = make_record(0, EpochSoFar(), measured, best=True)
        self.progress.best_score = self._score(measured)
        self.best_ranks = measured.metrics.ranks
        self.checkpointer.keep_best()
        self._close(self.progress.start, on_epoch)

    def _close(self, record: Record, on_epoch: Callable[[Record], object] | None) -> None:
        """Write and show the record of an epoch."""
        if self.run is not None:
            self.run.add_metrics(record)
        self.bar.epoch(record, self._seconds_left())
        (due,) = self.interrupts.agree(self.checkpointer.due())
        if self.progress.stopped is not None or due:
            self.save()
        if on_epoch is not None:
            on_epoch(copy.deepcopy(record))

    def _steps(self) -> int:
        """Steps of the epoch under way, which max_steps may cut short."""
        return int(min(self.steps, self.total - self.progress.epoch * self.steps))

    def _train(self) -> None:
        """Do the steps of the epoch that are still to be done."""
        settings, so_far, epoch = self.settings, self.progress.current, self.progress.epoch + 1
        order_seed, seeds = seeds_of_epoch(settings.seed, epoch, self.steps)
        batches, targets = self._batches(order_seed)
        given: Any = {"device": self.step.device, "statistics": self.step.statistics}
        monitor = LossMonitor(so_far, epoch=epoch, **given)
        steps = self._steps()
        statistics_every = -(-self.steps // _STATISTICS_PER_EPOCH)
        self.trained.model.train()
        begun = time.perf_counter()
        with matmul_precision(self.step.device, settings.precision), self.memory.phase():
            for number in range(so_far.step, steps):
                done = (epoch - 1) * self.steps + number
                factor = rate_factor(
                    settings.schedule, done, int(self.total), settings.warmup_steps
                )
                set_rate(self.step.optimizer, factor)
                statistics = number % statistics_every == 0
                self.step.upcoming = batches[number + 1] if number + 1 < steps else None
                try:
                    result = self.step(batches[number], seeds[number], with_statistics=statistics)
                except StopRequested:  # within the step, of which nothing is kept
                    monitor.check()
                    so_far.seconds += time.perf_counter() - begun
                    raise
                monitor.add(result, number + 1, batches[number], targets[number])
                last = number + 1 == steps
                save = self.checkpointer.due(60 * settings.save_minutes)
                save, show = self.interrupts.agree(save, self.bar.due)
                if not (last or save or monitor.full or show or self.interrupts.received):
                    continue
                monitor.check()
                so_far.seconds += time.perf_counter() - begun
                so_far.memory_mib = max(so_far.memory_mib, self.memory.peak())
                self.bar.training(epoch, number + 1, steps, monitor.last, self._seconds_left())
                if not last:
                    self.interrupts.check()
                if save:
                    self.save()
                begun = time.perf_counter()
        self._check_weights()

    def _batches(self, seed: int) -> tuple[Sequence[Tensor], list[int]]:
        """The rows of each batch of an epoch, and how many targets each has."""
        size = self.settings.step_size
        generator = torch.Generator().manual_seed(seed)
        order = self.rows[torch.randperm(len(self.rows), generator=generator)]
        return order.split(size), [int(part.sum()) for part in self.step.targets(order).split(size)]

    def measure(self, ranker: Any, split: Literal["validation", "test"]) -> Measured:
        """Evaluate a model or a baseline, on all test users or the sample for validation."""
        dataset = self.validation if split == "validation" else self.dataset

        def tell(done: int) -> None:
            self.interrupts.agree()
            self.interrupts.check()
            self.bar.update(f"evaluating {split}", done, len(dataset.test), "users")

        begun, sharded = time.perf_counter(), isinstance(ranker, ShardedRanker)
        evaluate_with: Any = ranker.evaluate if sharded else partial(evaluate, ranker)
        options = {"batch_size": self.settings.evaluation_batch_size, "progress": tell}
        with self.memory.phase():
            metrics = self.step.on_capture_stream(
                lambda: evaluate_with(dataset, split=split, **options)
            )
        return Measured(metrics, time.perf_counter() - begun, self.memory.peak())

    def _finish(self) -> Record:
        """Evaluate the epoch if it is time, and say whether it is the best, and the last."""
        progress, so_far = self.progress, self.progress.current
        epoch, measured = progress.epoch + 1, None
        due = epoch % self.settings.evaluate_every == 0 or epoch == self.epochs
        if due and len(self.dataset.test):
            measured = self.measure(self.ranker, "validation")
        # Without anything to compare by, the latest is the best.
        score = None if measured is None else self._score(measured)
        is_best = not len(self.dataset.test) if score is None else score > progress.best_score
        if is_best:
            progress.best_epoch, progress.stale = epoch, 0
            progress.best_score = -1.0 if score is None else score
            self.best_ranks = None if measured is None else measured.metrics.ranks
            self.checkpointer.keep_best()
        elif score is not None:
            progress.stale += 1
        record = make_record(epoch, so_far, measured, best=is_best)
        progress.history.append(record)
        progress.current = EpochSoFar()
        if self.settings.patience and progress.stale >= self.settings.patience:
            progress.stopped = "patience"
        elif epoch >= self.epochs:
            whole = self.total == self.settings.epochs * self.steps
            progress.stopped = "epochs" if whole else "max_steps"
        return record

    def _score(self, measured: Measured) -> float:
        """The score that the first rank found: one number decides for all which epoch is best."""
        score, ranks = measured.metrics.values[SCORE], self.interrupts.ranks
        return score if ranks is None else float(ranks.gather_json(score)[0])

    def save(self) -> None:
        """Write a checkpoint, unless the weights are broken."""
        self._check_weights()
        with self.interrupts.held():
            self.checkpointer.save(self.progress)

    def _check_weights(self) -> None:
        if not self.trained.finite():
            epoch, step = self.progress.epoch + 1, self.progress.current.step
            what = f"the weights stopped being numbers in epoch {epoch}"
            raise DivergenceError(what, epoch=epoch, step=step)

    def explain(self, error: DivergenceError) -> str:
        """What happened, in which batch, and what may help."""
        what, rows = str(error), error.rows
        if rows:
            train, ids = self.dataset.train, self.dataset.user_ids
            users = ", ".join(repr(ids[int(train.users[row])]) for row in rows[:3])
            more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
            what += f", in the batch of users {users}{more}"
        other = named("training.clip_norm", 1)
        if self.settings.row_wise:
            other = named("training.catalogue_learning_rate")
        hint = f"try a lower {named('learning_rate')} or {other}"
        if self.settings.precision != "float32":
            hint += f", or {named('training.precision', 'float32')}"
        kept = ""
        if self.run is not None:
            kept = f", {resume_hint(self.run)}"
            if best := self.progress.best_epoch:
                kept += f"; the best epoch so far, {best}, is in {self.run.path}"
        return f"{what}; {hint}{kept}"

    def _seconds_left(self) -> float:
        """Seconds until the last epoch ends."""
        history, so_far = self.progress.history, self.progress.current
        done = so_far.step + sum(record["steps"] for record in history)
        spent = so_far.seconds + sum(sum(record["seconds"].values()) for record in history)
        return float((self.total - done) * spent / max(done, 1))


def make_record(
    epoch: int, so_far: EpochSoFar, measured: Measured | None = None, *, best: bool = False
) -> Record:
    """The record of an epoch; its loss and statistics are means, and None before any step."""
    validation, seconds, mib = measured or (None, 0.0, None)
    stepped, speed = so_far.step > 0, so_far.targets / max(so_far.seconds, 1e-9)
    means = {name: total / so_far.samples for name, total in so_far.statistics.items()}
    record: Record = {
        "epoch": epoch,
        "loss": so_far.loss_sum / max(1, so_far.targets) if stepped else None,
        "buckets": means or None,
        "steps": so_far.step,
        "targets": so_far.targets,
        "seconds": {"training": so_far.seconds, "evaluation": seconds},
        "tokens_per_second": speed if stepped else None,
        "memory_mib": {"training": so_far.memory_mib if stepped else None, "evaluation": mib},
        "validation": None if validation is None else validation.values,
        "best": best,
    }
    if validation is not None:
        record["by_popularity"] = {"validation": validation.by_popularity}
    return record


def _sample_users(dataset: PreparedDataset, count: int | None) -> PreparedDataset:
    """The dataset with so many of its test users: the same in every epoch and run."""
    test = dataset.test
    if count is None or count >= len(test):
        return dataset
    rows = np.sort(np.random.default_rng(0).choice(len(test), count, replace=False))
    events = [np.arange(*test.offsets[row : row + 2]) for row in rows]
    offsets, chosen = np.cumsum([0, *map(len, events)], dtype=np.int64), np.concatenate(events)
    times = None if test.times is None else test.times[chosen]
    return replace(dataset, test=Sequences(test.items[chosen], offsets, test.users[rows], times))
