"""Losses over the positive and k sampled negatives: CE⁻, BCE, BCE⁺ and gBCE."""

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from sce.losses.inputs import check_inputs, check_reduction, check_size, reduce
from sce.losses.negatives import Negatives, UniformNegatives
from sce.losses.scoring import Sharing, check_sharing, score_negatives


class SampledCrossEntropy(nn.Module):
    """CE⁻: the softmax cross-entropy over the positive and k negatives.

    Args:
        n_negatives: k.
        negatives: Where they come from; uniform by default. See `sce.losses.negatives`.
        shared: Whether each "position", each "sequence" (all dimensions of the targets but the
            last) or the whole "batch" draws its k.
        ignore_index: The target of positions that do not count, such as padding.
        reduction: "mean" over the positions that count, "sum", or "none".
    """

    def __init__(
        self,
        n_negatives: int,
        *,
        negatives: Negatives | None = None,
        shared: Sharing = "sequence",
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        _check_settings(n_negatives, shared, reduction)
        self.n_negatives = n_negatives
        self.negatives = UniformNegatives() if negatives is None else negatives
        self.shared: Sharing = shared
        self.ignore_index = ignore_index
        self.reduction = reduction

    def forward(
        self,
        states: Tensor,
        catalogue: Tensor,
        targets: Tensor,
        *,
        generator: torch.Generator | None = None,
        exclude: Tensor | None = None,
    ) -> Tensor:
        """Return the loss. `exclude` [sequences, m] are items that are no sequence's negatives."""
        return sampled_cross_entropy(
            states,
            catalogue,
            targets,
            n_negatives=self.n_negatives,
            negatives=self.negatives,
            shared=self.shared,
            exclude=exclude,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            generator=generator,
        )

    def extra_repr(self) -> str:
        """Show the settings in the module's repr."""
        return f"n_negatives={self.n_negatives}, shared={self.shared}, reduction={self.reduction}"


class BinaryCrossEntropy(nn.Module):
    """BCE (k = 1) and BCE⁺ (k > 1): the positive against 1, each negative against 0.

    Args:
        n_negatives: k.
        average: Divide by 1 + k, as the paper's code does; its equation sums, and so do we by
            default.
        negatives: Where they come from; uniform by default. See `sce.losses.negatives`.
        shared: Whether each "position", each "sequence" or the whole "batch" draws its k. By
            default a position when k is 1, a sequence otherwise.
        ignore_index: The target of positions that do not count, such as padding.
        reduction: "mean" over the positions that count, "sum", or "none".
    """

    def __init__(
        self,
        n_negatives: int = 1,
        *,
        average: bool = False,
        negatives: Negatives | None = None,
        shared: Sharing | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        shared = _default_sharing(n_negatives) if shared is None else shared
        _check_settings(n_negatives, shared, reduction, negatives)
        self.n_negatives = n_negatives
        self.average = average
        self.negatives = UniformNegatives() if negatives is None else negatives
        self.shared: Sharing = shared
        self.ignore_index = ignore_index
        self.reduction = reduction

    def forward(
        self,
        states: Tensor,
        catalogue: Tensor,
        targets: Tensor,
        *,
        generator: torch.Generator | None = None,
        exclude: Tensor | None = None,
    ) -> Tensor:
        """Return the loss. `exclude` [sequences, m] are items that are no sequence's negatives."""
        return binary_cross_entropy(
            states,
            catalogue,
            targets,
            n_negatives=self.n_negatives,
            average=self.average,
            negatives=self.negatives,
            shared=self.shared,
            exclude=exclude,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            generator=generator,
        )

    def extra_repr(self) -> str:
        """Show the settings in the module's repr."""
        return f"n_negatives={self.n_negatives}, shared={self.shared}, reduction={self.reduction}"


class GeneralizedBinaryCrossEntropy(nn.Module):
    """gBCE: BCE⁺ with the positive's part scaled down to undo overconfidence from sampling.

    Args:
        n_negatives: k.
        t: How much to calibrate: 0 is BCE⁺, 1 undoes the sampling in full.
        negatives: Where they come from; uniform by default, which is what t is derived for.
        shared: Whether each "position", each "sequence" or the whole "batch" draws its k. By
            default a position when k is 1, a sequence otherwise.
        ignore_index: The target of positions that do not count, such as padding.
        reduction: "mean" over the positions that count, "sum", or "none".
    """

    def __init__(
        self,
        n_negatives: int,
        *,
        t: float = 0.75,
        negatives: Negatives | None = None,
        shared: Sharing | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        shared = _default_sharing(n_negatives) if shared is None else shared
        _check_settings(n_negatives, shared, reduction, negatives)
        _check_t(t)
        self.n_negatives = n_negatives
        self.t = t
        self.negatives = UniformNegatives() if negatives is None else negatives
        self.shared: Sharing = shared
        self.ignore_index = ignore_index
        self.reduction = reduction

    def forward(
        self,
        states: Tensor,
        catalogue: Tensor,
        targets: Tensor,
        *,
        generator: torch.Generator | None = None,
        exclude: Tensor | None = None,
    ) -> Tensor:
        """Return the loss. `exclude` [sequences, m] are items that are no sequence's negatives."""
        return generalized_binary_cross_entropy(
            states,
            catalogue,
            targets,
            n_negatives=self.n_negatives,
            t=self.t,
            negatives=self.negatives,
            shared=self.shared,
            exclude=exclude,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            generator=generator,
        )

    def extra_repr(self) -> str:
        """Show the settings in the module's repr."""
        return f"n_negatives={self.n_negatives}, t={self.t}, shared={self.shared}"


def sampled_cross_entropy(
    states: Tensor,  # [..., d]
    catalogue: Tensor,  # [c, d]
    targets: Tensor,  # [...]
    *,
    n_negatives: int,
    negatives: Negatives | None = None,
    shared: Sharing = "sequence",
    exclude: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    generator: torch.Generator | None = None,
) -> Tensor:
    """CE⁻ as a function; the arguments are those of `SampledCrossEntropy`.

    A sampler that corrects (logQ) has log(k·q) subtracted from the logits of its negatives, which
    makes the sum inside the logarithm an unbiased estimate of the whole catalogue's.
    """
    _check_settings(n_negatives, shared, reduction)
    inputs = check_inputs(states, catalogue, targets, ignore_index=ignore_index)
    scores = score_negatives(
        inputs,
        UniformNegatives() if negatives is None else negatives,
        n_negatives,
        shared=shared,
        exclude=exclude,
        generator=generator,
    )
    others = scores.others
    if scores.log_expected is not None:
        others = others - scores.log_expected.to(others.dtype)
    others = others.masked_fill(scores.masked, -torch.inf)
    own = scores.own
    losses = torch.cat([own.unsqueeze(1), others], dim=1).logsumexp(dim=1) - own
    return reduce(losses, None, inputs, reduction)


def binary_cross_entropy(
    states: Tensor,  # [..., d]
    catalogue: Tensor,  # [c, d]
    targets: Tensor,  # [...]
    *,
    n_negatives: int = 1,
    average: bool = False,
    negatives: Negatives | None = None,
    shared: Sharing | None = None,
    exclude: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    generator: torch.Generator | None = None,
) -> Tensor:
    """BCE and BCE⁺ as a function; the arguments are those of `BinaryCrossEntropy`."""
    return _binary(
        states,
        catalogue,
        targets,
        positive_weight=1.0,
        scale=1.0 / (1 + n_negatives) if average else 1.0,
        n_negatives=n_negatives,
        negatives=negatives,
        shared=shared,
        exclude=exclude,
        ignore_index=ignore_index,
        reduction=reduction,
        generator=generator,
    )


def generalized_binary_cross_entropy(
    states: Tensor,  # [..., d]
    catalogue: Tensor,  # [c, d]
    targets: Tensor,  # [...]
    *,
    n_negatives: int,
    t: float = 0.75,
    negatives: Negatives | None = None,
    shared: Sharing | None = None,
    exclude: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    generator: torch.Generator | None = None,
) -> Tensor:
    """GBCE as a function; the arguments are those of `GeneralizedBinaryCrossEntropy`.

    The positive enters as -β·log σ(s⁺), which is finite at any logit, with
    β = a·(t·(1 - 1/a) + 1/a) = 1 - t·(1 - a) and a = k / (items - 1), the share that is sampled, at
    most 1.
    """
    _check_t(t)
    check_size("n_negatives", n_negatives)
    share = min(1.0, n_negatives / max(1, len(catalogue) - 1))
    return _binary(
        states,
        catalogue,
        targets,
        positive_weight=1.0 - t * (1.0 - share),
        scale=1.0,
        n_negatives=n_negatives,
        negatives=negatives,
        shared=shared,
        exclude=exclude,
        ignore_index=ignore_index,
        reduction=reduction,
        generator=generator,
    )


def _binary(
    states: Tensor,
    catalogue: Tensor,
    targets: Tensor,
    *,
    positive_weight: float,
    scale: float,
    n_negatives: int,
    negatives: Negatives | None,
    shared: Sharing | None,
    exclude: Tensor | None,
    ignore_index: int,
    reduction: str,
    generator: torch.Generator | None,
) -> Tensor:
    """Return -w·log σ(s⁺) - Σ log(1 - σ(s⁻)), scaled."""
    shared = _default_sharing(n_negatives) if shared is None else shared
    _check_settings(n_negatives, shared, reduction, negatives)
    inputs = check_inputs(states, catalogue, targets, ignore_index=ignore_index)
    scores = score_negatives(
        inputs,
        UniformNegatives() if negatives is None else negatives,
        n_negatives,
        shared=shared,
        exclude=exclude,
        generator=generator,
    )
    # 1 - σ(s) = σ(-s), and logsigmoid is finite at any logit.
    others = logsigmoid(-scores.others).masked_fill(scores.masked, 0.0)
    losses = -(positive_weight * logsigmoid(scores.own) + others.sum(dim=1)) * scale
    return reduce(losses, None, inputs, reduction)


def _default_sharing(n_negatives: int) -> Sharing:
    return "position" if n_negatives == 1 else "sequence"


def _check_t(t: float) -> None:
    if not 0.0 <= t <= 1.0:
        raise ValueError(f"t must lie in [0, 1], got {t}")


def _check_settings(
    n_negatives: int, shared: str, reduction: str, binary_negatives: Negatives | None = None
) -> None:
    check_size("n_negatives", n_negatives)
    check_sharing(shared)
    check_reduction(reduction)
    if binary_negatives is not None and binary_negatives.correct:
        raise ValueError(
            "the logQ correction belongs to a softmax: give a binary loss a sampler with "
            "correct=False"
        )
