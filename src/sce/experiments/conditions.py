"""Memory and time compare only among runs that measured them in one way, on one device.

A sweep can be begun on a laptop and continued on a GPU. What its runs reached is still one thing;
what they took is not: resident memory of a process here, memory allocated on a GPU there.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from sce.experiments.rows import Row
from sce.experiments.summary import Setting
from sce.units import plural

_COSTS = (
    *("memory_mib", "seconds", "tokens_per_second", "components_mib"),
    *("memory_measured", "device"),
)
WHOLE_PROCESS = "Memory is that of the whole process, libraries included: there was no GPU."


@dataclass(frozen=True)
class Way:
    """How a run measured what it took, and where."""

    device: str
    memory: str

    @property
    def is_resident(self) -> bool:
        """Whether memory is that of the whole process: most of it is not the loss's."""
        return "resident" in self.memory

    def __str__(self) -> str:
        """In words."""
        return f"{self.device} ({self.memory})"


def way_of(row: Row) -> Way | None:
    """How a run measured what it took; None where it says of neither memory nor time."""
    if not (row.get("memory_mib") or row.get("seconds")):
        return None
    device, memory = row.get("device"), row.get("memory_measured")
    return Way(str(device or "an unknown device"), str(memory or "memory measured somehow"))


def ways_of(settings: Iterable[Setting]) -> set[Way]:
    """All ways in which runs of these measured."""
    return {way for setting in settings for row in setting.rows if (way := way_of(row)) is not None}


def measure_alike(settings: Sequence[Setting]) -> list[Setting]:
    """The same settings, with memory and time of one way of measuring only.

    It is the way that most of them have runs of; of two that as many have, the one of a GPU. Runs
    that measured otherwise lose their memory and time, and keep what they reached.
    """
    kept = _most_common(settings)
    return [
        replace(
            setting,
            rows=tuple(row if way_of(row) == kept else _without_costs(row) for row in setting.rows),
        )
        for setting in settings
    ]


def left_out(settings: Sequence[Setting]) -> Iterator[str]:
    """What `measure_alike` leaves out of these, in a sentence; nothing where they are alike."""
    kept = _most_common(settings)
    others: Counter[Way] = Counter()
    for setting in settings:
        ways = map(way_of, setting.rows)
        others.update(way for way in ways if way is not None and way != kept)
    if others:
        told = " and ".join(
            f"{plural(count, 'run')} on {way}"
            for way, count in sorted(others.items(), key=lambda pair: str(pair[0]))
        )
        yield f"Memory and time are those measured on {kept}; those of {told} are left out."


def is_resident(settings: Iterable[Setting]) -> bool:
    """Whether any memory among these is that of a whole process."""
    return any(way.is_resident for way in ways_of(settings))


def _most_common(settings: Iterable[Setting]) -> Way | None:
    counts = Counter(way for setting in settings for way in ways_of([setting]))
    return max(counts, key=lambda way: (counts[way], not way.is_resident, str(way)), default=None)


def _without_costs(row: Row) -> Row:
    return {name: value for name, value in row.items() if name not in _COSTS}
