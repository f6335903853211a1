"""Numbers as people read them."""

import math
from typing import TypeGuard

_THOUSANDS = [(1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")]


def show_metric(value: float | None) -> str:
    """A metric between 0 and 1, to four places, or three digits where there are only zeros.

    >>> show_metric(0.14235), show_metric(0.0000123), show_metric(None)
    ('0.1424', '0.0000123', '–')
    """
    if not is_number(value):
        return "–"
    if 0 < abs(value) < 0.001:
        return f"{value:.{2 - math.floor(math.log10(abs(value)))}f}"
    return f"{value:.4f}"


def show_share(value: float | None) -> str:
    """A share between 0 and 1, in percent.

    >>> show_share(0.398), show_share(1.0), show_share(0.00042)
    ('39.8%', '100%', '0.042%')
    """
    if not is_number(value):
        return "–"
    return f"{show_digits(100 * value)}%"


def show_count(value: float | None) -> str:
    """A whole number with its thousands apart.

    >>> show_count(1234567)
    '1,234,567'
    """
    return f"{value:,.0f}" if is_number(value) else "–"


def show_compact(value: float | None) -> str:
    """A number in three digits, thousands as k, millions as M.

    >>> [show_compact(n) for n in (0.25, 1500, 36_312_000, -2e9)]
    ['0.25', '1.5k', '36.3M', '-2B']
    """
    if not is_number(value):
        return "–"
    for size, letter in _THOUSANDS:
        if abs(value) >= size * 0.9995:  # 999,600 is 1M, not 1000k
            return show_digits(value / size) + letter
    return show_digits(value)


def show_digits(value: float | None) -> str:
    """A number in three digits, more where it is large.

    >>> [show_digits(n) for n in (1234.5, 12.345, 0.012345, 3.0)]
    ['1,234', '12.3', '0.0123', '3']
    """
    if not is_number(value):
        return "–"
    if value == 0:
        return "0"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def show_memory(mebibytes: float | None) -> str:
    """An amount of memory.

    >>> show_memory(451.2), show_memory(3622)
    ('451 MiB', '3.54 GiB')
    """
    if not is_number(mebibytes):
        return "–"
    if mebibytes < 999.5:
        return f"{show_digits(mebibytes)} MiB"
    return f"{show_digits(mebibytes / 1024)} GiB"


def show_duration(seconds: float | None) -> str:
    """A stretch of time in its two largest units.

    >>> [show_duration(s) for s in (0.0042, 7.25, 192, 3900, 190_000)]
    ['4.2 ms', '7.25 s', '3 min 12 s', '1 h 05 min', '2 d 4 h']
    """
    if not is_number(seconds):
        return "–"
    if seconds < 0.9995:
        return f"{show_digits(1000 * seconds)} ms"
    if seconds < 59.95:
        return f"{show_digits(seconds)} s"
    whole = round(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86_400
    if hours == 0:
        return f"{minutes} min {whole % 60:02d} s"
    if days == 0:
        return f"{hours} h {minutes % 60:02d} min"
    return f"{days} d {hours % 24} h"


def show_factor(value: float | None, other: float | None) -> str | None:
    """How many times as large, when that can be said.

    >>> show_factor(0.142, 0.0459), show_factor(0.1, 0.0)
    ('3.09×', None)
    """
    if not is_number(value) or not is_number(other) or other <= 0:
        return None
    return f"{show_digits(value / other)}×"


def is_number(value: object) -> TypeGuard[float]:
    """Whether there is a finite number to show."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
