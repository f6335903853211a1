"""A few steps of training for the memory they take: nothing is evaluated, nothing is kept.

    python -m sce.experiments.steps PREPARED --config FILE --out DIR --steps 40

The steps are those of `fit`, on a sample of the training users and without test users. What the
memory is taken by is measured once more, stage by stage: see components.py.
"""

import argparse
import gc
import json
import sys
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from sce.config import Config, load_toml
from sce.data.prepared import PreparedDataset, Sequences
from sce.data.storage import write_text
from sce.errors import InputError
from sce.experiments.components import measure_components
from sce.training.device import resolve_device
from sce.training.epochs import steps_per_epoch
from sce.training.loop import TrainingWarning, fit


def measure_steps(dataset: PreparedDataset, config: Config, steps: int) -> dict[str, Any]:
    """Train for about so many steps; return what result.json shall hold."""
    model, loss = config.build(dataset)  # sized for all of the data
    few = _sample(dataset, steps * config.training.batch_size, config.training.seed)
    epochs = -(-steps // steps_per_epoch(len(few.train), config.training.batch_size))
    settings = replace(config.training, epochs=epochs, patience=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrainingWarning)  # that there are no test users
        result = asdict(fit(model, loss, few, settings=settings, progress=False))
    del result["history"], model, loss
    gc.collect()  # what training took is not to be measured again
    device = resolve_device(config.training.device)
    return result | {"components_mib": measure_components(dataset, config, device)}


def _sample(dataset: PreparedDataset, count: int, seed: int) -> PreparedDataset:
    """The dataset with so many of its training users, drawn at random, and none to test."""
    train = dataset.train
    usable = np.flatnonzero(train.lengths >= 2)
    if not len(usable):
        raise InputError("there is nothing to train on: no sequence has two events")
    chosen = np.random.default_rng(seed).permutation(usable)[:count]
    chosen.sort()
    parts = [train.items[train.offsets[row] : train.offsets[row + 1]] for row in chosen]
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
    return replace(
        dataset,
        train=Sequences(np.concatenate(parts), offsets, train.users[chosen]),
        test=Sequences(train.items[:0], offsets[:1], train.users[:0]),
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure, and write DIR/result.json; return 2 when it cannot be."""
    parser = argparse.ArgumentParser(prog="python -m sce.experiments.steps", description=__doc__)
    parser.add_argument("prepared", type=Path)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    given = parser.parse_args(arguments)
    try:
        config = Config.compose(load_toml(given.config))
        result = measure_steps(PreparedDataset.load(given.prepared), config, given.steps)
        given.out.mkdir(parents=True, exist_ok=True)
        write_text(given.out / "result.json", json.dumps(result, indent=2) + "\n")
    except (InputError, OSError) as error:
        print("sce: error: " + " ".join(str(error).split()), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
