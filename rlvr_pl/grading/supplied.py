"""The grader of the supplied recipe, by the package `reasoning-from-scratch` itself."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import ClassVar

from rlvr_pl.errors import UserError
from rlvr_pl.grading.base import Grader, GradeRequest
from rlvr_pl.grading.pool import WorkerPool
from rlvr_pl.types import Grade, GradeStatus

_WORKER = "rlvr_pl.grading.supplied_worker"


class SuppliedGrader(Grader):
    """Extraction and comparison as in chapters 3 and 6 of `reasoning-from-scratch`, in killable workers.

    Raises UserError when that package is not installed.

    Args:
        cpu_limit: CPU seconds that a worker may spend on one answer; beyond it the status is `timeout`.
        memory_limit_mb: memory in MiB that grading may take in a worker; beyond it the status is `error`.
        workers: worker processes; each imports torch, because the package does.
    """

    name: ClassVar[str] = "supplied"

    def __init__(self, cpu_limit: float = 5.0, memory_limit_mb: int = 1024, workers: int = 1) -> None:
        if importlib.util.find_spec("reasoning_from_scratch") is None:
            raise UserError(
                'grader "supplied" needs the package reasoning-from-scratch: pip install "rlvr-pl[supplied]"'
            )
        self._pool = WorkerPool(_WORKER, workers, cpu_limit, memory_limit_mb)

    def grade(self, requests: Sequence[GradeRequest], *, require_box: bool) -> list[Grade]:
        jobs = [{"response": r.response, "gold": r.question.answer, "require_box": require_box} for r in requests]
        grades = []
        for reply in self._pool.map(jobs):
            if reply.status != "ok":
                grades.append(Grade(GradeStatus(reply.status), 0.0, seconds=reply.seconds))
                continue
            answer, correct, boxed = reply.value
            status = GradeStatus.CORRECT if correct else GradeStatus.WRONG if answer else GradeStatus.NO_ANSWER
            grades.append(Grade(status, float(correct), answer or None, boxed, reply.seconds))
        return grades

    def close(self) -> None:
        self._pool.close()
