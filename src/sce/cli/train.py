"""Stopgap."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from sce.config import Config, load_toml
from sce.data.prepared import PreparedDataset
from sce.training.begin import check_target
from sce.training.interrupt import TrainingInterrupted
from sce.training.loop import fit


def train(
    prepared: Annotated[Path, Parameter(name="PREPARED")],
    /,
    *,
    out: Path,
    config: Path,
    resume: bool = False,
    force: bool = False,
) -> int:
    """Train."""
    chosen = Config.compose(load_toml(config))
    check_target(out, force=force, resume=resume)
    dataset = PreparedDataset.load(prepared)
    try:
        model, loss = chosen.build(dataset)
        fit(model, loss, dataset, settings=chosen.training, out=out, resume=resume, force=force,
            config=chosen.to_dict())
    except TrainingInterrupted as interruption:
        return interruption.exit_code
    return 0
