"""The numbers of the formula: bytes per feature, part by part, and how far off they are.

`python benchmarks/plan_grid.py --fit --write` measures a grid of sizes on a GPU, fits the numbers
to it and writes them here, with their error on a second grid. Most of them can be read off the
code: a full softmax holds its logits three times (12 bytes each), a block keeps about 24 bytes per
number of a state. The workspace is that of a Hopper GPU, where cuBLAS takes 32 MiB for each thread
and stream that uses it; an older one has a quarter of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

_MIB = 2**20


@dataclass(frozen=True)
class Calibration:
    """The formula's numbers for one kind of GPU."""

    coefficients: Mapping[str, Mapping[str, float]]
    """Bytes by part of the step and by feature; see `formula.TERMS`."""
    workspace: Mapping[str, float]
    """Bytes that libraries keep for themselves: steps run as they are, and as CUDA graphs."""
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
            return f"{self.source}; their error on a GPU has not been measured"
        return (
            f"{self.source}; on {self.cells} other sizes the peak was off by {self.mean_error:.1%} "
            f"on average and {self.largest_error:.1%} at most"
        )


# Until `--write` replaces them, these were counted on a CPU, not measured on the GPU they are named
# for: `source` says so, and there is no error to state.
H200 = Calibration(
    coefficients={
        "activations, half": {
            "position_dim": 9.236,
            "block_position_dim": 19.19,
            "block_attended": 9.211,
        },
        "activations, single": {
            "position_dim": 9.326,
            "block_position_dim": 24.15,
            "block_attended": 17.74,
        },
        "bce backward": {"gathered": 13.57, "target": 389.9, "item_dim": 4.051},
        "bce forward": {"gathered": 6, "target": 64.68},
        "bce+ backward": {
            "logit": 9.283,
            "target_dim": 6.228,
            "negative_dim": 7.161,
            "item_dim": 3.778,
        },
        "bce+ forward": {
            "logit": 16.03,
            "padded_logit": 1.169,
            "target_dim": 12.45,
            "negative_dim": 3.975,
        },
        "ce backward": {"logit": 11.98},
        "ce chunked backward": {
            "logit": 4.002,
            "target_dim": 7.379,
            "chunk_dim": 1.095,
            "item_dim": 3.953,
        },
        "ce chunked forward": {"logit": 4.011, "target_dim": 4.371},
        "ce forward": {"logit": 8.002, "target_dim": 4.269},
        "ce- backward": {"padded_logit": 14.88, "negative_dim": 6.104, "item_dim": 2.479},
        "ce- forward": {
            "logit": 12.26,
            "padded_logit": 0.9925,
            "target_dim": 13.06,
            "negative_dim": 3.901,
        },
        "embedding, half": {"position_dim": 5.432},
        "embedding, single": {"position_dim": 5.083},
        "model backward, half": {"position_dim": 2.803},
        "model backward, single": {"position_dim": 2.839},
        "sce backward": {
            "place": 28.29,
            "place_dim": 3.437,
            "position_dim": 4.642,
            "item_dim": 3.871,
        },
        "sce forward": {"scores": 2.775, "position_dim": 8.74},
        "sce row-wise backward": {"place": 13.26, "place_dim": 8.037, "position_dim": 7.907},
        "sce row-wise embedding": {"place": 12.33, "place_dim": 8.049, "position_dim": 15.83},
        "sce row-wise model backward": {"place": 9.22, "place_dim": 3.918, "position_dim": 6.243},
        "sce row-wise update": {"place": 27.38, "place_dim": 20.12, "position_dim": 39.61},
    },
    workspace={"eager": 64.0 * _MIB, "captured": 192.0 * _MIB},
    source="counted on a CPU as a GPU would have it",
)
