"""Amounts of memory, as people write them."""

import re

from sce.errors import InputError

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
    # As graphics cards are sold: "16G" has 16 GiB.
    **{letter: 1024**power for power, letter in enumerate("kmgt", start=1)},
}
_LEAST = 10**6  # bytes that anybody means who gives no unit
_WRITTEN = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]+)?|\.[0-9]+)\s*([a-z]*)", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Read an amount of memory in bytes.

    >>> parse_size("16GB"), parse_size("900 MB"), parse_size("1.5 GiB")
    (16000000000, 900000000, 1610612736)

    Raises:
        InputError: When it is none.
    """
    found = _WRITTEN.fullmatch(text.strip())
    unit = found[2].lower() if found else ""
    if found is None or unit not in _UNITS:
        raise InputError(f"memory is an amount such as 16GB, 16GiB or '900 MB'; got {text!r}")
    size = int(float(found[1].replace("_", "").replace(",", "")) * _UNITS[unit])
    if size < 1:
        raise InputError(f"memory must be above 0; got {text!r}")
    if not unit and size < _LEAST:
        raise InputError(f"{text.strip()} bytes are meant? Give a unit, such as {text.strip()}GB")
    return size


def show_size(size: float) -> str:
    """Write an amount of memory with three digits.

    >>> show_size(1_434_451_968), show_size(310 * 10**9), show_size(5_000)
    ('1.34 GiB', '289 GiB', '4.88 KiB')
    """
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(size) >= 1000 and len(units) > 1:
        size /= 1024
        units.pop(0)
    if units[0] == "B":
        return f"{size:.0f} B"
    digits = 2 if size < 10 else 1 if size < 100 else 0
    return f"{size:,.{digits}f} {units[0]}"
