"""The losses that the benchmarks measure: ours, what one would write first, and those of others.

The straightforward version below is the obvious tensor code for the same definition. It shows what
a measured row saves.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import peers
from sce.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    GeneralizedBinaryCrossEntropy,
    GraphedLoss,
    SampledCrossEntropy,
    ScalableCrossEntropy,
    full,
    suggest_sizes,
)

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def tensor_sce(
    states: Tensor, catalogue: Tensor, targets: Tensor, *, n_buckets: int, size_x: int, size_y: int
) -> Tensor:
    """Scalable Cross-Entropy with Mix, every step one operation on whole tensors."""
    states, targets = states.flatten(0, -2), targets.flatten()
    with torch.no_grad():
        omega = torch.randn(n_buckets, len(states), dtype=states.dtype, device=states.device)
        centres = omega @ states
        rows = (centres @ states.T).topk(size_x, dim=1).indices
        items = (centres @ catalogue.T).topk(size_y, dim=1).indices
    logits = states[rows] @ catalogue[items].transpose(1, 2)  # [buckets, x, y]
    own_item = targets[rows].unsqueeze(2) == items.unsqueeze(1)
    logits = logits.masked_fill(own_item, -torch.inf)
    own = (states * catalogue[targets]).sum(dim=1)[rows].unsqueeze(2)
    losses = torch.cat([own, logits], dim=2).float().logsumexp(dim=2) - own.squeeze(2)
    largest = torch.full((len(states),), -torch.inf, device=states.device, dtype=losses.dtype)
    largest = largest.scatter_reduce(0, rows.flatten(), losses.flatten(), reduce="amax")
    return largest[largest > -torch.inf].mean()


def with_tf32(loss: Loss) -> Loss:
    """Let matrix products round their factors to 11 bits, from here on, in this process."""

    def rounded(states: Tensor, catalogue: Tensor, targets: Tensor) -> Tensor:
        torch.backends.cuda.matmul.allow_tf32 = True
        return loss(states, catalogue, targets)

    return rounded


def in_chunks(size: int) -> Loss:
    """Exact cross-entropy in chunks of so many items, also where our kernels would run instead."""
    loss = CrossEntropy(chunk_size=size)

    def chunked(states: Tensor, catalogue: Tensor, targets: Tensor) -> Tensor:
        with mock.patch.object(full, "why_not_triton", return_value="chunks are measured"):
            value: Tensor = loss(states, catalogue, targets)
        return value

    return chunked


def under_autocast(loss: Loss) -> Loss:
    """Let float32 inputs be rounded as a model in bf16 is trained."""

    def rounded(states: Tensor, catalogue: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return loss(states, catalogue, targets)

    return rounded


# Logits held at once by those whose chunks are tuned: as many as our chunks hold on a CPU, and as
# many as keep an H200 busy.
ROOM_CPU, ROOM_GPU = 25_600 * 1024, 1 << 28
# What a CPU has no kernels for, or what is the same there.
NOT_ON_CPU = re.compile("CUDA graph|GraphedLoss|sparse|TF32|RePlay|fused|cut-|Liger")


def contenders(
    n_states: int,
    *,
    buckets: int | None = None,
    size_y: int = 256,
    k: int = 256,
    room: int = ROOM_GPU,
) -> dict[str, Callable[[], Loss]]:
    """Return what makes each loss, by name, for a batch of `n_states` positions.

    Args:
        n_states: Positions in the batch.
        buckets: How many, and how many states in each; by default by the paper's rule.
        size_y: Items in a bucket.
        k: Negatives of the sampled losses.
        room: Logits held at once by the losses of others, where that is tuned.
    """
    n_buckets, size_x = (buckets, buckets) if buckets else suggest_sizes(1, n_states)
    ours: dict[str, Any] = {"n_buckets": n_buckets, "bucket_size_y": size_y}
    theirs: dict[str, Any] = {"n_buckets": n_buckets, "size_x": size_x, "size_y": size_y}
    return {
        "SCE": lambda: ScalableCrossEntropy(**ours),
        "SCE, default": ScalableCrossEntropy,
        "SCE, default, autocast, CUDA graph": lambda: under_autocast(ScalableCrossEntropy()),
        "SCE, CUDA graph": lambda: ScalableCrossEntropy(**ours),
        "SCE, GraphedLoss": lambda: GraphedLoss(ScalableCrossEntropy(**ours)),
        "SCE, sparse gradient": lambda: ScalableCrossEntropy(**ours | {"sparse_grad": True}),
        "SCE, tensor code": lambda: partial(tensor_sce, **theirs),
        "SCE, tensor code, TF32": lambda: with_tf32(partial(tensor_sce, **theirs)),
        "SCE, RePlay": lambda: partial(peers.replay_sce, **theirs),
        "CE": CrossEntropy,
        "CE, fused": lambda: CrossEntropy(chunk_size=1024),
        "CE, fused, autocast": lambda: under_autocast(CrossEntropy(chunk_size=1024)),
        "CE, fused, autocast, CUDA graph": lambda: under_autocast(
            partial(CrossEntropy(chunk_size=1024), max_targets=n_states)
        ),
        "CE, chunked": lambda: in_chunks(1024),
        "CE, chunked, tuned": lambda: in_chunks(max(1, room // n_states)),
        "CE, torch": lambda: peers.torch_cross_entropy,
        "CE, torch, linear_cross_entropy": lambda: peers.torch_linear,
        "CE, torch, linear_cross_entropy, tuned": lambda: partial(peers.torch_linear, room=room),
        "CE, cut-cross-entropy": lambda: peers.cut_cross_entropy,
        "CE, cut-cross-entropy, unfiltered": lambda: partial(
            peers.cut_cross_entropy, filter_eps=None
        ),
        "CE, Liger": lambda: peers.liger,
        "CE, Liger, tuned": lambda: partial(peers.liger, room=room),
        "CE-": lambda: SampledCrossEntropy(k),
        "BCE": BinaryCrossEntropy,
        "gBCE": lambda: GeneralizedBinaryCrossEntropy(k),
    }


def is_exact(name: str) -> bool:
    """Say whether a loss is the full cross-entropy, so that its gradient can be held against it."""
    return name.split(",")[0] == "CE"
