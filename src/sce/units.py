"""Numbers, sizes, durations and counts as people read and write them."""

import math
import re
from collections.abc import Callable
from functools import wraps
from typing import TypeGuard

from sce.errors import InputError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    # As graphics cards are sold: "16G" has 16 GiB.
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}
_SCALES = {" GiB": 1 / 1024, " ms": 1000.0}  # of MiB and of seconds
_PLACES = 4  # of metrics
_LEAST = 10**6  # bytes that anybody means who gives no unit
# Commas and underscores stand before three digits: 1,5GB is no 15GB.
_WHOLE = "[0-9]{1,3}(?:[_,][0-9]{3})+|[0-9]+"
_WRITTEN = re.compile(rf"((?:{_WHOLE})(?:\.[0-9]+)?|\.[0-9]+)\s*([a-z]*)", re.IGNORECASE)
_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


def is_number(value: object) -> TypeGuard[float]:
    """True for finite numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _or_dash(show: Callable[[float], str]) -> Callable[[float | None], str]:
    """Show what is no number as a dash."""
    return wraps(show)(lambda value: show(value) if is_number(value) else "–")


@_or_dash
def show_metric(value: float) -> str:
    """A metric between 0 and 1, to four places, or three digits where there are only zeros.

    >>> show_metric(0.14235), show_metric(0.0000123), show_metric(None)
    ('0.1424', '0.0000123', '–')
    """
    if 0 < abs(value) < 0.001:
        return f"{value:.{2 - math.floor(math.log10(abs(value)))}f}"
    return f"{value:.{_PLACES}f}"


@_or_dash
def show_share(value: float) -> str:
    """A share between 0 and 1, in percent.

    >>> show_share(0.398), show_share(1.0), show_share(0.00042)
    ('39.8%', '100%', '0.042%')
    """
    return f"{show_digits(100 * value)}%"


@_or_dash
def show_count(value: float) -> str:
    """A whole number with its thousands apart.

    >>> show_count(1234567)
    '1,234,567'
    """
    return f"{value:,.0f}"


@_or_dash
def show_digits(value: float) -> str:
    """A number in three digits, more where it is large.

    >>> [show_digits(n) for n in (1234.5, 12.345, 0.012345, 3.0)]
    ['1,234', '12.3', '0.0123', '3']
    """
    if value == 0:
        return "0"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


@_or_dash
def show_memory(mebibytes: float) -> str:
    """An amount of memory.

    >>> show_memory(451.2), show_memory(3622)
    ('451 MiB', '3.54 GiB')
    """
    unit, size = ("MiB", 1) if mebibytes < 999.5 else ("GiB", 1024)
    return f"{show_digits(mebibytes / size)} {unit}"


@_or_dash
def show_duration(seconds: float) -> str:
    """A stretch of time in its two largest units.

    >>> [show_duration(s) for s in (0.0042, 7.25, 192, 3900, 190_000)]
    ['4.2 ms', '7.25 s', '3 min 12 s', '1 h 05 min', '2 d 4 h']
    """
    if seconds < 0.9995:
        return f"{show_digits(1000 * seconds)} ms"
    if seconds < 59.95:
        return f"{show_digits(seconds)} s"
    whole = round(seconds)
    minutes, hours = whole // 60, whole // 3600
    if hours == 0:
        return f"{minutes} min {whole % 60:02d} s"
    if hours < 24:
        return f"{hours} h {minutes % 60:02d} min"
    return f"{hours // 24} d {hours % 24} h"


def show_spread(
    value: float | None, spread: float | None, show: Callable[[float | None], str]
) -> tuple[str, str]:
    """A mean and the spread around it, in one unit and to the same places; of one value, no spread.

    >>> show_spread(469.2, 0.0912, show_memory), show_spread(3584, 25, show_memory)
    (('469 MiB', '0 MiB'), ('3.50 GiB', '0.02 GiB'))
    """
    text = show(value)
    if spread is None:
        return text, ""
    found = re.fullmatch(r"[\d,]+(\.\d+)?( \w+)?", text)
    if not value or found is None:  # in two units
        return text, show(spread)
    scale, places = _SCALES.get(found[2] or "", 1.0), len(found[1] or ".") - 1
    if places < _PLACES:  # zeros at the end were left out
        places = max(0, 2 - math.floor(math.log10(value * scale)))
    mean, around = (f"{scale * one:,.{places}f}{found[2] or ''}" for one in (value, spread))
    return mean, around


def parse_size(text: str) -> int:
    """Read an amount of memory in bytes.

    >>> parse_size("16GB"), parse_size("900 MB"), parse_size("1.5 GiB")
    (16000000000, 900000000, 1610612736)
    """
    found = _WRITTEN.fullmatch(text.strip())
    unit = found[2].lower() if found else ""
    if found is None or unit not in _UNITS:
        raise InputError(f"memory is an amount such as 16GB, 16GiB or '900 MB'; got {text!r}")
    size = float(found[1].replace("_", "").replace(",", "")) * _UNITS[unit]
    if not 1 <= size < 2**63:
        raise InputError(f"memory must be above 0, and of 64 bits at most; got {text!r}")
    if not unit and size < _LEAST:
        raise InputError(f"{text.strip()} bytes are meant? Give a unit, such as {text.strip()}GB")
    return int(size)


def show_size(size: float) -> str:
    """Write an amount of memory with three digits.

    >>> show_size(1_434_451_968), show_size(310 * 10**9), show_size(5_000)
    ('1.34 GiB', '289 GiB', '4.88 KiB')
    """
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(size) >= 1000 and len(units) > 1:
        size /= 1024
        units.pop(0)
    digits = 0 if units[0] == "B" or size >= 100 else 1 if size >= 10 else 2
    return f"{size:,.{digits}f} {units[0]}"


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


def plural(count: int, noun: str) -> str:
    """A count of things.

    >>> plural(1, "epoch"), plural(1200, "epoch")
    ('1 epoch', '1,200 epochs')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def show_clock(seconds: float) -> str:
    """A duration as clocks show it: 0:07, 12:34, 5:00:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
