"""`sce evaluate`: unsampled metrics of a run, beside popularity."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from sce.cli.output import output_console, show_metrics
from sce.errors import InputError
from sce.evaluation.evaluate import evaluate as measure
from sce.evaluation.ranking import Popularity, Ranker, check_memory
from sce.progress import ProgressDisplay
from sce.recommend import Recommender
from sce.training.device import resolve_device
from sce.training.run import Run


def evaluate(
    run: Annotated[Path, Parameter(name="RUN")],
    /,
    *,
    split: Literal["test", "validation"] = "test",
    keep_seen: bool = False,
    k: Annotated[list[int] | None, Parameter(consume_multiple=True)] = None,
    data: Path | None = None,
    device: str = "auto",
    batch_size: int = 512,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Rank the whole catalogue for every test user, and see where the held-out items stand.

    Args:
        run: Directory that "sce train" wrote.
        split: Which event is to be predicted: a user's last (test) or last but one (validation).
        keep_seen: Rank also what a user has had before; without it, that is left out.
        k: Depths of the metrics. [default: 1 5 10 20 50]
        data: The run's dataset, if it was moved.
        device: auto (a GPU if there is one), cpu, cuda, or cuda:N.
        batch_size: Users at once.
        as_json: Print JSON instead of a table.
    """
    opened = Run.open(run)
    place = resolve_device(device)
    dataset = opened.load_dataset(data)
    if not len(dataset.test):
        why = " (split none: all was trained on)" if dataset.split == "none" else ""
        raise InputError(f"{dataset.path} has no test users{why}: there is nothing to evaluate")
    rankers: dict[str, Ranker] = {
        opened.loss: Recommender.load(opened, str(place)).model,
        "popularity": Popularity(dataset.train, dataset.n_items, device=place),
    }
    check_memory(rankers[opened.loss].catalogue, batch_size)
    measured = partial(measure, dataset=dataset, split=split, keep_seen=keep_seen)
    measured = partial(measured, ks=None if k is None else sorted(set(k)), batch_size=batch_size)
    with ProgressDisplay() as display:
        tell = partial(display.update, total=len(dataset.test), unit="users")
        model, popularity = (
            measured(ranker, progress=partial(tell, f"evaluating {name}"))
            for name, ranker in rankers.items()
        )
    if as_json:
        facts = {"run": str(run), "split": split, "keep_seen": keep_seen}
        facts |= {"users": model.users, "seen_targets": model.seen_targets}
        facts |= {"model": model.values, "by_popularity": model.by_popularity}
        print(json.dumps(facts | {"popularity": popularity.values}))
        return
    values = {opened.loss: model.values, "popularity": popularity.values}
    show_metrics(values, title=split, users=model.users, apart=model.by_popularity)
    line = f"{model.users:,} users; items that a user has had before are "
    line += "ranked as well" if keep_seen else "left out"
    if model.seen_targets and not keep_seen:
        line += f", and so are targets among them: {model.seen_targets:,} misses"
    output_console().print(line, soft_wrap=True, markup=False)
