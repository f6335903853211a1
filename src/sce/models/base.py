"""The base class of every backbone: a model from histories to hidden states."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, get_type_hints

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.func import functional_call

from sce.data.batches import PADDING
from sce.data.length_groups import LengthGroups
from sce.errors import InputError, check_types, checked
from sce.models.packing import cut, pack

# More is a mistake, and would take hours or all memory to build.
_MOST = {"dim": 2**27, "blocks": 1000, "heads": 2**27, "max_length": 2**27, "widening": 1000}


class Backbone(nn.Module):
    """Maps histories [b, l] to hidden states [b, l, d]; scores are `states @ catalogue.T`.

    Derive from it for a model of your own that wants what training can give: batches cut by length,
    row-wise updates, capture in a CUDA graph, a place in `sce plan`. Any module from histories to
    states with a `catalogue` can be trained as well.
    """

    catalogue: nn.Parameter
    """Item embeddings, [items, d]: input of the model and, live, its output layer."""
    settings: Any
    """The settings that it was built from, a `BackboneSettings`."""
    draws: bool = False
    """Training draws targets out of all: see `draw`."""
    sparse_grad: bool = False
    """Give the catalogue a sparse gradient, of the rows that were looked up."""

    @property
    def max_length(self) -> int:
        """Maximum history length."""
        return int(self.settings.max_length)

    @property
    def uses_times(self) -> bool:
        """True if `forward` and `encode` are given `times`, int32 [b, l + 1].

        Those of the events, in seconds, and behind the last of them that of the next event, or of
        the moment that is asked about; where there is neither they are arbitrary.
        """
        return False

    def forward(self, histories: Tensor, length_groups: LengthGroups | None = None) -> Tensor:
        """Return the hidden states [b, l, d]; the one at a position predicts the item after it.

        Histories [b, l] are padded on the right with `sce.PADDING`. With `length_groups`, each a
        number of rows and a width, no history is longer than its group is wide: the rest of the
        padding need not be computed.
        """
        raise NotImplementedError

    def inputs(self, histories: Tensor, targets: Tensor) -> Tensor:
        """Return what `forward` is given in training, of histories and the items that came next."""
        return histories

    def draw(self, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Draw the targets of a step out of all, [b, l]; and what more `forward` is given then.

        By torch's default generators, and without a sync. The others become `IGNORED`.
        """
        return targets, {}

    def most_targets(self, lengths: Tensor) -> Tensor:
        """Return how many targets `draw` leaves, at most, where there are so many."""
        return lengths

    def encode(self, embedded: Tensor, lengths: Tensor) -> Tensor:
        """Return the hidden state after each history, [b, d]: what is exported.

        In evaluation that is the last of `forward`, but for rounding. Nothing depends on the values
        in a batch but by operations on tensors, and the catalogue is not used.

        Args:
            embedded: Rows of the catalogue, [b, l, d]; those at padding are arbitrary.
            lengths: Events of each history, at least one, int64 [b].
        """
        raise NotImplementedError

    def activation_bytes(self, sequences: int, positions: int, *, half: bool) -> float:
        """Return the bytes that are kept for the backward pass, with the hidden states.

        Args:
            sequences: Histories in the batch.
            positions: Positions that are computed: those of all length groups.
            half: Run under autocast to half precision.
        """
        raise NotImplementedError

    def pair_bytes(self, *, half: bool) -> tuple[float, float]:
        """Return bytes for each two positions of a history, of a model that stores such matrices.

        Those that are kept for the backward pass besides `activation_bytes`, and those that it
        takes while it computes one block.
        """
        return 0.0, 0.0

    def backward_bytes(self, positions: int, *, half: bool) -> float:
        """Return the bytes that the backward pass of a layer takes beyond those that were kept."""
        return 4.0 * positions * self.catalogue.shape[1]  # gradients before and behind the layer

    def check(self, histories: Tensor) -> None:
        """Refuse histories that are none of this catalogue, or too long."""
        if histories.ndim != 2 or histories.is_floating_point():
            raise InputError(
                "histories are integers of shape [batch, length]; got "
                f"{histories.dtype} of shape {list(histories.shape)}"
            )
        if torch.compiler.is_exporting():
            return  # for histories of any length
        length = histories.shape[1]
        if length > self.max_length:
            raise InputError(
                f"histories of {length} events do not fit max_length {self.max_length}; give the "
                f"last {self.max_length} of each"
            )
        if histories.device.type != "cpu" or torch.compiler.is_compiling():
            return  # looking at values is a sync; embedding lookups still check
        outside = (histories != PADDING) & ((histories < 0) | (histories >= len(self.catalogue)))
        if outside.any():
            raise InputError(
                f"item {int(histories[outside][0])} is not in the catalogue of "
                f"{len(self.catalogue)} items (padding is {PADDING})"
            )
        real = (histories != PADDING).int()
        if (real.diff(dim=1) > 0).any():
            raise InputError("this model takes histories padded on the right, without gaps")

    def embed(self, histories: Tensor, groups: LengthGroups) -> Tensor:
        """Return rows of the catalogue at the positions of all groups, [n, d]; at padding any.

        Where an event follows padding, or is outside of its group, the index is out of bounds.
        """
        real = histories != PADDING
        events = real.sum(1, keepdim=True)
        inside = torch.cat([each.sum(1, keepdim=True) for each in cut(real, groups)])
        columns = torch.arange(histories.shape[1], device=histories.device)
        wrong = (real & (columns >= events)) | (inside < events)
        items = torch.where(real, histories, 0) + wrong * 2**31  # more than any catalogue has
        return self.look_up(pack(items, groups))

    def look_up(self, items: Tensor) -> Tensor:
        """Return rows of the catalogue, whose gradient is sparse where `sparse_grad` says so."""
        # A compiled graph knows no sparse gradients: such a lookup stays outside of it.
        outside = self.sparse_grad and torch.compiler.is_compiling()
        look_up = torch.compiler.disable(F.embedding) if outside else F.embedding
        return look_up(items, self.catalogue, sparse=self.sparse_grad)


@dataclass(frozen=True)
class BackboneSettings:
    """Base of the frozen dataclass beside a backbone: fields are the options, with their help."""

    backbone: ClassVar[type["ConfiguredBackbone"]]

    dim: int = 64
    """Width of item embeddings and hidden states."""
    blocks: int = 2
    """Blocks, one after another."""
    dropout: float = 0.2
    """Share of activations and attention weights dropped in training."""
    max_length: int = 200
    """Maximum history length; of a longer one the last events count."""

    def __post_init__(self) -> None:
        vars(self).update(check_types(vars(self), get_type_hints(type(self)), "model."))
        for name, value in vars(self).items():
            most = _MOST.get(name)
            if most is not None and not 1 <= value <= most:
                bound = "at least 1" if value < 1 else f"at most {most:,}"
                raise InputError(f"{name} must be {bound}; got {value}")
        if not 0 <= self.dropout < 1:
            raise InputError(f"dropout is a share from 0 to below 1; got {self.dropout}")

    def build(self, n_items: int, *, seed: int = 0) -> "ConfiguredBackbone":
        """Make the model with new weights, which follow from the seed alone."""
        return self.backbone(n_items, self, seed=seed)


class ConfiguredBackbone(Backbone):
    """A backbone that is built from settings, those of its `settings_class`."""

    settings_class: ClassVar[type[BackboneSettings]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "settings_class" in vars(cls):
            cls.settings_class.backbone = cls

    @checked
    def __init__(
        self, n_items: int, settings: Any = None, *, seed: int = 0, **options: Any
    ) -> None:
        """Make a model with new weights.

        Args:
            n_items: Items in the catalogue, C.
            settings: The settings, all at once.
            seed: The initial weights follow from it alone; the global random state is neither
                read nor moved.
            options: Settings by name, such as dim=64.
        """
        super().__init__()
        if n_items < 1:
            raise InputError(f"a model needs at least one item; got {n_items}")
        if not isinstance(settings, self.settings_class | None):
            kind = self.settings_class.__name__
            raise InputError(f"settings must be {kind} or None; got {settings!r}")
        self.settings = replace(settings or self.settings_class(), **options)
        self.catalogue = nn.Parameter(torch.empty(n_items, self.settings.dim))
        self.dropout = nn.Dropout(self.settings.dropout)
        self._build()
        if not self.catalogue.is_meta:  # made to be counted, or to be filled from a file
            with torch.no_grad():
                self._fill(torch.Generator(device=self.catalogue.device).manual_seed(seed))

    def encode(self, embedded: Tensor, lengths: Tensor, *times: Tensor) -> Tensor:
        """Return the hidden state after each history, [b, d]: see `Backbone.encode`.

        It is the last that `forward` gives with the embedded events as the whole catalogue.
        """
        rows, width = embedded.shape[:2]
        places = torch.arange(rows * width, device=embedded.device).view(rows, width)
        histories = places.where(places[:1] < lengths[:, None], PADDING)
        catalogue = {"catalogue": embedded.flatten(0, 1)}
        states: Tensor = functional_call(self, catalogue, (histories, None, *times))
        final = (lengths - 1)[:, None, None].expand(-1, -1, states.shape[2])
        return states.gather(1, final)[:, 0]

    def _build(self) -> None:
        """Make all layers, without weights."""
        raise NotImplementedError

    def _fill(self, generator: torch.Generator) -> None:
        """Draw new weights."""
        raise NotImplementedError
