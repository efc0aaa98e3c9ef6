r"""The default grader: the last box (or the evaluation fallback), compared as mathematics in killable workers.

Where sound graders differ, this one holds:

- The last closed box is the answer, whatever is said after it; a run of boxes joined by commas, "and" or "or" may also
  be read as one list. A box that never closes or has no braces is none, nor is ``\\boxed`` (a line break and a word).
- A list without brackets is a set: order and repetition do not matter. A tuple is ordered, and an interval keeps the
  kind of its ends.
- Percent signs are optional (28%, 28 and 0.28 are one answer); units, currency, degrees and a label before the answer
  (x = 5 for 5) are dropped, but x = 5 is not y = 5; digits with a base subscript equal only the same digits in the
  same base.
- Unevaluated forms count (5! is 120), as do inequality and interval, and row, column and bracket styles of a matrix.
- Numbers are exact, however near: a decimal equals a fraction or a root only with 10 to 17 significant digits, as a
  printed double has. 0.333 is not 1/3, and 3.14159 is not pi.
- Words are compared by their letters, not by case or font. An empty gold equals nothing.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from rlvr_pl.grading.base import Grader, GradeRequest
from rlvr_pl.grading.extract import extract
from rlvr_pl.grading.normalize import compare
from rlvr_pl.grading.pool import Reply, WorkerPool
from rlvr_pl.types import Grade, GradeStatus

_WORKER = "rlvr_pl.grading.equivalence"
_LONG = 1000  # characters
_Pair = tuple[tuple[str, ...], str]  # the readings of an answer, and the gold


class MathGrader(Grader):
    """Equality as mathematics, symmetric in answer and gold; the policy is told at the head of its module.

    Text and exact numbers decide most answers in this process; the rest goes to worker processes that start when first
    needed. An answer that takes too long has the status `timeout`, one that breaks its worker `error`; neither earns a
    reward or disturbs another answer.

    Args:
        cpu_limit: CPU seconds that a worker may spend on one answer. Not wall-clock: a busy machine changes no verdict.
        memory_limit_mb: MiB of memory that an answer may take in a worker.
        workers: number of workers; 0 means one a core, but at least 2 and at most 4.
        cache_size: number of the workers' verdicts that are remembered.

    Example:
        >>> from rlvr_pl import GradeRequest, Question
        >>> asked = [GradeRequest(r"\\boxed{0.5}", Question("q", "", "1/2"))]
        >>> MathGrader().grade(asked, require_box=True)[0].status.value
        'correct'
    """

    name: ClassVar[str] = "math"

    def __init__(
        self, cpu_limit: float = 3.0, memory_limit_mb: int = 512, workers: int = 0, cache_size: int = 10_000
    ) -> None:
        count = workers or min(4, max(2, os.cpu_count() or 2))
        self._pool = WorkerPool(_WORKER, count, cpu_limit, memory_limit_mb)
        self._cache: OrderedDict[_Pair, Reply] = OrderedDict()
        self._cache_size = cache_size

    def grade(self, requests: Sequence[GradeRequest], *, require_box: bool) -> list[Grade]:
        found = [extract(r.response, require_box=require_box) for r in requests]
        pairs = [(f.readings, r.question.answer) for f, r in zip(found, requests)]
        verdicts = self._verdicts([pair for pair in pairs if pair[0]])
        grades = []
        for f, pair in zip(found, pairs):
            if not f.readings:
                grades.append(Grade(GradeStatus.NO_ANSWER, 0.0, None, f.boxed))
                continue
            reply = verdicts[pair]
            status = _STATUS[reply.value] if reply.status == "ok" else GradeStatus(reply.status)
            grades.append(Grade(status, float(status is GradeStatus.CORRECT), f.answer, f.boxed, reply.seconds))
        return grades

    def close(self) -> None:
        self._pool.close()

    def _verdicts(self, pairs: list[_Pair]) -> dict[_Pair, Reply]:
        """One reply for each distinct pair: by text and exact numbers, or remembered, or a worker's."""
        verdicts: dict[_Pair, Reply] = {}
        jobs: dict[_Pair, list[tuple[str, str]]] = {}
        for pair in dict.fromkeys(pairs):
            readings, gold = pair
            easy = [compare(reading, gold) for reading in readings]
            hard = [texts for verdict in easy if isinstance(verdict, list) for texts in verdict]
            if True in easy or not hard:
                verdicts[pair] = Reply("ok", True in easy, 0.0)
            elif (known := self._cache.get(pair)) is not None:
                self._cache.move_to_end(pair)
                verdicts[pair] = known
            else:
                jobs[pair] = hard
        if jobs:
            replies = dict(zip(jobs, self._pool.map(list(jobs.values()))))
            self._remember(replies)
            verdicts.update(replies)
        return verdicts

    def _remember(self, replies: dict[_Pair, Reply]) -> None:
        for (readings, gold), reply in replies.items():
            # an error may be the machine's fault, and a long answer will not come again
            if reply.status != "error" and len(gold) + sum(map(len, readings)) < _LONG:
                self._cache[readings, gold] = replace(reply, seconds=0.0)
        while len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)


_STATUS = {True: GradeStatus.CORRECT, False: GradeStatus.WRONG}
