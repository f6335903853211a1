"""Losses over the positive and k sampled negatives: CE⁻, BCE, BCE⁺ and gBCE.

torch.func cannot transform them (their gradients are written by hand, in bounded memory): use
backward() or torch.autograd.grad.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypedDict, Unpack, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, softplus

from sce.losses.base import TINY_DATA, BatchShape, DataSummary, Loss, LossMemory
from sce.losses.inputs import (
    Inputs,
    check_flag,
    check_ignore_index,
    check_inputs,
    check_number,
    check_reduction,
    check_size,
    reduce,
)
from sce.losses.negatives import (
    InBatchNegatives,
    Negatives,
    PopularityNegatives,
    UniformNegatives,
    check_negatives,
)
from sce.losses.scoring import MAX_GATHERED, SampledScores, Sharing, score_negatives


class SamplingSettings(TypedDict, total=False):
    """The settings that all sampled losses take beside their own, by name.

    `negatives` says where the negatives come from: uniform by default, see `sce.losses.negatives`.
    `shared` says whether each "position", each "sequence" (all dimensions of the targets but the
    last) or the whole "batch" draws its k; by default a position when k is 1, a sequence otherwise.
    `ignore_index` (-100) is the target of positions that do not count, such as padding; `reduction`
    is "mean" over the positions that count, "sum", or "none".

    A call takes, beside states, catalogue and targets, a `generator` to draw from; `exclude`
    [sequences, m], items that are no sequence's negatives; and `max_targets`: no more than so many
    positions may count, and how many do is not asked of the device, so that the call can be
    recorded in a CUDA graph (see `is_capturable`). It needs negatives that do not depend on the
    targets, uniform or by popularity.
    """

    negatives: Negatives | None
    shared: Sharing | None
    ignore_index: int
    reduction: str


class _Sampled(Loss):
    """What the sampled losses have in common."""

    n_negatives: int
    negatives: Negatives
    shared: Sharing
    logit_copies = 2
    """Copies of the logits at the peak of either pass."""

    def is_capturable(self, catalogue: Tensor) -> bool:
        """True if the call, given `max_targets`, can be captured in a CUDA graph."""
        # Others look at the targets, or are not ours; draws without replacement are looked at. For
        # a gradient in half precision the touched rows are counted.
        again = getattr(self.negatives, "replacement", True)
        single = catalogue.dtype in (torch.float32, torch.float64)
        return _never_looks(self.negatives) and again and single

    def memory(self, shape: BatchShape) -> LossMemory:
        """Return the bytes of logits, of the valid states, and of rows gathered at once."""
        v, k, d, length = shape.max_targets, self.n_negatives, shape.dim, shape.length
        states, logits = 4 * v * d, 4 * v * k
        drawn: float
        gathered: float
        if self.shared == "sequence":  # negatives, logits and states of a few sequences
            drawn = shape.sequences * k
            at_once = max(1, MAX_GATHERED // max(k * d, length * k, length * d))
            gathered = min(shape.sequences, at_once) * (k * d + length * k + length * d)
            added = max(_piece(shape.sequences, k * d), _piece(v, d))
        elif self.shared == "position":  # targets and negatives of a few positions
            drawn = v * (k + 1)
            gathered = added = _piece(v, (k + 1) * d)
        else:
            drawn = v + k
            gathered, added = (2 * v + k) * d, (v + k) * d
        indices = 8 * drawn + 48 * v
        masked = 9 * min(v * k, MAX_GATHERED // 2)  # an index and a flag for each
        forward = max((self.logit_copies - 1) * logits, 4 * gathered, masked)
        # Gradients of rows; a sorted copy, sums, and 48 bytes of indices to add them up.
        adding = 4 * added + max(4 * gathered, (8 + 48 / d) * added)
        backward = max(
            self.logit_copies * logits - shape.catalogue_bytes,
            states + logits + adding,
            shape.state_bytes,
        )
        kept = states + indices
        return LossMemory(kept + logits + forward, kept + backward - shape.state_bytes)


class SampledCrossEntropy(_Sampled):
    """CE⁻: the softmax cross-entropy over the positive and k negatives.

    A sampler that corrects (logQ) has log(k·q) subtracted from the logits of its negatives, which
    makes the sum inside the logarithm an unbiased estimate of the whole catalogue's.

    >>> loss = SampledCrossEntropy(16, shared="batch")
    >>> loss(torch.randn(8, 20, 32), torch.randn(1000, 32), torch.randint(1000, (8, 20))).shape
    torch.Size([])

    Args:
        n_negatives: k.
        settings: `negatives`, `shared`, `ignore_index` and `reduction`: see `SamplingSettings`.
    """

    logit_copies = 3

    def __init__(self, n_negatives: int, **settings: Unpack[SamplingSettings]) -> None:
        super().__init__()
        self.n_negatives, self.negatives, self.shared, self.ignore_index, self.reduction = (
            _Settings.of(n_negatives, settings)
        )

    def forward(
        self,
        states: Tensor,
        catalogue: Tensor,
        targets: Tensor,
        *,
        generator: torch.Generator | None = None,
        exclude: Tensor | None = None,
        max_targets: int | None = None,
    ) -> Tensor:
        """Return the loss; see `SamplingSettings` for the arguments that it shares with others."""
        inputs, scores = _score(self, states, catalogue, targets, generator, exclude, max_targets)
        logits = torch.cat([scores.own.unsqueeze(1), scores.others], dim=1)
        losses = -logits.log_softmax(dim=1)[:, 0]
        return reduce(losses, None, inputs, self.reduction)

    def extra_repr(self) -> str:
        """Show the settings in the module's repr."""
        return _show(self)


class BinaryCrossEntropy(_Sampled):
    """BCE (k = 1) and BCE⁺ (k > 1): the positive against 1, each negative against 0.

    Args:
        n_negatives: k.
        average: Divide by 1 + k, as the paper's code does; its equation sums, and so do we by
            default.
        settings: `negatives`, `shared`, `ignore_index` and `reduction`: see `SamplingSettings`.
    """

    def __init__(
        self, n_negatives: int = 1, *, average: bool = False, **settings: Unpack[SamplingSettings]
    ) -> None:
        super().__init__()
        check_flag("average", average)
        self.average = average
        self.n_negatives, self.negatives, self.shared, self.ignore_index, self.reduction = (
            _Settings.of(n_negatives, settings, binary=True)
        )

    def forward(
        self,
        states: Tensor,
        catalogue: Tensor,
        targets: Tensor,
        *,
        generator: torch.Generator | None = None,
        exclude: Tensor | None = None,
        max_targets: int | None = None,
    ) -> Tensor:
        """Return the loss; see `SamplingSettings` for the arguments that it shares with others."""
        inputs, scores = _score(self, states, catalogue, targets, generator, exclude, max_targets)
        losses = _binary(scores, positive_weight=1.0)
        if self.average:
            losses = losses / (1 + self.n_negatives)
        return reduce(losses, None, inputs, self.reduction)

    def extra_repr(self) -> str:
        """Show the settings in the module's repr."""
        return f"{_show(self)}, average={self.average}"


class GeneralizedBinaryCrossEntropy(_Sampled):
    """gBCE: BCE⁺ with the positive's part scaled down to undo overconfidence from sampling.

    The positive enters as -β·log σ(s⁺), which is finite at any logit, with
    β = a·(t·(1 - 1/a) + 1/a) = 1 - t·(1 - a) and a = k / (items - 1), the share that is sampled, at
    most 1.

    Args:
        n_negatives: k.
        t: How much to calibrate: 0 is BCE⁺, 1 undoes the sampling in full.
        settings: `negatives`, `shared`, `ignore_index` and `reduction`: see `SamplingSettings`.
            Uniform negatives are what t is derived for.
    """

    def __init__(
        self, n_negatives: int, *, t: float = 0.75, **settings: Unpack[SamplingSettings]
    ) -> None:
        super().__init__()
        check_number("t", t)
        if not 0.0 <= t <= 1.0:
            raise ValueError(f"t must lie in [0, 1], got {t}")
        self.t = t
        self.n_negatives, self.negatives, self.shared, self.ignore_index, self.reduction = (
            _Settings.of(n_negatives, settings, binary=True)
        )

    def forward(
        self,
        states: Tensor,
        catalogue: Tensor,
        targets: Tensor,
        *,
        generator: torch.Generator | None = None,
        exclude: Tensor | None = None,
        max_targets: int | None = None,
    ) -> Tensor:
        """Return the loss; see `SamplingSettings` for the arguments that it shares with others."""
        inputs, scores = _score(self, states, catalogue, targets, generator, exclude, max_targets)
        share = min(1.0, self.n_negatives / max(1, len(catalogue) - 1))
        losses = _binary(scores, positive_weight=1.0 - self.t * (1.0 - share))
        return reduce(losses, None, inputs, self.reduction)

    def extra_repr(self) -> str:
        """Show the settings in the module's repr."""
        return f"{_show(self)}, t={self.t}"


def _piece(rows: float, width: int) -> float:
    """Numbers in a piece of rows that are gathered at once."""
    return width * min(rows, max(1, MAX_GATHERED // width))


Sampler = Literal["uniform", "popularity", "in-batch"]


@dataclass(frozen=True)
class BCESettings:
    """Settings of BCE: one negative for each target."""

    negatives: Sampler = "uniform"
    """Distribution that negatives are drawn from."""
    shared: Sharing = "position"
    """What draws negatives of its own: each position, each sequence, or the batch."""

    def __post_init__(self) -> None:
        self.build(TINY_DATA)

    def build(self, data: DataSummary) -> BinaryCrossEntropy:
        """Make the loss."""
        sampler = make_sampler(self.negatives, data)
        return BinaryCrossEntropy(negatives=sampler, shared=self.shared)


@dataclass(frozen=True)
class _NegativesSettings:
    n_negatives: int = 256
    """Negatives drawn against each target."""
    negatives: Sampler = "uniform"
    """Distribution that negatives are drawn from; ce- corrects its logits for it."""
    shared: Sharing = "sequence"
    """What draws negatives of its own: each position, each sequence, or the batch."""

    def __post_init__(self) -> None:
        self.build(TINY_DATA)

    def build(self, data: DataSummary) -> Loss:
        raise NotImplementedError


@dataclass(frozen=True)
class BCEPlusSettings(_NegativesSettings):
    """Settings of BCE⁺."""

    def build(self, data: DataSummary) -> BinaryCrossEntropy:
        """Make the loss."""
        sampler = make_sampler(self.negatives, data)
        return BinaryCrossEntropy(self.n_negatives, negatives=sampler, shared=self.shared)


@dataclass(frozen=True)
class GBCESettings(_NegativesSettings):
    """Settings of gBCE."""

    t: float = 0.75
    """Calibration, from 0 (none) to 1 (full)."""

    def build(self, data: DataSummary) -> GeneralizedBinaryCrossEntropy:
        """Make the loss."""
        sampler = make_sampler(self.negatives, data)
        return GeneralizedBinaryCrossEntropy(
            self.n_negatives, t=self.t, negatives=sampler, shared=self.shared
        )


@dataclass(frozen=True)
class SampledCrossEntropySettings(_NegativesSettings):
    """Settings of CE⁻."""

    def build(self, data: DataSummary) -> SampledCrossEntropy:
        """Make the loss."""
        sampler = make_sampler(self.negatives, data, correct=True)
        return SampledCrossEntropy(self.n_negatives, negatives=sampler, shared=self.shared)


def make_sampler(name: Sampler, data: DataSummary, *, correct: bool = False) -> Negatives:
    """Make a sampler by its name; only a softmax can use the logQ correction."""
    if name == "uniform":
        return UniformNegatives()
    if name == "popularity":
        return PopularityNegatives(data.item_counts, correct=correct)
    if name == "in-batch":
        return InBatchNegatives(data.item_counts, correct=correct)
    raise ValueError(f"negatives must be one of {get_args(Sampler)}, got {name!r}")


_Loss = SampledCrossEntropy | BinaryCrossEntropy | GeneralizedBinaryCrossEntropy


def _score(
    loss: _Loss,
    states: Tensor,
    catalogue: Tensor,
    targets: Tensor,
    generator: torch.Generator | None,
    exclude: Tensor | None,
    max_targets: int | None,
) -> tuple[Inputs, SampledScores]:
    if max_targets is not None and not _never_looks(loss.negatives):
        raise ValueError(
            "max_targets is for samplers that do not look at the targets, UniformNegatives and "
            f"PopularityNegatives: what is left of it has none. Got {loss.negatives}"
        )
    inputs = check_inputs(
        states, catalogue, targets, ignore_index=loss.ignore_index, max_targets=max_targets
    )
    scores = score_negatives(
        inputs,
        loss.negatives,
        loss.n_negatives,
        shared=loss.shared,
        exclude=exclude,
        generator=generator,
    )
    return inputs, scores


def _never_looks(negatives: Negatives) -> bool:
    """Whether a sampler is known to draw without looking at the targets."""
    return type(negatives) in (UniformNegatives, PopularityNegatives)


def _binary(scores: SampledScores, *, positive_weight: float) -> Tensor:
    """Return -w·log σ(s⁺) - Σ log(1 - σ(s⁻)): [v]."""
    # -log(1 - σ(s)) is softplus(s): finite at any logit, and 0 at -inf. Where torch takes it to be
    # s itself, it is.
    others = softplus(scores.others, threshold=40.0)
    return others.sum(dim=1) - positive_weight * logsigmoid(scores.own)


class _Settings(NamedTuple):
    """The settings that the losses share: checked, and none left out."""

    n_negatives: int
    negatives: Negatives
    shared: Sharing
    ignore_index: int
    reduction: str

    @classmethod
    def of(cls, n_negatives: int, given: SamplingSettings, *, binary: bool = False) -> "_Settings":
        for unknown in given.keys() - SamplingSettings.__annotations__.keys():
            raise TypeError(f"a sampled loss has no setting {unknown!r}")
        check_size("n_negatives", n_negatives)
        negatives, shared = given.get("negatives"), given.get("shared")
        found = cls(
            n_negatives,
            UniformNegatives() if negatives is None else negatives,
            ("position" if n_negatives == 1 else "sequence") if shared is None else shared,
            given.get("ignore_index", -100),
            given.get("reduction", "mean"),
        )
        check_negatives(found.negatives)
        if found.shared not in get_args(Sharing):
            raise ValueError(f"shared must be one of {get_args(Sharing)}, got {found.shared!r}")
        check_ignore_index(found.ignore_index)
        check_reduction(found.reduction)
        if binary and found.negatives.correct:
            raise ValueError(
                "the logQ correction belongs to a softmax: give a binary loss a sampler with "
                "correct=False"
            )
        return found


def _show(loss: _Loss) -> str:
    names = ["n_negatives", "shared", "ignore_index", "reduction"]
    if not isinstance(loss.negatives, nn.Module):  # a module shows itself
        names.append("negatives")
    return ", ".join(f"{name}={getattr(loss, name)}" for name in names)
