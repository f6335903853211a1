"""Warnings before training starts, and the meaning of errors while it runs."""

import math
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sce.data.batches import PADDING
from sce.data.prepared import PreparedDataset
from sce.errors import InputError, named
from sce.evaluation.evaluate import evaluating
from sce.evaluation.ranking import uses_times
from sce.losses import LOSSES, BatchShape, CrossEntropy, DataSummary, Loss, ScalableCrossEntropy
from sce.memory import ran_out
from sce.models.registry import BACKBONES
from sce.training.describe import name_model
from sce.training.device import free_memory
from sce.training.settings import TrainingSettings
from sce.units import plural

_GIB = 2**30
_UNUSED = 0.1  # share of the events that is worth a word


def preflight(
    model: nn.Module,
    loss: object,
    dataset: PreparedDataset,
    data: DataSummary,
    settings: TrainingSettings,
    *,
    max_length: int,
    device: torch.device,
    ranks: int = 1,
) -> Iterator[str]:
    """Yield what will not go as the user may think."""
    yield from _about_data(dataset, settings.batch_size, max_length)
    yield from _about_future(model, dataset, max_length)
    yield from _about_buckets(loss, data)
    shares = 4.0  # of the catalogue: weights, gradients, and two moments of each
    if settings.row_wise:
        shares = 1 / ranks if settings.shard_catalogue else 1
    half = settings.precision == "bf16" and device.type == "cuda"
    yield from _about_memory(loss, model, data, free_memory(device), shares, half=half)
    if not len(dataset.test) and dataset.settings.get("split") != "none":
        yield (
            "the dataset has no test users: nothing can be evaluated, training stops after "
            f"{plural(settings.epochs, 'epoch')}, and the last weights are kept"
        )
    if settings.precision == "tf32" and device.type != "cuda":
        yield f"tf32 is a precision of GPUs; on {device.type} it is float32"
    if settings.precision == "bf16" and device.type == "cpu":
        yield "bf16 is slower than float32 on a CPU that does not compute in it"


def _about_data(dataset: PreparedDataset, batch_size: int, max_length: int) -> Iterator[str]:
    targets = dataset.train.lengths - 1
    users, trainable = len(targets), int((targets > 0).sum())
    if trainable < users:
        yield (
            f"{users - trainable:,} of {users:,} training users have a single event, which "
            "predicts nothing; they are skipped"
        )
    events, unused = int(targets.sum()), int((targets - max_length).clip(min=0).sum())
    if unused > _UNUSED * events:
        yield (
            f"{int((targets > max_length).sum()):,} training histories are longer than "
            f"{max_length:,} events: what came before is not trained on, {unused:,} of "
            f"{events:,} events; a larger {named('model.max_length')} would use more"
        )
    if trainable < batch_size:
        yield (
            f"there are {trainable:,} training users and a batch has {batch_size:,}: each epoch "
            f"is one step; consider a smaller {named('batch_size')}"
        )


def _about_future(model: nn.Module, dataset: PreparedDataset, max_length: int) -> Iterator[str]:
    """Exchange the last event of a history: a state before it must not notice."""
    catalogue: Any = model.catalogue
    length = int(dataset.train.lengths.max(initial=0)) - 1
    masks = getattr(model, "draws", False)  # the targets that it is trained on
    ours = name_model(model) in BACKBONES
    if masks or ours or length < 2 or dataset.n_items < 2 or catalogue.is_meta:
        return
    events = dataset.train[int(dataset.train.lengths.argmax())][: min(length, max_length, 32)]
    histories = torch.tensor(events.tolist(), device=catalogue.device).repeat(3, 1)
    histories[2, -1] = (histories[2, -1] + 1) % dataset.n_items
    with torch.no_grad(), evaluating(model):
        times = {"times": histories.new_zeros(3, histories.shape[1] + 1).int()}
        states = model(histories, **(times if uses_times(model) else {}))
    if not isinstance(states, Tensor) or states.shape[:2] != histories.shape:
        return  # the first step says so
    first, again, other = states[:, :-1].float()
    # The second row tells a model that draws at random from one that looks ahead.
    if torch.allclose(first, again, 1e-3, 1e-4) and not torch.allclose(first, other, 1e-3, 1e-4):
        yield (
            f"{type(model).__name__} computes states of events before the last otherwise when the "
            "last is another: it sees the targets that it is trained on; give it a causal mask"
        )


def _about_buckets(loss: object, data: DataSummary) -> Iterator[str]:
    if not isinstance(loss, ScalableCrossEntropy):
        return
    size = loss.bucket_size_y
    if size == "auto":
        size = loss.sizes(data.n_items, round(data.targets))[2]
    if size >= data.n_items:
        yield (
            f"{named('loss.bucket_size_y')} is {size:,} and the catalogue has {data.n_items:,} "
            f"items: every bucket holds all of them, and {_other_loss('ce')} would do the same for "
            "less"
        )
    if loss.bucket_size_x is not None and loss.bucket_size_x > data.targets:
        yield (
            f"{named('loss.bucket_size_x')} is {loss.bucket_size_x:,} and a mean batch has "
            f"{data.targets:,.0f} targets: buckets hold all of them; consider a larger "
            f"{named('batch_size')} or a smaller {named('loss.alpha')}"
        )


def _about_memory(
    loss: object, model: Any, data: DataSummary, free: int | None, shares: float, *, half: bool
) -> Iterator[str]:
    shape = BatchShape(
        data.n_items,
        sequences=max(1, round(data.sequences)),
        length=math.ceil(data.mean_length),
        dim=int(model.catalogue.shape[1]),
        targets=data.targets,
        max_targets=data.targets,  # of a mean batch: only what is certain is warned of
        half=half,
    )
    memory = loss.memory(shape) if isinstance(loss, Loss) else None
    if memory is None or free is None:
        return
    logits = max(memory.forward, memory.backward)
    # The weights (not yet on a GPU), their gradients, and two moments of each.
    weights = 4 * sum(p.numel() * p.element_size() for p in model.parameters())
    weights -= (4 - shares) * model.catalogue.numel() * model.catalogue.element_size()
    if weights + logits <= free:
        return
    what = (
        f"the logits of this loss will take about {logits / _GIB:,.1f} GiB "
        f"({data.targets:,.0f} targets a batch), the model {weights / _GIB:,.1f} GiB, and "
        f"{free / _GIB:,.1f} GiB are free"
    )
    if isinstance(loss, CrossEntropy):
        fits = int(max(0, free - weights) / 4 / (data.targets * 4))  # floats, in a quarter of it
        chunk = 1 << max(0, fits.bit_length() - 1)
        smaller = named("loss.chunk_size", chunk)
        yield f"{what}; what would fit: {_other_loss('sce')}, or {smaller}"
    else:
        yield f"{what}; what would fit: a smaller {named('batch_size')}{_or_sce(loss)}"


def _or_sce(loss: object) -> str:
    return "" if isinstance(loss, ScalableCrossEntropy) else f", or {_other_loss('sce')}"


def _other_loss(name: str) -> str:
    return named("loss", name, python=f"{LOSSES[name].loss.__name__}()")


@contextmanager
def explained_errors(model: nn.Module, loss: object, *, compiled: bool) -> Iterator[None]:
    """Turn errors of training into what to do about them, where that is known."""
    try:
        yield
    except (IndexError, RuntimeError, MemoryError) as error:
        first = " ".join(str(error).split()).partition(". ")[0]
        ours = name_model(model) in BACKBONES
        # Dynamo and Inductor have many errors of their own, which are all RuntimeErrors.
        by_compiler = type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))
        if reason := ran_out(error):
            hint = f"try a smaller {named('batch_size')}{_or_sce(loss)}"
            text = f"memory ran out ({reason}); {hint}"
        elif compiled and by_compiler:
            compiling = named("training.compile")
            text = f"the model could not be compiled ({first}); leave out {compiling}"
        elif isinstance(error, IndexError) and not ours and _raised_in(model, error):
            text = (
                f"{type(model).__name__} failed on a batch of histories ({error}): they are padded "
                f"with sce.PADDING, which is {PADDING} and no row of a table; look items up with "
                "histories.clamp(min=0)"
            )
        else:
            raise
        raise InputError(text) from error


def _raised_in(model: nn.Module, error: BaseException) -> bool:
    """True if the error came while the model was computing its states."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_locals.get("self") is model for frame in frames)
