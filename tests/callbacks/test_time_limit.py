"""Ending in time and when asked to."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from lightning.pytorch import Callback

from rlvr_pl.callbacks import time_limit
from rlvr_pl.callbacks.time_limit import TimeLimit, seconds


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (90, 90.0),
        ("90.5", 90.5),
        ("00:01:30", 90.0),
        ("1:30", 90.0),
        ("03:50:00", 13800.0),  # 3 h 50 min
        ("1-00:00:01", 86401.0),
    ],
)
def test_ways_to_write_a_limit(limit, expected):
    assert seconds(limit) == expected


@pytest.mark.parametrize("limit", ["", "soon", 0, -5, "nan", "inf", "1:2:3:4", "00:00:00"])
def test_what_is_no_limit_is_refused(limit):
    with pytest.raises(ValueError, match="HH:MM:SS"):
        TimeLimit(limit)


class Clock:
    """A clock of 10 s an update, read once when training begins and once an update."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 10
        return self.now


def test_stops_before_the_limit_and_goes_on_later(run, monkeypatch, capsys, tmp_path):
    """60 s: after update 4, at 40 s, another update of up to 15 s still fits; after update 5, at 50 s, none does."""
    whole = run(folder=tmp_path / "whole")
    monkeypatch.setattr(time_limit, "time", Clock())
    done = run(TimeLimit("00:01:00"))
    assert done.module.updates_done == 5 and done.module.stopped_by == "time"
    assert (done.folder.checkpoints / "update-000005.ckpt").exists()
    assert "stopped after update 5 for the time limit of 00:01:00" in capsys.readouterr().err
    monkeypatch.setattr(time_limit, "time", Clock())
    again = run(TimeLimit(3600), resume=True)
    assert again.module.updates_done == 12 and again.module.stopped_by is None
    assert again.module.policy.weights_sha256() == whole.module.policy.weights_sha256()


class Send(Callback):
    """Sends a signal to this process in the middle of an update."""

    def __init__(self, number: int, update: int) -> None:
        self.number = number
        self.update = update

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if pl_module.updates_done == self.update - 1:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_ends_the_run_after_the_update(run, capsys, number):
    before = [signal.getsignal(n) for n in time_limit.SIGNALS]
    done = run(TimeLimit(), Send(number, 3))
    assert done.module.updates_done == 3 and done.module.stopped_by == "signal"
    assert (done.folder.checkpoints / "update-000003.ckpt").exists()
    assert signal.Signals(number).name in capsys.readouterr().err
    assert [signal.getsignal(n) for n in time_limit.SIGNALS] == before


def test_a_second_signal_ends_the_process_at_once(monkeypatch):
    done = []
    monkeypatch.setattr(time_limit.signal, "signal", lambda number, handler: done.append((number, handler)))
    monkeypatch.setattr(time_limit.os, "kill", lambda pid, number: done.append((pid, number)))
    limit = TimeLimit()
    limit._on_signal(signal.SIGTERM, None)
    assert not done
    limit._on_signal(signal.SIGTERM, None)
    assert done == [(signal.SIGTERM, signal.SIG_DFL), (os.getpid(), signal.SIGTERM)]
