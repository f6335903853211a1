"""Training with the catalogue sharded over ranks: its step, its checkpoints, and when."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sce.data.prepared import PreparedDataset
from sce.distributed.checkpoint import load_sharded, save_sharded, whole_rows
from sce.distributed.loss import ShardedCrossEntropy
from sce.distributed.plan import needs_shards
from sce.distributed.ranks import Ranks
from sce.distributed.table import ShardedTable
from sce.errors import InputError, named
from sce.losses import ScalableCrossEntropy
from sce.losses.buckets import count_buckets
from sce.losses.scalable import ScalableCrossEntropySettings
from sce.models.base import Backbone
from sce.planning import Job, summarize_lengths
from sce.training.capture import StepResult
from sce.training.checkpoint import Checkpointer, write_tensors
from sce.training.run import MANIFEST, Run
from sce.training.settings import TrainingSettings
from sce.training.slices import SlicedStep, seeds_of_slice
from sce.training.step import Batch, StepSeeds

CATALOGUE = "catalogue"  # the parameter of a backbone


class ShardedStep(SlicedStep):
    """A step on rows that are looked up in a sharded table, by a `ScalableCrossEntropy`."""

    def __init__(self, *given: Any, table: ShardedTable, slices: int, **options: Any) -> None:
        loss = given[1]
        super().__init__(*given, ranks=table.ranks, slices=slices, row_wise=table.shard, **options)
        self.table, self.sharded = table, ShardedCrossEntropy(loss, table)
        model: Any = self.model
        model.sparse_grad = False  # all rows that were fetched have a gradient
        self._rows = torch.empty(0)  # of the step under way
        self._prepared: tuple[Tensor, int, Batch] | None = None  # the next batch

    def _move_slices(self, rows: Tensor, *others: Any) -> StepResult:
        self._rows = rows
        return super()._move_slices(rows, *others)

    def _take(self, rows: Tensor, number: int) -> Batch:
        """Return a batch of the rows of a step, which may have been prepared."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] is rows and prepared[1] == number:
            return prepared[2]
        own = rows[number * self.batch_size :][: self.batch_size]
        empty = torch.empty(0, 1, dtype=torch.int64, device=self.device)
        return self.batch(own) if len(own) else Batch(empty, empty, (), True)

    def _prepare(self, number: int) -> None:
        """Make the batch after this one, and have its sizes exchanged with those of this one."""
        number += self.ranks.size
        rows: Tensor | None = self._rows
        if number >= self.slices:
            rows, number = self.upcoming, self.ranks.rank
        if rows is not None:
            batch = self._take(rows, number)
            self._prepared = rows, number, batch
            given = batch.histories, batch.targets
            self.sharded.expect(*given, max_targets=self.mean_targets)

    def _total(
        self, rows: Tensor, seeds: StepSeeds, number: int, with_statistics: bool
    ) -> tuple[Tensor, Tensor | None]:
        self._seed(seeds_of_slice(seeds, number))
        batch = self._take(self._rows, number)
        histories = batch.histories
        found = self.sharded.look_up(histories, batch.targets, max_targets=self.mean_targets)
        self._prepare(number)
        targets, given = self.draw(batch)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            states = found.values.new_empty(0, 1, self.table.dim)
            if len(rows):
                weights, places = {CATALOGUE: found.values}, found.places(histories)
                states = functional_call(self.model, weights, (places,), given)
            options: Any = {"generator": self.generator, "max_targets": self.mean_targets}
            if with_statistics:
                options["count"] = count_buckets
            total, counted = self.sharded.total(states, found, targets, **options)
        return total, torch.stack(list(counted)) if with_statistics and len(rows) else None

    @torch.no_grad()
    def _count_placed(self, *given: Any) -> int:
        return super()._count_placed(*given)

    def _collect_rows(self) -> None:
        self.table.collect_gradients()

    def _send_rows(self) -> None:
        self.table.send_gradients()


class ShardedCheckpointer(Checkpointer):
    """Saves the shards of all ranks, which call it together; each keeps its own best one."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        assert self.trained.table is not None
        self.table, self.takes_part = self.trained.table, True
        self._best_shard: Tensor | None = None

    @property
    def place(self) -> Path:
        """The directory of the run."""
        return super().place.parent

    def _read(self, path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        more: dict[str, Tensor] = {}
        found = load_sharded(path.parent, self.table, self.trained.optimizer, more=more)
        self._best_shard = more.get("best")
        return found

    def _write(
        self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]
    ) -> None:
        progress = metadata["progress"]
        step = sum(record["steps"] for record in progress["history"]) + progress["current"]["step"]
        has_best = any(name.startswith("best.") for name in tensors)
        more = {"best": self._best_shard} if has_best and self._best_shard is not None else {}
        given = self.table, self.trained.optimizer, tensors, metadata
        save_sharded(path.parent, step, *given, more=more)

    def keep_best(self) -> None:
        """Remember the weights, and the shard here, as they are now."""
        super().keep_best()
        self._best_shard = self.table.shard.detach().to("cpu", copy=True)

    def restore_best(self) -> None:
        """Give model, loss and table the weights of the best epoch."""
        super().restore_best()
        assert self._best_shard is not None
        self.table.shard.data.copy_(self._best_shard)

    def _write_best(self, weights: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        if self.state_file is None:
            return
        assert self._best_shard is not None
        rows = whole_rows(self.table, self._best_shard)
        if self.best_file is None:  # of another rank, which is sent the rows
            for _ in rows:
                pass
            return
        shape = [self.table.n_items, self.table.dim]
        streamed = CATALOGUE, self._best_shard.dtype, shape, rows
        write_tensors(self.best_file, weights, metadata, streamed)


@contextmanager
def sharded_catalogue(
    model: nn.Module, loss: object, ranks: Ranks, settings: TrainingSettings
) -> Iterator[ShardedTable | None]:
    """For the block, take the catalogue out of the model and share it among ranks, if wanted.

    New rows are drawn for a catalogue on the meta device, which it stays. Any other has the trained
    rows afterwards, and the model is where it was.
    """
    if not settings.shard_catalogue:
        yield None
        return
    shards = named("training.shard_catalogue")
    if type(loss) is not ScalableCrossEntropy or loss.reduction != "mean":
        raise InputError(f"{shards} needs the loss sce, as a mean; leave one of the two out")
    if not isinstance(model, Backbone) or CATALOGUE not in dict(model.named_parameters()):
        raise InputError(
            f"{shards} needs a sce.models.base.Backbone that looks items up in its "
            f"parameter `catalogue`, as SASRec does; {type(model).__name__} does not"
        )
    catalogue: Any = model.catalogue
    rows = None if catalogue.is_meta else catalogue
    n_items, dim = catalogue.shape
    if catalogue.element_size() < 4:
        raise InputError(f"{shards} needs a model in float32; this is in {catalogue.dtype}")
    if n_items < ranks.size:
        raise InputError(f"{ranks.size} processes cannot share {n_items} items; start fewer")
    options: Any = {"seed": settings.seed, "dtype": catalogue.dtype, "rows": rows}
    table = ShardedTable(n_items, dim, ranks, **options)
    table.shard.requires_grad_(catalogue.requires_grad)
    model.register_parameter(CATALOGUE, None)
    try:
        yield table
        if rows is not None:
            first = 0
            for some in whole_rows(table, table.shard.detach(), to_all=True):
                rows.data[first : first + len(some)] = some.to(rows.device)
                first += len(some)
            model.to(rows.device)
    finally:
        model.register_parameter(CATALOGUE, catalogue)


def chose_shards() -> str:
    """What is said where shards were chosen for the user."""
    by = named("training.shard_catalogue")
    return f"one GPU is too small for the catalogue: all share its rows, row-wise ({by})"


def begun_with(out: Path | str | None) -> dict[str, Any]:
    """What the run that is there, if one is, has settled: batches, shards, where it began."""
    if out is None or not (Path(out) / MANIFEST.file).exists():
        return {}
    run = Run.open(out)
    training, start = run.config["training"], run.config.get("start")
    batches, shards = training.get("accumulate") or 1, bool(training.get("shard_catalogue"))
    saved = run.resume_state.exists()
    return {"accumulate": batches, "shard_catalogue": shards, "start": start, "saved": saved}


def need_shards(
    settings: TrainingSettings,
    backbone: Any,
    loss: object,
    dataset: PreparedDataset,
    *,
    ranks: int,
    device: torch.device,
) -> bool:
    """True if only with shards the GPUs of all ranks are large enough, as `sce plan` has it.

    `backbone` are the settings of the model; `loss` is a Scalable Cross-Entropy, or its settings.
    """
    if settings.shard_catalogue is not None or ranks == 1 or device.type != "cuda":
        return False
    try:
        replace(settings, shard_catalogue=True)
    except InputError:  # for another setting
        return False
    width, found = summarize_lengths(dataset.train.lengths, backbone.max_length)
    names = [option.name for option in fields(ScalableCrossEntropySettings)]
    job = Job(
        items=dataset.n_items,
        batch=settings.batch_size,
        backbone=replace(backbone, max_length=width),
        precision=settings.precision,
        options={name: value for name in names if (value := getattr(loss, name)) != "auto"},
        users=len(dataset.train),
        events=len(dataset.train.items),
        **found,
    )
    memory = torch.cuda.get_device_properties(device).total_memory
    return needs_shards(job, ranks, memory, row_wise=settings.row_wise)


def settle(
    settings: TrainingSettings,
    model: nn.Module,
    loss: object,
    dataset: PreparedDataset,
    ranks: Ranks,
    begun: Mapping[str, Any],
) -> tuple[TrainingSettings, str]:
    """Settle how many batches a step has and whether there are shards; and what to say of it."""
    if (slices := settings.accumulate or begun.get("accumulate") or ranks.size) > 1:
        settings = replace(settings, accumulate=slices)
    if slices % ranks.size:
        raise InputError(
            f"{ranks.size} processes cannot share the {slices} batches of a step equally "
            f"({named('training.accumulate')}); start as many, or a number that divides it"
        )
    if begun:
        if begun["shard_catalogue"] and settings.shard_catalogue is None:
            settings = replace(settings, shard_catalogue=True)
        return settings, ""
    options: Any = {"ranks": ranks.size, "device": ranks.device}
    small = type(loss) is ScalableCrossEntropy and isinstance(model, Backbone)
    small = small and need_shards(settings, model.settings, loss, dataset, **options)
    if not any(each for (each,) in ranks.gather_counts(int(small))):
        return settings, ""
    return replace(settings, shard_catalogue=True), chose_shards()
