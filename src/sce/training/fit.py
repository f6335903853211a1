"""Training a model: `fit`, and its result."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn

from sce.data.batches import DeviceSequences
from sce.data.prepared import PreparedDataset
from sce.data.storage import write_json
from sce.distributed.ranks import Ranks, in_torchrun, start_ranks
from sce.errors import InputError, TrainingWarning, check_types
from sce.evaluation.ranking import Popularity
from sce.losses import LOSSES, DataSummary, Loss, ScalableCrossEntropy
from sce.models.registry import BACKBONES
from sce.planning import summarize_data
from sce.training.checkpoint import Trained
from sce.training.describe import describe_loss, describe_model, name_model
from sce.training.device import (
    PeakMemory,
    device_name,
    free_memory,
    quiet_bf16,
    resolve_device,
    same_bits,
    spare_workspace,
)
from sce.training.optimizer import make_optimizer, row_wise_table, sparse_gradients
from sce.training.preflight import explained_errors, preflight
from sce.training.progress import TrainingProgress
from sce.training.ranks import write_ranks
from sce.training.run import MANIFEST, Run
from sce.training.run_start import note_divergence, run_target
from sce.training.settings import TrainingSettings
from sce.training.signals import Interrupts, StopRequested, TrainingInterrupted
from sce.training.slices import SlicedStep
from sce.training.step import TrainingStep
from sce.training.trainer import DivergenceError, Record, Trainer
from sce.units import plural, show_duration, show_memory, show_metric

__all__ = ["FitResult", "TrainingSettings", "TrainingWarning", "fit"]

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


def fit(
    model: nn.Module,
    loss: Callable[..., Tensor],
    dataset: PreparedDataset,
    *,
    settings: TrainingSettings | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    force: bool = False,
    config: Mapping[str, Any] | None = None,
    loss_name: str | None = None,
    on_epoch: Callable[[Record], object] | None = None,
    progress: bool = True,
) -> FitResult:
    """Train a model with a loss.

    Afterwards the model (and a loss with weights of its own) has the weights of its best epoch, is
    on the device that it was trained on, and in evaluation mode.

    Called by all processes of a `torchrun`, each step has a batch for each of them. All of them
    have the result, and the first one writes it.

    >>> from sce import SASRec, ScalableCrossEntropy
    >>> model = SASRec(dataset.n_items, dim=64)                                  # doctest: +SKIP
    >>> result = fit(model, ScalableCrossEntropy(), dataset)                     # doctest: +SKIP
    >>> result.test["ndcg@10"]                                                   # doctest: +SKIP

    Args:
        model: Any module that maps histories [b, l] to hidden states [b, l, d], and has a
            `catalogue` [C, d]; histories are as long as its `max_length`, if it has one. They are
            padded on the right with `sce.PADDING`, which is -1 and no row of a table: look items up
            with `histories.clamp(min=0)`. A `sce.models.base.Backbone` is given histories with the
            longest first and their `length_groups`, and need not compute their padding.
        loss: Any function of (states, catalogue, targets) that gives a scalar; it may draw from
            torch's default generators, which are seeded for each step. A `sce.losses.Loss` is given
            the generator of the step, and `max_targets`.
        dataset: The prepared dataset.
        settings: The settings of training.
        out: The directory of the run: records, weights, and the checkpoint to resume from. Without
            it nothing is written.
        resume: Resume the run in `out`, if there is one.
        force: Replace the run in `out`, when training begins.
        config: The settings of model and loss to be kept with the run.
        loss_name: The loss in run.json, by which resuming knows it, if its class, attributes and
            code do not say all. A partial, a lambda or a closure needs one, if there is `out`.
        on_epoch: Called with the record of each epoch, which is a line of metrics.jsonl.
        progress: Show progress on stderr.

    Raises:
        InputError: When what was given cannot work, or the loss stops being a number.
        TrainingInterrupted: After Ctrl-C or SIGTERM, when the state has been saved in `out`.
    """
    settings = TrainingSettings() if settings is None else settings
    _check_arguments(model, loss, dataset, settings)
    others: dict[str, Any] = {"out": out, "resume": resume, "force": force, "config": config}
    others |= {"loss_name": loss_name, "on_epoch": on_epoch, "progress": progress}
    check_types(others, get_type_hints(fit))
    described = {"model": describe_model(model), "loss": {}, "training": asdict(settings)}
    described |= config or {}
    if out is not None and (loss_name is not None or not described["loss"]):
        described["loss"] = describe_loss(loss, loss_name)
    launched = settings.device in ("auto", "cuda") and in_torchrun()  # a GPU for each
    with start_ranks(device=None if launched else resolve_device(settings.device)) as ranks:
        begun = _batches_of(out) if resume and ranks.rank == 0 else None
        begun = ranks.gather_json(begun)[0]
        if (slices := settings.accumulate or begun or ranks.size) > 1:
            settings = replace(settings, accumulate=slices)
            described["training"] = {**described["training"], "accumulate": slices}
        if slices % ranks.size:
            raise InputError(
                f"{ranks.size} processes cannot share the {slices} batches of a step equally "
                "(training.accumulate); start as many, or a number that divides it"
            )
        if ranks.rank:  # the first one writes, shows and asks
            out, resume, force, on_epoch, progress = None, False, False, None, False
        target = {"path": out, "resume": resume, "force": force}
        return _fit(ranks, model, loss, dataset, settings, described, target, on_epoch, progress)


def _fit(
    ranks: Ranks,
    model: nn.Module,
    loss: Callable[..., Tensor],
    dataset: PreparedDataset,
    settings: TrainingSettings,
    described: Mapping[str, Any],
    target: Mapping[str, Any],
    on_epoch: Callable[[Record], object] | None,
    progress: bool,
) -> FitResult:
    """Train as one of the ranks."""
    device, slices = ranks.device, settings.accumulate or 1
    table = row_wise_table(model, loss) if settings.row_wise else None
    longest = max(1, int(dataset.train.lengths.max(initial=0)) - 1)
    max_length = min(int(getattr(model, "max_length", longest)), longest)

    # Training draws from the default generators; what comes after it must not notice.
    gpus = [device.index] if device.type == "cuda" else []
    with (
        run_target(
            dataset=dataset, config=described, model=name_model(model), **target
        ) as open_run,
        torch.random.fork_rng(devices=gpus),
        same_bits(device) if settings.deterministic else spare_workspace(device),
        quiet_bf16(),
        explained_errors(model, loss, compiled=settings.compile),
        sparse_gradients(model, loss, wanted=table is not None),
    ):
        data = summarize_data(
            dataset.train, dataset.n_items, batch_size=settings.batch_size, max_length=max_length
        )
        for text in preflight(
            model, loss, dataset, data, settings, max_length=max_length, device=device
        ):
            if ranks.rank == 0:
                warnings.warn(text, TrainingWarning, stacklevel=3)

        # Place data and weights; build the step.
        sequences = _place(dataset, device)
        model.to(device)
        loss_module = loss.to(device) if isinstance(loss, nn.Module) else None
        captured = _can_capture(model, loss, settings, device)
        parameters = [*model.parameters(), *(loss_module.parameters() if loss_module else ())]
        optimizer = make_optimizer(
            parameters, settings, device=device, capturable=captured, row_wise=table
        )
        given = (model, loss, optimizer, sequences, settings)
        options: dict[str, Any] = {"device": device, "max_length": max_length}
        step = TrainingStep(*given, **options, captured=captured)
        if slices > 1:
            step = SlicedStep(*given, **options, ranks=ranks, slices=slices, row_wise=table)

        # Open the run, train, conclude.
        run = open_run(_derived(loss, data, step))
        written = None if run is None else (str(run.resume_state), run.identity)
        written = ranks.gather_json(written)[0]  # by the first rank, for all
        memory = PeakMemory(device)
        with (
            Interrupts(wanted=written is not None, say=progress, ranks=ranks) as interrupts,
            TrainingProgress(
                wanted=progress,
                epochs=settings.epochs,
                memory=memory,
                on_lost=interrupts.lose_reader,
            ) as bar,
        ):
            trainer = Trainer(
                Trained(model, loss_module, optimizer),
                step,
                dataset,
                settings,
                run=run,
                bar=bar,
                memory=memory,
                interrupts=interrupts,
                resume_from=None if written is None else (Path(written[0]), written[1]),
            )
            if run is not None and target["resume"] and not run.resume_state.exists():
                bar.print(f"sce: nothing to resume in {run.path}: starting")
            try:
                trainer.resume()
                trainer.run_epochs(on_epoch)
                return _conclude(trainer)
            except StopRequested as stop:
                raise TrainingInterrupted(
                    f"training has ended, and is saved in {target['path']}; its last evaluation is "
                    "not done",
                    stop.signal_number,
                ) from stop
            except DivergenceError as error:
                if run is not None:
                    trainer.checkpointer.save_best(trainer.progress)
                    note_divergence(run, epoch=error.epoch, step=error.step)
                raise


def _check_arguments(model: object, loss: object, dataset: object, settings: object) -> None:
    """Refuse what a notebook gives by mistake."""
    if not isinstance(dataset, PreparedDataset):
        raise InputError(
            f"the dataset is a PreparedDataset, such as PreparedDataset.load(path); got {dataset!r}"
        )
    if not isinstance(settings, TrainingSettings):
        raise InputError(f"settings are TrainingSettings(...); got {settings!r}")
    if not callable(loss) or isinstance(loss, type):
        raise InputError(
            f"a loss is a function of states, catalogue and targets, or a module; got {loss!r}"
        )
    catalogue = getattr(model, "catalogue", None)
    if not isinstance(model, nn.Module) or not isinstance(catalogue, Tensor):
        raise InputError(
            "a model is a torch module that maps histories to states and has a tensor `catalogue` "
            f"of item vectors; got {type(model).__name__}, whose catalogue is "
            f"{type(catalogue).__name__}"
        )
    if len(catalogue) != dataset.n_items:
        raise InputError(
            f"the model has {len(catalogue):,} items and the dataset {dataset.n_items:,}; make it "
            "for dataset.n_items"
        )


def _batches_of(out: Path | str | None) -> int | None:
    """The batches in a step of the run that is there, if one is."""
    if out is None or not (Path(out) / MANIFEST.file).exists():
        return None
    return int(Run.open(out).config["training"].get("accumulate") or 1)


def _derived(loss: object, data: DataSummary, step: TrainingStep) -> dict[str, Any]:
    """Values for run.json that follow from settings and dataset."""
    found: dict[str, Any] = {"targets_per_batch": round(data.targets, 1)}
    if isinstance(loss, ScalableCrossEntropy):
        cpu = step.device.type == "cpu"
        found |= loss.named_sizes(data.n_items, step.mean_targets, cpu=cpu)
    return found


def _place(dataset: PreparedDataset, device: torch.device) -> DeviceSequences:
    """Put the training sequences where the model is, if they leave it most of the memory."""
    free = free_memory(device)
    fits = free is None or dataset.train.items.nbytes < free // 4
    return DeviceSequences.place(dataset.train, device if fits else "cpu")


def _can_capture(
    model: Any, loss: object, settings: TrainingSettings, device: torch.device
) -> bool:
    """True if steps are captured in CUDA graphs; by default where model and loss are ours.

    Whatever a user's own model or loss does on the host would be done once, and not again: also
    one that is derived from ours.
    """
    if (settings.accumulate or 1) > 1:
        if settings.capture:
            raise InputError("training.capture captures a step of one batch; leave it out")
        return False
    syncs = isinstance(loss, Loss) and not loss.is_capturable(model.catalogue)
    if settings.capture is None:
        ours = name_model(model) in BACKBONES and type(loss) in {e.loss for e in LOSSES.values()}
        return device.type == "cuda" and ours and not syncs
    if settings.capture and device.type != "cuda":
        raise InputError(f"training.capture captures CUDA graphs, and the device is {device}")
    if settings.capture and syncs:
        raise InputError(
            "training.capture captures CUDA graphs, in which nothing may wait for the device, "
            f"and this loss does: {loss}"
        )
    return settings.capture


def _conclude(trainer: Trainer) -> FitResult:
    """Evaluate the model, which has its best weights now, and complete its run."""
    progress, dataset = trainer.progress, trainer.dataset
    history = progress.history
    model: Any = trainer.trained.model.eval()
    test = trainer.measure(model, "test") if len(dataset.test) else None
    popularity = None
    if test is not None:
        popular = Popularity(dataset.train, dataset.n_items, device=trainer.step.device)
        popularity = {
            "validation": trainer.measure(popular, "validation").metrics.values,
            "test": trainer.measure(popular, "test").metrics.values,
        }
    seconds = {
        phase: sum(record["seconds"][phase] for record in history)
        for phase in ("training", "evaluation")
    }
    peaks = [record["memory_mib"] for record in history]
    peak = {"training": max(one["training"] for one in peaks), "evaluation": None}
    if test is not None:
        seconds["evaluation"] += test.seconds
        peak["evaluation"] = max([test.mib, *(one["evaluation"] or 0.0 for one in peaks)])
    result = FitResult(
        best_epoch=progress.best_epoch,
        epochs=progress.epoch,
        stopped=progress.stopped or "epochs",
        validation=next(
            (r["validation"] for r in history if r["epoch"] == progress.best_epoch), None
        ),
        test=None if test is None else test.metrics.values,
        users={"validation": len(trainer.validation.test), "test": len(dataset.test)},
        popularity=popularity,
        seconds=seconds,
        memory_mib=peak,
        memory_measured=trainer.memory.measures,
        tokens_per_second=sum(r["targets"] for r in history) / max(seconds["training"], 1e-9),
        device=device_name(trainer.step.device),
        history=history,
    )
    if trainer.run is not None:
        content: dict[str, Any] = asdict(result)
        del content["history"]
        if test is not None:
            content["test_ranks"] = write_ranks(trainer.run.path, test.metrics.ranks)
        write_json(trainer.run.result_file, content)
    return result
