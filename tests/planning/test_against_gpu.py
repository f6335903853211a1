"""The formula against the peaks of trainings on an H200, as torch's allocator counted them.

The trainings are those of benchmarks/results/parity.jsonl, with the sink, in float32; the sizes are
those of their datasets.
"""

import pytest

from sce.planning import Job, LossName, predict

JOBS = {
    "ml1m": Job(3_411, mean_length=99.95, length_spread=66.51, users=5_227, events=724_964),
    "globo": Job(11_282, mean_length=31.76, length_spread=15.87, users=19_212, events=630_253),
    "beauty": Job(
        12_101,
        batch=1024,
        length=50,
        mean_length=5.725,
        length_spread=6.691,
        users=22_363,
        events=153_776,
    ),
}


@pytest.mark.parametrize(
    ("data", "loss", "mib"),
    [
        ("ml1m", "sce", 261.4),
        ("globo", "sce", 279.6),
        ("beauty", "sce", 493.5),
        ("ml1m", "ce", 812.6),
        ("globo", "ce", 847.1),
        ("beauty", "ce", 1313.8),
        ("ml1m", "ce-", 314.8),
        ("globo", "ce-", 286.0),
    ],
)
def test_the_peak_of_a_training(data: str, loss: LossName, mib: float) -> None:
    assert predict(JOBS[data], loss).total / 2**20 == pytest.approx(mib, rel=0.1)
