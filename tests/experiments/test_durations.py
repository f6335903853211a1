import pytest

from sce.errors import InputError
from sce.experiments.durations import parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("1.5m", 90), ("10 min", 600), ("1h30m", 5400), ("1d", 86_400)],
)
def test_times(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "soon", "10 weeks", "-5m", "0s", "5", "1h30", "5m!", "1..2s", "m"]
)
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(InputError, match="like 90s, 10m or 1h30m"):
        parse_duration(text)
