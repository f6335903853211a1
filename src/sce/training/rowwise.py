"""Row-wise updates of the catalogue: who can have them, and the gradients that they need."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from sce.errors import InputError
from sce.losses import ScalableCrossEntropy
from sce.training.optimizer import RowWise
from sce.training.settings import TrainingSettings

NEEDS_SCE = (
    "training.row_wise updates the rows of the catalogue that a batch touches, and only the loss "
    "sce has a gradient of those alone (the others give a dense one); choose --loss sce, or leave "
    "row_wise out"
)


def row_wise(model: nn.Module, loss: object, settings: TrainingSettings) -> RowWise | None:
    """Say which table is updated by its touched rows alone, and how fast; None: none is.

    Raises:
        InputError: When the gradient of the model or of the loss would be of all rows.
    """
    if not settings.row_wise:
        return None
    if not isinstance(loss, ScalableCrossEntropy):
        raise InputError(NEEDS_SCE)
    table = getattr(model, "catalogue", None)
    if not hasattr(model, "sparse_grad") or not isinstance(table, nn.Parameter):
        raise InputError(
            "training.row_wise needs a model whose `catalogue` is a parameter, and whose lookups "
            "give a sparse gradient while its attribute `sparse_grad` is True, as SASRec has them; "
            f"{type(model).__name__} does not"
        )
    assert settings.catalogue_learning_rate is not None  # the settings fill it in
    return RowWise(table, settings.catalogue_learning_rate)


@contextmanager
def gradients_of_rows(model: nn.Module, loss: object, *, wanted: bool) -> Iterator[None]:
    """Let model and loss give the catalogue sparse gradients meanwhile, or dense ones."""
    switched = [part for part in (model, loss) if hasattr(part, "sparse_grad")]
    before = [part.sparse_grad for part in switched]
    try:
        for part in switched:
            part.sparse_grad = wanted
        yield
    finally:
        for part, setting in zip(switched, before, strict=True):
            part.sparse_grad = setting
