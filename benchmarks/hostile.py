"""What hostile answers cost: how long they take on W workers, in limits, and what becomes of honest ones among them.

usage: python benchmarks/hostile.py [--answers 64] [--workers 2] [--limit 1.0] [--json]

A hostile answer is a tower of powers to be compared with a taller one; no two are equal, so that none is remembered. An
honest answer stands behind each fourth of them.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections import Counter
from typing import Any

from rlvr_pl.grading import GradeRequest, MathGrader
from rlvr_pl.types import Question


def hostile(number: int) -> GradeRequest:
    return GradeRequest(rf"\boxed{{9^{{9^{{9^8}}}}+{number}}}", Question("", "", r"9^{9^{9^9}}"))


def honest(number: int) -> GradeRequest:
    return GradeRequest(rf"\boxed{{\frac{{1}}{{2}}x+{number}}}", Question("", "", rf"{number}+\frac{{x}}{{2}}"))


def measure(answers: int, workers: int, limit: float) -> dict[str, Any]:
    """Grade the answers once, workers warm, and count."""
    requests = [hostile(n) for n in range(answers)]
    kept = [honest(n) for n in range(answers // 4)]
    together = [r for n in range(0, answers, 4) for r in (*requests[n : n + 4], *kept[n // 4 : n // 4 + 1])]
    grader = MathGrader(cpu_limit=limit, workers=workers)
    grader.grade([honest(-1 - n) for n in range(workers)], require_box=True)
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    grades = grader.grade(together, require_box=True)
    seconds = time.perf_counter() - begin
    grader.close()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    right = set(map(id, kept))
    return {
        "hostile": dict(Counter(g.status.value for r, g in zip(together, grades) if id(r) not in right)),
        "honest": dict(Counter(g.status.value for r, g in zip(together, grades) if id(r) in right)),
        "seconds": seconds,
        "limits": seconds / limit,
        "answers_per_worker": answers / workers,
        "workers_cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "most_seconds_of_an_answer": max(g.seconds for g in grades),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=float, default=1.0, help="CPU seconds an answer")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = measure(args.answers, args.workers, args.limit)
    if args.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:28} {value:.2f}" if isinstance(value, float) else f"{name:28} {value}")


if __name__ == "__main__":
    main()
