"""What the server counts, in the text format of Prometheus."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class Histogram:
    """How many values are at most each bound, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str) -> Iterator[str]:
        """The lines of its samples."""
        total = 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self.sum}"
        yield f"{name}_count {total}"


class Metrics:
    """Counts since the server began; they belong to the event loop."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by path and status
        self.seconds = Histogram(SECONDS)
        self.sizes = Histogram(SIZES)
        self.loads: Counter[str] = Counter(taken=0, refused=0)

    def text(self, gauges: Mapping[str, tuple[str, float]], info: Mapping[str, str]) -> str:
        """All of it; gauges by name with their help."""
        requests = (
            f'sce_requests_total{{path="{path}",status="{status}"}} {count}'
            for (path, status), count in sorted(self.requests.items())
        )
        loads = (
            f'sce_loads_total{{result="{result}"}} {count}' for result, count in self.loads.items()
        )
        seconds, sizes = "sce_request_seconds", "sce_batch_size"
        labels = ",".join(f'{name}="{value}"' for name, value in info.items())
        lines = [
            *_family("sce_requests_total", "counter", "Requests answered.", requests),
            *_family(seconds, "histogram", "Time to answer.", self.seconds.lines(seconds)),
            *_family(sizes, "histogram", "Requests computed together.", self.sizes.lines(sizes)),
            *_family("sce_loads_total", "counter", "Versions and lists, taken or refused.", loads),
            *_family("sce_info", "gauge", "What is served.", [f"sce_info{{{labels}}} 1"]),
        ]
        for name, (meaning, value) in gauges.items():
            lines += _family(name, "gauge", meaning, [f"{name} {value}"])
        return "\n".join(lines) + "\n"


def _family(name: str, kind: str, meaning: str, samples: Iterable[str]) -> Iterator[str]:
    yield f"# HELP {name} {meaning}"
    yield f"# TYPE {name} {kind}"
    yield from samples
