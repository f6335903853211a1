"""Peak memory of training, predicted before it is tried, and what fits on a GPU.

Losses and backbones say what they take, in their own files; here it is added up. Weights, their
optimizer's state, the training data and the batch are always there. A step then goes through
moments that can be its peak:

    forward        activations, and what the loss takes while it computes
    loss backward  activations, and what the loss takes for its gradients
    model backward activations, the catalogue's gradient, and gradients of states
    embedding      the catalogue's gradient twice: by the loss, and by the input of the model
    update         with row-wise updates: the touched rows are gathered and moved
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sce.data.batches import Ragged
from sce.data.length_groups import LengthGroups, group_widths, groups_for_all, shares_longer
from sce.data.popular import count_items
from sce.errors import InputError
from sce.evaluation.precision import Precision
from sce.losses import LOSSES, BatchShape, DataSummary, Loss, ScalableCrossEntropy
from sce.models.base import Backbone, BackboneSettings
from sce.models.sasrec import SASRecSettings
from sce.optim import update_bytes

CONTEXT = 512 << 20  # bytes that the CUDA driver takes before torch allocates anything
MAX_SEQUENCES = 1 << 20  # the largest batch that is looked for
MARGIN = 0.15  # share of the memory that a loss should leave free: the prediction may be off
CHUNKED, ROW_WISE = "ce chunked", "sce row-wise"
_VARIANTS = {"ce": ("ce", CHUNKED), "sce": ("sce", ROW_WISE)}
PLANNED = {name: loss for loss in LOSSES for name in _VARIANTS.get(loss, (loss,))}
"""The losses that are planned, each with its name in `LOSSES`."""

# cuBLAS has 4 MiB for each of two threads (`training.device`), other libraries a little.
_WORKSPACE = 9 << 20
_DEVIATIONS = 3.5  # standard deviations of the fullest of some thousand batches above the mean


# Error of predicted peaks over benchmarks/results/plan_grid.jsonl.
_CHECKED = "counted in the code, checked on an NVIDIA H200"
ERROR: dict[str, Any] = {"source": _CHECKED, "sizes": 265, "mean": 0.0117, "largest": 0.1271}


def summarize_data(
    train: Ragged, n_items: int, *, batch_size: int, max_length: int, model: object = None
) -> DataSummary:
    """Summarize the training sequences; those of one event are not trained on."""
    targets = torch.from_numpy(_targets(np.diff(train.offsets), max_length))
    if isinstance(model, Backbone):
        targets = model.most_targets(targets)
    counts = torch.from_numpy(count_items(train.items, n_items))
    mean = float(targets.double().mean())
    return DataSummary(n_items, min(batch_size, len(targets)), mean, counts)


def summarize_lengths(lengths: NDArray[np.int64], longest: int) -> tuple[int, dict[str, Any]]:
    """Return the width of batches, and what a job says of lengths, from events of each sequence."""
    targets = _targets(lengths, longest)
    length = int(targets.max())
    return length, {
        "mean_length": float(targets.mean()),
        "length_spread": float(targets.std()),
        "longer": tuple(shares_longer(targets, length)),
    }


def _targets(lengths: NDArray[np.int64], longest: int) -> NDArray[np.int64]:
    targets = (lengths[lengths >= 2] - 1).clip(max=longest)
    if not len(targets):
        raise InputError("there is nothing to train on: no sequence has two events")
    return targets


@dataclass(frozen=True)
class Job:
    """A training to plan: catalogue, backbone, batch, and options of the losses."""

    items: int  # items in the catalogue
    batch: int = 128  # sequences in a step
    backbone: BackboneSettings = field(default_factory=SASRecSettings)
    """Its maximum length is the width of a batch."""
    precision: Precision = "float32"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of losses by name, such as n_negatives; each loss takes those that it has."""
    mean_length: float | None = None
    """Mean length of a history; None: all are as long as the longest."""
    length_spread: float = 0.0
    """Standard deviation of the lengths: some batches have more targets than the mean one."""
    longer: tuple[float, ...] | None = None
    """Shares of histories longer than each width of a length group but the first; None: as many as
    the mean allows."""
    events: int = 0
    users: int = 0  # size of the training data, which is on the GPU; 0: not known, and not counted

    def __post_init__(self) -> None:
        for name in ("items", "batch"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.items >= 2**31:  # as their indices are stored
            raise InputError(f"items must be fewer than {2**31:,}; got {self.items:,}")
        if self.mean_length is not None and not 0 < self.mean_length <= self.length:
            raise InputError(
                f"mean_length lies above 0 and is no more than length, {self.length}; got "
                f"{self.mean_length}"
            )

    @property
    def length(self) -> int:
        """Width of a batch."""
        return self.backbone.max_length

    @property
    def mean_events(self) -> float:
        """Mean length of a history."""
        return self.length if self.mean_length is None else self.mean_length

    @property
    def length_groups(self) -> LengthGroups:
        """The length groups of a batch: what the model computes of it."""
        mean = self.mean_events
        # No more histories can be longer than that (Markov's inequality).
        most = [min(1.0, mean / width) for width in group_widths(self.length)[1:]]
        shares = most if self.longer is None else self.longer
        return groups_for_all(shares, self.batch, self.length, among=self.users or None)

    @property
    def shape(self) -> BatchShape:
        """A batch as a loss sees it; the fullest of some thousand has the most targets."""
        more = _DEVIATIONS * self.length_spread / math.sqrt(self.batch)
        events = self.mean_events, min(self.length, self.mean_events + more)
        targets = self.build_model().most_targets(torch.tensor(events, dtype=torch.float64))
        mean, most = (self.batch * targets).tolist()
        half, dim = self.precision == "bf16", self.backbone.dim
        return BatchShape(self.items, self.batch, self.length, dim, mean, most, half)

    def build_model(self) -> Backbone:
        """Make the model on the meta device, to be counted."""
        settings: Any = self.backbone
        return _model(settings, self.items)

    def build_loss(self, name: str) -> Loss:
        """Make a loss of `PLANNED`, for the mean batch."""
        settings = LOSSES[PLANNED[name]].settings
        known = {option.name for option in fields(settings)}
        options = {key: value for key, value in self.options.items() if key in known}
        if name == "ce":
            options.pop("chunk_size", None)
        elif name == CHUNKED:
            options.setdefault("chunk_size", 1024)
        mean = self.shape.targets / self.batch
        data = DataSummary(self.items, self.batch, mean, torch.ones(1))
        try:
            loss = settings(**options).build(data)
        except ValueError as error:
            raise InputError(str(error)) from error
        if name == ROW_WISE:
            assert isinstance(loss, ScalableCrossEntropy)
            loss.sparse_grad = True
        return loss


@lru_cache(maxsize=1024)
def _model(settings: Any, items: int) -> Backbone:
    with torch.device("meta"):
        model: Backbone = settings.build(items)
    return model


@dataclass(frozen=True)
class Prediction:
    """Predicted bytes at the peak of a step, as torch's allocator counts them on a GPU."""

    moment: str
    model: float
    """Weights, the optimizer's state, and gradients of weights as far as they exist then."""
    activations: float  # activations, with gradients of states
    loss: float  # bytes of the loss besides the catalogue's gradient
    other: float  # training data, batch, and what libraries keep

    @property
    def total(self) -> float:
        """The peak."""
        return self.model + self.activations + self.loss + self.other


def predict(job: Job, name: str) -> Prediction:
    """Predict the peak of training with a loss of `PLANNED`."""
    shape, model = job.shape, job.build_model()
    memory = job.build_loss(name).memory(shape)
    if memory is None:
        raise InputError(f"the loss {name} does not say how much memory it takes")
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    others = weights - shape.catalogue_bytes
    rows = memory.gradient_rows
    # Adam has two moments of each weight, row-wise updates have a number for each item.
    state = 2 * weights if rows is None else 2 * others + 4 * job.items
    gradient = shape.catalogue_bytes if rows is None else 4 * rows * shape.dim
    computed = sum(count * width for count, width in job.length_groups)
    states = 4 * computed * shape.dim
    half = job.precision == "bf16"
    activations = model.activation_bytes(job.batch, computed, half=half)
    pairs = sum(count * width**2 for count, width in job.length_groups)
    kept, taken = (each * pairs for each in model.pair_bytes(half=half))
    activations += kept
    activations += shape.state_bytes - states  # padded to one batch again
    freed = min(0, memory.backward)
    # Gradients of weights, activations, and what the loss takes.
    moments = {
        "forward": (0, activations, memory.forward),
        "loss backward": (gradient, activations + freed, memory.backward - freed),
        "model backward": (
            gradient + others,
            activations + model.backward_bytes(computed, half=half) + taken,
            0,
        ),
    }
    if rows is None:
        moments["embedding"] = (2 * gradient + others, 2 * states, 0)
    else:
        # Entries with two gradients of rows, and indices, which are put one behind the other.
        entries = math.ceil(rows) + computed
        moments["embedding"] = (others + 2 * entries * (4 * shape.dim + 8), 0, 0)
        moments["update"] = (others + update_bytes(entries, shape.dim), 0, 0)
    event = 8 if model.uses_times else 4  # bytes: an item, and its time
    data = event * job.events + 8 * (job.users + 1) if job.events else 0
    other = _WORKSPACE + data + (2 * 8 + event - 4) * shape.positions
    found = [
        Prediction(moment, weights + state + gradients, active, loss, other)
        for moment, (gradients, active, loss) in moments.items()
    ]
    return max(found, key=lambda one: one.total)


@dataclass(frozen=True)
class PlannedLoss:
    """A loss, its predicted peak, and what fits."""

    name: str
    sizes: dict[str, int]  # options of `sce train`, after `--loss.`
    peak: Prediction
    fits: bool | None = None  # None where the memory is not known, as in what follows
    tight: bool | None = None  # True if it fits by less than `MARGIN`
    largest_batch: int | None = None
    """The largest batch that fits, at most `most_sequences`; 0: not even one sequence does."""


@dataclass(frozen=True)
class MemoryPlan:
    """A job with every loss."""

    job: Job
    memory: int | None
    losses: tuple[PlannedLoss, ...]
    largest_bucket: int | None = None  # the most items in a bucket of sce that fit
    largest_dim: int | None = None
    """The widest model of which one sequence fits with sce, where the job's does not."""
    row_wise_dim: int | None = None  # likewise with row-wise updates


def plan(job: Job, memory: int | None, names: Iterable[str] = PLANNED) -> MemoryPlan:
    """Predict each loss that says what it takes, and find what fits into so many bytes."""
    known = [name for name in names if job.build_loss(name).memory(job.shape) is not None]
    losses = tuple(_plan_loss(job, name, memory) for name in known)
    if memory is None:
        return MemoryPlan(job, None, losses)
    one = replace(job, batch=1)

    def with_bucket(size: int) -> Job:
        return replace(job, options={**job.options, "bucket_size_y": size})

    def with_dim(dim: int) -> Job:
        narrow: Any = job.backbone
        heads = {"heads": 1} if hasattr(narrow, "heads") else {}
        return replace(one, backbone=replace(narrow, dim=dim, **heads))

    bucket = _largest(lambda size: fits(with_bucket(size), "sce", memory), job.items)

    def widest(name: str) -> int | None:
        if fits(one, name, memory):
            return None
        return _largest(lambda dim: fits(with_dim(dim), name, memory), job.backbone.dim)

    return MemoryPlan(job, memory, losses, bucket, widest("sce"), widest(ROW_WISE))


def _plan_loss(job: Job, name: str, memory: int | None) -> PlannedLoss:
    loss, peak = job.build_loss(name), predict(job, name)
    found: Mapping[str, Any] = vars(loss)
    if isinstance(loss, ScalableCrossEntropy):
        found = loss.named_sizes(job.items, int(job.shape.max_targets))
    names = [option.name for option in fields(LOSSES[PLANNED[name]].settings)]
    sizes_of = {key: found[key] for key in names if isinstance(found.get(key), int)}
    if memory is None:
        return PlannedLoss(name, sizes_of, peak)
    room = usable(memory)
    tight = room / (1 + MARGIN) < peak.total <= room
    largest = largest_batch(job, name, memory)
    return PlannedLoss(name, sizes_of, peak, peak.total <= room, tight, largest)


def usable(memory: int) -> int:
    """Return the bytes of a GPU that training can have."""
    return max(0, memory - CONTEXT)


def fits(job: Job, name: str, memory: int) -> bool:
    """True if training with a loss is predicted to fit."""
    return predict(job, name).total <= usable(memory)


def largest_batch(job: Job, name: str, memory: int) -> int:
    """Return the most sequences of a batch that fit; 0: not even one does."""
    most = most_sequences(job)
    return _largest(lambda batch: fits(replace(job, batch=batch), name, memory), most)


def most_sequences(job: Job) -> int:
    """Return the most sequences of a batch: no more than there are users, where that is known."""
    return min(job.users or MAX_SEQUENCES, MAX_SEQUENCES)


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number up to `most` that fits, when all smaller ones do; 0: none."""
    return bisect_left(range(1, most + 1), True, key=lambda number: not fits(number))
