import os
import signal
from collections.abc import Iterator

import pytest

from sce.training.signals import Interrupted, Interrupts, StopRequested, as_ctrl_c

Capture = pytest.CaptureFixture[str]


def send(number: int) -> None:
    os.kill(os.getpid(), number)


pytestmark = pytest.mark.usefixtures("hangup")


@pytest.fixture(autouse=True)
def _handlers_as_they_were() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    assert {number: signal.getsignal(number) for number in numbers} == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU])
def test_the_first_signal_is_answered_and_asks_to_stop(number: int, capsys: Capture) -> None:
    with Interrupts(wanted=True) as interrupts:
        interrupts.check()
        send(number)
        assert capsys.readouterr() == (
            "",
            "sce: stopping after this batch, then saving; once more to stop at once\n",
        )
        with pytest.raises(StopRequested) as caught:
            interrupts.check()
    assert caught.value.signal_number == number


def test_the_second_signal_stops_at_once_but_not_in_a_write(capsys: Capture) -> None:
    with Interrupts(wanted=True) as interrupts:
        send(signal.SIGTERM)
        with interrupts.held():
            send(signal.SIGINT)
        assert "still saving" in capsys.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


@pytest.mark.parametrize("first", [signal.SIGXCPU, signal.SIGTERM])
def test_a_limit_of_cpu_time_that_is_told_again_stops_nothing_at_once(first: int) -> None:
    with Interrupts(wanted=True) as interrupts:
        for number in (first, signal.SIGXCPU, signal.SIGXCPU):
            send(number)
        assert interrupts.received == first
    send(signal.SIGXCPU)  # while the process ends
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    with pytest.raises(Interrupted) as caught, as_ctrl_c():
        send(signal.SIGXCPU)
    assert caught.value.exit_code == 128 + signal.SIGXCPU
    send(signal.SIGXCPU)


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with Interrupts(wanted=True) as interrupts:
            send(signal.SIGHUP)
            interrupts.check()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_nothing_is_caught_where_nothing_would_be_saved() -> None:
    with Interrupts(wanted=False) as interrupts:
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        interrupts.lose_reader()
        interrupts.check()


def test_a_reader_that_went_away_asks_to_stop() -> None:
    with Interrupts(wanted=True) as interrupts:
        interrupts.lose_reader()
        with pytest.raises(StopRequested) as caught:
            interrupts.check()
    assert caught.value.signal_number == signal.SIGPIPE


def test_a_signal_is_obeyed_though_it_cannot_be_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead:
        def write(self, _: str) -> int:
            raise OSError(5, "Input/output error")  # a terminal that was closed

    monkeypatch.setattr("sys.stderr", Dead())
    with Interrupts(wanted=True) as interrupts:
        send(signal.SIGHUP)
        assert interrupts.received == signal.SIGHUP
