"""What a user would regret not having been told before training starts."""

from collections.abc import Iterator

import torch
from torch import nn

from sce.data.batches import DeviceSequences
from sce.errors import InputError
from sce.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    GeneralizedBinaryCrossEntropy,
    SampledCrossEntropy,
    ScalableCrossEntropy,
)
from sce.training.objective import Workload

_SAMPLED = (BinaryCrossEntropy, GeneralizedBinaryCrossEntropy, SampledCrossEntropy)
_GIB = 2**30
_FLOAT = 4
# Copies of the logits that are alive at once, at the worst moment.
_COPIES_WHOLE, _COPIES_CHUNKED, _COPIES_SAMPLED = 3, 2, 4


class TrainingWarning(UserWarning):
    """Training goes on, but perhaps not as it was meant."""


def predict_bytes(loss: object, workload: Workload) -> int | None:
    """Roughly the memory that a loss takes for its logits at each step; None for unknown losses."""
    if isinstance(loss, CrossEntropy):
        if loss.chunk_size is None or loss.chunk_size >= workload.n_items:
            return int(workload.targets * workload.n_items * _FLOAT * _COPIES_WHOLE)
        return int(workload.targets * loss.chunk_size * _FLOAT * _COPIES_CHUNKED)
    if isinstance(loss, _SAMPLED):
        return int(workload.targets * loss.n_negatives * _FLOAT * _COPIES_SAMPLED)
    return None


def foresee(
    loss: object,
    model: nn.Module,
    workload: Workload,
    sequences: DeviceSequences,
    *,
    batch_size: int,
    free: int | None,
) -> Iterator[str]:
    """Say what will not go as the user may think.

    Args:
        loss: The loss, ours or the user's.
        model: The model.
        workload: A mean batch.
        sequences: The training sequences.
        batch_size: What was asked for.
        free: Bytes free for training where it will be done, if known.
    """
    trainable = int((sequences.lengths >= 2).sum())
    if trainable < len(sequences):
        yield (
            f"{len(sequences) - trainable:,} of {len(sequences):,} training users have a single "
            "event, which predicts nothing; they are skipped"
        )
    if trainable < batch_size:
        yield (
            f"there are {trainable:,} training users and a batch has {batch_size:,}: each epoch "
            "is one step; consider a smaller --batch-size"
        )
    if isinstance(loss, ScalableCrossEntropy):
        yield from _about_buckets(loss, workload)
    yield from _about_memory(loss, model, workload, free)


def _about_buckets(loss: ScalableCrossEntropy, workload: Workload) -> Iterator[str]:
    if loss.bucket_size_y > workload.n_items:
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
    loss: object, model: nn.Module, workload: Workload, free: int | None
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
        fits = int(room / 2 / (workload.targets * _FLOAT * _COPIES_CHUNKED))
        chunk = 1 << max(0, fits.bit_length() - 1)
        yield f"{what}; what would fit: --loss sce, or --loss.chunk-size {chunk}"
    else:
        yield f"{what}; what would fit: a smaller --batch-size, or --loss sce"


def explained(error: RuntimeError, loss: object, *, compiled: bool) -> Exception:
    """Turn what torch raised into what to do about it, where that is known."""
    text = " ".join(str(error).split())
    first = text.partition(". ")[0]
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in text:
        sce = "" if isinstance(loss, ScalableCrossEntropy) else ", or --loss sce"
        return InputError(f"memory ran out ({first}); try a smaller --batch-size{sce}")
    # Dynamo and Inductor have many errors of their own, which are all RuntimeErrors.
    if compiled and type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return InputError(f"the model could not be compiled ({first}); leave out compile")
    return error
