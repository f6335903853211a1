"""Losses over the positive and k sampled negatives: CE⁻, BCE, BCE⁺ and gBCE.

torch.func cannot transform them (their gradients are written by hand, in bounded memory): use
backward() or torch.autograd.grad.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Generator, Tensor
from torch.nn.functional import logsigmoid, softplus

from sce.losses.base import BatchShape, DataSummary, LossMemory, LossOfPositions, LossSettings
from sce.losses.inputs import (
    Catalogue,
    Inputs,
    check_choice,
    check_flag,
    check_number,
    check_size,
    refuse_transforms,
    unwrap_catalogue,
)
from sce.losses.negatives import (
    InBatchNegatives,
    MixedNegatives,
    Negatives,
    PopularityNegatives,
    UniformNegatives,
    check_negatives,
)
from sce.losses.scoring import (
    MAX_GATHERED,
    Sharing,
    draw,
    piece_width,
    score,
)
from sce.losses.tiled import tiled_memory


class SampledLoss(LossOfPositions):
    """Base of the losses over sampled negatives, which differ in `_combine` alone.

    `max_targets` is for samplers that do not depend on the targets, uniform or by popularity.

    Args:
        n_negatives: Negatives drawn, k.
        negatives: Sampler (see `sce.losses.negatives`). Default: uniform.
        shared: What draws k negatives of its own: each "position", each "sequence" (all dimensions
            of the targets but the last) or the whole "batch". Default: a position when k is 1, a
            sequence otherwise.
        options: See `Loss`.
    """

    takes_correction = False  # negatives with the logQ correction
    logit_copies = 2  # at the peak of either pass
    cut = False  # True if logits are not kept

    def __init__(
        self,
        n_negatives: int,
        *,
        negatives: Negatives | None = None,
        shared: Sharing | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        n_negatives = check_size("n_negatives", n_negatives)
        if shared is None:
            shared = "position" if n_negatives == 1 else "sequence"
        check_choice("shared", shared, Sharing)
        self.n_negatives = n_negatives
        self.negatives: Negatives = UniformNegatives() if negatives is None else negatives
        self.shared: Sharing = shared
        check_negatives(self.negatives)
        if self.negatives.correct and not self.takes_correction:
            raise ValueError("the logQ correction is for a softmax: give a sampler correct=False")

    def _losses(self, inputs: Inputs, generator: Generator | None) -> Tensor:
        refuse_transforms()
        if inputs.valid is not None and not _ignores_targets(self.negatives):
            raise ValueError(
                "max_targets is for UniformNegatives and PopularityNegatives, which do not look at "
                f"the targets; got {self.negatives}"
            )
        compute = self._compute
        if torch.compiler.is_compiling():
            # The number of valid positions is not known while compiling: the graph breaks here.
            compute = torch.compiler.disable(compute)
        return compute(inputs, generator)

    def _compute(self, inputs: Inputs, generator: Generator | None) -> Tensor:
        drawn = draw(inputs, self.negatives, self.n_negatives, self.shared, generator)
        found = score(inputs, drawn, self.shared, cut=self.cut)
        return found if isinstance(found, Tensor) else self._combine(*found, len(inputs.catalogue))

    def _combine(self, positive_logits: Tensor, negative_logits: Tensor, n_items: int) -> Tensor:
        """Return the loss of each valid position [v], of which negatives have -inf if masked."""
        raise NotImplementedError

    def is_capturable(self, catalogue: Catalogue) -> bool:
        """True if the call, given `max_targets`, can be captured in a CUDA graph."""
        # A gradient in half precision counts the rows that are touched, which is a sync.
        dtype = unwrap_catalogue(catalogue)[0].dtype
        return _ignores_targets(self.negatives) and dtype in (torch.float32, torch.float64)

    def memory(self, shape: BatchShape) -> LossMemory:
        """Return the bytes of logits, of the valid states, and of what a tile gathers."""
        v, k, d = shape.max_targets, self.n_negatives, shape.dim
        states, logits, pairs = 4 * v * d, 4 * v * k, _piece(v, d)
        groups, at_once, rows = self._tile(shape)
        items = at_once * k * d
        # Of sequences states and logits are gathered; others lie together.
        gathered = at_once * rows * (k + d) if self.shared == "sequence" else 0
        adding = (12 + 48 / d) * max(items, pairs)  # they, sorted, and sums; indices
        kept = states + 8 * groups * k + 56 * v
        forward = max((self.logit_copies - 1) * logits, 4 * (items + gathered), 8 * pairs)
        backward = max(
            self.logit_copies * logits - shape.catalogue_bytes,
            states + logits + 4 * gathered + max(4 * items, adding),
            shape.state_bytes,
        )
        return LossMemory(kept + logits + forward, kept + backward - shape.state_bytes)

    def _tile(self, shape: BatchShape) -> tuple[float, float, float]:
        """Return groups that share negatives, those in a tile, and the states of each."""
        v, k, d = shape.max_targets, self.n_negatives, shape.dim
        width = piece_width(k, d, shape.length) if self.shared == "sequence" else k * d
        groups, rows = {
            "sequence": (shape.sequences, shape.length), "position": (v, 1), "batch": (1, v)
        }[self.shared]  # fmt: skip
        return groups, min(groups, max(1, MAX_GATHERED // width)), rows


class SampledCrossEntropy(SampledLoss):
    """CE⁻: the softmax cross-entropy over the positive and k negatives.

    A sampler that corrects (logQ) has log(k·q) subtracted from the logits of its negatives: the sum
    inside the logarithm is then an unbiased estimate. The positive is not drawn and not corrected:
    gradients are those of arXiv 2507.09331. With `cut` logits are computed twice, and never kept,
    as in CCE⁻ (arXiv 2509.09682). Other arguments: see `SampledLoss`.

    >>> loss = SampledCrossEntropy(16, shared="batch")
    >>> loss(torch.randn(8, 20, 32), torch.randn(1000, 32), torch.randint(1000, (8, 20))).shape
    torch.Size([])
    """

    takes_correction = True
    logit_copies = 3

    def __init__(self, n_negatives: int, *, cut: bool = False, **options: Any) -> None:
        super().__init__(n_negatives, **options)
        check_flag("cut", cut)
        self.cut = cut

    def memory(self, shape: BatchShape) -> LossMemory:
        """Return the bytes of logits, of the valid states, and of rows gathered at once."""
        if not self.cut:
            return super().memory(shape)
        k, (groups, at_once, rows) = self.n_negatives, self._tile(shape)
        if self.shared == "batch":
            rows = min(rows, max(1, MAX_GATHERED // max(k, shape.dim)))
        kept = 8 * groups * k + 48 * shape.max_targets
        return tiled_memory(shape, (at_once, rows, k), kept)

    def _combine(self, positive_logits: Tensor, negative_logits: Tensor, n_items: int) -> Tensor:
        logits = torch.cat([positive_logits.unsqueeze(1), negative_logits], dim=1)
        return -logits.log_softmax(dim=1)[:, 0]


class BinaryCrossEntropy(SampledLoss):
    """BCE (k = 1) and BCE⁺ (k > 1): the positive against 1, the sum of the negatives against 0.

    The paper's equation sums over the negatives, its code divides by 1 + k; this is the equation.
    Arguments: see `SampledLoss`.
    """

    t = 0.0

    def __init__(self, n_negatives: int = 1, **options: Any) -> None:
        super().__init__(n_negatives, **options)

    def _combine(self, positive_logits: Tensor, negative_logits: Tensor, n_items: int) -> Tensor:
        share = min(1.0, self.n_negatives / max(1, n_items - 1))
        # -log(1 - σ(s)) is softplus(s): finite at any logit, and 0 at -inf. Above the threshold
        # torch returns s itself, which is exact there.
        negative = softplus(negative_logits, threshold=40.0).sum(dim=1)
        return negative - (1.0 - self.t * (1.0 - share)) * logsigmoid(positive_logits)


class GeneralizedBinaryCrossEntropy(BinaryCrossEntropy):
    """gBCE: BCE⁺ with the positive's part scaled down to undo overconfidence from sampling.

    The positive enters as -β·log σ(s⁺), which is finite at any logit, with
    β = a·(t·(1 - 1/a) + 1/a) = 1 - t·(1 - a) and a = k / (items - 1), the share that is sampled, at
    most 1. β is derived for uniform negatives. The calibration t goes from 0, which is BCE⁺, to 1,
    which undoes the sampling in full. Other arguments: see `SampledLoss`.
    """

    def __init__(self, n_negatives: int, *, t: float = 0.75, **options: Any) -> None:
        super().__init__(n_negatives, **options)
        check_number("t", t)
        if not 0.0 <= t <= 1.0:
            raise ValueError(f"t must lie in [0, 1], got {t}")
        self.t = t


def _ignores_targets(negatives: Negatives) -> bool:
    """True if a sampler is known to draw without looking at the targets."""
    return type(negatives) in (UniformNegatives, PopularityNegatives)


def _piece(rows: float, width: int) -> float:
    """Numbers in a piece of rows that are gathered at once."""
    return width * min(rows, max(1, MAX_GATHERED // width))


Sampler = Literal["uniform", "scaled", "popularity", "in-batch", "mixed"]
_BY_COUNTS = {
    "popularity": PopularityNegatives,
    "in-batch": InBatchNegatives,
    "mixed": MixedNegatives,
}


class _SampledSettings(LossSettings):
    loss: ClassVar[type[SampledLoss]] = BinaryCrossEntropy
    negatives: Sampler

    def build(self, data: DataSummary) -> SampledLoss:
        """Make the loss."""
        check_choice("negatives", self.negatives, Sampler)
        sampler: Negatives = UniformNegatives(correct=self.negatives == "scaled")
        if make := _BY_COUNTS.get(self.negatives):
            sampler = make(data.item_counts, correct=self.loss.takes_correction)
        return self.loss(**vars(self) | {"negatives": sampler})


@dataclass(frozen=True)
class BCESettings(_SampledSettings):
    """Settings of BCE: one negative for each target."""

    negatives: Sampler = "uniform"
    """Distribution that negatives are drawn from."""
    shared: Sharing = "position"
    """Scope that draws negatives of its own: each position, each sequence, or the batch."""


@dataclass(frozen=True)
class BCEPlusSettings(_SampledSettings):
    """Settings of BCE⁺."""

    n_negatives: int = 256
    """Negatives drawn against each target."""
    negatives: Sampler = "uniform"
    """Distribution that negatives are drawn from; ce- corrects its logits for it. Scaled: uniform,
    with their sum scaled up to the catalogue's (scaled CE); mixed: in-batch and uniform."""
    shared: Sharing = "sequence"
    """Scope that draws negatives of its own: each position, each sequence, or the batch."""


@dataclass(frozen=True)
class GBCESettings(BCEPlusSettings):
    """Settings of gBCE."""

    loss = GeneralizedBinaryCrossEntropy

    t: float = 0.75
    """Calibration, from 0 (none) to 1 (full)."""


@dataclass(frozen=True)
class SampledCrossEntropySettings(BCEPlusSettings):
    """Settings of CE⁻."""

    loss = SampledCrossEntropy

    cut: bool = False
    """Compute logits twice instead of keeping them (CCE⁻): less memory, more time."""
