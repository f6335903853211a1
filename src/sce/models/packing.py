"""The positions of a batch's length groups, one after another: what a backbone computes."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from sce.data.batches import PADDING
from sce.data.length_groups import LengthGroups
from sce.errors import InputError


def check_groups(histories: Tensor, groups: LengthGroups | None) -> LengthGroups:
    """Return the length groups of a batch, by default one; refuse those of another."""
    if groups is None:
        return ((histories.shape[0], histories.shape[1]),)
    shape = list(histories.shape)
    sound = groups and all(rows > 0 and 0 < width <= shape[1] for rows, width in groups)
    if not sound or sum(rows for rows, _ in groups) != shape[0]:
        raise InputError(f"length groups {groups} are not those of a batch of shape {shape}")
    if histories.device.type != "cpu" or torch.compiler.is_compiling():
        return groups
    lengths = (histories != PADDING).sum(1).split([rows for rows, _ in groups])
    if any((some > width).any() for some, (_, width) in zip(lengths, groups, strict=True)):
        raise InputError(f"histories are longer than their groups {groups} are wide")
    return groups


def cut(tensor: Tensor, groups: LengthGroups) -> list[Tensor]:
    """Return the groups of a batch [b, l], each [rows, width]."""
    by_rows = tensor.split([rows for rows, _ in groups])
    return [each[:, :width] for each, (_, width) in zip(by_rows, groups, strict=True)]


def pack(tensor: Tensor, groups: LengthGroups) -> Tensor:
    """Return the positions of all groups of a batch [b, l], one after another, [n]."""
    return join([each.flatten() for each in cut(tensor, groups)])


def split(states: Tensor, groups: LengthGroups) -> list[Tensor]:
    """Return states [n, d] as those of each group, [rows, width, d]."""
    each = states.split([rows * width for rows, width in groups])
    return [part.unflatten(0, group) for part, group in zip(each, groups, strict=True)]


def unpack(states: Tensor, groups: LengthGroups, length: int) -> Tensor:
    """Return states [n, d] as a batch [b, l, d]; zeros where there is no group."""
    lacking = [length - width for _, width in groups]
    return join(
        [
            F.pad(part, (0, 0, 0, lack)) if lack else part
            for part, lack in zip(split(states, groups), lacking, strict=True)
        ]
    )


def join(tensors: list[Tensor]) -> Tensor:
    """Return tensors one after another; one alone is not copied."""
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]
