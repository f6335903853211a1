"""What fits into a given memory: which losses, how large a batch, how large the buckets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sce.planning.coefficients import H200, Calibration
from sce.planning.formula import ROW_WISE, Forecast, in_groups, predict
from sce.planning.job import LOSSES, Job, LossName

# What the driver and its context take of a GPU before torch allocates anything.
CONTEXT = 512 * 2**20
_AIM = 0.15  # the error that predictions shall have at most
_MOST_SEQUENCES = 1 << 20  # in a batch: nobody has more


@dataclass(frozen=True)
class Planned:
    """What is to be expected of one loss."""

    loss: LossName
    settings: dict[str, int]
    """Of the loss: as `sce train` takes them, after `--loss.`."""
    forecast: Forecast
    fits: bool | None
    """None where the memory is not known."""
    tight: bool | None
    """Whether it fits by so little that it may not; None where the memory is not known."""
    largest_batch: int | None
    """That fits, at most `most_sequences`; 0 when not even one sequence does, None where the memory
    is not known."""


@dataclass(frozen=True)
class Plan:
    """What is to be expected of every loss."""

    job: Job
    memory: int | None
    losses: tuple[Planned, ...]
    largest_bucket: int | None
    """The most items in a bucket of sce that fit; None: not known."""
    largest_dim: int | None
    """The widest model that fits with sce, where the job's does not and another would."""
    most_items: int | None
    """The largest catalogue that fits with sce, where the job's does not and another would."""


def plan(job: Job, memory: int | None, losses: Sequence[LossName] = LOSSES) -> Plan:
    """Predict each loss, and find what fits into so many bytes of a GPU."""
    planned = tuple(_planned(job, loss, memory) for loss in losses)
    largest_bucket = largest_dim = most_items = None
    if memory is not None:
        largest_bucket = _largest(
            lambda size: fits(replace(job, bucket_size_y=size), "sce", memory), job.items
        )
        if not fits(replace(job, batch=1), "sce", memory):
            largest_dim = _largest(
                lambda dim: fits(replace(job, batch=1, dim=dim, heads=1), "sce", memory), job.dim
            )
            most_items = _largest(
                lambda items: fits(replace(job, batch=1, items=items), "sce", memory), job.items
            )
    return Plan(job, memory, planned, largest_bucket, largest_dim or None, most_items or None)


def margin(calibration: Calibration = H200) -> float:
    """The share within which a prediction may turn out either way: as measured, or as aimed at."""
    return max(_AIM, calibration.largest_error or 0.0)


def usable(memory: int) -> float:
    """The bytes of a GPU that training can have."""
    return max(0, memory - CONTEXT)


def fits(job: Job, loss: LossName, memory: int) -> bool:
    """Whether the predicted peak is no more than the GPU has to give."""
    return predict(job, loss).total <= usable(memory)


def largest_batch(job: Job, loss: LossName, memory: int) -> int:
    """The most sequences in a batch that fit; 0 when not even one does."""
    most = most_sequences(job)
    found = _largest(lambda batch: fits(replace(job, batch=batch), loss, memory), most)
    if loss != ROW_WISE or found == most:
        return found
    # From where on buckets are worked through in groups, a sparse gradient has fewer rows again.
    first = 1 + _largest(lambda batch: not in_groups(replace(job, batch=batch), loss), most)
    more = _largest(
        lambda number: fits(replace(job, batch=first + number - 1), loss, memory), most - first + 1
    )
    return max(found, first + more - 1) if more else found


def most_sequences(job: Job) -> int:
    """How many sequences a batch can have: no more than there are users, where that is known."""
    return min(job.users or _MOST_SEQUENCES, _MOST_SEQUENCES)


def _planned(job: Job, loss: LossName, memory: int | None) -> Planned:
    forecast = predict(job, loss)
    if memory is None:
        return Planned(loss, loss_settings(job, loss), forecast, None, None, None)
    room = usable(memory)
    return Planned(
        loss,
        loss_settings(job, loss),
        forecast,
        fits=forecast.total <= room,
        tight=room / (1 + margin()) < forecast.total <= room,
        largest_batch=largest_batch(job, loss, memory),
    )


def loss_settings(job: Job, loss: LossName) -> dict[str, int]:
    """The sizes of a loss, by the names that training gives them."""
    n_buckets, size_x = job.bucket_sizes
    sizes: dict[str, dict[str, int]] = {
        "bce": {},
        "ce": {},
        "ce chunked": {"chunk_size": job.chunk_size},
        "sce": {
            "n_buckets": n_buckets,
            "bucket_size_x": size_x,
            "bucket_size_y": job.items_in_bucket(row_wise=False),
        },
    }
    sizes[ROW_WISE] = sizes["sce"] | {"bucket_size_y": job.items_in_bucket(row_wise=True)}
    return sizes.get(loss, {"n_negatives": job.n_negatives})


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, when all below one that fits do; 0 for none."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
