"""Names and settings of model and loss for run.json: a run is resumed with the same alone."""

import math
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sce.data.storage import digest_bytes
from sce.errors import InputError
from sce.losses import LOSSES
from sce.models.base import Backbone
from sce.models.registry import BACKBONES
from sce.training.code import digest_code

_NOT_SETTINGS = ("training", "sparse_grad")  # which `fit` sets itself


def name_model(model: nn.Module) -> str:
    """The model's name in `BACKBONES`, or the class of a user's own, also if derived from ours."""
    names = [name for name, entry in BACKBONES.items() if type(model) is entry.backbone]
    return names[0] if names else _path(type(model))


def describe_model(model: nn.Module) -> dict[str, Any]:
    """The model's name and settings; of a user's own, its code and the number of parameters."""
    name = name_model(model)
    # Its parts in the order of their names, which is that of no process.
    parts = {type(part) for part in model.modules()} if name not in BACKBONES else set()
    code = digest_code(sorted(parts, key=_path))
    if isinstance(model, Backbone):
        return {"name": name, **vars(model.settings), **code}
    return {"name": name, "parameters": sum(p.numel() for p in model.parameters()), **code}


def describe_loss(loss: Callable[..., Tensor], name: str | None = None) -> dict[str, Any]:
    """The given name; else that of the function, or the class and its public attributes, and code.

    Raises:
        InputError: When it cannot be told from another: a lambda, a partial, a closure.
    """
    if name is not None:
        return {"name": name}
    try:
        code: list[Any] = []
        found = _describe(loss, code)
    except (_Nameless, RecursionError) as error:
        raise InputError(
            f"a run remembers its loss, to be resumed with the same, and {error} cannot be told "
            'from another like it; name it: fit(..., loss_name="...")'
        ) from error
    return (found if isinstance(found, dict) else {"name": found}) | digest_code(code)


class _Nameless(Exception):  # noqa: N818 - becomes an InputError
    """Nothing tells this value from another like it."""


def _describe(value: Any, code: list[Any]) -> Any:
    """A value as JSON; an object by its class and public attributes.

    Functions and classes are added to `code`.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, torch.dtype | torch.device | Enum):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # which JSON does not have
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        flat = value.detach().cpu().reshape(-1).view(torch.uint8).numpy()
        return {"shape": list(value.shape), "digest": digest_bytes(flat.tobytes())[:16]}
    if isinstance(value, np.ndarray):
        return _describe(torch.from_numpy(value), code)
    if isinstance(value, list | tuple):
        return [_describe(one, code) for one in value]
    if isinstance(value, Mapping):
        return {str(key): _describe(one, code) for key, one in value.items()}
    if hasattr(value, "__qualname__") and not isinstance(value, MethodType):
        if "<lambda>" in value.__qualname__ or getattr(value, "__closure__", None):
            raise _Nameless(f"{value.__qualname__}, a lambda or a function with values of its own,")
        code.append(value)
        return _path(value)
    if isinstance(value, partial | MethodType) or not hasattr(value, "__dict__"):
        raise _Nameless(f"a {type(value).__name__}")
    code.append(type(value))
    ours = [name for name, entry in LOSSES.items() if type(value) is entry.loss]
    attributes = vars(value) | dict(value.named_children() if isinstance(value, nn.Module) else ())
    return {"name": ours[0] if len(ours) == 1 else _path(type(value))} | {
        key: _describe(one, code)
        for key, one in sorted(attributes.items())
        if not key.startswith("_") and key not in _NOT_SETTINGS
    }


def _path(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
