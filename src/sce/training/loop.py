"""Training a model: `fit`. What it puts together is in the other rooms; the epochs in epochs.py."""

import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sce.data.batches import PADDING, DeviceSequences
from sce.data.prepared import PreparedDataset
from sce.data.storage import locked
from sce.errors import InputError
from sce.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    DataSummary,
    GeneralizedBinaryCrossEntropy,
    SampledCrossEntropy,
    ScalableCrossEntropy,
)
from sce.models.sasrec import SASRec
from sce.planning import summarize_data
from sce.training.begin import (
    check_resumable,
    check_target,
    note_divergence,
    resume_run,
    start_run,
)
from sce.training.checkpoint import Trained
from sce.training.device import (
    cpu_has_bf16,
    free_memory,
    quiet_bf16,
    resolve_device,
    same_bits,
    spare_workspace,
)
from sce.training.display import Display
from sce.training.epochs import Record, Training
from sce.training.foresight import TrainingWarning, explained, foresee
from sce.training.interrupt import Interrupts, StopRequested, TrainingInterrupted
from sce.training.journal import Journal, check_tensorboard
from sce.training.memory import PeakMemory
from sce.training.optimizer import make_optimizer
from sce.training.outcome import FitResult, conclude
from sce.training.rowwise import gradients_of_rows, row_wise
from sce.training.run import SASREC, Run
from sce.training.settings import TrainingSettings
from sce.training.step import Loss, TrainingStep
from sce.training.watch import DivergenceError

__all__ = ["FitResult", "TrainingSettings", "TrainingWarning", "fit"]


def fit(
    model: nn.Module,
    loss: Loss,
    dataset: PreparedDataset,
    *,
    settings: TrainingSettings | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    force: bool = False,
    config: Mapping[str, Any] | None = None,
    on_epoch: Callable[[Record], object] | None = None,
    tensorboard: bool = False,
    progress: bool = True,
) -> FitResult:
    """Train a model with a loss, and leave it with the weights of its best epoch.

    >>> from sce.losses import ScalableCrossEntropy
    >>> model = SASRec(dataset.n_items)                                          # doctest: +SKIP
    >>> result = fit(model, ScalableCrossEntropy(), dataset)                     # doctest: +SKIP
    >>> result.test["ndcg@10"]                                                   # doctest: +SKIP

    Args:
        model: Any module that maps histories [b, l] to states [b, l, d], and has a `catalogue`
            [C, d]; histories are as long as its `max_length`, if it has one. They are padded on the
            right with `sce.PADDING`, which is -1 and no row of a table: look items up with
            `histories.clamp(min=0)`. A model that also takes `parts` is given histories
            with the longest first, and need not compute their padding: see `SASRec.forward`.
        loss: Any function of (states, catalogue, targets) that gives a scalar; one that takes
            `generator` is given the generator of the step.
        dataset: The prepared dataset.
        settings: How to train.
        out: The directory of the run: records, weights, and the state to go on from. Without it
            nothing is written.
        resume: Go on with the run in `out`, if there is one.
        force: Replace the run in `out`.
        config: The settings of model and loss to be kept with the run; found by themselves for
            `SASRec`.
        on_epoch: Called with the record of each epoch, which is a line of metrics.jsonl.
        tensorboard: Write event files into the run as well.
        progress: Show progress on stderr.

    Raises:
        InputError: When what was given cannot work, or the loss stops being a number.
        TrainingInterrupted: After Ctrl-C or SIGTERM, when the state has been saved in `out`.
    """
    settings = settings or TrainingSettings()
    _check_arguments(model, loss, dataset, settings)
    by_rows = row_wise(model, loss, settings)
    if out is None and (resume or force or tensorboard):
        raise InputError("resume, force and tensorboard are about a run: name its directory, out")
    kind, described = _describe(model, loss, settings, config)
    if out is not None and check_target(out, force=force, resume=resume) and resume:
        check_resumable(out, dataset, config=described, model=kind)
    if tensorboard:
        check_tensorboard()
    device = resolve_device(settings.device)
    if not settings.deterministic:
        spare_workspace(device)
    sequences = _place(dataset, device)
    max_length = _usable_length(model, sequences)
    workload = summarize_data(
        dataset.train, dataset.n_items, batch_size=settings.batch_size, max_length=max_length
    )
    for text in _warnings(model, loss, dataset, sequences, workload, settings, device):
        warnings.warn(text, TrainingWarning, stacklevel=2)
    model.to(device)
    loss_module = loss.to(device) if isinstance(loss, nn.Module) else None
    capture = _capture(model, loss, settings, device)
    optimizer = make_optimizer(
        [*model.parameters(), *(loss_module.parameters() if loss_module else ())],
        learning_rate=settings.learning_rate,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        device=device,
        capturable=capture,
        row_wise=by_rows,
    )
    step = TrainingStep(
        model,
        loss,
        optimizer,
        sequences,
        device=device,
        max_length=max_length,
        precision=settings.precision,
        clip_norm=settings.clip_norm,
        compiled=settings.batch_size if settings.compile else None,
        captured=settings.batch_size if capture else None,
    )
    memory = PeakMemory(device)
    # Training draws from the default generators; what comes after it must not notice.
    gpus = [device.index] if device.type == "cuda" else []
    with (
        _open_run(
            out,
            dataset,
            config=described,
            derived=_derived(loss, workload),
            model=kind,
            resume=resume,
            force=force,
        ) as run,
        torch.random.fork_rng(devices=gpus),
        same_bits(device) if settings.deterministic else nullcontext(),
        quiet_bf16(device),
        gradients_of_rows(model, loss, wanted=by_rows is not None),
        Interrupts(wanted=run is not None, say=progress) as interrupts,
        Display(
            wanted=progress,
            epochs=settings.epochs,
            memory=memory,
            on_lost=interrupts.lose_reader,
        ) as display,
    ):
        training = Training(
            Trained(model, loss_module, optimizer),
            step,
            dataset,
            settings,
            run=run,
            display=display,
            memory=memory,
            interrupts=interrupts,
        )
        if run is not None and resume and not run.resume_state.exists():
            display.note(f"nothing to resume in {run.path}: starting")
        training.take_up()
        journal = None if run is None else Journal(run, training.progress.history, tensorboard)
        try:
            training.run_epochs(journal, on_epoch)
            return conclude(training)
        except StopRequested as stop:
            raise TrainingInterrupted(
                f"training has ended, and is saved in {out}; its last evaluation is not done",
                stop.signal_number,
            ) from stop
        except DivergenceError as error:
            if run is not None:
                training.keeper.save_best(training.progress)
                note_divergence(run, error)
            raise
        except IndexError as error:
            if isinstance(model, SASRec) or not _raised_in(model, error):
                raise
            raise InputError(
                f"{type(model).__name__} failed on a batch of histories ({error}): they are padded "
                f"with sce.PADDING, which is {PADDING} and no row of a table; look items up with "
                "histories.clamp(min=0), and leave out where histories == sce.PADDING"
            ) from error
        except (RuntimeError, MemoryError) as error:
            raise explained(error, loss, compiled=settings.compile) from error
        finally:
            if journal is not None:
                journal.close()


def _raised_in(model: nn.Module, error: BaseException) -> bool:
    """Whether the error came while the model was computing its states."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_locals.get("self") is model for frame in frames)


# The losses whose steps are recorded without being asked for.
_RECORDED = (
    BinaryCrossEntropy,
    CrossEntropy,
    DataSummary,
    GeneralizedBinaryCrossEntropy,
    SampledCrossEntropy,
    ScalableCrossEntropy,
)


def _capture(
    model: nn.Module, loss: Loss, settings: TrainingSettings, device: torch.device
) -> bool:
    """Whether steps are recorded as CUDA graphs; by default where model and loss are known to be.

    Whatever a user's own model or loss does on the host would be done once, and not again: also
    one that is derived from ours.
    """
    on_gpu = device.type == "cuda"
    if settings.capture is None:
        known = type(model) is SASRec and type(loss) in _RECORDED
        return on_gpu and known and not _waits(loss, model)
    if settings.capture and not on_gpu:
        raise InputError(f"training.capture records CUDA graphs, and the device is {device}")
    if settings.capture and _waits(loss, model):
        raise InputError(
            f"training.capture records CUDA graphs, in which nothing may wait for the device, "
            f"and this loss does: {loss}"
        )
    return settings.capture


def _waits(loss: Loss, model: nn.Module) -> bool:
    """Whether a loss makes the host wait for the device, as far as it says."""
    is_capturable = getattr(loss, "is_capturable", None)
    return is_capturable is not None and not is_capturable(model.catalogue)


@contextmanager
def _open_run(
    out: Path | str | None,
    dataset: PreparedDataset,
    *,
    config: Mapping[str, Any],
    derived: Mapping[str, Any],
    model: str,
    resume: bool,
    force: bool,
) -> Iterator[Run | None]:
    """Make a run, or take one up, and keep other trainings out of it."""
    if out is None:
        yield None
        return
    there = check_target(out, force=force, resume=resume)
    if there and resume:
        with locked(Path(out)):
            yield resume_run(out, dataset, config=config, model=model)
        return
    with locked(Path(out)) if there else nullcontext():
        run = start_run(out, dataset, config=config, derived=derived, model=model, force=force)
    with locked(run.path):
        yield run


def _check_arguments(model: object, loss: object, dataset: object, settings: object) -> None:
    """Refuse what a notebook gives by mistake, before it fails in the depths."""
    if not isinstance(dataset, PreparedDataset):
        raise InputError(
            f"the dataset is a PreparedDataset, such as PreparedDataset.load(path); got {dataset!r}"
        )
    if not isinstance(settings, TrainingSettings):
        raise InputError(f"settings are TrainingSettings(...); got {settings!r}")
    if not callable(loss):
        raise InputError(
            f"a loss is a function of states, catalogue and targets, or a module; got {loss!r}"
        )
    catalogue = getattr(model, "catalogue", None)
    if not isinstance(model, nn.Module) or not isinstance(catalogue, torch.Tensor):
        raise InputError(
            "a model is a torch module that maps histories to states and has a `catalogue` of item "
            f"vectors; got {type(model).__name__}"
        )
    if len(catalogue) != dataset.n_items:
        raise InputError(
            f"the model has {len(catalogue):,} items and the dataset {dataset.n_items:,}; make it "
            "for dataset.n_items"
        )
    if getattr(model, "padding_side", "right") != "right":
        raise InputError("training pads histories on the right; make the model so")


def _place(dataset: PreparedDataset, device: torch.device) -> DeviceSequences:
    """Put the training sequences where the model is, if they leave it most of the memory."""
    free = free_memory(device)
    fits = free is None or dataset.train.items.nbytes < free // 4
    return DeviceSequences.place(dataset.train, device if fits else "cpu")


def _usable_length(model: nn.Module, sequences: DeviceSequences) -> int:
    """The longest history that occurs and that the model takes."""
    longest = max(1, int(sequences.lengths.max()) - 1)
    return min(int(getattr(model, "max_length", longest)), longest)


def _warnings(
    model: nn.Module,
    loss: Loss,
    dataset: PreparedDataset,
    sequences: DeviceSequences,
    workload: DataSummary,
    settings: TrainingSettings,
    device: torch.device,
) -> Iterator[str]:
    free = free_memory(device)
    yield from foresee(
        loss,
        model,
        workload,
        sequences,
        batch_size=settings.batch_size,
        max_length=_usable_length(model, sequences),
        free=free,
    )
    if not len(dataset.test):
        yield (
            "the dataset has no test users: nothing can be evaluated, training stops after "
            f"{settings.epochs} epochs, and the last weights are kept"
        )
    if settings.precision == "tf32" and device.type != "cuda":
        yield f"tf32 is a precision of GPUs; on {device.type} it is float32"
    if settings.precision == "bf16" and device.type == "cpu" and not cpu_has_bf16():
        yield "this processor has no bf16 arithmetic: training will be slower than in float32"


def _describe(
    model: nn.Module, loss: Loss, settings: TrainingSettings, config: Mapping[str, Any] | None
) -> tuple[str, dict[str, Any]]:
    """Name the model, and give every setting as run.json keeps it."""
    if isinstance(model, SASRec):
        kind, of_model = SASREC, asdict(model.settings)
    else:
        kind = f"{type(model).__module__}.{type(model).__qualname__}"
        of_model = {"parameters": sum(p.numel() for p in model.parameters())}
    name = repr(loss) if isinstance(loss, nn.Module) else getattr(loss, "__qualname__", "")
    described = {"model": of_model, "loss": {"name": name}, "training": asdict(settings)}
    return kind, described | dict(config or {})


def _derived(loss: Loss, workload: DataSummary) -> dict[str, Any]:
    found: dict[str, Any] = {"targets_per_batch": round(workload.targets, 1)}
    if isinstance(loss, ScalableCrossEntropy):
        names = ("n_buckets", "bucket_size_x", "bucket_size_y", "centres")
        found |= {name: getattr(loss, name) for name in names}
    return found
