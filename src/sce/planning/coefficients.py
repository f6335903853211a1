"""The numbers of the formula: bytes per feature, part by part, and how far off they are.

`python benchmarks/plan_grid.py --fit --write` measures a grid of sizes (with `--device cpu` it
counts them), fits the numbers to it and writes them here, with their error on a second grid. Most
of them can be read off the code: a full softmax holds its logits three times (12 bytes each), a
block keeps about 24 bytes per number of a state. The workspace is what cuBLAS is given, 4 MiB for
each thread and stream that uses it (training.device), and a little more.
"""

from collections.abc import Mapping
from dataclasses import dataclass

_MIB = 2**20


@dataclass(frozen=True)
class Calibration:
    """The formula's numbers for one kind of GPU."""

    coefficients: Mapping[str, Mapping[str, float]]
    """Bytes by part of the step and by feature; see `formula.TERMS`."""
    workspace: float
    """Bytes that libraries keep for themselves."""
    source: str
    """Where the numbers come from."""
    largest_error: float | None = None
    """The largest relative error of a predicted peak, on sizes that were not used to fit."""
    mean_error: float | None = None
    """The mean of those errors, without their signs."""
    cells: int = 0
    """How many those sizes were."""

    def describe(self) -> str:
        """Say in a line where the numbers come from, and how far off they are."""
        if self.largest_error is None or self.mean_error is None:
            return f"{self.source}; their error over a grid of sizes has not been measured"
        return (
            f"{self.source}; on {self.cells} other sizes the peak was off by {self.mean_error:.1%} "
            f"on average and {self.largest_error:.1%} at most"
        )


# Counted on a CPU, but for the workspace; the error is that of predicted peaks on the GPU they are
# named for, over the rows in benchmarks/results/plan_grid.jsonl that are not marked "fit".
H200 = Calibration(
    coefficients={
        "activations, half": {
            "computed_dim": 9.287,
            "block_computed_dim": 16.73,
            "block_attended": 11.16,
        },
        "activations, single": {
            "computed_dim": 9.409,
            "block_computed_dim": 23.98,
            "block_attended": 17.87,
        },
        "bce backward": {
            "gathered": 9.739,
            "target_dim": 2.402,
            "target": 442.2,
            "item_dim": 4.058,
        },
        "bce forward": {"gathered": 4.034, "target_dim": 3.933, "target": 64.38},
        "bce+ backward": {"logit": 4.274, "adding": 3.868, "target_dim": 3.679, "item_dim": 3.875},
        "bce+ forward": {"logit": 3.986, "beside": 4.036, "negative": 8.19, "target_dim": 4.538},
        "ce backward": {"logit": 11.93},
        "ce chunked backward": {"logit": 4, "target_dim": 7.943, "item_dim": 3.909},
        "ce chunked forward": {"logit": 4.009, "target_dim": 4.678},
        "ce forward": {"logit": 8.002, "target_dim": 4.159},
        "ce- backward": {"logit": 3.241, "adding": 3.922, "target_dim": 5.384, "item_dim": 3.988},
        "ce- forward": {"logit": 3.959, "beside": 4.017, "negative": 9.35, "target_dim": 4.903},
        "embedding, half": {"computed_dim": 6.506},
        "embedding, single": {"computed_dim": 5.663},
        "model backward, half": {"computed_dim": 3.494},
        "model backward, single": {"computed_dim": 3.315},
        "sce backward": {
            "place": 3.511,
            "part": 13.79,
            "part_dim": 3.965,
            "position_dim": 4.487,
            "item_dim": 4,
        },
        "sce forward": {"scores": 2.333, "place": 5.042, "part": 8.998, "position_dim": 0.9483},
        "sce row-wise backward": {
            "place": 6.874,
            "part": 13.96,
            "part_dim": 3.993,
            "row_dim": 4.021,
            "position_dim": 4.158,
        },
        "sce row-wise embedding": {"part": 0.6167, "row_dim": 8.26, "computed_dim": 8.101},
        "sce row-wise model backward": {"row_dim": 3.962, "computed_dim": 3.644},
        "sce row-wise update": {"part": 1.328, "row_dim": 20.58, "computed_dim": 20.23},
    },
    workspace=9.0 * _MIB,
    source="counted on a CPU, checked on an NVIDIA H200",
    largest_error=0.0501,
    mean_error=0.0128,
    cells=60,
)
