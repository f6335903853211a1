"""How much memory a training step takes: weights, and the highest of its moments.

Always there are the weights and Adam's two moments of each, the training data, the batch, and what
the libraries keep for themselves. A step then goes through four moments that can be the highest:

    forward        the model's activations, and what the loss takes while it computes
    loss backward  the activations, and what the loss takes for its gradients
    model backward the activations, the catalogue's gradient, and gradients of states
    embedding      the catalogue's gradient twice: by the loss, and by the input of the model

With row-wise updates there are no moments of the catalogue, but a number a row; its gradients are
of the touched rows alone; and adding these up and moving the rows is a fifth moment, the update.

Each is a sum of bytes per position, per logit and so on: `TERMS` says of what, `coefficients.py`
how many bytes. Weights and their gradients are known exactly. Peaks of GPUs are meant, as torch's
allocator counts them.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sce.planning.coefficients import H200, Calibration
from sce.planning.job import Job, LossName

_FLOAT, _INDEX, _EVENT = 4, 8, 4  # bytes of a weight, of an index in a batch, of a stored event
_SINKS, _SINK_WIDTH = 8, 8  # what SASRec's attention adds to length and width
_FUSED_DIM = 512  # up to which Scalable Cross-Entropy has fused kernels
_PLAIN = 128 << 20  # bytes that it takes more of beyond that, where scores are held in tiles
_GATHERED = 1 << 21  # numbers that losses with negatives gather, or compute for padding, at once
# Numbers that the fused selection of buckets holds at once: a maximum for each bucket and group of
# √(items / k) items, for large buckets perhaps every score, but no more than so many, or than a
# share of a large catalogue.
_SCORES, _LARGE_SCORES, _MOST_SCORES, _SHARE = 6 << 20, 20 << 20, 48 << 20, 0.02
_INDICES = 2.25  # numbers that an index and a flag take the room of
_LARGE_BUCKET = 1024  # items beyond which a bucket is large
_PARTS = 16 << 20  # numbers that the catalogue's gradient is added up from at once

ROW_WISE: LossName = "sce row-wise"
_LOSS_PARTS = ("forward", "backward")
# How many gradients of the catalogue there are when the model's turn has come. All other weights
# have theirs by then.
GRADIENTS = {"model backward": 1, "embedding": 2}
# What there is instead with row-wise updates. Forward it is as with sce.
_OF_ROWS = ("place", "part", "part_dim", "row_dim")
_ROW_WISE_PARTS = (*GRADIENTS, "update")

# What the bytes of each part are proportional to. Those of losses are for the backward pass;
# forward, most have the same but for the gradient of the catalogue, which is not there yet.
_SAMPLED = ("logit", "adding", "negative", "target_dim", "item_dim")
_SAMPLED_FORWARD = ("logit", "beside", "negative", "target_dim")
_MODEL_TERMS = {
    "activations": ("computed_dim", "block_computed_dim", "block_attended"),
    "model backward": ("computed_dim",),
    "embedding": ("computed_dim",),
}
_LOSS_TERMS = {
    "bce": ("gathered", "target_dim", "target", "item_dim"),
    "bce+": _SAMPLED,
    "ce-": _SAMPLED,
    "ce": ("logit", "target_dim", "item_dim"),
    "ce chunked": ("logit", "target_dim", "item_dim"),
    "sce": ("scores", "place", "part", "part_dim", "position_dim", "item_dim"),
}
TERMS: Mapping[str, tuple[str, ...]] = {
    **{f"{part}, {half}": t for part, t in _MODEL_TERMS.items() for half in ("single", "half")},
    **{f"{loss} forward": terms[:-1] for loss, terms in _LOSS_TERMS.items()},
    **{f"{loss} backward": terms for loss, terms in _LOSS_TERMS.items()},
    "bce+ forward": _SAMPLED_FORWARD,
    "ce- forward": _SAMPLED_FORWARD,
    f"{ROW_WISE} backward": (*_OF_ROWS, "position_dim"),
    **{f"{ROW_WISE} {part}": (*_OF_ROWS, "computed_dim") for part in _ROW_WISE_PARTS},
}


@dataclass(frozen=True)
class Forecast:
    """Predicted bytes at the highest moment of training."""

    moment: str
    """Which one that is."""
    model: float
    """Weights, their gradients as far as they exist then, and Adam's moments."""
    activations: float
    """Of the model, with gradients of states."""
    loss: float
    """Everything that the loss takes besides the gradient of the catalogue; with row-wise updates,
    with it."""
    other: float
    """Training data, batch, and what libraries keep."""

    @property
    def total(self) -> float:
        """The peak."""
        return self.model + self.activations + self.loss + self.other


def predict(job: Job, loss: LossName, calibration: Calibration = H200) -> Forecast:
    """Predict the peak of training with a loss, on a GPU."""
    other = _data_and_batch(job) + calibration.workspace
    moments = [
        Forecast(moment, model, activations, of_loss, other)
        for moment, model, activations, of_loss in _moments(job, loss, calibration.coefficients)
    ]
    return max(moments, key=lambda moment: moment.total)


def loss_bytes(job: Job, loss: LossName) -> float:
    """Predict what a loss alone takes, at its highest moment, without the catalogue's gradient."""
    terms = features(job, loss)
    return max(_sum(H200.coefficients[part_of(loss, part)], terms)[1] for part in _LOSS_PARTS)


def fixed_bytes(job: Job, loss: LossName) -> float:
    """What is there between steps, and is known exactly: weights, moments, data, batch."""
    return _weights_and_moments(job, loss) + _data_and_batch(job)


def _weights_and_moments(job: Job, loss: LossName) -> float:
    if loss != ROW_WISE:
        return 3 * _FLOAT * job.parameters
    catalogue = job.items * job.dim
    return _FLOAT * (catalogue + job.items + 3 * (job.parameters - catalogue))


def _data_and_batch(job: Job) -> float:
    data = job.events * _EVENT + (job.users + 1) * _INDEX if job.events else 0
    return data + 2 * _INDEX * job.positions


def _moments(
    job: Job, loss: LossName, coefficients: Mapping[str, Mapping[str, float]]
) -> Iterator[tuple[str, float, float, float]]:
    """Yield each of the moments, with the bytes of model, activations and loss."""
    terms = features(job, loss)
    half = "half" if job.half else "single"
    kept = _weights_and_moments(job, loss)
    others = job.parameters - job.items * job.dim
    activations = sum(_sum(coefficients[f"activations, {half}"], terms)) + padded_states(terms)
    for moment, part in (("forward", "forward"), ("loss backward", "backward")):
        gradient, rest = _sum(coefficients[part_of(loss, part)], terms)
        plain = _PLAIN if loss in ("sce", ROW_WISE) and job.dim > _FUSED_DIM else 0
        yield moment, kept + gradient, activations, rest + plain
    if loss == ROW_WISE:
        for moment in (*GRADIENTS, "update"):
            _, rest = _sum(coefficients[f"{ROW_WISE} {moment}"], terms)
            before = activations if moment == "model backward" else 0.0
            yield moment, kept + _FLOAT * others, before, rest
        return
    for moment, copies in GRADIENTS.items():
        gradients = copies * job.items * job.dim + others
        _, rest = _sum(coefficients[f"{moment}, {half}"], terms)
        before = activations if moment == "model backward" else 0.0
        yield moment, kept + _FLOAT * gradients, before + rest, 0.0


def part_of(loss: LossName, part: str) -> str:
    """The part of a step whose numbers are meant: gBCE is BCE+ as far as memory goes."""
    if loss == ROW_WISE and part == "forward":
        return "sce forward"
    return f"{'bce+' if loss == 'gbce' else loss} {part}"


def padded_states(terms: Mapping[str, float]) -> float:
    """By how much the states of all parts grow when they are one batch again."""
    return _FLOAT * (terms["position_dim"] - terms["computed_dim"])


def _sum(numbers: Mapping[str, float], terms: Mapping[str, float]) -> tuple[float, float]:
    """Add up bytes: those of gradients of the catalogue, and all others."""
    rest = sum(number * terms[name] for name, number in numbers.items() if name != "item_dim")
    return numbers.get("item_dim", 0.0) * terms["item_dim"], rest


def in_groups(job: Job, loss: LossName) -> bool:
    """Whether buckets have so many items that their gradient is added up in groups."""
    n_buckets, size_y = job.bucket_sizes[0], job.items_in_bucket(row_wise=loss == ROW_WISE)
    return n_buckets * size_y > max(_PARTS / job.dim, size_y)


def features(job: Job, loss: LossName) -> dict[str, float]:
    """What bytes are counted by, for a job and a loss."""
    b, d, n, v = job.batch, job.dim, job.positions, job.most_targets
    computed = sum(rows * width for rows, width in job.parts)
    attended = (computed + b * _SINKS) * (d + _SINK_WIDTH * job.heads)
    k = 1 if loss == "bce" else job.n_negatives
    logits: dict[str, float] = {
        "ce": v * job.items,
        "ce chunked": v * min(job.chunk_size, job.items),
    }
    at_once = (k * d, job.length * k, job.length * d)  # of a sequence: negatives, logits, states
    sequences = min(b, max(1, _GATHERED // max(at_once)))
    group = min(b, max(1, _GATHERED // (k * d)))  # whose gradients are added up at once
    copies = 2 if loss == "ce-" else 1
    n_buckets, size_x = job.bucket_sizes
    size_y = job.items_in_bucket(row_wise=loss == ROW_WISE)
    size_x = min(size_x, n)
    large = size_y > _LARGE_BUCKET
    scores = n_buckets * (job.items if large else math.sqrt(job.items * size_y))
    held = max(_LARGE_SCORES if large else _SCORES, min(_MOST_SCORES, _SHARE * job.items * d))
    places = n_buckets * size_y
    part: float = places  # that are added up at once
    if in_groups(job, loss):
        part = max(_PARTS / d, size_y)
    return {
        "position_dim": n * d,
        "computed_dim": computed * d,
        "block_computed_dim": job.blocks * computed * d,
        "block_attended": job.blocks * attended,
        "target": v,
        "target_dim": v * d,
        "item_dim": job.items * d,
        "logit": logits.get(loss, v * k),
        "negative": b * k,
        "gathered": min(2 * v * d, _GATHERED),
        # What there is beside logits: a copy or two, or what some sequences take, or indices.
        "beside": max(
            copies * v * k, sequences * sum(at_once), _INDICES * min(v * k, _GATHERED / 2)
        ),
        # Gradients of negatives, and what they come of; to add them up takes two more copies, and
        # six indices each.
        "adding": group * k * d + max(sequences * sum(at_once), group * k * (2 * d + 12)),
        "scores": min(scores, held),
        "place": n_buckets * size_x + places + n,
        "part": part,
        "part_dim": part * d,
        "row_dim": min(places + n, job.items) * d,  # of a sparse gradient
    }
