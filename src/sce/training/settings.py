"""The settings of `fit`."""

import math
from dataclasses import dataclass
from typing import get_args

from sce.errors import InputError
from sce.training.device import Precision
from sce.training.optimizer import Schedule

_MOST = 2**31 - 1  # of anything that is counted
_SEEDS = 2**63  # torch's generators take no more
_CATALOGUE_RATE = 3e-2


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of training."""

    epochs: int = 100
    """Passes over the training sequences, at most."""
    batch_size: int = 128
    """Sequences in a step."""
    learning_rate: float = 1e-3
    """Adam's step size."""
    seed: int = 0
    """The same seed gives the same result on the same machine."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda, or cuda:N."""
    patience: int = 10
    """Stop after this many evaluations in a row without a better validation NDCG@10; 0: never."""
    evaluate_every: int = 1
    """Epochs between evaluations. The last epoch is evaluated too, and that counts if a resumed
    run has more."""
    evaluation_batch_size: int = 512
    """Users evaluated at once."""
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
    catalogue_learning_rate: float | None = None
    """Learning rate of the catalogue with row_wise; others have learning_rate. [default: 0.03]"""
    deterministic: bool = False
    """On a GPU too, give the same bits each time; slower. A CPU does in any case."""

    def __post_init__(self) -> None:
        counts = ("epochs", "batch_size", "evaluate_every", "evaluation_batch_size")
        not_negative = ("patience", "weight_decay", "warmup_steps")
        positive = ("learning_rate", "catalogue_learning_rate", "clip_norm")
        for name, value in vars(self).items():
            if value is None:
                continue
            if name in counts and value < 1:
                raise InputError(f"training.{name} must be at least 1; got {value}")
            if name in counts and value > _MOST:
                raise InputError(f"training.{name} must be at most {_MOST:,}")
            if name in not_negative and not 0 <= value < math.inf:
                raise InputError(f"training.{name} must not be negative; got {value}")
            if name in positive and not 0 < value < math.inf:
                raise InputError(f"training.{name} must be above 0; got {value}")
        if not 0 <= self.seed < _SEEDS:
            raise InputError(f"training.seed lies between 0 and 2**63 - 1; got {self.seed}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(f"training.betas are two numbers from 0 to below 1; got {self.betas}")
        for name, choices in (("schedule", get_args(Schedule)), ("precision", get_args(Precision))):
            if getattr(self, name) not in choices:
                raise InputError(
                    f"training.{name} is one of {', '.join(choices)}; got {getattr(self, name)!r}"
                )
        if self.warmup_steps is not None and self.schedule == "constant":
            raise InputError(
                "training.warmup_steps belongs to the schedule warmup-cosine, and the schedule is "
                "constant; leave one of the two out"
            )
        self._check_row_wise()

    def _check_row_wise(self) -> None:
        if not self.row_wise:
            if self.catalogue_learning_rate is not None:
                raise InputError(
                    "training.catalogue_learning_rate belongs to training.row_wise, which is off; "
                    "leave it out, or turn row_wise on"
                )
            return
        if self.catalogue_learning_rate is None:
            object.__setattr__(self, "catalogue_learning_rate", _CATALOGUE_RATE)
        why = {
            "clip_norm": "the entries of each row are added up in the update, after the norm",
            "weight_decay": "it moves every row at every step",
        }
        for name, reason in why.items():
            if getattr(self, name):
                raise InputError(
                    f"training.{name} does not go with training.row_wise ({reason}); leave one of "
                    "the two out"
                )
