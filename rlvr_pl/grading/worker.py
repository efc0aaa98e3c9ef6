"""The process in which answers are parsed and compared: ``python -m rlvr_pl.grading.worker CPU_SECONDS MEMORY_MB``.

It reads one job a line (a JSON list ``[readings, gold]``), answers ``["ok", bool, seconds]`` or
``["error", reason, seconds]``, and ends at end of input. The kernel kills it when a job exceeds its CPU time.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time


def main() -> None:
    cpu_limit, memory_mb = float(sys.argv[1]), int(sys.argv[2])
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # what a library prints must not mix with the replies
    from rlvr_pl.grading.equivalence import equivalent

    _limit_resources(memory_mb)
    print('"ready"', file=replies, flush=True)
    for line in sys.stdin:
        readings, gold = json.loads(line)
        start = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, cpu_limit)
        try:
            reply = ["ok", any(equivalent(reading, gold) for reading in readings)]
        except (MemoryError, RecursionError) as error:
            reply = ["error", type(error).__name__]
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps([*reply, time.process_time() - start]), file=replies, flush=True)


def _limit_resources(memory_mb: int) -> None:
    """Bound memory, forbid writing files and dumping core, and let the profiling timer kill (its default action)."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    sys.setrecursionlimit(3000)
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(100_000)


if __name__ == "__main__":
    main()
