"""The settings of `fit`."""

import math
from dataclasses import dataclass
from typing import Literal, get_type_hints

from sce.documented import documented
from sce.errors import InputError, check_types, named
from sce.training.device import Precision

Schedule = Literal["constant", "warmup-cosine"]

_CATALOGUE_RATE = 3e-2


@documented
@dataclass(frozen=True)
class TrainingSettings:
    """Settings of training; `sce train --help` explains each, under the same name."""

    epochs: int = 100
    """Passes over the training sequences, at most."""
    batch_size: int = 128
    """Sequences in a step."""
    accumulate: int | None = None
    """Batches in a step. The processes that torchrun starts share them: any number that divides it
    gives the same result, to the bit. [default: one for each process; on resuming, as before]"""
    learning_rate: float = 1e-3
    """Adam's step size."""
    seed: int = 0
    """On a CPU the same seed gives the same result on the same machine; on a GPU with
    `deterministic`."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda, or cuda:N."""
    patience: int = 10
    """Stop after this many evaluations in a row without a better validation NDCG@10; 0: never."""
    evaluate_every: int = 1
    """Epochs between evaluations. The last epoch is evaluated too, and that counts if a resumed
    run has more."""
    evaluation_batch_size: int = 512
    """Users evaluated at once."""
    validation_users: int | None = None
    """Evaluate epochs on a random sample of so many test users, the same in every epoch and run;
    the last evaluation, on test, is of all. [default: all]"""
    max_steps: int | None = None
    """Stop after so many steps, if the epochs are not over before. [default: never]"""
    save_minutes: float = 5.0
    """Save within an epoch, to resume from there, when the last save was so many minutes ago; less
    often where saving would take more than a twentieth of the time."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Adam's averaging of gradients and of their squares."""
    weight_decay: float = 0.0
    """Decoupled, as in AdamW."""
    clip_norm: float | None = None
    """Largest norm of the gradient. [default: any]"""
    schedule: Schedule = "constant"
    """Learning rate: constant, or a linear warm-up and then a cosine down to 0."""
    warmup_steps: int | None = None
    """Steps of the warm-up. [default: a twentieth of all]"""
    precision: Precision = "float32"
    """float32; tf32 in matrix products on a GPU; or bf16, by autocast."""
    compile: bool = False
    """Compile the model: quicker steps after a slow first one. Batches have a fixed width then."""
    capture: bool | None = None
    """Capture the step in a CUDA graph. [default: on a GPU, where model and loss are of sce and can
    be captured]"""
    row_wise: bool = False
    """Update only the rows of the catalogue that a step touches, by row-wise Adagrad: for huge
    catalogues, where Adam over all rows takes most of time and memory. Not equal to Adam: rows have
    no momentum, and shorter steps the more they have moved. Needs the loss sce."""
    shard_catalogue: bool | None = None
    """Share the rows of the catalogue among the processes that torchrun starts, for one that a GPU
    does not hold; includes row_wise. Any number of processes gives the same result, to the bit.
    [default: where the GPUs are too small for all of it]"""
    catalogue_learning_rate: float | None = None
    """Learning rate of the catalogue with row_wise; others have learning_rate. [default: 0.03]"""
    deterministic: bool = False
    """On a GPU too, give the same bits each time; slower. A CPU does in any case."""

    def __post_init__(self) -> None:
        vars(self).update(check_types(vars(self), get_type_hints(type(self)), "training."))
        counts = {"epochs", "batch_size", "evaluate_every", "evaluation_batch_size"}
        counts |= {"validation_users", "max_steps", "accumulate"}
        not_negative = ("patience", "weight_decay", "warmup_steps", "save_minutes")
        positive = ("learning_rate", "catalogue_learning_rate", "clip_norm")
        for name, value in vars(self).items():
            if value is None:
                continue
            setting = named(f"training.{name}")
            if name in counts and not 1 <= value < 2**31:
                raise InputError(f"{setting} must be from 1 to 2**31 - 1; got {value}")
            if name in not_negative and not 0 <= value < math.inf:
                raise InputError(f"{setting} must not be negative; got {value}")
            if name in positive and not 0 < value < math.inf:
                raise InputError(f"{setting} must be above 0; got {value}")
        if not 0 <= self.seed < 2**63:  # torch's generators take no more
            raise InputError(f"{named('seed')} lies between 0 and 2**63 - 1; got {self.seed}")
        if not all(0 <= beta < 1 for beta in self.betas):
            betas = named("training.betas")
            raise InputError(f"{betas} are two numbers from 0 to below 1; got {self.betas}")
        if self.shard_catalogue:
            object.__setattr__(self, "row_wise", True)
        if self.row_wise and self.catalogue_learning_rate is None:
            object.__setattr__(self, "catalogue_learning_rate", _CATALOGUE_RATE)
        constant = named("training.schedule", "constant"), self.schedule == "constant"
        by_rows = named("training.row_wise"), self.row_wise
        sharded = named("training.shard_catalogue"), bool(self.shard_catalogue)
        for name, other, clash, reason in (
            ("warmup_steps", *constant, "it belongs to warmup-cosine"),
            ("catalogue_learning_rate", f"{by_rows[0]} off", not self.row_wise, "it belongs to it"),
            ("clip_norm", *by_rows, "entries of a row are added up after it"),
            ("weight_decay", *by_rows, "it moves every row at every step"),
            ("compile", *sharded, "each step has another number of rows"),
            ("capture", *sharded, "ranks wait for each other in a step"),
        ):
            if clash and getattr(self, name) not in (None, 0.0):
                what = f"{named(f'training.{name}')} does not go with {other}"
                raise InputError(f"{what} ({reason}); leave one of the two out")

    @property
    def step_size(self) -> int:
        """Sequences in a step, of all its batches."""
        return self.batch_size * (self.accumulate or 1)
