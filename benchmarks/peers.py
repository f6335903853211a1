"""Cross-entropy and Scalable Cross-Entropy as other packages have them, each set up at its best.

Nothing here is imported before it is called: a package that is missing is a row that says so.
`pip install cut-cross-entropy liger-kernel` and `pip install --no-deps replay-rec` bring them.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def torch_cross_entropy(states: Tensor, catalogue: Tensor, targets: Tensor) -> Tensor:
    """What one writes first: all logits, in the precision of the inputs."""
    return functional.cross_entropy(states.flatten(0, -2) @ catalogue.T, targets.flatten())


def torch_linear(
    states: Tensor, catalogue: Tensor, targets: Tensor, *, room: int | None = None
) -> Tensor:
    """The fused loss of torch 2.13, in the chunks it chooses, or with room for so many logits."""
    if not hasattr(functional, "linear_cross_entropy"):
        raise ModuleNotFoundError(f"torch {torch.__version__} has no linear_cross_entropy")
    rows = None if room is None else max(1, room // len(catalogue))
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows)
    return functional.linear_cross_entropy(
        states.flatten(0, -2), catalogue, targets.flatten(), options=options
    )


def cut_cross_entropy(
    states: Tensor, catalogue: Tensor, targets: Tensor, **settings: Any
) -> Tensor:
    """Apple's kernels. `filter_eps=None` keeps the gradients that they drop by default."""
    package = importlib.import_module("cut_cross_entropy")
    loss: Tensor = package.linear_cross_entropy(states, catalogue, targets, **settings)
    return loss


def liger(states: Tensor, catalogue: Tensor, targets: Tensor, *, room: int | None = None) -> Tensor:
    """LinkedIn's fused loss as it comes, or with room for so many logits and summed in float32."""
    module = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
    x, wanted = states.flatten(0, -2), targets.flatten()
    # It measures room in numbers of the states. All but the last argument are the defaults of its
    # module, which does not take the last.
    chunk = 1 if room is None else max(1, room // x.numel())
    sum_in = None if room is None else torch.float32
    settings = (None, None, -100, 0.0, 0.0, "mean", None, False, sum_in, False, False, False)
    loss: Tensor = module.LigerFusedLinearCrossEntropyFunction.apply(
        x, catalogue, wanted, *settings, None, None, chunk
    )[0]
    return loss


def replay_sce(
    states: Tensor, catalogue: Tensor, targets: Tensor, *, n_buckets: int, size_x: int, size_y: int
) -> Tensor:
    """RePlay's port of the authors' code, with Mix."""
    module = _replay_module()
    loss = module.ScalableCrossEntropyLoss(
        module.SCEParams(
            n_buckets=n_buckets, bucket_size_x=size_x, bucket_size_y=size_y, mix_x=True
        )
    )
    everywhere = torch.ones_like(targets, dtype=torch.bool)
    value: Tensor = loss(states, targets, catalogue, everywhere)
    return value


def _replay_module() -> ModuleType:
    """Load the one file: importing the package would start by asking for Spark and Lightning."""
    name = "replay_sce"
    if name in sys.modules:
        return sys.modules[name]
    package = importlib.util.find_spec("replay")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'replay'")
    path = Path(package.submodule_search_locations[0], "models", "nn", "loss", "sce.py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
