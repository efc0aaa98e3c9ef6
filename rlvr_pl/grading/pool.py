"""Killable worker processes: one job each, under a limit of CPU time and memory that the kernel enforces.

The limit is CPU time of the worker, so that a busy machine changes no verdict; a generous wall-clock limit stands
behind it for jobs that sleep. A worker that runs over is dead (no signal handler of this process is involved), and its
place is taken by a fresh one. Workers are plain `python -m` children: nothing is forked from this process, whatever
threads, locks or GPU contexts it holds.
"""

from __future__ import annotations

import json
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
from pathlib import Path
from typing import Any

_START_SECONDS = 120.0  # wall clock for a worker to import its libraries
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
    """

    def __init__(self, module: str, count: int, cpu_limit: float, memory_limit_mb: int) -> None:
        self._args = (module, count, cpu_limit, memory_limit_mb)
        self.count = count
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for _ in range(count):
            self._idle.put(_Worker(module, cpu_limit, memory_limit_mb))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._args

    def map(self, jobs: Sequence[Any]) -> list[Reply]:
        """One reply per job, in order; at most `count` jobs run at a time."""
        if len(jobs) == 1:
            return [self._run(jobs[0])]
        with ThreadPoolExecutor(min(self.count, max(1, len(jobs)))) as threads:
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
        self._owner = 0
        self._end: weakref.finalize | None = None

    def run(self, job: Any) -> Reply:
        try:
            process = self._started()
            line = self._ask(process, json.dumps(job).encode() + b"\n", self._wall_limit)
        except TimeoutError:
            self.stop()
            return Reply("timeout", None, self._cpu_limit)
        except (OSError, EOFError):
            return self._post_mortem()
        status, value, seconds = json.loads(line)
        if status != "ok":
            self.stop()  # after running out of memory or stack, a fresh process is safer
        return Reply(status, value, seconds)

    def stop(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._end = None

    def _post_mortem(self) -> Reply:
        """The process closed its pipe: it ran out of CPU time (SIGPROF), or it crashed."""
        process, self._process = self._process, None
        try:
            code = process.wait(timeout=10) if process is not None else None
        except subprocess.TimeoutExpired:
            code = None
        if self._end is not None:
            self._end()
        if code in (-signal.SIGPROF, -signal.SIGXCPU):
            return Reply("timeout", None, self._cpu_limit)
        return Reply("error", f"the worker process ended with status {code}", 0.0)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._owner == os.getpid():
            return self._process
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        process = subprocess.Popen(
            [sys.executable, "-m", "rlvr_pl.grading.worker", *map(str, self._args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            bufsize=0,
            start_new_session=True,  # Ctrl-C in the terminal is for the trainer
        )
        self._process, self._owner = process, os.getpid()
        self._end = weakref.finalize(self, _kill, process, os.getpid())
        if self._read(process, _START_SECONDS) != b'"ready"':
            raise EOFError
        return process

    def _ask(self, process: subprocess.Popen[bytes], request: bytes, wall_limit: float) -> bytes:
        assert process.stdin is not None
        view = memoryview(request)
        while view:
            view = view[process.stdin.write(view) :]
        return self._read(process, wall_limit)

    def _read(self, process: subprocess.Popen[bytes], wall_limit: float) -> bytes:
        assert process.stdout is not None
        deadline = time.monotonic() + wall_limit
        parts: list[bytes] = []
        while not (parts and parts[-1].endswith(b"\n")):
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            part = os.read(process.stdout.fileno(), 65536)
            if not part:
                raise EOFError
            parts.append(part)
        return b"".join(parts).strip()


def _kill(process: subprocess.Popen[bytes], owner: int) -> None:
    if owner != os.getpid():
        return  # a fork's copy of the handle: the process belongs to the parent
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    if process.poll() is None:
        process.kill()
        process.wait()
