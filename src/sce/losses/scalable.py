"""Scalable Cross-Entropy: the front door.

The paper's Algorithm 1: a softmax inside random buckets of states and items that are likely to have
large inner products, instead of over the whole catalogue.
"""

from typing import Literal, TypedDict, Unpack, get_args, overload

import torch
from torch import Tensor, nn

from sce.losses.backend import Backend, choose_backend, why_not_triton
from sce.losses.bucketed import bucketed_cross_entropy
from sce.losses.buckets import (
    draw_centres,
    fill_buckets,
    round_centres,
    suggest_sizes,
)
from sce.losses.inputs import (
    autocast_rounding,
    check_arguments,
    check_flag,
    check_ignore_index,
    check_inputs,
    check_number,
    check_reduction,
    check_size,
    check_tensor,
    reduce,
    rounded,
)
from sce.losses.statistics import BucketStatistics, count_buckets

MOST_NOISE = 1_000_000  # beyond which nothing is left of the states


class ScalableCrossEntropy(nn.Module):
    """Cross-entropy over random buckets of hard negatives, in a fraction of the memory.

    >>> loss = ScalableCrossEntropy(bucket_size_y=64)
    >>> states, catalogue = torch.randn(8, 20, 32), torch.randn(1000, 32)
    >>> targets = torch.randint(1000, (8, 20))
    >>> loss(states, catalogue, targets).shape
    torch.Size([])

    In a compiled model the kernels are one operation of the graph. The graph breaks where it cannot
    hold the call: on the plain path, with the default of `n_buckets` or `bucket_size_x` (which
    depend on values), with `sparse_grad`, and with a `generator`.

    Under torch.autocast, float32 inputs are rounded to its precision wherever they are multiplied:
    to choose the buckets, for logits and for gradients. A few rows are rounded at a time (there is
    no copy of the catalogue); sums, the loss and the gradients are float32.

    The gradients are written by hand: `backward()` and `torch.autograd.grad` give them, once; the
    transforms of torch.func (grad, jacrev, vmap, ...) are refused.

    Args:
        n_buckets: How many buckets. Default: α √(valid states / β) for each batch.
        bucket_size_x: States in a bucket. Default: α √(valid states · β) for each batch.
        bucket_size_y: Items in a bucket: the one size to tune.
        mix: Draw the centres of the buckets where the states are, rather than in all directions
            alike.
        mix_of: With `mix`, how many states a centre is a sum of, with positive weights. 0: of all,
            with weights of either sign, which is the paper's Mix. `sce train` takes 4, for which
            docs/paper.md has the reasons.
        noise: With `mix_of` of one or more, how long a random vector is that is added to each
            centre, in lengths of the centre: 0 is a centre amid its states, and the longer it is,
            the more buckets hold what the states are not close to.
        alpha: How densely the buckets cover the states, for the two defaults.
        beta: Many small buckets (below 1) or few large ones (above 1), for the two defaults.
        ignore_index: The target of positions that do not count, such as padding.
        reduction: "mean" over the states that fell into any bucket, "sum", or "none", with 0 for
            positions that are ignored and for states that fell into no bucket (few, by default:
            `with_stats` says what share was placed).
        backend: "triton" are fused GPU kernels, "torch" is plain PyTorch on any device; "auto"
            takes the kernels where they run.
        sparse_grad: Whether the catalogue's gradient is a sparse tensor of the rows that are in any
            bucket or a target, for optimizers that update those rows alone, such as
            `torch.optim.SparseAdam` and `sce.RowwiseAdagrad`. Nothing of the size of the catalogue
            is then allocated, unless the buckets hold all of it. Telling how many rows there are
            makes the host wait for the device.
    """

    def __init__(
        self,
        *,
        n_buckets: int | None = None,
        bucket_size_x: int | None = None,
        bucket_size_y: int = 256,
        mix: bool = True,
        mix_of: int = 0,
        noise: float = 0.0,
        alpha: float = 2.0,
        beta: float = 1.0,
        ignore_index: int = -100,
        reduction: str = "mean",
        backend: Backend = "auto",
        sparse_grad: bool = False,
    ) -> None:
        super().__init__()
        for name, size in (("n_buckets", n_buckets), ("bucket_size_x", bucket_size_x)):
            if size is not None:
                check_size(name, size)
        check_size("bucket_size_y", bucket_size_y)
        if isinstance(mix_of, bool) or not hasattr(mix_of, "__index__") or mix_of < 0:
            raise ValueError(f"mix_of must be a number of states, or 0 for all, got {mix_of!r}")
        for name, flag in (("mix", mix), ("sparse_grad", sparse_grad)):
            check_flag(name, flag)
        check_number("noise", noise)
        if not 0 <= noise <= MOST_NOISE:
            raise ValueError(
                f"noise lies between 0 and {MOST_NOISE:,} (mix=False is nothing but noise), got "
                f"{noise!r}"
            )
        if noise and not (mix and mix_of):
            raise ValueError(
                "noise is added to centres mixed from a few states: it needs mix=True and a mix_of "
                "of 1 or more"
            )
        suggest_sizes(1, 1, alpha=alpha, beta=beta)  # refuses what is not positive and finite
        check_ignore_index(ignore_index)
        check_reduction(reduction)
        if backend not in get_args(Backend):
            raise ValueError(f"backend must be one of {get_args(Backend)}, got {backend!r}")
        self.n_buckets = n_buckets
        self.bucket_size_x = bucket_size_x
        self.bucket_size_y = bucket_size_y
        self.mix = mix
        self.mix_of = mix_of
        self.noise = float(noise)
        self.alpha = alpha
        self.beta = beta
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.backend: Backend = backend
        self.sparse_grad = sparse_grad

    @overload
    def forward(
        self,
        states: Tensor,
        catalogue: Tensor,
        targets: Tensor,
        *,
        generator: torch.Generator | None = ...,
        centres: Tensor | None = ...,
        with_stats: Literal[False] = ...,
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        states: Tensor,
        catalogue: Tensor,
        targets: Tensor,
        *,
        generator: torch.Generator | None = ...,
        centres: Tensor | None = ...,
        with_stats: Literal[True],
    ) -> tuple[Tensor, BucketStatistics]: ...
    def forward(
        self,
        states: Tensor,
        catalogue: Tensor,
        targets: Tensor,
        *,
        generator: torch.Generator | None = None,
        centres: Tensor | None = None,
        with_stats: bool = False,
    ) -> Tensor | tuple[Tensor, BucketStatistics]:
        """Return the loss; with `with_stats`, also the statistics of the buckets.

        Sums are float32 whatever the precision of the inputs or of autocast, and so is the loss
        (both are float64 where an input is).

        Args:
            states: What the model puts out, [..., d].
            catalogue: A row for each item, [c, d].
            targets: The item that is correct for each state, [...].
            generator: Where the centres of the buckets are drawn from.
            centres: [n_buckets, d], instead of random ones, and with them of `n_buckets` and `mix`.
            with_stats: Whether to return the statistics as well.
        """
        compute = self._compute
        if torch.compiler.is_compiling() and not self._in_graph(
            states, catalogue, targets, generator
        ):
            # (The decorator would do the same, but takes seconds to import.)
            compute = torch.compiler.disable(compute)
        loss, stats = compute(states, catalogue, targets, generator, centres, with_stats)
        return loss if stats is None else (loss, stats)

    def _compute(
        self,
        states: Tensor,
        catalogue: Tensor,
        targets: Tensor,
        generator: torch.Generator | None,
        centres: Tensor | None,
        with_stats: bool,
    ) -> tuple[Tensor, BucketStatistics | None]:
        check_arguments(states, catalogue, targets, ignore_index=self.ignore_index)
        if centres is not None:
            _check_centres(centres, catalogue)
        if self.sparse_grad and catalogue.requires_grad and not catalogue.is_leaf:
            raise ValueError(
                "sparse_grad gives the catalogue a sparse gradient, which torch takes no further: "
                "the catalogue must be the parameter itself, not what was computed from one"
            )
        rounding = autocast_rounding(states, catalogue)
        if choose_backend(states, catalogue, self.backend) == "triton" and targets.numel():
            return self._fused(states, catalogue, targets, generator, centres, with_stats, rounding)
        inputs = check_inputs(states, catalogue, targets, ignore_index=self.ignore_index)
        x, y, wanted = inputs.states, inputs.catalogue, inputs.targets
        with torch.no_grad(), torch.autocast(states.device.type, enabled=False):
            n_buckets, size_x = self._sizes(len(wanted))
            seen = rounded(x, rounding)
            if centres is None:
                centres = draw_centres(
                    seen,
                    n_buckets,
                    mix=self.mix,
                    mix_of=self.mix_of,
                    noise=self.noise,
                    generator=generator,
                )
                centres = round_centres(centres, rounding or y.dtype)
            # A state that is not finite may fall into no bucket, and would then go unnoticed.
            sound = seen.isfinite().all()
        buckets = fill_buckets(
            seen,
            y,
            centres.to(inputs.dtype),
            bucket_size_x=size_x,
            bucket_size_y=self.bucket_size_y,
            rounding=rounding,
        )
        losses, placed = bucketed_cross_entropy(
            x, y, wanted, buckets, sparse=self.sparse_grad, rounding=rounding
        )
        losses = losses * torch.where(sound, 1.0, torch.nan).to(losses.dtype)
        loss = reduce(losses, placed, inputs, self.reduction)
        return loss, count_buckets(buckets, wanted, placed) if with_stats else None

    def _fused(
        self,
        states: Tensor,
        catalogue: Tensor,
        targets: Tensor,
        generator: torch.Generator | None,
        centres: Tensor | None,
        with_stats: bool,
        rounding: torch.dtype | None,
    ) -> tuple[Tensor, BucketStatistics | None]:
        """Run the kernels: nothing is taken out, counted or looked at on the host."""
        from sce.losses import kernels

        n_buckets, size_x = self._sizes(None, targets)
        seed = kernels.draw_seed(states.device, generator) if centres is None else None
        compiling = torch.compiler.is_compiling()
        run = kernels.fused_operator if compiling else kernels.fused_cross_entropy
        loss, buckets, wanted, winner = run(
            states.reshape(-1, states.shape[-1]),
            catalogue,
            targets.reshape(-1),
            kernels.FusedOptions(
                n_buckets=n_buckets if centres is None else centres.shape[0],
                bucket_size_x=size_x,
                bucket_size_y=self.bucket_size_y,
                mix=self.mix,
                mix_of=self.mix_of,
                noise=self.noise,
                ignore_index=self.ignore_index,
                reduction=self.reduction,
                sparse_grad=self.sparse_grad,
                rounding=rounding,
            ),
            centres=centres,
            seed=seed,
        )
        if self.reduction == "none":
            loss = loss.reshape(targets.shape)
        if not with_stats:
            return loss, None
        return loss, count_buckets(buckets, wanted, winner != kernels.NOWHERE)

    def _in_graph(
        self, states: Tensor, catalogue: Tensor, targets: Tensor, generator: torch.Generator | None
    ) -> bool:
        """Say whether a compiled graph can hold this call; it breaks there otherwise."""
        return (
            self._sized
            and why_not_triton(states, catalogue, self.backend) is None
            and targets.numel() > 0
            and not self.sparse_grad  # a graph knows no sparse tensors,
            and generator is None  # and no generators
        )

    def _sizes(self, count: int | None, targets: Tensor | None = None) -> tuple[int, int]:
        """Return the number of buckets, and of states in each: as given, or by the rule."""
        if self.n_buckets is not None and self.bucket_size_x is not None:
            return self.n_buckets, self.bucket_size_x
        if count is None:
            assert targets is not None
            count = int((targets != self.ignore_index).sum())
        n_buckets, size_x = suggest_sizes(1, count, alpha=self.alpha, beta=self.beta)
        return self.n_buckets or n_buckets, self.bucket_size_x or size_x

    def never_waits(self, catalogue: Tensor) -> bool:
        """Say whether a call with this catalogue runs without the host waiting for the device.

        Such a call can be recorded in a CUDA graph. It needs the kernels, and sizes that are given:
        the default ones count the valid states.
        """
        return self._sized and why_not_triton(catalogue, catalogue, self.backend) is None

    @property
    def _sized(self) -> bool:
        return self.n_buckets is not None and self.bucket_size_x is not None

    def extra_repr(self) -> str:
        """Show the settings in the module's repr."""
        names = ScalableSettings.__annotations__
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


class ScalableSettings(TypedDict, total=False):
    """The settings of `ScalableCrossEntropy`, by name."""

    n_buckets: int | None
    bucket_size_x: int | None
    bucket_size_y: int
    mix: bool
    mix_of: int
    noise: float
    alpha: float
    beta: float
    ignore_index: int
    reduction: str
    backend: Backend
    sparse_grad: bool


@overload
def scalable_cross_entropy(
    states: Tensor,
    catalogue: Tensor,
    targets: Tensor,
    *,
    generator: torch.Generator | None = ...,
    centres: Tensor | None = ...,
    with_stats: Literal[False] = ...,
    **settings: Unpack[ScalableSettings],
) -> Tensor: ...
@overload
def scalable_cross_entropy(
    states: Tensor,
    catalogue: Tensor,
    targets: Tensor,
    *,
    generator: torch.Generator | None = ...,
    centres: Tensor | None = ...,
    with_stats: Literal[True],
    **settings: Unpack[ScalableSettings],
) -> tuple[Tensor, BucketStatistics]: ...
def scalable_cross_entropy(
    states: Tensor,
    catalogue: Tensor,
    targets: Tensor,
    *,
    generator: torch.Generator | None = None,
    centres: Tensor | None = None,
    with_stats: bool = False,
    **settings: Unpack[ScalableSettings],
) -> Tensor | tuple[Tensor, BucketStatistics]:
    """Scalable Cross-Entropy as a function: `ScalableCrossEntropy(**settings)`, called once."""
    found: Tensor | tuple[Tensor, BucketStatistics] = ScalableCrossEntropy(**settings)(
        states, catalogue, targets, generator=generator, centres=centres, with_stats=with_stats
    )
    return found


def _check_centres(centres: Tensor, catalogue: Tensor) -> None:
    check_tensor("centres", centres)
    if not centres.is_floating_point():
        raise TypeError(f"centres must be floating point, got {centres.dtype}")
    if centres.device != catalogue.device:
        raise ValueError(
            f"centres must be where the catalogue is, on {catalogue.device}, got {centres.device}"
        )
    d = catalogue.shape[1]
    if centres.dim() != 2 or centres.shape[1] != d or len(centres) == 0:
        raise ValueError(f"centres must be [n_buckets, {d}], got {tuple(centres.shape)}")
    # Where looking at values is free: not on a GPU, nor while a graph is made.
    looks = centres.device.type == "cpu" and not torch.compiler.is_compiling()
    if looks and not centres.isfinite().all():
        raise ValueError("centres must be finite numbers")
