"""What is to be trained: the sizes that decide how much memory it takes."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from sce.data.parts import Parts, part_widths, parts_for_all, shares_longer
from sce.errors import InputError
from sce.losses import suggest_sizes

LossName = Literal["bce", "bce+", "gbce", "ce-", "ce", "ce chunked", "sce", "sce row-wise"]
LOSSES: tuple[LossName, ...] = get_args(LossName)
Precision = Literal["float32", "tf32", "bf16"]

_DEVIATIONS = 3.5  # that the fullest of some thousand batches is above the mean


def sizes_of(lengths: NDArray[np.int64], longest: int) -> dict[str, Any]:
    """What a job says of its histories, from the events of each training sequence.

    A sequence of one event is not trained on; of a longer history than `longest` the last events
    are.
    """
    targets = (lengths[lengths >= 2] - 1).clip(max=longest)
    if not len(targets):
        return {"length": 1}
    length = int(targets.max())
    return {
        "length": length,
        "mean_length": float(targets.mean()),
        "length_spread": float(targets.std()),
        "longer": tuple(shares_longer(targets, length)),
    }


@dataclass(frozen=True)
class Job:
    """SASRec on batches of one shape, with the settings of every loss."""

    items: int
    """In the catalogue."""
    batch: int = 128
    """Sequences in a step."""
    length: int = 200
    """Of the longest history."""
    dim: int = 64
    """Of item embeddings and states."""
    blocks: int = 2
    heads: int = 1
    precision: Precision = "float32"
    mean_length: float | None = None
    """Of a history; None: all are as long as the longest."""
    length_spread: float = 0.0
    """The standard deviation of the lengths: some batches have more targets than the mean one."""
    longer: tuple[float, ...] | None = None
    """The shares of histories longer than each of the widths of parts, but the first, into which a
    batch is cut (`sce.data.parts`); None: as many as the mean allows."""
    n_negatives: int = 256
    """Of bce+, gbce and ce-."""
    bucket_size_y: int | None = None
    """Of sce: items in a bucket; None: as many as `sce train` takes by itself."""
    alpha: float = 2.0
    beta: float = 1.0
    """Of sce, for the number of buckets and the states in each."""
    n_buckets: int | None = None
    bucket_size_x: int | None = None
    """Of sce, instead of what alpha and beta give."""
    chunk_size: int = 1024
    """Of ce chunked: items scored at once."""
    events: int = 0
    users: int = 0
    """In the training data, which is on the GPU; 0: not known, and not counted."""

    def __post_init__(self) -> None:
        for name in (
            "items",
            "batch",
            "length",
            "dim",
            "blocks",
            "heads",
            "n_negatives",
            "chunk_size",
        ):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1; got {getattr(self, name)}")
        for name in ("n_buckets", "bucket_size_x", "bucket_size_y"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.dim % self.heads:
            raise InputError(
                f"the heads share the width equally: dim {self.dim} is not a multiple of "
                f"{self.heads} heads"
            )
        if self.precision not in get_args(Precision):
            choices = ", ".join(get_args(Precision))
            raise InputError(f"precision is one of {choices}; got {self.precision!r}")
        if self.mean_length is not None and not 0 < self.mean_length <= self.length:
            raise InputError(
                f"mean_length lies above 0 and is no more than length, {self.length}; got "
                f"{self.mean_length}"
            )
        if not 0 <= self.length_spread < float("inf"):
            raise InputError(f"length_spread must not be negative; got {self.length_spread}")
        if self.longer is not None:
            narrower = len(part_widths(self.length)) - 1
            rising = all(a <= b for a, b in pairwise((0.0, *self.longer, 1.0)))
            if len(self.longer) != narrower or not rising:
                raise InputError(
                    f"longer has {narrower} shares from 0 to 1, none smaller than the one before; "
                    f"got {self.longer}"
                )
        for name in ("alpha", "beta"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InputError(f"{name} must be above 0; got {getattr(self, name)}")
        try:
            _ = self.bucket_sizes
        except ValueError as error:
            raise InputError(str(error)) from error

    @property
    def positions(self) -> int:
        """Of a batch, padding included."""
        return self.batch * self.length

    @property
    def parts(self) -> Parts:
        """Of a batch: what the model computes of it."""
        mean = self.length if self.mean_length is None else self.mean_length
        # Of all histories, no more can be longer than that (Markov's inequality).
        most = [min(1.0, mean / width) for width in part_widths(self.length)[1:]]
        shares = most if self.longer is None else self.longer
        return parts_for_all(shares, self.batch, self.length, among=self.users or None)

    @property
    def targets(self) -> float:
        """Of the mean batch: positions without padding."""
        return self.batch * (self.length if self.mean_length is None else self.mean_length)

    @property
    def most_targets(self) -> float:
        """Of the fullest of some thousand batches, drawn at random: their peak is the peak."""
        more = _DEVIATIONS * self.length_spread * math.sqrt(self.batch)
        return min(self.positions, self.targets + more)

    @property
    def bucket_sizes(self) -> tuple[int, int]:
        """The number of buckets of sce, and of states in each."""
        n_buckets, size_x = suggest_sizes(1, self.targets, alpha=self.alpha, beta=self.beta)
        return self.n_buckets or n_buckets, self.bucket_size_x or size_x

    def items_in_bucket(self, *, row_wise: bool) -> int:
        """Of sce, with row-wise updates or without."""
        if self.bucket_size_y is None:
            return min(self.items, 256 if row_wise else 2048)
        return min(self.bucket_size_y, self.items)

    @property
    def parameters(self) -> int:
        """Numbers that are trained; those of the catalogue are most of them."""
        attention = 4 * self.dim * (self.dim + 1)
        feed_forward = 2 * self.dim * (self.dim + 1)
        norms = 2 * 2 * self.dim
        block = attention + feed_forward + norms
        return (self.items + self.length) * self.dim + self.blocks * block + 2 * self.dim

    @property
    def half(self) -> bool:
        """Whether activations are in half precision, where they may be."""
        return self.precision == "bf16"
