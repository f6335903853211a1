"""JSON of ours: its numbers, and the shape of its content."""

import json
import math
from collections.abc import Mapping
from typing import Any


def parse_json(data: bytes) -> Any:
    """Parse JSON of ours, whose numbers are finite and have 64 bits at most; else ValueError."""
    return json.loads(data, parse_constant=_finite, parse_float=_finite, parse_int=_int64)


def misfit(content: Any, shape: Any) -> str | None:
    """Name of the first member of JSON that is not of a shape; None if all are.

    A checksum can be right and the content still none of ours. A shape is a type, a union of types,
    a list of the shape that every member of a list has, or a mapping of names to shapes, where "*"
    stands for every name. Members without a shape may be anything; one that may be missing has None
    in its union, or its name ends in "?".

    >>> misfit({"sizes": {"a": 1, "b": "2"}}, {"sizes": {"*": int}, "note?": {"text": str}})
    'sizes.b'
    """
    if isinstance(shape, list):
        content = dict(enumerate(content)) if isinstance(content, list) else None
        shape = {"*": shape[0]}
    if not isinstance(shape, Mapping):
        return None if isinstance(content, shape) else ""
    if not isinstance(content, Mapping):
        return ""
    for name, inner in shape.items():
        for key in content if name == "*" else [name.removesuffix("?")]:
            if name.endswith("?") and content.get(key) is None:
                continue
            if (found := misfit(content.get(key), inner)) is not None:
                return f"{key}.{found}".rstrip(".")
    return None


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is not finite")
    return value


def _int64(text: str) -> int:
    if not -(2**63) <= (value := int(text)) < 2**63:
        raise ValueError(f"{text} has more than 64 bits")
    return value
