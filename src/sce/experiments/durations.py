"""Stretches of time as people write them."""

import re

from sce.errors import InputError

_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


def parse_duration(text: str) -> float:
    """Seconds.

    >>> parse_duration("90s"), parse_duration("10m"), parse_duration("1h 30m")
    (90.0, 600.0, 5400.0)
    """
    parts = re.findall(r"([\d.]+)\s*([a-z]*)", text.lower())
    left = re.sub(r"[\d.]+\s*[a-z]*|\s", "", text.lower())
    try:
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    except (KeyError, ValueError):  # no unit is none that is known: is 5 a second or a minute?
        seconds = 0.0
    if left or not seconds > 0:
        raise InputError(f"a time is written like 90s, 10m or 1h30m; got {text!r}")
    return seconds
