"""Two processes that train one model: DistributedDataParallel over gloo."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from tests.distributed.pool import forks
from tests.losses import distributed_worker
from tests.losses.distributed_worker import CASES

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)


def run_both(folder: Path) -> list[dict[str, Any]]:
    """Return what each of the processes wrote."""
    workers = [
        forks().Process(target=distributed_worker.main, args=(rank, folder)) for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join(timeout=240)
        assert [worker.exitcode for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


# One test, because starting the processes is what takes time.
def test_gradients_are_the_average_over_buckets_that_each_process_draws(tmp_path: Path) -> None:
    ranks = run_both(tmp_path)
    for case in CASES:
        alone = [rank[case]["alone"] for rank in ranks]
        for rank in ranks:
            for name, grad in rank[case]["together"].items():
                assert grad.is_sparse == (case == "sparse" and name == "items.weight")
                average = sum(found[name].to_dense() for found in alone) / 2
                torch.testing.assert_close(grad.to_dense(), average)
        # The data and the weights are the same in both: only the buckets are not.
        touched = [found["items.weight"].to_dense().abs().sum(dim=1) > 0 for found in alone]
        assert not torch.equal(*touched)
