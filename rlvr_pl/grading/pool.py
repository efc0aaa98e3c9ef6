"""Killable worker processes: one job each, under a limit of CPU time and memory that the kernel enforces.

The limit is CPU time of the worker, so that a busy machine changes no verdict; a generous wall-clock limit stands
behind it for jobs that sleep. A worker that runs over is dead (no signal handler of this process is involved), and its
place is taken by a fresh one. Workers are plain child processes of Python, not forks: whatever threads, locks or GPU
contexts this process holds, they have none of them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rlvr_pl.errors import RunFailure

# with the import path of this process, so that a worker finds what this process finds
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from rlvr_pl.grading.worker import main; main()"
_START_SECONDS = 300.0  # wall clock for a worker to import its libraries
_WALL_FACTOR, _WALL_EXTRA = 20.0, 20.0  # wall-clock limit = factor * CPU limit + extra


@dataclass(frozen=True, slots=True)
class Reply:
    """Outcome of a job: "ok" with its value; "timeout"; or "error" (out of memory, crash) with the reason as value."""

    status: str
    value: Any
    seconds: float  # CPU seconds in the worker


class WorkerPool:
    """`count` processes that run ``module.handle(job)`` (see `rlvr_pl.grading.worker`), started when first needed.

    Jobs and values are JSON. Usable from several threads at once; a copy that was pickled or forked starts workers of
    its own.

    Args:
        module: the importable module with the function `handle`.
        count: number of processes.
        cpu_limit: CPU seconds for a job.
        memory_limit_mb: MiB of memory that jobs may take in a worker beyond what it needs to start.

    Raises ValueError for a number that is not above 0.
    """

    def __init__(self, module: str, count: int, cpu_limit: float, memory_limit_mb: int) -> None:
        if count < 1 or not 0 < cpu_limit < math.inf or memory_limit_mb < 1:  # a limit of 0 would be none
            raise ValueError(
                f"workers={count}, cpu_limit={cpu_limit}, memory_limit_mb={memory_limit_mb}: all must be above 0, the "
                "limits finite"
            )
        self._args = (module, count, cpu_limit, memory_limit_mb)
        self._fill()

    def _fill(self) -> None:
        module, count, cpu_limit, memory_limit_mb = self._args
        self._owner = os.getpid()
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for _ in range(count):
            self._idle.put(_Worker(module, cpu_limit, memory_limit_mb))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._args

    def map(self, jobs: Sequence[Any]) -> list[Reply]:
        """One reply per job, in order; at most `count` jobs run at a time.

        Raises RunFailure when a worker cannot be started.
        """
        if self._owner != os.getpid():
            self._fill()  # this is a fork's copy: the workers are the parent's
        if len(jobs) == 1:
            return [self._run(jobs[0])]
        with ThreadPoolExecutor(min(self._args[1], max(1, len(jobs)))) as threads:
            return list(threads.map(self._run, jobs))

    def close(self) -> None:
        """End the idle workers; a later job starts fresh ones."""
        workers = []
        while not self._idle.empty():
            workers.append(self._idle.get_nowait())
        for worker in workers:
            worker.stop()
            self._idle.put(worker)

    def _run(self, job: Any) -> Reply:
        worker = self._idle.get()
        try:
            return worker.run(job)
        finally:
            self._idle.put(worker)


class _Worker:
    """One place in the pool: its process, and the bytes read from it."""

    def __init__(self, module: str, cpu_limit: float, memory_limit_mb: int) -> None:
        self._args = (module, cpu_limit, memory_limit_mb)
        self._cpu_limit = cpu_limit
        self._wall_limit = _WALL_FACTOR * cpu_limit + _WALL_EXTRA
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize | None = None

    def run(self, job: Any) -> Reply:
        """The reply to a job. A worker that something else killed (the kernel, short of memory) gets a second try."""
        reply, code = self._attempt(job)
        return self._attempt(job)[0] if code == -signal.SIGKILL else reply

    def stop(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._end = None

    def _attempt(self, job: Any) -> tuple[Reply, int | None]:
        """The reply, and the exit status of the process if it died of the job."""
        process = self._started()
        try:
            self._write(process, json.dumps(job).encode() + b"\n")
            status, value, seconds = json.loads(self._read(process, self._wall_limit))
        except TimeoutError:
            self.stop()
            return Reply("timeout", None, self._cpu_limit), None
        except (OSError, EOFError):
            code = self._exit_status(process)
            if code == -signal.SIGPROF:
                return Reply("timeout", None, self._cpu_limit), code
            return Reply("error", f"the worker ended with status {code}", 0.0), code
        if status != "ok":
            self.stop()  # after running out of memory or stack, a fresh process is safer
        return Reply(status, value, seconds), None

    def _exit_status(self, process: subprocess.Popen[bytes]) -> int | None:
        """Of a process that closed its pipes."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        self.stop()
        return process.returncode

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.stop()
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(sys.path), *map(str, self._args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
            bufsize=0,
            start_new_session=True,  # Ctrl-C in the terminal is for the trainer
        )
        self._process = process
        self._end = weakref.finalize(self, _kill, process, os.getpid())
        try:
            greeting = json.loads(self._read(process, _START_SECONDS))
        except TimeoutError:
            greeting = f"it was not ready after {_START_SECONDS:.0f} s"
        except EOFError:
            greeting = f"it ended with status {self._exit_status(process)}"
        if greeting != "ready":
            self.stop()
            raise RunFailure(f"a grading worker ({self._args[0]}) did not start: {greeting}")
        return process

    @staticmethod
    def _write(process: subprocess.Popen[bytes], request: bytes) -> None:
        assert process.stdin is not None
        rest = memoryview(request)
        while rest:
            rest = rest[process.stdin.write(rest) :]

    @staticmethod
    def _read(process: subprocess.Popen[bytes], wall_limit: float) -> bytes:
        assert process.stdout is not None
        deadline = time.monotonic() + wall_limit
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        parts = [b""]
        while not parts[-1].endswith(b"\n"):
            if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            parts.append(os.read(process.stdout.fileno(), 65536))
            if not parts[-1]:
                raise EOFError
        return b"".join(parts)


def _kill(process: subprocess.Popen[bytes], owner: int) -> None:
    if owner != os.getpid():
        return  # a fork's copy of the handle: the process belongs to the parent
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    if process.poll() is None:
        process.kill()
        process.wait()
