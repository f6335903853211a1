"""Scalable Cross-Entropy: the front door.

The paper's Algorithm 1: a softmax inside random buckets of states and items that are likely to have
large inner products, instead of over the whole catalogue.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Generator, Tensor

from sce.losses.backend import MAX_DIM, Backend, explain, why_not_triton
from sce.losses.base import BatchShape, DataSummary, Loss, LossMemory, LossSettings
from sce.losses.bucketed import bucketed_cross_entropy
from sce.losses.buckets import (
    LARGE_K,
    MAX_PARTS,
    MAX_SCORES,
    MAX_SORTED,
    Buckets,
    BucketStatistics,
    Centres,
    auto_alpha,
    count_buckets,
    count_placed,
    draw_centres,
    group_by_bucket,
    nearest_centres,
    of_equal_size,
    of_length_one,
    round_centres,
    score_bytes,
    suggest_sizes,
    top_rows,
)
from sce.losses.inputs import (
    Catalogue,
    Inputs,
    active_autocast_dtype,
    check_arguments,
    check_centres,
    check_choice,
    check_flag,
    check_inputs,
    check_size,
    check_size_or_none,
    check_values,
    reduce,
    refuse_transforms,
    rounded,
    unwrap_catalogue,
)

AUTO_ITEMS = 2048  # in a bucket, of "auto"
AUTO_TOUCHED = 256  # with a sparse gradient: every row in a bucket is touched


class ScalableCrossEntropy(Loss):
    """Cross-entropy over random buckets of hard negatives, in a fraction of the memory.

    >>> loss = ScalableCrossEntropy()
    >>> states, catalogue = torch.randn(8, 20, 32), torch.randn(1000, 32)
    >>> targets = torch.randint(1000, (8, 20))
    >>> loss(states, catalogue, targets).shape
    torch.Size([])

    Its value is not comparable with that of exact cross-entropy: the softmax is over a bucket.

    Value and gradients of float32 inputs are float32, under torch.autocast too: it rounds no more
    than the factors of products. With a float64 input they are float64.

    In a compiled model the kernels are one operation of the graph. The graph breaks at the loss,
    and `fullgraph=True` fails, on the plain path (a CPU, or more than 512 dimensions), with
    `sparse_grad`, and with a `generator`. The gradients are written by hand: `backward()` and
    `torch.autograd.grad` give them, once; torch.func (grad, vmap, ...) is refused.

    It is called `loss(states, catalogue, targets)`; the arguments are those of `sce.losses.Loss`.
    There is no bias per item, no label smoothing, and there are no class weights.

    Args:
        bucket_size_y: Items in a bucket. "auto" is 2,048, with `sparse_grad` 256, or the whole
            catalogue where that is smaller.
        centres: Where the buckets lie. "random": standard normal vectors, in all directions alike.
            "states": a few hidden states, mixed, and as much noise. "mix": the paper's Mix, sums of
            all hidden states with random weights.
        coverage: Every hidden state is in one bucket, that with the nearest centre. Without it, as
            in the paper, each bucket takes the `bucket_size_x` hidden states nearest to its centre:
            some are in several buckets, of which the one with the largest loss counts, and some in
            none, which do not count.
        n_buckets: Number of buckets. Default: α √(targets / β).
        bucket_size_x: Hidden states in a bucket, without `coverage`. Default: α √(targets · β).
        alpha: How many buckets there are, and without `coverage` how densely they cover the hidden
            states: each is in α² buckets on average. Default: 8, down to 2 where buckets times
            items would be more than 2²⁸; 2 without `coverage`, and on a CPU, where each bucket
            costs more.
        beta: Many small buckets (below 1) or few large ones (above 1).
        ignore_index: The target of positions that do not count, such as padding.
        reduction: "mean" over the states that are in any bucket, "sum", or "none", with 0 for
            positions that are ignored and states in no bucket (`with_statistics` counts them). One
            state that is not finite makes all of them NaN, unless its position is ignored: centres
            may depend on every state. Where all positions are ignored the mean is 0.
        backend: "triton" are fused GPU kernels, for up to 512 dimensions, and an error where they
            cannot run; "torch" is plain PyTorch on any device, much slower on a GPU; "auto" takes
            the kernels where they run, and says nothing where they do not.
        sparse_grad: Give the catalogue a sparse gradient of the rows that are in any bucket or a
            target, for optimizers such as `torch.optim.SparseAdam` and `sce.RowwiseAdagrad`:
            nothing of the size of the catalogue is allocated. It stays sparse only if all other
            gradients of the catalogue are: one that is the input layer as well must be an
            `nn.Embedding(..., sparse=True)`. The host waits for the number of rows.
    """

    statistics = BucketStatistics._fields
    sized_by_targets = True

    def __init__(
        self,
        *,
        bucket_size_y: int | Literal["auto"] = "auto",
        centres: Centres = "random",
        coverage: bool = True,
        n_buckets: int | None = None,
        bucket_size_x: int | None = None,
        alpha: float | None = None,
        beta: float = 1.0,
        ignore_index: int = -100,
        reduction: str = "mean",
        backend: Backend = "auto",
        sparse_grad: bool = False,
    ) -> None:
        super().__init__(ignore_index=ignore_index, reduction=reduction)
        n_buckets = check_size_or_none("n_buckets", n_buckets)
        bucket_size_x = check_size_or_none("bucket_size_x", bucket_size_x)
        if bucket_size_y != "auto":
            bucket_size_y = check_size("bucket_size_y", bucket_size_y)
        check_choice("centres", centres, Centres)
        check_choice("backend", backend, Backend)
        check_flag("sparse_grad", sparse_grad)
        check_flag("coverage", coverage)
        if coverage and bucket_size_x is not None:
            raise ValueError("bucket_size_x needs coverage=False; leave one of the two out")
        # Refuses what is not positive and finite.
        suggest_sizes(1, 1, alpha=2.0 if alpha is None else alpha, beta=beta)
        self.bucket_size_y, self.centres, self.coverage = bucket_size_y, centres, coverage
        self.n_buckets, self.bucket_size_x = n_buckets, bucket_size_x
        self.alpha, self.beta = alpha, beta
        self.backend, self.sparse_grad = backend, sparse_grad

    @classmethod
    def paper(
        cls, *, mix: bool = True, bucket_size_y: int = 256, **settings: Any
    ) -> "ScalableCrossEntropy":
        """Make the loss of the publication, with its Mix or without; settings: as above."""
        check_flag("mix", mix)
        centres: Centres = "mix" if mix else "random"
        return cls(bucket_size_y=bucket_size_y, centres=centres, coverage=False, **settings)

    def sizes(self, n_items: int, max_targets: float, *, cpu: bool = False) -> tuple[int, int, int]:
        """Return the number of buckets, and the states and items in each, for a call.

        With `coverage` a bucket has any number of states, which is 0 here.
        """
        n_buckets, size_x = self.n_buckets, 0 if self.coverage else self.bucket_size_x
        if n_buckets is None or size_x is None:
            alpha = self.alpha
            if alpha is None:
                few = cpu or not self.coverage
                alpha = 2.0 if few else auto_alpha(n_items, max_targets, self.beta)
            suggested = suggest_sizes(1, max_targets, alpha=alpha, beta=self.beta)
            n_buckets = suggested[0] if n_buckets is None else n_buckets
            size_x = suggested[1] if size_x is None else size_x
        size_y = self.bucket_size_y
        if size_y == "auto":
            size_y = AUTO_TOUCHED if self.sparse_grad else AUTO_ITEMS
        return n_buckets, size_x, min(size_y, n_items)

    def named_sizes(self, n_items: int, max_targets: float, *, cpu: bool = False) -> dict[str, int]:
        """Return the sizes of a call that are fixed, by the names of their settings."""
        sizes = self.sizes(n_items, max_targets, cpu=cpu)
        named = zip(("n_buckets", "bucket_size_x", "bucket_size_y"), sizes, strict=True)
        return {name: size for name, size in named if size}

    def forward(
        self,
        states: Tensor,
        catalogue: Catalogue,
        targets: Tensor,
        *,
        generator: Generator | None = None,
        max_targets: int | None = None,
        centres: Tensor | None = None,
    ) -> Tensor:
        """Return the loss; see `Loss.forward`.

        The number of buckets follows from `max_targets`, which here need not be an upper bound: the
        number of targets in a mean batch will do. None: as many as there are positions.
        `centres` [n_buckets, d] take the place of random ones; with `coverage` their length counts
        for nothing.
        """
        return self._run(states, catalogue, targets, generator, max_targets, centres)[0]

    def with_statistics(
        self, states: Tensor, catalogue: Catalogue, targets: Tensor, **options: Any
    ) -> tuple[Tensor, BucketStatistics]:
        """Return the loss, and shares, as scalar tensors.

        picked_once: Of the states, those in exactly one bucket. placed: Those in any bucket.
        correct_in_bucket: Of the states of all buckets, those whose target is among the bucket's
        items. occupied: Of the buckets, those that have any state.
        """
        return self._run(states, catalogue, targets, **options, count=count_buckets)

    def in_buckets(self, *given: Tensor, count: Any = count_placed) -> tuple[Tensor, Any]:
        """Return the loss of states, catalogue, targets, centres, ascending items; and a count."""
        states, catalogue, targets, centres, items = given
        within = (items.amin() >= 0) & (items.amax() < len(catalogue))
        check_values(within, f"items must lie in [0, {len(catalogue)})")
        return self._run(states, catalogue, targets, None, None, centres, count, items)

    def _run(
        self,
        states: Tensor,
        catalogue: Catalogue,
        targets: Tensor,
        generator: Generator | None = None,
        max_targets: int | None = None,
        centres: Tensor | None = None,
        count: Callable[[Buckets, Tensor], Any] | None = None,
        items: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """Return the loss and, if the buckets are to be counted, what was counted."""
        catalogue = _weight(catalogue)
        check_arguments(states, catalogue, targets)
        refuse_transforms()
        if centres is not None and items is None:
            check_centres(centres, catalogue)
            if self.coverage:
                centres = of_length_one(centres)
        if max_targets is not None:
            max_targets = check_size("max_targets", max_targets)
        if self.sparse_grad and catalogue.requires_grad and not catalogue.is_leaf:
            raise ValueError(
                "sparse_grad needs the parameter itself as the catalogue, not what was computed "
                "from one: torch takes a sparse gradient no further"
            )
        reason = why_not_triton(states, catalogue, self.backend)
        fused, compiling = reason is None and targets.numel() > 0, torch.compiler.is_compiling()
        # A compiled graph holds the kernels, but no sparse tensors and no generators.
        breaks = self.sparse_grad or generator is not None or items is not None
        if compiling and (breaks or not fused):
            run = torch.compiler.disable(self._run)  # the decorator takes seconds to import
            return run(states, catalogue, targets, generator, max_targets, centres, count, items)  # type: ignore[no-any-return]
        on_cpu = states.device.type == "cpu"
        sizes = self.sizes(len(catalogue), max_targets or max(1, targets.numel()), cpu=on_cpu)
        sizes = sizes if items is None else (*sizes[:2], items.shape[1])
        autocast_dtype = active_autocast_dtype(states, catalogue)
        if fused:
            from sce.losses import kernels

            if centres is None:
                seed = kernels.draw_seed(states.device, generator)
            else:
                sizes, seed = (len(centres), *sizes[1:]), None
            # Of few states among many positions it is not worth the memory.
            dense = max_targets is None or 2 * max_targets >= targets.numel()
            with_grads = dense and torch.is_grad_enabled() and states.requires_grad
            said = (self.centres, self.ignore_index, with_grads, self.reduction, autocast_dtype)
            options = kernels.FusedOptions(list(sizes), *said)
            x = states if states.dim() == 2 else states.reshape(-1, states.shape[-1])
            given = (x, catalogue, targets.reshape(-1), options, centres, seed)
            if compiling:
                found = kernels.fused_operator(*given)
            else:
                found = kernels.fused_cross_entropy(*given, self.sparse_grad, items)
            loss = found.loss if self.reduction != "none" else found.loss.reshape(targets.shape)
            return loss, None if count is None else count(kernels.buckets_of(found), found.targets)
        if reason is not None:
            explain(reason, self.backend)
        inputs = check_inputs(states, catalogue, targets, self.ignore_index)
        with torch.no_grad(), torch.autocast(states.device.type, enabled=False):
            buckets, sound = self._fill(inputs, sizes, centres, generator, autocast_dtype, items)
        losses, placed = bucketed_cross_entropy(
            inputs.states, catalogue, inputs.targets, buckets, self.sparse_grad, autocast_dtype
        )
        losses = losses * torch.where(sound | ~placed, 1.0, torch.nan).to(losses.dtype)
        loss = reduce(losses, placed, inputs, self.reduction)
        return loss, None if count is None else count(buckets, inputs.targets)

    def _fill(
        self,
        inputs: Inputs,
        sizes: tuple[int, int, int],
        centres: Tensor | None,
        generator: Generator | None,
        autocast_dtype: torch.dtype | None,
        items: Tensor | None,
    ) -> tuple[Buckets, Tensor]:
        """Return the buckets, in plain PyTorch, and if all states are finite."""
        n_buckets, size_x, size_y = sizes
        seen = rounded(inputs.states, autocast_dtype)
        if centres is None:
            centres = draw_centres(seen, n_buckets, self.centres, generator=generator)
            centres = round_centres(centres, autocast_dtype or inputs.catalogue.dtype)
        centres = centres.to(inputs.dtype)
        if size_x:
            members = of_equal_size(top_rows(centres, seen, size_x))
        else:
            members = group_by_bucket(nearest_centres(seen, centres), len(centres))
        if items is None:
            items = top_rows(centres, inputs.catalogue, size_y, autocast_dtype=autocast_dtype)
        # A state that is not finite may fall into no bucket, and would then go unnoticed.
        return Buckets(members, items), seen.isfinite().all()

    def is_capturable(self, catalogue: Catalogue) -> bool:
        """True if a call with this catalogue can be captured in a CUDA graph: the kernels run."""
        weight = _weight(catalogue)
        return why_not_triton(weight, weight, self.backend) is None

    def memory(self, shape: BatchShape) -> LossMemory:
        """Return the bytes that the kernels take: indices, scores, and parts of the gradient."""
        n, d = shape.positions, shape.dim
        n_buckets, size_x, size_y = self.sizes(shape.n_items, int(shape.max_targets))
        members, places = n_buckets * min(size_x, n), n_buckets * size_y
        # For each state: target, loss and bucket, own logit, key, and its number in the list by
        # bucket; for each place in a bucket: one.
        kept = 28 * n + 4 * (members + places)
        # With each state in one bucket, and most positions with one, the gradients of their losses.
        kept += shape.state_bytes if not members and 2 * shape.max_targets >= n else 0
        # The largest scores of groups of items, for large buckets of every item.
        scored = shape.n_items if size_y > LARGE_K else math.sqrt(shape.n_items * size_y)
        scores = min(4 * n_buckets * scored, score_bytes(shape.n_items, d))
        forward = kept + 24 * n + 4 * n_buckets * d + scores
        # Of the catalogue's gradient: the states once more, in the order of the buckets; keys,
        # sorted with their order, of which the sort makes copies; then parts, of as many buckets
        # as have room. Then the gradient of the states.
        ordered = n * (12 + (2 if shape.half else 4) * d)
        parts = min(4 * places * d, max(MAX_PARTS, 4 * size_y * d))
        entries = min(places, max(MAX_SORTED, parts / (4 * d))) + n
        summed = ordered + max(36 * entries, 12 * entries + parts)
        backward = kept + max(shape.state_bytes, summed)
        if d > MAX_DIM:  # the plain path, in tiles of scores
            forward, backward = forward + 16 * MAX_SCORES, backward + 16 * MAX_SCORES
        if not self.sparse_grad:
            return LossMemory(forward, backward)
        # The keys are sorted first, all of them, to number the rows: that takes 32 bytes each.
        keys, rows = places + n, min(places + n, shape.n_items)
        return LossMemory(forward, max(backward + 4 * keys, kept + 32 * keys), rows)


@dataclass(frozen=True)
class ScalableCrossEntropySettings(LossSettings):
    """Settings of Scalable Cross-Entropy."""

    bucket_size_y: int | None = None
    """Items in a bucket. [default: 2,048, with training.row-wise 256, or the whole catalogue]"""
    centres: Centres = "random"
    """Where the buckets lie: in all directions alike, near hidden states, or by the paper's Mix."""
    coverage: bool = True
    """Every hidden state is in its nearest bucket. Without it, as in the paper, a bucket takes the
    hidden states nearest to it: some are in several, some in none, which do not count."""
    alpha: float | None = None
    """How many buckets there are; without coverage, a hidden state is in alpha² of them on average.
    [default: 8, for large catalogues down to 2; 2 without coverage, and on a CPU]"""
    beta: float = 1.0
    """Many small buckets (below 1) or few large ones (above 1)."""
    n_buckets: int | None = None
    """Number of buckets; of rece, vectors and chunks of a round. [default: sce: from alpha, beta
    and the mean batch; rece: the authors', from items and targets]"""
    bucket_size_x: int | None = None
    """Hidden states in a bucket, without coverage. [default: from alpha, beta, the mean batch]"""

    def build(self, data: DataSummary) -> ScalableCrossEntropy:
        """Make the loss, with buckets for the mean batch: the shapes in a step stay the same."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        loss = ScalableCrossEntropy(**given)
        sizes = loss.named_sizes(data.n_items, data.targets, cpu=data.cpu)
        given = {name: value for name, value in given.items() if name not in ("alpha", "beta")}
        return ScalableCrossEntropy(**sizes | {"bucket_size_y": "auto"} | given)


def _weight(catalogue: Catalogue) -> Tensor:
    weight, bias = unwrap_catalogue(catalogue)
    if bias is not None:
        raise ValueError("SCE takes no bias per item: use nn.Linear(..., bias=False)")
    return weight
