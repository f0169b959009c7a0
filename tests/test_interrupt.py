"""Signals: the first is a request that whoever may be stopped hears of; the second is the system's."""

import signal
import threading
from collections.abc import Iterator

import pytest

from gspo.errors import Stopped
from gspo.interrupt import Interrupt, check_stop, signal_heard

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_a_request_and_says_so(number: signal.Signals) -> None:
    said: list[str] = []
    with Interrupt(said.append) as interrupt:
        check_stop()
        assert interrupt.signal is None and signal_heard() is None
        signal.raise_signal(number)
        assert interrupt.signal is number and signal_heard() is number
        with pytest.raises(Stopped) as stopped:
            check_stop()
    assert stopped.value.args == (number,)
    assert len(said) == 1 and said[0].startswith("ending, and saving what is done")


@pytest.mark.parametrize("number", SIGNALS)
def test_the_second_signal_is_the_systems_whichever_came_first(number: signal.Signals) -> None:
    with Interrupt(lambda text: None):
        signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)] == [signal.SIG_DFL] * 2


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_raises_nothing_where_it_comes(number: signal.Signals) -> None:
    with Interrupt(lambda text: None):
        try:
            signal.raise_signal(number)
        except BaseException:
            pytest.fail("raised from the handler")
        with pytest.raises(Stopped):
            try:
                check_stop()
            except Exception:  # nothing on the way takes it for an error
                pytest.fail("caught")


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what nohup does
    try:
        with Interrupt(lambda text: None) as interrupt:
            signal.raise_signal(signal.SIGHUP)
            assert interrupt.signal is None
            signal.raise_signal(signal.SIGTERM)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_the_main_thread_the_signal_is_left_alone() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def enter() -> None:
        with Interrupt(print) as interrupt:
            seen.append((interrupt.signal, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [(None, before)]


def test_a_signal_is_heard_of_within_its_context_alone_and_again_where_that_is_entered_again() -> None:
    first, second = Interrupt(lambda text: None), Interrupt(lambda text: None)
    with first:
        signal.raise_signal(signal.SIGTERM)
        with second:
            assert second.signal is None and signal_heard() is signal.SIGTERM
        with pytest.raises(Stopped):
            check_stop()
    with second:
        check_stop()
    check_stop()
    with first, second, pytest.raises(Stopped):
        check_stop()
    assert signal_heard() is None


def test_a_context_that_an_error_leaves_is_not_heard_of_any_more() -> None:
    with pytest.raises(ZeroDivisionError), Interrupt(lambda text: None):
        signal.raise_signal(signal.SIGTERM)
        raise ZeroDivisionError
    check_stop()


def test_a_signal_is_heard_of_in_every_thread() -> None:
    heard: list[signal.Signals | None] = []
    with Interrupt(lambda text: None):
        signal.raise_signal(signal.SIGHUP)
        thread = threading.Thread(target=lambda: heard.append(signal_heard()))
        thread.start()
        thread.join()
    assert heard == [signal.SIGHUP]
