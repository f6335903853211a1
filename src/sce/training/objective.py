"""Which loss to train with: its settings, and the loss built from them."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from sce.data.batches import Ragged
from sce.errors import InputError
from sce.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    GeneralizedBinaryCrossEntropy,
    InBatchNegatives,
    PopularityNegatives,
    SampledCrossEntropy,
    ScalableCrossEntropy,
    UniformNegatives,
    suggest_bucket_size_y,
    suggest_sizes,
)
from sce.losses.scalable import MOST_NOISE

T = TypeVar("T")
LossName = Literal["bce", "bce+", "gbce", "ce-", "ce", "sce"]
Sampler = Literal["uniform", "popularity", "in-batch"]
Sharing = Literal["position", "sequence", "batch"]

# What each loss understands, beside its name, and what it takes where nothing is given.
_DEFAULTS: dict[LossName, dict[str, Any]] = {
    "bce": {"negatives": "uniform", "shared": "position"},
    "bce+": {"n_negatives": 256, "negatives": "uniform", "shared": "sequence"},
    "gbce": {"n_negatives": 256, "t": 0.75, "negatives": "uniform", "shared": "sequence"},
    "ce-": {"n_negatives": 256, "negatives": "uniform", "shared": "sequence"},
    "ce": {"chunk_size": None},
    "sce": {
        "bucket_size_y": None,  # this and mix: as the dataset has it, see `settled`
        "mix": None,
        "mix_of": 4,
        "noise": 1.0,
        "n_buckets": None,
        "bucket_size_x": None,
        "alpha": 2.0,
        "beta": 1.0,
    },
}

# Training events for each item of the catalogue from which on SCE puts its buckets near the states.
# Where items have fewer, the hardest negatives are often false ones: four logs with 5 to 13 events
# an item were better off without, or no worse, and two with 56 and 213 with it (docs/paper.md).
_EVENTS_TO_MIX = 25


def settings_of(name: str) -> frozenset[str]:
    """Which settings of a loss, beside its name, this one understands."""
    return frozenset(_DEFAULTS.get(name, ()))  # type: ignore[call-overload]


@dataclass(frozen=True)
class LossSettings:
    """Which loss, and its own settings. What another loss would need is refused."""

    name: LossName = "sce"
    """Binary (bce; bce+ and gbce with more negatives), sampled softmax (ce-), full softmax (ce), or
    Scalable Cross-Entropy (sce)."""
    bucket_size_y: int | None = None
    """sce: items in a bucket, the one size to tune. [default: a fortieth of the catalogue, 64 to
    4,096, or to 256 with training.row_wise]"""
    mix: bool | None = None
    """sce: put the buckets where the states are. [default: where items have 25 training events or
    more on average]"""
    mix_of: int | None = None
    """sce: how many states the centre of a bucket is mixed from; 0: all, as in the paper. Turns mix
    on. [default: 4]"""
    noise: float | None = None
    """sce: how long a random vector is that is added to a mix of a few states, in lengths of it.
    Turns mix on. [default: 1]"""
    alpha: float | None = None
    """sce: how densely buckets cover the states of a batch. [default: 2]"""
    beta: float | None = None
    """sce: many small buckets (below 1) or few large ones (above 1). [default: 1]"""
    n_buckets: int | None = None
    """sce: how many buckets. [default: from alpha, beta and the mean batch]"""
    bucket_size_x: int | None = None
    """sce: states in a bucket. [default: from alpha, beta and the mean batch]"""
    n_negatives: int | None = None
    """bce+, gbce, ce-: sampled items against each target. [default: 256]"""
    negatives: Sampler | None = None
    """bce, bce+, gbce, ce-: how they are sampled; ce- corrects for it. [default: uniform]"""
    shared: Sharing | None = None
    """bce, bce+, gbce, ce-: what draws its own negatives. [default: sequence; bce: position]"""
    t: float | None = None
    """gbce: calibration, 0 (none) to 1 (full). [default: 0.75]"""
    chunk_size: int | None = None
    """ce: items scored at once; less memory, more time. [default: all]"""

    def __post_init__(self) -> None:
        if self.name not in get_args(LossName):
            names = ", ".join(get_args(LossName))
            raise InputError(f"there is no loss {self.name!r}; choose from {names}")
        known = _DEFAULTS[self.name]
        for field in fields(self)[1:]:
            if getattr(self, field.name) is not None and field.name not in known:
                owners = [name for name, own in _DEFAULTS.items() if field.name in own]
                raise InputError(
                    f"loss.{field.name} belongs to {' and '.join(owners)}, and the loss is "
                    f"{self.name}; leave it out, or choose another loss"
                )
        sized = self.n_buckets is not None and self.bucket_size_x is not None
        if sized and (self.alpha is not None or self.beta is not None):
            raise InputError(
                "loss.alpha and loss.beta give n_buckets and bucket_size_x, which are both given: "
                "leave out the two, or alpha and beta"
            )
        if self.mix is False and self.mix_of is not None:
            raise InputError(
                "loss.mix_of says how many states a centre is mixed from, and loss.mix is off: "
                "leave out one of them"
            )
        if self.noise is not None and (self.mix is False or self.mix_of == 0):
            raise InputError(
                "loss.noise is added to centres mixed from a few states, and "
                f"{'loss.mix is off' if self.mix is False else 'loss.mix_of is 0'}: leave out one "
                "of them"
            )
        if self.mix is None and (self.mix_of is not None or self.noise is not None):
            object.__setattr__(self, "mix", True)
        unused = {"alpha", "beta"} if sized else set()
        if self.mix_of == 0:
            unused.add("noise")
        if not self.mix:
            unused |= {"mix_of", "noise"}
        for name in known.keys() - unused:
            if getattr(self, name) is None:
                object.__setattr__(self, name, known[name])
        self._check_values()

    def settled(self, n_items: int, n_events: int, *, sparse_grad: bool = False) -> "LossSettings":
        """Fill in what follows from the dataset, its items and its training events.

        >>> settled = LossSettings().settled(n_items=12_101, n_events=153_776)
        >>> settled.bucket_size_y, settled.mix
        (303, False)
        """
        if self.name != "sce":
            return self
        size, mix = self.bucket_size_y, self.mix
        if size is None:
            size = suggest_bucket_size_y(n_items, sparse_grad=sparse_grad)
        if mix is None:
            mix = n_events >= _EVENTS_TO_MIX * n_items
        return replace(self, bucket_size_y=size, mix=mix)

    def _check_values(self) -> None:
        for name in ("bucket_size_y", "n_buckets", "bucket_size_x", "n_negatives", "chunk_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"loss.{name} must be at least 1; got {value}")
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"loss.{name} must be above 0; got {value}")
        if self.mix_of is not None and self.mix_of < 0:
            raise InputError(
                f"loss.mix_of is a number of states, or 0 for all of them; got {self.mix_of}"
            )
        if self.noise is not None and not 0 <= self.noise <= MOST_NOISE:
            raise InputError(
                f"loss.noise lies between 0 and {MOST_NOISE:,} (--loss.no-mix is nothing but "
                f"noise); got {self.noise}"
            )
        if self.t is not None and not 0 <= self.t <= 1:
            raise InputError(f"loss.t lies between 0 and 1; got {self.t}")
        for name, choices in (("negatives", get_args(Sampler)), ("shared", get_args(Sharing))):
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise InputError(f"loss.{name} is one of {', '.join(choices)}; got {value!r}")


@dataclass(frozen=True)
class Workload:
    """What a loss is given at each step, on average."""

    n_items: int
    sequences: float  # in a batch
    mean_length: float  # targets of a sequence, once it is cut to the model's length
    counts: NDArray[np.int64]  # how often each item occurs

    @property
    def targets(self) -> float:
        """Targets in a batch."""
        return self.sequences * self.mean_length

    @classmethod
    def measure(
        cls, train: Ragged, n_items: int, *, batch_size: int, max_length: int
    ) -> "Workload":
        """Look at the training sequences; those of one event are not trained on."""
        targets = np.diff(train.offsets) - 1
        targets = targets[targets >= 1].clip(max=max_length)
        if not len(targets):
            raise InputError("there is nothing to train on: no sequence has two events")
        counts = np.bincount(train.items, minlength=n_items)
        return cls(n_items, min(batch_size, len(targets)), float(targets.mean()), counts)


def bucket_sizes(settings: LossSettings, workload: Workload) -> dict[str, int]:
    """The two sizes that alpha and beta give for the mean batch, fixed for the whole run.

    Each batch could have its own; the same for all keeps the shapes in a step the same.
    """
    if settings.name != "sce":
        return {}
    if settings.n_buckets is not None and settings.bucket_size_x is not None:
        return {"n_buckets": settings.n_buckets, "bucket_size_x": settings.bucket_size_x}
    try:
        n_buckets, size_x = suggest_sizes(
            1, workload.targets, alpha=_given(settings.alpha), beta=_given(settings.beta)
        )
    except ValueError as error:
        raise InputError(str(error)) from error
    return {
        "n_buckets": settings.n_buckets or n_buckets,
        "bucket_size_x": settings.bucket_size_x or size_x,
    }


def build_loss(
    settings: LossSettings, workload: Workload, *, sparse_grad: bool = False
) -> nn.Module:
    """Make the loss that the settings name, sized for the workload.

    Args:
        settings: What they leave open is settled here.
        workload: What the loss will be given.
        sparse_grad: Whether its gradient of the catalogue will be one of touched rows alone.
    """
    n_events = int(workload.counts.sum())
    settings = settings.settled(workload.n_items, n_events, sparse_grad=sparse_grad)
    if settings.name == "sce":
        sizes = bucket_sizes(settings, workload)
        return ScalableCrossEntropy(
            n_buckets=sizes["n_buckets"],
            bucket_size_x=sizes["bucket_size_x"],
            bucket_size_y=_given(settings.bucket_size_y),
            mix=_given(settings.mix),
            mix_of=settings.mix_of or 0,
            noise=settings.noise or 0.0,
        )
    if settings.name == "ce":
        return CrossEntropy(chunk_size=settings.chunk_size)
    sampler = _sampler(settings, workload)
    shared: Sharing = _given(settings.shared)
    if settings.name == "bce":
        return BinaryCrossEntropy(negatives=sampler, shared=shared)
    k = _given(settings.n_negatives)
    if settings.name == "bce+":
        return BinaryCrossEntropy(k, negatives=sampler, shared=shared)
    if settings.name == "gbce":
        return GeneralizedBinaryCrossEntropy(
            k, t=_given(settings.t), negatives=sampler, shared=shared
        )
    return SampledCrossEntropy(k, negatives=sampler, shared=shared)


def _sampler(
    settings: LossSettings, workload: Workload
) -> UniformNegatives | PopularityNegatives | InBatchNegatives:
    if settings.negatives == "uniform":
        return UniformNegatives()
    correct = settings.name == "ce-"  # the correction (logQ) belongs to a softmax
    counts = torch.from_numpy(workload.counts)
    if settings.negatives == "popularity":
        return PopularityNegatives(counts, correct=correct)
    return InBatchNegatives(counts, correct=correct)


def _given(value: T | None) -> T:
    assert value is not None  # LossSettings fills in what the loss needs
    return value
