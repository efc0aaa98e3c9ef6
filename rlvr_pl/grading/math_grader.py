"""The default grader: the last box (or the evaluation fallback), compared as mathematics in killable workers."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import ClassVar

from rlvr_pl.grading.base import Grader, GradeRequest
from rlvr_pl.grading.extract import extract
from rlvr_pl.grading.normalize import decide
from rlvr_pl.grading.pool import Reply, WorkerPool
from rlvr_pl.types import Grade, GradeStatus

_WORKER = "rlvr_pl.grading.worker"


class MathGrader(Grader):
    """Equal as mathematics: numbers exactly, expressions, sets, intervals, matrices and equations through math-verify.

    Args:
        cpu_limit: CPU seconds that a worker may spend on one answer; beyond it the status is `timeout`.
        memory_limit_mb: memory of a worker in MiB; beyond it the status is `error`.
        workers: worker processes; 0 means one per core, between 2 and 4.
        cache_size: verdicts remembered by (answer, gold).
    """

    name: ClassVar[str] = "math"

    def __init__(
        self, cpu_limit: float = 3.0, memory_limit_mb: int = 1024, workers: int = 0, cache_size: int = 100_000
    ) -> None:
        count = workers or min(4, max(2, os.cpu_count() or 2))
        self._pool = WorkerPool(_WORKER, count, cpu_limit, memory_limit_mb)
        self._cache: OrderedDict[tuple[tuple[str, ...], str], Reply] = OrderedDict()
        self._cache_size = cache_size

    def grade(self, requests: Sequence[GradeRequest], *, require_box: bool) -> list[Grade]:
        found = [extract(r.response, require_box=require_box) for r in requests]
        pairs = [(f.readings, r.question.answer) for f, r in zip(found, requests)]
        verdicts = self._compare([p for p in pairs if p[0]])
        grades = []
        for f, pair in zip(found, pairs):
            if f.answer is None:
                grades.append(Grade(GradeStatus.NO_ANSWER, 0.0, None, f.boxed))
                continue
            reply = verdicts[pair]
            if reply.status == "ok":
                status = GradeStatus.CORRECT if reply.value else GradeStatus.WRONG
            else:
                status = GradeStatus(reply.status)
            grades.append(Grade(status, float(status is GradeStatus.CORRECT), f.answer, f.boxed, reply.seconds))
        return grades

    def close(self) -> None:
        self._pool.close()

    def _compare(self, pairs: list[tuple[tuple[str, ...], str]]) -> dict[tuple[tuple[str, ...], str], Reply]:
        """A verdict for each distinct (readings, gold): by text or exact numbers where these decide, else a worker's."""
        verdicts: dict[tuple[tuple[str, ...], str], Reply] = {}
        hard = []
        for pair in dict.fromkeys(pairs):
            if pair in self._cache:
                self._cache.move_to_end(pair)
                verdicts[pair] = self._cache[pair]
                continue
            readings, gold = pair
            easy = [decide(reading, gold) for reading in readings]
            if True in easy or None not in easy:
                verdicts[pair] = Reply("ok", True in easy, 0.0)
            else:
                hard.append(pair)
        verdicts.update(zip(hard, self._pool.map(hard)))
        for pair in verdicts:
            self._cache[pair] = verdicts[pair]
        while len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)
        return verdicts
