"""Names and settings of model and loss for run.json: a run is resumed with the same alone."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
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

# What `fit` sets itself, and what torch keeps in every module.
_NOT_SETTINGS = {"sparse_grad", *vars(nn.Module())}
_PLAIN = (bool, int, float, str)
_LIBRARIES = ("numpy", "sce", "torch")
CODE = "code in "  # a setting that begins so may be another when a run is resumed


def name_model(model: nn.Module) -> str:
    """The model's name in `BACKBONES`, or the class of a user's own, also if derived from ours."""
    names = [name for name, entry in BACKBONES.items() if type(model) is entry.backbone]
    return names[0] if names else _path(type(model))


def describe_model(model: nn.Module) -> dict[str, Any]:
    """The model's name and settings; of a user's own, its code, parts and number of parameters."""
    name = name_model(model)
    found: dict[str, Any] = {"name": name}
    if isinstance(model, Backbone):
        found |= vars(model.settings)
    if name in BACKBONES:
        return found
    # Its parts in the order of their names, which is that of no process.
    code = _digest_source(sorted({type(part) for part in model.modules()}, key=_path))
    parts = [
        f"{place} {key}={value!r}"
        for place, part in model.named_modules()
        for key, value in sorted(vars(part).items())
        if isinstance(value, _PLAIN) and key not in _NOT_SETTINGS
    ]
    found["parts"] = digest_bytes("\n".join(parts).encode())[:16]
    return found | {"parameters": sum(p.numel() for p in model.parameters())} | code


def describe_loss(loss: Callable[..., Tensor], name: str | None = None) -> dict[str, Any]:
    """The given name; else that of the function, or the class and its attributes, and code.

    Of private attributes those that are plain values count: others may be caches. What cannot be
    told from another is refused: a lambda, a partial, a closure.
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
    return (found if isinstance(found, dict) else {"name": found}) | _digest_source(code)


class _Nameless(Exception):  # noqa: N818 - becomes an InputError
    """Nothing tells this value from another like it."""


def _describe(value: Any, code: list[Any]) -> Any:
    """A value as JSON, an object by class and attributes; functions and classes go to `code`."""
    if isinstance(value, np.generic):
        value = value.item()
    unlike_json = isinstance(value, float) and not math.isfinite(value)
    if unlike_json or isinstance(value, torch.dtype | torch.device | Enum):
        return str(value)
    if value is None or isinstance(value, _PLAIN):
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
    known = type(value).__module__.partition(".")[0] == "sce"
    attributes = {
        key: one
        for key, one in vars(value).items()
        if not key.startswith("_") or (isinstance(one, _PLAIN) and not known)
    }
    if isinstance(value, nn.Module):
        attributes |= dict(value.named_children()) | dict(value.named_buffers(recurse=False))
    return {"name": ours[0] if len(ours) == 1 else _path(type(value))} | {
        key: _describe(one, code)
        for key, one in sorted(attributes.items())
        if key not in _NOT_SETTINGS
    }


def _digest_source(values: Iterable[Any]) -> dict[str, str]:
    """Digest of the text of functions and classes of the user's own; {} where none is known."""
    texts = []
    for value in values:
        if str(value.__module__).partition(".")[0] not in _LIBRARIES:
            with suppress(OSError, TypeError):  # typed in, or not of Python
                texts.append(inspect.getsource(value))
    return {f"{CODE}text": digest_bytes("\n".join(texts).encode())[:16]} if texts else {}


def _path(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
