"""Runs the commands of a study, several at once, each in a process of its own, and says how far they are.

A run is a chain of `rlvr-pl` commands; the last makes its run folder. What is finished is left alone, what was
interrupted goes on where its last checkpoint stands, and what fails stops nobody else.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rlvr_pl.errors import UserError
from rlvr_pl.records import RunFolder

ENTRY = "from rlvr_pl.cli import entry; entry()"
POLL_SECONDS = 0.5
GRACE_SECONDS = 120.0
"""How long a run may take to finish its update and save when it is asked to stop."""


@dataclass
class Job:
    """One run of a study.

    Attributes:
        arm, seed: which run.
        folder: its run folder.
        commands: argument lists of `rlvr-pl`, done in this order.
        updates: how many its last command plans.
        state: "waiting", "running", "finished", "stopped" (will go on when asked again) or "failed".
        reason: why it failed: its last words.
    """

    arm: str
    seed: int
    folder: RunFolder
    commands: Sequence[Sequence[str]]
    updates: int
    state: str = "waiting"
    reason: str = ""
    seconds: float = 0.0
    _step: int = 0
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _log: IO[bytes] | None = field(default=None, repr=False)
    _since: float = 0.0

    def __post_init__(self) -> None:
        if self._run_state() == "finished":
            self.state = "finished"

    @property
    def name(self) -> str:
        return f"{self.arm}, seed {self.seed}"

    @property
    def log(self) -> Path:
        """Where everything that its commands print goes."""
        return self.folder.path.with_name(self.folder.path.name + ".log")

    @property
    def done(self) -> int:
        """Updates done, by the run's own account."""
        cost = self.folder.read_json("cost.json")
        return int(cost["updates"]) if cost else 0

    def start(self, keep_open: int) -> None:
        """Begin the next command of the chain. The child keeps the file `keep_open`, so its lock lasts as long."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if self._log is None:
            self._log = self.log.open("ab")
            self._since = time.monotonic()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", ENTRY, *self.commands[self._step]],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=environment,
            pass_fds=(keep_open,),
            start_new_session=True,  # a Ctrl-C reaches the study alone, which then stops its runs in order
        )
        self.state = "running"

    def poll(self, keep_open: int) -> None:
        """Look at the process; go on to the next command, or settle the state."""
        assert self._process is not None
        status = self._process.poll()
        if status is None:
            return
        if status == 0 and self._step + 1 < len(self.commands):
            self._step += 1
            self.start(keep_open)
            return
        assert self._log is not None
        self._log.close()
        self.seconds = time.monotonic() - self._since
        self.state = "failed" if status else "finished" if self._run_state() == "finished" else "stopped"
        if status:
            self.reason = _last_words(self.log) or f"ended with status {status}"

    def signal(self, number: int) -> None:
        """Send a signal to the running command."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _run_state(self) -> str | None:
        state = self.folder.read_json("run.json")
        return None if state is None else state["state"]


def run_jobs(
    jobs: Sequence[Job], at_once: int, lock: int, *, seconds: float | None = None, watch: Callable[[], None]
) -> None:
    """Run all jobs that wait, `at_once` at a time; `watch` is called after every look at them.

    After `seconds`, and on Ctrl-C or SIGTERM, running jobs finish their update, save and end; then this returns. A
    second Ctrl-C or SIGTERM ends them at once and raises KeyboardInterrupt.
    """
    waiting = [job for job in jobs if job.state == "waiting"]
    running: list[Job] = []
    deadline = None if seconds is None else time.monotonic() + seconds
    with _terminable():
        try:
            while (waiting or running) and (deadline is None or time.monotonic() < deadline):
                while waiting and len(running) < at_once:
                    running.append(waiting.pop(0))
                    running[-1].start(lock)
                watch()
                time.sleep(POLL_SECONDS)
                for job in running:
                    job.poll(lock)
                running = [job for job in running if job.state == "running"]
        except KeyboardInterrupt:
            pass
        finally:
            _stop(running, lock, watch)
            watch()


def _stop(running: list[Job], lock: int, watch: Callable[[], None]) -> None:
    """Ask running jobs to finish their update and save; a second Ctrl-C, or too long a wait, ends them at once."""
    for job in running:
        job.signal(signal.SIGTERM)
        job.commands = job.commands[: job._step + 1]
    limit = time.monotonic() + GRACE_SECONDS
    try:
        while any(job.state == "running" for job in running) and time.monotonic() < limit:
            watch()
            time.sleep(POLL_SECONDS)
            _settle(running, lock)
    finally:
        for job in running:
            job.signal(signal.SIGKILL)
        while any(job.state == "running" for job in running):
            time.sleep(POLL_SECONDS / 10)
            _settle(running, lock)


def _settle(running: list[Job], lock: int) -> None:
    for job in running:
        if job.state == "running":
            job.poll(lock)
            if job.state == "failed":  # by our own signal
                job.state = "stopped"


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM acts as Ctrl-C."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread, which alone may set handlers
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Hold the study folder for one call at a time; gives the open file that holds the lock.

    Runs inherit it, so that a study whose own process was killed stays locked while its runs still write.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{folder}: another call of `rlvr-pl study`, or a run of it, is still at work") from None
        yield file.fileno()


def _last_words(log: Path) -> str:
    """The last line of a log that says something."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-50:]]
    return next((line for line in reversed(lines) if line), "")[-300:]
