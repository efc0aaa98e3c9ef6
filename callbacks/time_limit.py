"""Stops in time: before a job's limit, and when asked to by a signal."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer

from rlvr_pl.callbacks.base import UpdateCallback

if TYPE_CHECKING:
    from rlvr_pl.module import RLVRModule
    from rlvr_pl.update import UpdateReport

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT") if hasattr(signal, name))


class TimeLimit(UpdateCallback):
    """Finishes the update that is running, saves a checkpoint and ends with status 0; `--resume` goes on from there.

    It stops when the next update might not end in time, judged by the longest update so far (validation and callbacks
    included) and half as much again. SIGTERM, SIGUSR1 and SIGINT (Ctrl-C) stop after the current update whatever the
    time; a second one ends the process at once, and the run continues from its last checkpoint.

    Args:
        limit: seconds, or ``HH:MM:SS``, since this process began to train; null reacts to signals alone.
    """

    def __init__(self, limit: float | str | None = None) -> None:
        self.limit = limit
        self._seconds = None if limit is None else seconds(limit)
        self._asked: str | None = None
        self._signalled = False
        self._previous: dict[int, Any] = {}
        self._longest = 0.0

    def begin(self, trainer: Trainer, module: RLVRModule) -> None:
        self._started = self._last = time.monotonic()
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._on_signal) for number in SIGNALS}

    def after_update(self, trainer: Trainer, module: RLVRModule, report: UpdateReport) -> None:
        now = time.monotonic()
        self._longest, self._last = max(self._longest, now - self._last), now
        elapsed = now - self._started
        if self._asked is None and self._seconds is not None and elapsed + 1.5 * self._longest > self._seconds:
            self._asked = f"the time limit of {self.limit}"
        if not trainer.strategy.reduce_boolean_decision(self._asked is not None, all=False):
            return
        trainer.should_stop = True
        signalled = trainer.strategy.reduce_boolean_decision(self._signalled, all=False)
        module.stopped_by = module.stopped_by or ("signal" if signalled else "time")
        if trainer.is_global_zero:
            reason = self._asked or "another rank's limit"
            print(f"rlvr-pl: stopped after update {report.number} for {reason}; go on with --resume", file=sys.stderr)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._asked is not None:
            os.write(2, b"rlvr-pl: ended at once; --resume goes on from the last checkpoint\n")
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._asked, self._signalled = signal.Signals(number).name, True
        # not print: the signal may have come in the middle of one
        os.write(2, f"rlvr-pl: {self._asked}: ends after this update; once more ends it at once\n".encode())

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._restore()

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}


def seconds(limit: float | str) -> float:
    """Seconds of a number or of ``HH:MM:SS`` (``MM:SS`` and ``D-HH:MM:SS`` as well, as SLURM writes them)."""
    match = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+(?:\.\d+)?)", str(limit).strip())
    if match:
        days, hours, minutes, rest = (float(x or 0) for x in match.groups())
        value = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    else:
        try:
            value = float(limit)
        except ValueError:
            value = -1.0
    if not 0 < value < float("inf"):
        raise ValueError(f"limit={limit!r}: give seconds, or HH:MM:SS, above 0")
    return value
