"""One step of training: batch, hidden states, loss, gradients, update, without a sync."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from sce.data.batches import DeviceSequences, event_times, trainable_rows, training_batch
from sce.data.length_groups import (
    LengthGroups,
    fits,
    group_by_length,
    groups_for_all,
    shares_longer,
)
from sce.errors import InputError
from sce.losses import Loss
from sce.models.base import Backbone
from sce.training.capture import CapturedSteps, StepResult
from sce.training.device import plain_products
from sce.training.settings import TrainingSettings

T = TypeVar("T")

# Targets of captured batches are rounded up by so little of their mean: each number has graphs.
_BOUND = 1 / 32


class StepSeeds(NamedTuple):
    """The random numbers of one step follow from these alone."""

    model: int  # dropout, and whatever else draws from torch's default generators
    loss: int  # the generator that the loss is given


def seeds_of_epoch(seed: int, epoch: int, steps: int) -> tuple[int, list[StepSeeds]]:
    """Derive the seeds of an epoch's order and of its steps: training can resume from any step."""
    state = np.random.SeedSequence([seed, epoch]).generate_state(2 * steps + 1, np.uint64)
    first, *rest = (int(number) >> 1 for number in state)
    return first, [StepSeeds(*pair) for pair in zip(rest[::2], rest[1::2], strict=True)]


class Batch(NamedTuple):
    """A batch on the device."""

    histories: Tensor  # [b, l]
    targets: Tensor  # [b, l]
    length_groups: LengthGroups | None  # for a backbone of ours
    fixed: bool  # its shape is one of few: it can be compiled and captured
    times: Tensor | None = None  # [b, l + 1], for a model that uses them

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What differs from batch to batch of one shape."""
        known = self.histories, self.targets
        return known if self.times is None else (*known, self.times)

    @property
    def options(self) -> dict[str, Any]:
        """What the model is given beside histories."""
        given = {"length_groups": self.length_groups, "times": self.times}
        return {name: value for name, value in given.items() if value is not None}


class TrainingStep:
    """Called with the rows of a batch, moves the weights once.

    Model and loss are as for `fit`. A batch with fewer rows than `batch_size` is neither compiled
    nor captured; what is `captured` must not sync.

    On a GPU and where the step is compiled or captured, all batches of as many rows have the same
    length groups: libraries prepare for a shape when it first occurs, as fast attention does for
    20 ms. The rare batch that does not fit into them has its own.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor],
        optimizer: torch.optim.Optimizer,
        sequences: DeviceSequences,
        settings: TrainingSettings,
        *,
        device: torch.device,
        max_length: int,
        captured: bool = False,
    ) -> None:
        self.model, self.loss, self.optimizer, self.sequences = model, loss, optimizer, sequences
        self.device, self.max_length, self.captured = device, max_length, captured
        self.batch_size, self.clip_norm = settings.batch_size, settings.clip_norm
        self.precision, self.autocast = settings.precision, settings.precision == "bf16"
        self.compiled_model: Callable[..., Tensor] | None = None
        if settings.compile:
            # The model's kernels on a GPU are so short that launching them is what takes the time:
            # they are captured and replayed as one, unless the whole step is. Dropout still follows
            # the seeds.
            mode = "reduce-overhead" if device.type == "cuda" and not captured else None
            self.compiled_model = torch.compile(model, dynamic=False, mode=mode)
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.statistics = loss.statistics if isinstance(loss, Loss) else ()
        self.generator = torch.Generator(device) if isinstance(loss, Loss) else None
        self._lengths_of_all = self._lengths(trainable_rows(sequences))
        targets = self.targets(trainable_rows(sequences))
        fullest = targets.topk(min(self.batch_size, len(targets)))
        self.max_targets = int(fullest.values.sum())
        self.mean_targets = round(len(fullest.values) * float(targets.double().mean()))
        self._shares: list[float] | None = None  # of long rows, where all batches are cut alike
        self.fixed = settings.compile or captured
        if isinstance(model, Backbone) and (device.type == "cuda" or self.fixed):
            self._shares = shares_longer(self._lengths_of_all, max_length)
        self._groups: dict[int, LengthGroups] = {}  # of batches of so many rows
        self.upcoming: Tensor | None = None  # rows of the step after the next, if it is known
        self._captured: CapturedSteps | None = None
        if captured:
            generators = [] if self.generator is None else [self.generator]
            self._captured = CapturedSteps(self._move_captured, device, generators)

    def __call__(
        self, rows: Tensor, seeds: StepSeeds, *, with_statistics: bool = False
    ) -> StepResult:
        """Train on the sequences `rows` (on the host)."""
        self._seed(seeds)
        batch = self.batch(rows)
        captured = self._captured is not None and batch.fixed and len(rows) == self.batch_size
        max_targets = self._max_targets(rows, captured)
        if self._captured is not None and captured:
            return self._captured(batch.tensors, with_statistics, max_targets)
        with plain_products(self.device, self.precision):
            return self.on_capture_stream(lambda: self._move(batch, with_statistics, max_targets))

    def batch(self, rows: Tensor) -> Batch:
        """Make the batch of some sequences, sorted and grouped by length for a backbone."""
        width: int | None
        if isinstance(self.model, Backbone):
            lengths, order = self._lengths(rows).sort(descending=True, stable=True)
            rows = rows[order]
            width, groups = self.max_length, self._groups_for_all(len(rows))
            if groups is None or not fits(lengths, groups):
                width, groups = None, group_by_length(lengths, max(1, int(lengths[0])))
        else:  # one shape for all that are compiled or captured
            fixed = len(rows) == self.batch_size and self.fixed
            width, groups = self.max_length if fixed else None, None
        if self.device.type == "cuda":
            rows = rows.pin_memory()  # the GPU then fetches them while the host goes on
        longest = width or self.max_length
        histories, targets = training_batch(self.sequences, rows, max_length=longest, pad_to=width)
        options = {"max_length": longest, "width": histories.shape[1]}
        times = event_times(self.sequences, rows, **options)
        if isinstance(self.model, Backbone):
            histories = self.model.inputs(histories, targets)
        if histories.device != self.device:
            histories = histories.to(self.device, non_blocking=True)
            targets = targets.to(self.device, non_blocking=True)
            times = times if times is None else times.to(self.device, non_blocking=True)
        return Batch(histories, targets, groups, width is not None, times)

    def on_capture_stream(self, work: Callable[[], T]) -> T:
        """Run something else where steps run: workspaces kept for a stream then serve both."""
        return work() if self._captured is None else self._captured.on_capture_stream(work)

    def _groups_for_all(self, rows: int) -> LengthGroups | None:
        """The length groups of all batches of so many rows; None where each has its own."""
        if self._shares is None:
            return None
        if rows not in self._groups:
            among = len(self._lengths_of_all)
            self._groups[rows] = groups_for_all(self._shares, rows, self.max_length, among)
        return self._groups[rows]

    def _max_targets(self, rows: Tensor, captured: bool) -> int | None:
        """The bound on the targets of the batch that the loss is given."""
        if not isinstance(self.loss, Loss):
            return None
        if self.loss.sized_by_targets:
            return self.mean_targets
        if not captured:
            return None  # counting is cheaper than padding
        step = math.ceil(_BOUND * self.mean_targets)
        return min(self.max_targets, -(-int(self.targets(rows).sum()) // step) * step)

    def targets(self, rows: Tensor) -> Tensor:
        """Number of targets of each sequence, or the most where they are drawn."""
        lengths = self._lengths(rows)
        return self.model.most_targets(lengths) if isinstance(self.model, Backbone) else lengths

    def _lengths(self, rows: Tensor) -> Tensor:
        """Length of each history."""
        return (self.sequences.lengths[rows] - 1).clamp(min=0, max=self.max_length)

    def _move_captured(
        self, inputs: tuple[Tensor, ...], with_statistics: bool, max_targets: int | None
    ) -> StepResult:
        histories, targets, *times = inputs
        groups = self._groups_for_all(len(histories))
        batch = Batch(histories, targets, groups, True, *times)
        return self._move(batch, with_statistics, max_targets)

    def _move(self, batch: Batch, with_statistics: bool, max_targets: int | None) -> StepResult:
        """Forward, backward, and the update."""
        self.optimizer.zero_grad(set_to_none=True)
        loss, statistics = self._forward(batch, with_statistics, max_targets)
        loss.backward()
        self._update()
        return StepResult(loss.detach(), statistics)

    def _forward(
        self, batch: Batch, with_statistics: bool, max_targets: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the loss of a batch, and its statistics."""
        model: Callable[..., Tensor] = self.model
        whole = batch.fixed and len(batch.histories) == self.batch_size
        if whole and self.compiled_model is not None:  # has a len() of its own in older torch
            model = self.compiled_model
        (targets, given), statistics = self.draw(batch), None
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            states, catalogue = model(batch.histories, **given), cast("Any", self.model.catalogue)
            inputs = states, catalogue, targets
            options: dict[str, Any] = {}
            if isinstance(self.loss, Loss):
                options = {"generator": self.generator, "max_targets": max_targets}
            if with_statistics and self.statistics:
                loss, found = cast("Loss", self.loss).with_statistics(*inputs, **options)
                statistics = torch.stack(list(found))
            else:
                loss = self.loss(*inputs, **options)
        if not isinstance(loss, Tensor) or loss.dim():  # of the user's own
            what = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(f"a loss must be a scalar tensor; got {what}")
        if not loss.requires_grad:
            raise InputError("the loss depends on no parameter: was it detached from its graph?")
        return loss, statistics

    def draw(self, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
        """Return the targets of a step, and what the model is given with the histories."""
        if not isinstance(self.model, Backbone):
            return batch.targets, batch.options
        targets, given = self.model.draw(batch.targets)
        return targets, given | batch.options

    def _update(self) -> None:
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
        self.optimizer.step()
        # Between steps nobody needs gradients, which may be as large as the model: not even a
        # graph, whose memory the next one uses.
        self.optimizer.zero_grad(set_to_none=True)

    def _seed(self, seeds: StepSeeds) -> None:
        torch.default_generator.manual_seed(seeds.model)
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index].manual_seed(seeds.model)
        if self.generator is not None:
            self.generator.manual_seed(seeds.loss)
