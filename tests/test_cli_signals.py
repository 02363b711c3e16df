"""Signals that end a command."""

from __future__ import annotations

import signal

import pytest

from ktmoe.cli.signals import signals_as_exit


@pytest.fixture(params=[signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def number(request):
    old = signal.getsignal(request.param)
    yield request.param
    signal.signal(request.param, old)


def test_they_exit(number):
    signal.signal(number, signal.SIG_DFL)
    with pytest.raises(SystemExit) as exit_, signals_as_exit():
        signal.raise_signal(number)
    assert exit_.value.code == 128 + number
    assert signal.getsignal(number) == signal.SIG_DFL


def test_another_one_does_not_break_off_the_end(number):
    """A command's temporary folders are removed whatever comes meanwhile."""
    signal.signal(number, signal.SIG_DFL)
    with signals_as_exit():
        with pytest.raises(SystemExit):
            signal.raise_signal(number)
        signal.raise_signal(number)


def test_one_that_is_ignored_stays_so(number):
    """As SIGHUP under nohup."""
    signal.signal(number, signal.SIG_IGN)
    with signals_as_exit():
        signal.raise_signal(number)
    assert signal.getsignal(number) == signal.SIG_IGN
