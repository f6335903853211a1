"""One step of training: batch, states, loss, gradients, update. The host never waits in it."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from sce.data.batches import DeviceSequences, trainable_rows, training_batch
from sce.data.parts import Parts, fits, parts_for_all, parts_of, shares_longer
from sce.errors import InputError
from sce.losses import BucketStatistics
from sce.training.capture import CapturedSteps, StepResult
from sce.training.device import Precision

Loss = Callable[..., Tensor]
T = TypeVar("T")

_WIDTHS = 8  # of captured batches: a graph for each is recorded when it first occurs
_ROOMS = 128  # for the valid positions of a captured batch, where the loss makes room for them


class StepSeeds(NamedTuple):
    """The random numbers of one step follow from these alone."""

    model: int  # dropout, and whatever else draws from torch's default generators
    loss: int  # the generator that the loss is given


def seeds_of_epoch(seed: int, epoch: int, steps: int) -> tuple[int, list[StepSeeds]]:
    """Derive the seed of an epoch's order, and the seeds of its steps.

    Every step has its own, so training can go on from any step without saving generators.
    """
    state = np.random.SeedSequence([seed, epoch]).generate_state(2 * steps + 1, np.uint64)
    first, *rest = (int(number) >> 1 for number in state)
    return first, [StepSeeds(*pair) for pair in zip(rest[::2], rest[1::2], strict=True)]


class Batch(NamedTuple):
    """What a step is done with, on the device."""

    histories: Tensor  # [b, l]
    targets: Tensor  # [b, l]
    parts: Parts | None  # where the model takes them
    fixed: bool  # whether its shape is one of few


class TrainingStep:
    """Called with the rows of a batch, moves the weights once.

    Args:
        model: Histories [b, l] to states [b, l, d], with a `catalogue` [C, d]. One that takes
            `parts` is given batches sorted by length, and their parts (see `sce.data.parts`).
        loss: (states, catalogue, targets) to a scalar; given `generator=` if it takes one.
        optimizer: Over the parameters of both.
        sequences: The training sequences, on the device or on the host.
        device: Where the model is.
        max_length: The longest history.
        precision: "bf16" runs model and loss under autocast.
        clip_norm: The largest norm of the gradient.
        compiled: How many rows a batch has when the model is to be compiled for it; batches are
            then as wide as `max_length`, so that shapes never change. Other batches run as they
            are.
        captured: How many rows a batch has when its step is to be recorded as a CUDA graph (where
            the model takes no parts, one for each of a few widths). Other batches run as they are.
            The optimizer must be capturable, and model and loss must not make the host wait; a loss
            that takes valid positions out must take the argument `room`.

    Where the model takes parts, they are the same for all batches of as many rows, on a GPU and
    where it is compiled: libraries prepare for a shape when it first occurs, as fast attention does
    for 20 ms. The rare batch that does not fit into them has its own.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        sequences: DeviceSequences,
        *,
        device: torch.device,
        max_length: int,
        precision: Precision = "float32",
        clip_norm: float | None = None,
        compiled: int | None = None,
        captured: int | None = None,
    ) -> None:
        self.model, self.loss, self.optimizer, self.sequences = model, loss, optimizer, sequences
        self.device, self.max_length, self.clip_norm = device, max_length, clip_norm
        self.autocast = precision == "bf16"
        self.compiled_rows = compiled
        self.compiled_model = _compile(model, device, captured is not None) if compiled else model
        self.captured_rows = captured
        self._shares: list[float] | None = None  # of long rows, where parts are the same for all
        self._parts: dict[int, Parts] = {}  # of batches of so many rows
        self._takes_parts = "parts" in keyword_arguments(model)
        self._trainable = self._lengths(trainable_rows(sequences))
        if self._takes_parts and (device.type == "cuda" or compiled or captured):
            self._shares = shares_longer(self._trainable, max_length)
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        takes = keyword_arguments(loss)
        self.generator = torch.Generator(device) if "generator" in takes else None
        self.has_statistics = hasattr(loss, "statistics") and bool(loss.statistics)
        self._most: int | None = None  # valid positions of a batch
        if captured is not None and "max_targets" in takes:
            lengths = self._trainable
            self._most = int(lengths.topk(min(captured, len(lengths))).values.sum())
        self._captured: CapturedSteps | None = None
        if captured is not None:
            generators = [] if self.generator is None else [self.generator]
            self._captured = CapturedSteps(self._move_recorded, device, generators)

    def __call__(
        self, rows: Tensor, seeds: StepSeeds, *, with_statistics: bool = False
    ) -> StepResult:
        """Train on the sequences `rows` (on the host)."""
        self._seed(seeds)
        batch = self.batch(rows)
        histories, targets = batch.histories, batch.targets
        if self._captured is not None and batch.fixed and len(rows) == self.captured_rows:
            return self._captured(histories, targets, with_statistics, self._room(rows))
        return self.aside(
            lambda: self._move(histories, targets, with_statistics, None, batch.parts, batch.fixed)
        )

    def batch(self, rows: Tensor) -> Batch:
        """Make the batch of some sequences, in parts where the model takes them."""
        width: int | None
        if self._takes_parts:
            lengths, order = self._lengths(rows).sort(descending=True, stable=True)
            rows = rows[order]
            width, parts = self.max_length, self._parts_of_all(len(rows))
            if parts is None or not fits(lengths, parts):
                width, parts = None, parts_of(lengths, max(1, int(lengths[0])))
        else:
            width, parts = self._width(rows), None
        if self.device.type == "cuda":
            rows = rows.pin_memory()  # the GPU then fetches them while the host goes on
        histories, targets = training_batch(
            self.sequences, rows, max_length=width or self.max_length, pad_to=width
        )
        if histories.device != self.device:
            histories = histories.to(self.device, non_blocking=True)
            targets = targets.to(self.device, non_blocking=True)
        return Batch(histories, targets, parts, fixed=width is not None)

    def _parts_of_all(self, rows: int) -> Parts | None:
        """The parts of all batches of so many rows; None where each has its own."""
        if self._shares is None:
            return None
        if rows not in self._parts:
            among = len(self._trainable)
            self._parts[rows] = parts_for_all(self._shares, rows, self.max_length, among)
        return self._parts[rows]

    def aside(self, work: Callable[[], T]) -> T:
        """Do something else where steps run: what libraries keep for a stream then serves both."""
        return work() if self._captured is None else self._captured.aside(work)

    def _width(self, rows: Tensor) -> int | None:
        """The width of the batch if its shape is one of few, no less than its longest history."""
        if len(rows) == self.compiled_rows:
            return self.max_length
        if len(rows) != self.captured_rows:
            return None
        longest = int(self._lengths(rows).max())
        step = -(-self.max_length // _WIDTHS)
        return min(self.max_length, -(-longest // step) * step)

    def _room(self, rows: Tensor) -> int | None:
        """The room for the valid positions of the batch: one of few sizes, no less than them."""
        if self._most is None:
            return None
        step = -(-self._most // _ROOMS)
        return min(self._most, -(-int(self._lengths(rows).sum()) // step) * step)

    def _lengths(self, rows: Tensor) -> Tensor:
        """How many positions of each sequence are trained on."""
        return (self.sequences.lengths[rows] - 1).clamp(min=0, max=self.max_length)

    def _move_recorded(
        self, histories: Tensor, targets: Tensor, with_statistics: bool, room: int | None
    ) -> StepResult:
        parts = self._parts_of_all(len(histories))
        return self._move(histories, targets, with_statistics, room, parts, fixed=True)

    def _move(
        self,
        histories: Tensor,
        targets: Tensor,
        with_statistics: bool,
        room: int | None,
        parts: Parts | None,
        fixed: bool,
    ) -> StepResult:
        """Forward, backward, and the update."""
        self.optimizer.zero_grad(set_to_none=True)
        compiled = fixed and len(histories) == self.compiled_rows
        model = self.compiled_model if compiled else self.model
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            states = model(histories) if parts is None else model(histories, parts=parts)
            loss, statistics = self._loss(states, targets, with_statistics, room)
        del states
        _check_loss(loss)
        loss.backward()
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
        self.optimizer.step()
        # Between steps nobody needs gradients, which may be as large as the model: not even a
        # recording, whose memory the next one uses.
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(loss.detach(), statistics)

    def _loss(
        self, states: Tensor, targets: Tensor, with_statistics: bool, room: int | None
    ) -> tuple[Tensor, Tensor | None]:
        options: dict[str, Any] = {} if room is None else {"max_targets": room}
        if self.generator is not None:
            options["generator"] = self.generator
        if not (with_statistics and self.has_statistics):
            return self.loss(states, self.model.catalogue, targets, **options), None
        loss: Tensor
        found: BucketStatistics
        loss, found = self.loss.with_statistics(states, self.model.catalogue, targets, **options)
        return loss, torch.stack(list(found))

    def _seed(self, seeds: StepSeeds) -> None:
        torch.default_generator.manual_seed(seeds.model)
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index].manual_seed(seeds.model)
        if self.generator is not None:
            self.generator.manual_seed(seeds.loss)


def _check_loss(loss: object) -> None:
    """Refuse what a loss of the user's own may give by mistake."""
    if not isinstance(loss, Tensor):
        raise InputError(f"a loss must be a scalar tensor; got a {type(loss).__name__}")
    if loss.dim():
        raise InputError(f"a loss must be a scalar; got one of shape {list(loss.shape)}")
    if not loss.requires_grad:
        raise InputError("the loss depends on no parameter: was it detached from its graph?")


def _compile(model: nn.Module, device: torch.device, captured: bool) -> Callable[..., Tensor]:
    # On a GPU the model's kernels are so short that launching them is what takes the time:
    # "reduce-overhead" records them once and replays them as one. Dropout still follows the seeds.
    # Where the whole step is recorded, that is done already.
    mode = "reduce-overhead" if device.type == "cuda" and not captured else None
    compiled: Callable[..., Tensor] = torch.compile(model, dynamic=False, mode=mode)
    return compiled


def keyword_arguments(function: Loss) -> Sequence[str]:
    """The names that a function, or the forward of a module, can be given."""
    target = function.forward if isinstance(function, nn.Module) else function
    try:
        return list(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return []  # written in C
