"""What a user would regret not having been told before training starts."""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from sce.data.batches import DeviceSequences
from sce.errors import InputError
from sce.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    DataSummary,
    GeneralizedBinaryCrossEntropy,
    SampledCrossEntropy,
    ScalableCrossEntropy,
)
from sce.planning import Job, LossName, loss_bytes

_SAMPLED = (BinaryCrossEntropy, GeneralizedBinaryCrossEntropy, SampledCrossEntropy)
_GIB = 2**30
_FLOAT = 4
_UNUSED = 0.1  # of the events: a share that is worth a word

# What torch's CPU allocator says, in one version or another.
_NO_MEMORY = ("DefaultCPUAllocator", "can't allocate memory", "not enough memory")


class TrainingWarning(UserWarning):
    """Training goes on, but perhaps not as it was meant."""


def predict_bytes(loss: object, workload: DataSummary) -> int | None:
    """Roughly the memory that a loss takes for its logits at each step; None for unknown losses."""
    job = Job(
        workload.n_items,
        batch=max(1, round(workload.sequences)),
        length=math.ceil(workload.mean_length),
        mean_length=workload.mean_length,
    )
    if isinstance(loss, CrossEntropy):
        if loss.chunk_size is None:
            return int(loss_bytes(job, "ce"))
        return int(loss_bytes(replace(job, chunk_size=loss.chunk_size), "ce chunked"))
    if isinstance(loss, _SAMPLED):
        name: LossName = "ce-" if isinstance(loss, SampledCrossEntropy) else "bce+"
        return int(loss_bytes(replace(job, n_negatives=loss.n_negatives), name))
    return None


def foresee(
    loss: object,
    model: nn.Module,
    workload: DataSummary,
    sequences: DeviceSequences,
    *,
    batch_size: int,
    max_length: int,
    free: int | None,
) -> Iterator[str]:
    """Say what will not go as the user may think.

    Args:
        loss: The loss, ours or the user's.
        model: The model.
        workload: A mean batch.
        sequences: The training sequences.
        batch_size: What was asked for.
        max_length: The longest history that the model takes.
        free: Bytes free for training where it will be done, if known.
    """
    trainable = int((sequences.lengths >= 2).sum())
    if trainable < len(sequences):
        yield (
            f"{len(sequences) - trainable:,} of {len(sequences):,} training users have a single "
            "event, which predicts nothing; they are skipped"
        )
    targets = (sequences.lengths - 1).clamp(min=0)
    unused = int((targets - max_length).clamp(min=0).sum())
    if unused > _UNUSED * int(targets.sum()):
        yield (
            f"{int((targets > max_length).sum()):,} training histories are longer than "
            f"{max_length:,} events: what came before is not trained on, {unused:,} of "
            f"{int(targets.sum()):,} events; a larger --model.max-length would use more"
        )
    if trainable < batch_size:
        yield (
            f"there are {trainable:,} training users and a batch has {batch_size:,}: each epoch "
            "is one step; consider a smaller --batch-size"
        )
    if isinstance(loss, ScalableCrossEntropy):
        yield from _about_buckets(loss, workload)
    yield from _about_memory(loss, model, workload, free)


def _about_buckets(loss: ScalableCrossEntropy, workload: DataSummary) -> Iterator[str]:
    if loss.bucket_size_y != "auto" and loss.bucket_size_y >= workload.n_items:
        yield (
            f"bucket_size_y is {loss.bucket_size_y:,} and the catalogue has {workload.n_items:,} "
            "items: every bucket holds all of them, and --loss ce would do the same for less"
        )
    if loss.bucket_size_x is not None and loss.bucket_size_x > workload.targets:
        yield (
            f"bucket_size_x is {loss.bucket_size_x:,} and a mean batch has {workload.targets:,.0f} "
            "targets: buckets hold all of them; consider a larger --batch-size or a smaller "
            "--loss.alpha"
        )


def _about_memory(
    loss: object, model: nn.Module, workload: DataSummary, free: int | None
) -> Iterator[str]:
    logits = predict_bytes(loss, workload)
    if logits is None or free is None:
        return
    # The weights (not yet on a GPU), their gradients, and two moments of each.
    weights = 4 * sum(p.numel() * p.element_size() for p in model.parameters())
    if weights + logits <= free:
        return
    what = (
        f"the logits of this loss will take about {logits / _GIB:,.1f} GiB "
        f"({workload.targets:,.0f} targets a batch), the model {weights / _GIB:,.1f} GiB, and "
        f"{free / _GIB:,.1f} GiB are free"
    )
    room = max(0, free - weights)
    if isinstance(loss, CrossEntropy):
        fits = int(room / 4 / (workload.targets * _FLOAT))  # a quarter, to be sure
        chunk = 1 << max(0, fits.bit_length() - 1)
        yield f"{what}; what would fit: --loss sce, or --loss.chunk-size {chunk}"
    else:
        yield f"{what}; what would fit: a smaller --batch-size, or --loss sce"


def explained(error: Exception, loss: object, *, compiled: bool) -> Exception:
    """Turn what torch raised into what to do about it, where that is known."""
    text = " ".join(str(error).split()).partition("DefaultCPUAllocator: ")
    first = text[2] or text[0].partition(". ")[0]
    out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
    if out_of_memory or any(sign in str(error) for sign in _NO_MEMORY):
        sce = "" if isinstance(loss, ScalableCrossEntropy) else ", or --loss sce"
        return InputError(f"memory ran out ({first.rstrip('.')}); try a smaller --batch-size{sce}")
    # Dynamo and Inductor have many errors of their own, which are all RuntimeErrors.
    if compiled and type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return InputError(f"the model could not be compiled ({first}); leave out compile")
    return error
