"""Training a model: `fit`, and its result."""

import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor, nn

from sce.data.batches import IGNORED, DeviceSequences
from sce.data.prepared import PreparedDataset
from sce.distributed.ranks import Ranks, in_torchrun, start_ranks, was_started
from sce.distributed.table import ShardedTable
from sce.errors import InputError, TrainingWarning, check_types, named, show_value
from sce.evaluation.ranking import longest_history, uses_times
from sce.losses import LOSSES, Loss, ScalableCrossEntropy
from sce.models.registry import BACKBONES
from sce.planning import summarize_data
from sce.training.checkpoint import Trained
from sce.training.describe import describe_loss, describe_model, name_model
from sce.training.device import (
    PeakMemory,
    free_memory,
    quiet_torch,
    resolve_device,
    same_bits,
    spare_workspace,
)
from sce.training.optimizer import make_optimizer, row_wise_table, sparse_gradients
from sce.training.preflight import explained_errors, preflight
from sce.training.progress import TrainingProgress
from sce.training.result import FitResult, conclude
from sce.training.run import Run
from sce.training.run_start import note_divergence, run_target
from sce.training.settings import TrainingSettings
from sce.training.shards import ShardedStep, begun_with, settle, sharded_catalogue
from sce.training.signals import Interrupts, StopRequested, TrainingInterrupted
from sce.training.slices import SlicedStep
from sce.training.start import Start, choose_start, tell_start
from sce.training.step import TrainingStep
from sce.training.trainer import DivergenceError, Record, Trainer

__all__ = ["FitResult", "TrainingSettings", "TrainingWarning", "fit"]


def fit(
    model: nn.Module,
    loss: Callable[..., Tensor],
    dataset: PreparedDataset,
    *,
    settings: TrainingSettings | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    force: bool = False,
    start_from: Path | str | None = None,
    config: Mapping[str, Any] | None = None,
    loss_name: str | None = None,
    on_epoch: Callable[[Record], object] | None = None,
    progress: bool = True,
) -> FitResult:
    """Train a model with a loss.

    Afterwards the model (and a loss with weights of its own) has the weights of its best epoch, is
    on the device that it was trained on, and in evaluation mode.

    Called by all processes of a `torchrun`, each step has a batch for each of them. All of them
    have the result, and the first one writes it. With `settings.shard_catalogue` they share the
    rows of the catalogue, and afterwards the model is where it was; a catalogue on the meta device
    stays there, and its rows are in `out` alone.

    >>> from sce import SASRec, ScalableCrossEntropy
    >>> model = SASRec(dataset.n_items, dim=64)                                  # doctest: +SKIP
    >>> result = fit(model, ScalableCrossEntropy(), dataset)                     # doctest: +SKIP
    >>> result.test["ndcg@10"]                                                   # doctest: +SKIP

    Args:
        model: Any module that maps histories [b, l] to hidden states [b, l, d], each of the events
            up to it (others are warned of), and has a `catalogue` [C, d]; histories are as long as
            its `max_length`, if it has one. They are
            padded on the right with `sce.PADDING`, which is -1 and no row of a table: look items up
            with `histories.clamp(min=0)`. A `sce.models.base.Backbone` is given histories with the
            longest first and their `length_groups`, and need not compute their padding.
        loss: Any function of (states, catalogue, targets) that gives a scalar, the mean over
            targets unless it has another `reduction`: batches are accumulated so. It may draw from
            torch's default generators, which are seeded for each step. A `sce.losses.Loss` is given
            the generator of the step, and `max_targets`.
        dataset: The prepared dataset.
        settings: The settings of training.
        out: The directory of the run: records, weights, and the checkpoint to resume from. Without
            it nothing is written.
        resume: Resume the run in `out`, if there is one.
        force: Replace the run in `out`, when training begins; not again where torchrun starts a
            script once more, which then resumes what it has begun.
        start_from: The directory of another run, of the same model, whose best weights and
            optimizer state to begin with, by the ids of the items; the dataset has all of these if
            it comes from `sce.unite_items(dataset, start_from)`. New items begin as the mean of
            known ones near them. A loss with weights of its own keeps those. The evaluation before
            any step is epoch 0, and may remain the best.
        config: The settings of model and loss to be kept with the run.
        loss_name: The loss in run.json, by which resuming knows it, if its class and attributes do
            not say all. A partial, a lambda or a closure needs one, if there is `out`.
        on_epoch: Called with the record of each epoch, which is a line of metrics.jsonl.
        progress: Show progress on stderr.

    Raises:
        InputError: When what was given cannot work, or the loss stops being a number.
        TrainingInterrupted: After Ctrl-C or SIGTERM, when the state has been saved in `out`.
    """
    arguments = locals().copy()
    settings = TrainingSettings() if settings is None else settings
    _check_arguments(model, loss, dataset, settings)
    check_types(arguments, get_type_hints(fit))
    if not uses_times(model):
        dataset = replace(dataset, times_hash="")  # other times are then no other dataset
    if out is not None and was_started(out):
        resume, force = True, False
    described = {"model": describe_model(model), "loss": {}, "training": asdict(settings)}
    described |= config or {}
    for section in ("model", "loss", "training"):
        if not isinstance(given := described[section], Mapping):
            raise InputError(f"config[{section!r}] must be a dictionary; got {given!r}")
    if out is not None and (loss_name is not None or not described["loss"]):
        described["loss"] = describe_loss(loss, loss_name)
    launched = settings.device in ("auto", "cuda") and in_torchrun()  # a GPU for each
    with start_ranks(device=None if launched else resolve_device(settings.device)) as ranks:
        begun = begun_with(out) if resume and ranks.rank == 0 else {}
        before, begun = asdict(settings), ranks.gather_json(begun)[0]
        settings, note = settle(settings, model, loss, dataset, ranks, begun)
        settled = {name: now for name, now in asdict(settings).items() if now != before[name]}
        described["training"] = {**described["training"], **settled}
        start = choose_start(start_from, begun, model, dataset, settings, out)
        notes = [note] if note else []
        if resume and not begun.get("saved"):
            notes.append(f"nothing to resume in {out}: starting")
        if start is not None:
            described["start"] = start.summary
            notes.append(tell_start(start.summary))
        if ranks.rank:  # the first one writes, shows and asks
            out, resume, force, on_epoch, progress = None, False, False, None, False
        options: Any = {"config": described, "model": name_model(model)}
        target = run_target(out, dataset, **options, resume=resume, force=force)
        trained = model, loss, dataset, settings, start
        return _Training(ranks, *trained, target, on_epoch, progress, notes).run()


class _Training(NamedTuple):
    """The training of one of the ranks."""

    ranks: Ranks
    model: nn.Module
    loss: Callable[..., Tensor]
    dataset: PreparedDataset
    settings: TrainingSettings
    start: Start | None
    target: AbstractContextManager[Callable[[Mapping[str, Any]], Run | None]]
    on_epoch: Callable[[Record], object] | None
    progress: bool
    notes: list[str]  # to be said first

    def run(self) -> FitResult:
        """Train and conclude."""
        ranks, model, loss, dataset, settings, *_ = self
        device = ranks.device
        longest = max(1, int(dataset.train.lengths.max(initial=0)) - 1)
        max_length = min(longest_history(model) or longest, longest)

        # Training draws from the default generators; what comes after it must not notice.
        gpus = [device.index] if device.type == "cuda" else []
        with (
            self.target as opened,
            torch.random.fork_rng(devices=gpus),
            same_bits(device) if settings.deterministic else spare_workspace(device),
            quiet_torch(),
            explained_errors(model, loss, compiled=settings.compile),
            sparse_gradients(model, loss, wanted=settings.row_wise),
        ):
            sizes: Any = {"batch_size": settings.batch_size, "max_length": max_length}
            data = summarize_data(dataset.train, dataset.n_items, **sizes, model=model)
            sizes = {"max_length": max_length, "device": device, "ranks": ranks.size}
            for text in preflight(model, loss, dataset, data, settings, **sizes):
                if ranks.rank == 0:
                    warnings.warn(text, TrainingWarning, stacklevel=3)
            with sharded_catalogue(model, loss, ranks, settings) as table:
                trained, step = self._build(table, max_length)
                derived: dict[str, Any] = {"targets_per_batch": round(data.targets, 1)}
                if isinstance(loss, ScalableCrossEntropy):
                    cpu = device.type == "cpu"
                    derived |= loss.named_sizes(data.n_items, step.mean_targets, cpu=cpu)
                run = opened(derived)
                return self._train(trained, step, run)

    def _build(self, sharded: ShardedTable | None, max_length: int) -> tuple[Trained, TrainingStep]:
        """Place data and weights, and build the optimizer and the step."""
        ranks, model, loss, dataset, settings, *_ = self
        device, slices = ranks.device, settings.accumulate or 1
        table: nn.Parameter | None = None
        if settings.row_wise:
            table = row_wise_table(model, loss) if sharded is None else sharded.shard
        sequences = _place(dataset, device, times=uses_times(model))
        model.to(device)
        module = loss.to(device) if isinstance(loss, nn.Module) else None
        captured = _can_capture(model, loss, settings, device)
        parameters = [*model.parameters(), *(module.parameters() if module else ())]
        optimizer = make_optimizer(
            parameters, settings, device=device, capturable=captured, row_wise=table
        )
        given = (model, loss, optimizer, sequences, settings)
        options: dict[str, Any] = {"device": device, "max_length": max_length}
        step = TrainingStep(*given, **options, captured=captured)
        if sharded is not None:
            step = ShardedStep(*given, **options, table=sharded, slices=slices)
        elif slices > 1:
            step = SlicedStep(*given, **options, ranks=ranks, slices=slices, row_wise=table)
        return Trained(model, module, optimizer, sharded), step

    def _train(self, trained: Trained, step: TrainingStep, run: Run | None) -> FitResult:
        ranks, start, progress = self.ranks, self.start, self.progress
        written = None if run is None else (str(run.resume_state), run.identity)
        written = ranks.gather_json(written)[0]  # by the first rank, for all
        memory = PeakMemory(ranks.device)
        with (
            Interrupts(wanted=written is not None, say=progress, ranks=ranks) as interrupts,
            TrainingProgress(wanted=progress, memory=memory, on_lost=interrupts.lose_reader) as bar,
        ):
            trainer = Trainer(
                trained,
                step,
                self.dataset,
                self.settings,
                run=run,
                bar=bar,
                memory=memory,
                interrupts=interrupts,
                resume_from=written,
                continued=start is not None,
            )
            for note in self.notes:
                bar.print(f"sce: {note}")
            if start is not None:
                start.give(trained)
            try:
                trainer.resume()
                trainer.run_epochs(self.on_epoch)
                return conclude(trainer, start.summary if start else None)
            except StopRequested as stop:
                where = f"training has ended, saved in {trainer.checkpointer.place}"
                what = f"{where}; its last evaluation is not done"
                raise TrainingInterrupted(what, stop.signal_number) from stop
            except DivergenceError as error:
                trainer.checkpointer.save_best(trainer.progress)
                if run is not None:
                    note_divergence(run, epoch=error.epoch, step=error.step)
                error.args = (trainer.explain(error),)
                raise


def _check_arguments(model: object, loss: object, dataset: object, settings: object) -> None:
    """Refuse what a notebook gives by mistake."""
    if not isinstance(dataset, PreparedDataset):
        raise InputError(
            "the dataset is a PreparedDataset: PreparedDataset.load(path), or of a frame "
            f"prepare(frame, path); got {show_value(dataset)}"
        )
    if not isinstance(settings, TrainingSettings):
        raise InputError(f"settings are TrainingSettings(...); got {settings!r}")
    if not _takes_three(loss):
        raise InputError(
            "a loss is a function of states, catalogue and targets, as sce.CrossEntropy() is, and "
            f"torch's own, of logits, is not; got {show_value(loss)}"
        )
    if isinstance(loss, Loss) and loss.ignore_index != IGNORED:
        raise InputError(f"training pads targets with {IGNORED}; leave out the loss's ignore_index")
    catalogue = getattr(model, "catalogue", None)
    if not isinstance(model, nn.Module) or not isinstance(catalogue, Tensor):
        raise InputError(
            "a model is a torch module that maps histories to states and has a tensor `catalogue`; "
            f"got {type(model).__name__}, whose catalogue is {type(catalogue).__name__}"
        )
    if len(catalogue) != dataset.n_items:
        sizes = f"the model has {len(catalogue):,} items and the dataset {dataset.n_items:,}"
        raise InputError(f"{sizes}; make it for dataset.n_items")


def _takes_three(loss: object) -> bool:
    """True for what can be called with states, catalogue and targets, as far as one can see."""
    if not callable(loss) or isinstance(loss, type):
        return False
    try:
        inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).bind(1, 2, 3)
    except TypeError:
        return False
    except ValueError:  # of a function that is not Python's
        pass
    return True


def _place(
    dataset: PreparedDataset, device: torch.device, *, times: bool = False
) -> DeviceSequences:
    """Put the training sequences where the model is, if they leave it most of the memory."""
    free = free_memory(device)
    fits = free is None or (1 + times) * dataset.train.items.nbytes < free // 4
    return DeviceSequences.place(dataset.train, device if fits else "cpu", times=times)


def _can_capture(
    model: Any, loss: object, settings: TrainingSettings, device: torch.device
) -> bool:
    """True if steps are captured in CUDA graphs; by default where model and loss are ours.

    Whatever a user's own model or loss does on the host would be done once, and not again.
    """
    several = (settings.accumulate or 1) > 1 or bool(settings.shard_catalogue)
    # A sharded model has no catalogue.
    syncs = not several and isinstance(loss, Loss) and not loss.is_capturable(model.catalogue)
    for wrong, why in (
        (several, "captures a step of one batch"),
        (device.type != "cuda", f"captures CUDA graphs, and the device is {device}"),
        (syncs, f"lets nothing wait for the device, and this loss does: {loss}"),
    ):
        if wrong and settings.capture:
            raise InputError(f"{named('training.capture')} {why}; leave it out")
        if wrong:
            return False
    ours = name_model(model) in BACKBONES and type(loss) in {e.loss for e in LOSSES.values()}
    return ours if settings.capture is None else settings.capture
