"""A process that grades one answer at a time, started by `rlvr_pl.grading.pool` as ``MODULE CPU_SECONDS MEMORY_MB``.

It reads one job a line (JSON), gives it to ``MODULE.handle``, and writes ``["ok", value, seconds]`` or ``["error",
reason, seconds]``; it ends at end of input. The kernel kills it when a job exceeds its CPU time. Jobs can neither write
files nor start programs.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    module, cpu_limit, memory_mb = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # what a library prints must not mix with the replies
    try:
        handle = importlib.import_module(module).handle
    except Exception as error:
        print(json.dumps(f"{type(error).__name__}: {error}"), file=replies, flush=True)
        return
    _limit_resources(memory_mb)
    sys.addaudithook(_forbid)
    print('"ready"', file=replies, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        start = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, cpu_limit)
        try:
            reply = ["ok", handle(job)]
        except Exception as error:
            reply = ["error", type(error).__name__]
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps([*reply, time.process_time() - start]), file=replies, flush=True)


def _limit_resources(memory_mb: int) -> None:
    """Bound the memory that jobs may add, forbid writing files and dumping core; let the profiling timer kill."""
    statm = Path("/proc/self/statm")
    used = int(statm.read_text().split()[0]) * resource.getpagesize() if statm.exists() else 0
    _lower(resource.RLIMIT_AS, used + (memory_mb << 20))
    _lower(resource.RLIMIT_FSIZE, 0)
    _lower(resource.RLIMIT_CORE, 0)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    sys.setrecursionlimit(3000)
    sys.dont_write_bytecode = True
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(100_000)


_FORBIDDEN = (
    "ctypes.", "http.", "os.chmod", "os.chown", "os.exec", "os.fork", "os.kill", "os.link", "os.mkdir",
    "os.posix_spawn", "os.remove", "os.rename", "os.rmdir", "os.spawn", "os.startfile", "os.symlink", "os.system",
    "os.truncate", "pty.", "shutil.", "socket.", "subprocess.", "urllib.", "webbrowser.",
)  # fmt: skip


def _forbid(event: str, args: tuple[Any, ...]) -> None:
    """Audit hook: the parsers need none of this, so whatever asks for it is a model's text that became code."""
    if event == "open":
        if args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise PermissionError(f"a grading worker writes no files: {args[0]!r}")
    elif event.startswith(_FORBIDDEN):
        raise PermissionError(f"forbidden in a grading worker: {event}")


def _lower(limit: int, value: int) -> None:
    hard = resource.getrlimit(limit)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))
